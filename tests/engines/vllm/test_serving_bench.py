"""The benchmark of the real vLLM gives a figure for every way, and refuses one that loaded nothing."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks import serving
from benchmarks.harness.options import Options

WAYS_HERE = ["none", "async", "fs"]


def test_each_way_has_its_figures(tmp_path: Path) -> None:
    arguments = Namespace(only="prompts", ways=WAYS_HERE, tokens=256)
    result = serving.run(Options(tmp_path, tmp_path, 1, True), arguments)
    first, cold, warm = result.tables
    assert first.column("way") == cold.column("way") == warm.column("way") == WAYS_HERE
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
