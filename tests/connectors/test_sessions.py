"""Sessions: which branches the order of their requests says are abandoned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.common import BRANCHES_MAX, Abandoned, Branch, Sessions, shared


class Known(Sessions):
    """Sessions whose blocks are letters; the part of a branch behind a colon was generated."""

    def told(
        self, session: str, text: str, supersede: bool | None = None, running: tuple[str, ...] = ()
    ) -> list[tuple[str, str]]:
        """Returns what is abandoned with this request: the part that stays, and the rest."""
        prompt, _, generated = text.partition(":")
        found = self.ended(
            session, Branch(prefixes(prompt + generated), len(prompt), 0.0), supersede, map(prefixes, running)
        )
        return [cut(each) for each in found]


def prefixes(text: str) -> list[str]:
    """A name for each block that stands for all before it, too, as a chained hash does."""
    return [text[: at + 1] for at in range(len(text))]


def cut(left: Abandoned) -> tuple[str, str]:
    text = str(left.names[len(left.names) - 1])
    return text[: left.first], text[left.first :]


@pytest.fixture
def known() -> Known:
    return Known()


def test_a_session_that_goes_on_abandons_nothing(known: Known) -> None:
    assert [known.told("s", text) for text in ("sa:b", "sabc:d", "sabcdef:g")] == [[], [], []]


def test_a_session_that_returns_abandons_what_it_did_in_between(known: Known) -> None:
    for text in ("sabc", "saxy", "saxyz", "sabq"):
        assert known.told("s", text) == []
    assert sorted(known.told("s", "sabcd")) == [("sa", "xyz"), ("sab", "q")]
    assert known.told("s", "sabcde") == [], "once"


def test_an_answer_that_is_written_anew_is_abandoned(known: Known) -> None:
    known.told("s", "sab:cd")
    assert known.told("s", "sab:ce") == [("sabc", "d")]
    assert known.told("s", "sabq:r") == [("sab", "ce")]


def test_a_request_can_say_that_all_others_are_left(known: Known) -> None:
    for text in ("sabc", "saxy"):
        known.told("s", text)
    assert sorted(known.told("s", "sqq", True)) == [("s", "abc"), ("s", "axy")]


def test_a_request_can_say_that_all_stay_and_itself_for_good(known: Known) -> None:
    known.told("s", "sabc")
    assert known.told("s", "saxy", False) == []
    assert known.told("s", "sabcd") == [], "it returned, and the fork stays"
    known.told("s", "sqq")
    assert known.told("s", "sabcd", False) == [], "this one says that the others stay"
    assert sorted(known.told("s", "sabcde", True)) == [("s", "qq"), ("sa", "xy")]


def test_what_another_live_session_has_is_not_abandoned(known: Known) -> None:
    known.told("s", "sabc")
    known.told("s", "saxyz")
    known.told("other", "saxyq")
    assert known.told("s", "sabcd") == [("saxy", "z")]


def test_what_a_running_request_has_is_not_abandoned(known: Known) -> None:
    known.told("s", "sabc")
    known.told("s", "saxyz")
    assert known.told("s", "sabcd", running=("qq", "saxy")) == [("saxy", "z")]


def test_a_session_that_uses_what_it_seemed_to_have_left_is_not_guessed_about_any_more(known: Known) -> None:
    for text in ("sabc", "saxy"):
        known.told("s", text)
    assert known.told("s", "sabcd") == [("sa", "xy")]
    for text in ("saxyz", "sabcde", "saxyzz", "sabcdef"):
        assert known.told("s", text) == [], "it goes on with both"
    assert known.told("s", "sabcdefg", True) == [("sa", "xyzz")], "its word counts"


def test_branches_sessions_and_blocks_are_bounded() -> None:
    known = Known(blocks_max=100)
    for number in range(BRANCHES_MAX + 1):
        known.told("s", f"s{chr(65 + number)}")
    assert len(known.told("s", "sZ", True)) == BRANCHES_MAX, "the oldest is forgotten"
    for number in range(60):
        known.told(f"session {number}", "a" * 10)
    assert known._blocks == sum(len(each.names) for one in known._sessions.values() for each in one.branches) <= 100
    assert list(known._sessions) == [f"session {number}" for number in range(50, 60)]


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_what_two_chains_share_is_found(one: str, other: str) -> None:
    names = prefixes(one), prefixes(other)
    assert shared(*names) == len(set(names[0]) & set(names[1]))


def test_a_request_costs_few_comparisons_for_each_branch_of_others(known: Known) -> None:
    """The engine's scheduler waits for it, and thousands of branches may begin alike."""
    compared = 0

    class Counted(list[str]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal compared
            compared += 1
            return super().__getitem__(at)

    for number in range(1000):
        known.ended(str(number), Branch(Counted(prefixes(f"{'s' * 50}{number:04}")), 54, 0.0))
    compared = 0
    known.told("0", f"{'s' * 50}x", supersede=True)
    assert compared < 3_000, "each was searched for the end of the common part"
