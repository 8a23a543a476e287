"""The benchmark of the real vLLM gives a figure for every way, and refuses one that loaded nothing."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import serving, streams, turns
from benchmarks.contents import WrongBytes
from benchmarks.options import Options
from benchmarks.played import Played, Sizes, Turn
from benchmarks.serving import WAYS, Took, Way
from benchmarks.streams import Reply
from benchmarks.turns import Pair

WAYS_HERE = ["none", "async", "fs"]
TALK = Sizes(chats=3, chatters=1, turns=2, system_tokens=64, asked_tokens=32, answered_tokens=8)


def test_each_way_has_its_figures(tmp_path: Path) -> None:
    arguments = Namespace(only="prompts", ways=WAYS_HERE, tokens=256)
    result = serving.run(Options(tmp_path, tmp_path, 1, True), arguments)
    cold, warm = result.tables
    assert cold.column("way") == warm.column("way") == WAYS_HERE
    assert all(isinstance(each, float) and each > 0 for each in cold.column("first token s") + warm.column("CPU s"))
    assert not list(tmp_path.iterdir())


def test_chats_through_two_servers_have_their_figures_and_the_same_answers(tmp_path: Path) -> None:
    arguments = Namespace(only="chats", chat_ways=["none", "async"], held=None)
    result = serving.run(Options(tmp_path, tmp_path, 1, True), arguments)
    (chats,) = result.tables
    assert chats.column("way") == ["none", "async"]
    for name in ("first token s", "CPU s a request", "requests/s", "tokens/s", "computed %"):
        assert all(isinstance(each, float) and each > 0 for each in chats.column(name)), name
    without, ours = chats.column("loaded %")
    assert without == 0 and isinstance(ours, float) and ours > 0
    same, other = chats.column("other answers")
    assert same == 0 and other == chats.note.count("its two best tokens"), f"more than a tie: {chats.note}"
    assert not list(tmp_path.iterdir())


def test_a_warm_request_that_loaded_nothing_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def forget(self) -> None:
            pass

    monkeypatch.setattr(Way, "_timed", lambda *_: (Took(1.0, 1.0), 0))
    with pytest.raises(WrongBytes, match="0 of 64 stored tokens"):
        Way("async", Engine(), tmp_path, ()).warm([1] * 65, 2)  # type: ignore[arg-type]
    assert set(serving.ABOUT) == set(WAYS)


class Server:
    """A server without processes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def processes(self) -> list[int]:
        """None."""
        return []


def pair(name: str) -> Pair:
    """A way that has no vLLM."""
    return Pair(name, [Server("first"), Server("second")])  # type: ignore[list-item]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Records requests. Each server answers eight tokens, and loads nothing."""
    found: list[tuple[str, list[int]]] = []

    def ask(url: str, prompt: list[int], count: int) -> Reply:
        found.append((url, prompt))
        return Reply([7] * count, 0.5, 32)

    monkeypatch.setattr(streams, "ask", ask)
    monkeypatch.setattr(turns, "counters", lambda _: {})
    monkeypatch.setattr(turns, "REST_S", 0.0)
    return found


def test_the_turns_of_a_chat_go_to_the_servers_in_turn_with_all_that_was_said(
    asked: list[tuple[str, list[int]]],
) -> None:
    played = pair("none").play(TALK, 1)
    assert [url for url, _ in asked] == ["first", "second", "first", "second", "first", "second"]
    (_, one), (_, other), _, (_, later), _, _ = asked
    assert one[:64] == other[:64] and one[64:] != other[64:]
    assert later[:104] == one + [7] * 8 and len(later) == 136
    assert [turn.prompt for turn in played.chats[0]] == [one, later]
    assert played.computed == 1 - 6 * 32 / (3 * 96 + 3 * 136)
    # The system prompt on each server, and of each turn what is behind the full blocks of the one before it.
    assert played.needed == (3 * 32 + 2 * 64 + 3 * (136 - 96)) / (3 * 96 + 3 * 136)


def test_chats_that_loaded_nothing_are_no_figure(asked: list[tuple[str, list[int]]]) -> None:
    with pytest.raises(WrongBytes, match="async: nothing came from the store"):
        pair("async").play(TALK, 1)
    assert len(asked) == 6


def test_another_answer_is_told_with_the_distance_of_the_best_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(*answers: list[int]) -> Played:
        return Played(TALK, [[Turn([1, 2], Reply(answer, 0.5, 0)) for answer in answers]], 1.0, 1.0, 0.0)

    monkeypatch.setattr(
        streams, "best_two", lambda url, prompt: {3: -0.5, 9: -0.75} if (url, prompt) == ("first", [1, 2, 5]) else {}
    )
    expected = played([5, 3, 4], [6, 6, 6])
    (line,) = turns.differing(pair("none"), expected, played([5, 9, 4], [8, 8, 8]))
    assert line == "turn 0, token 1: its two best tokens are 0.25 apart"
    (line,) = turns.differing(pair("none"), expected, played([5, 10, 4], [8, 8, 8]))
    assert "NOT" in line
    assert turns.differing(pair("none"), expected, played([5, 3, 4], [6, 6, 6])) == []
