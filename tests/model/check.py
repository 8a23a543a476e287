"""One world or mutation, searched and compared with what is expected of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.model.config import Dropped
from tests.model.configs import CONFIGS
from tests.model.liveness import HELPFUL, KEEPING, STUCK, stuck_state
from tests.model.mutations import MUTATIONS
from tests.model.search import Found, search

EXPECTED = {mutation.name: mutation.invariant for mutation in MUTATIONS}
LIVENESS = {"nodes cooperate": HELPFUL, "nodes keep what they hold": KEEPING, "only leases end": STUCK}


@dataclass(frozen=True, slots=True)
class Checked:
    """``broken`` is the invariant that does not hold, None where all do; ``trace`` is a shortest way there."""

    name: str
    states_count: int
    seconds: float
    broken: str | None
    expected: str | None
    why: str
    trace: tuple[str, ...]

    @property
    def is_expected(self) -> bool:
        """True if the verdict is the right one."""
        return self.broken == self.expected


def check(name: str) -> Checked:
    """Searches ``config`` or ``config/mutation``; also checks liveness if no mutation or I5 is expected to break."""
    began_s = time.perf_counter()
    config, _, dropped = name.partition("/")
    rules = frozenset(dropped.split("+")) if dropped else frozenset()
    expected = EXPECTED.get(name)
    found = search(CONFIGS[config], rules)
    broken, why = found.invariant, found.why
    if broken is None and (not dropped or expected == "I5") and not CONFIGS[config].replaces:
        broken, why = _liveness(found, config, rules)
    return Checked(name, len(found.reached), time.perf_counter() - began_s, broken, expected, why, found.trace)


def _liveness(found: Found, config: str, rules: Dropped) -> tuple[str | None, str]:
    for case, helpful in LIVENESS.items():
        stuck = stuck_state(found.reached, CONFIGS[config], helpful, rules)
        if stuck is not None:
            return "I5", f"nothing helps any more, where {case}: {stuck}"
    return None, ""
