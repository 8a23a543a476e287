"""Prompts are split into those that a rule is chosen by and those that the verdict reports on."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.connectors.transformers.gate import PROMPTS_MIN, Case, Split
from kvstore.errors import InvalidRequest


def asked(number: int, *kinds: str) -> Case:
    """A prompt with a question of each kind."""
    ids = (1, *range(100 * number, 100 * number + 20))
    return Case(ids, (range(1, 5),), tuple(range(10 + at, 11 + at) for at in range(len(kinds))), kinds)


def test_each_prompt_is_in_one_half_and_the_same_prompts_are_split_alike() -> None:
    cases = [asked(number, "") for number in range(21)]
    split = Split.of(cases)
    assert (len(split.searched), len(split.held_out)) == (11, 10)
    assert {each.ids for each in (*split.searched, *split.held_out)} == {each.ids for each in cases}
    assert Split.of(cases) == split
    assert Split.of(cases, seed=1) != split
    assert split.searched != cases[::2], "not by their order, which may mean something"


def test_both_halves_have_their_share_of_each_kind() -> None:
    cases = [asked(number, *kinds) for number, kinds in enumerate([("a",)] * 9 + [("b",)] * 4 + [("a", "b")] * 6)]
    split = Split.of(cases)
    shares = [Counter(kind for each in half for kind in each.kinds) for half in (split.searched, split.held_out)]
    assert abs(shares[0]["a"] - shares[1]["a"]) <= 1 and abs(shares[0]["b"] - shares[1]["b"]) <= 1


def test_too_few_prompts_are_an_error() -> None:
    cases = [asked(number, "") for number in range(PROMPTS_MIN)]
    assert len(Split.of(cases).held_out) == PROMPTS_MIN // 2
    with pytest.raises(InvalidRequest, match="9 prompts are too few: expected 10 or more"):
        Split.of(cases[1:])
    with pytest.raises(InvalidRequest, match="questions of kind 'rare' are in too few prompts"):
        Split.of([*cases, asked(99, "rare")])
