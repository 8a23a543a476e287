"""Which prompts a rule is chosen by, and which others its figures come from.

A rule that is the cheapest to hold on some prompts looks better on them than it is: it was chosen for that. So the
verdict reports on prompts that had no part in the choice.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.connectors.transformers.comparing import Case
from kvstore.errors import InvalidRequest

SEED = 22
"""Seed of the split: the same prompts in the same order are split alike."""
PROMPTS_MIN = 10
"""Prompts that are split; fewer say nothing about others."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two halves of the prompts that were given, each with questions of all kinds."""

    searched: list[Case]
    """Those that a rule is chosen by; one more if the number is odd."""
    held_out: list[Case]
    """Those that the verdict reports on."""

    @classmethod
    def of(cls, cases: Sequence[Case], seed: int = SEED) -> Split:
        """Deals the prompts in an order by ``seed``, those with the same kinds of questions in turn to either half.

        Raises InvalidRequest for fewer than PROMPTS_MIN prompts, or if a half has no question of some kind.
        """
        if len(cases) < PROMPTS_MIN:
            raise InvalidRequest(
                f"{len(cases)} prompts are too few: expected {PROMPTS_MIN} or more, half of them to choose a rule by "
                "and half to report on; use some hundreds for bounds of a few percent"
            )
        alike = defaultdict[tuple[str, ...], list[Case]](list)
        for case in random.Random(seed).sample(cases, len(cases)):
            alike[tuple(sorted(set(case.kinds)))].append(case)
        dealt = [case for kinds in sorted(alike) for case in alike[kinds]]
        found = cls(dealt[::2], dealt[1::2])
        lacking = _kinds(found.searched) ^ _kinds(found.held_out)
        if lacking:
            raise InvalidRequest(
                f"questions of kind {min(lacking)!r} are in too few prompts to choose by some and report on others: "
                "expected 2 or more with the same kinds"
            )
        return found


def _kinds(cases: Sequence[Case]) -> set[str]:
    return {kind for case in cases for kind in case.kinds}
