"""Benchmarks that count instead of measuring, and two that run planned batches and segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import segments
from benchmarks.harness import baselines
from benchmarks.harness.load import WrongBytes
from benchmarks.planning import BLOCK, Load, prefetching_main, saved, shared_by
from kvstore.batch import PromptSet
from kvstore.segments import Segments

FEW = ["--groups", "3", "--prefix", "512", "--rounds", "1"]


def small_batch() -> Load:
    chance = np.random.default_rng(0)
    prompts = shared_by(chance, 20, 4, prefix=64, own=16)
    packed = PromptSet.of_tokens((prompts[at] for at in chance.permutation(len(prompts))), BLOCK)
    return Load("small", packed)


def test_planned_order_saves_all_that_can_be_saved() -> None:
    rows = list(saved(small_batch(), [10_000]))
    assert [row[1] for row in rows] == [160, 10_000]
    for row in rows:
        assert row[3] == row[4] == row[5] == pytest.approx(60.0)
    arrival = [row[2] for row in rows]
    assert isinstance(arrival[0], float) and arrival[0] < 10
    assert arrival[1] == pytest.approx(60.0), "memory for all"


@pytest.mark.slow
def test_prefetching_needs_a_cold_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baselines, "emptied", lambda *_: 0.0)  # a file system in memory cannot be emptied
    assert prefetching_main(["--root", str(tmp_path), *FEW]) == 0
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("in memory", "from the root", "brought ahead"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(baselines, "emptied", lambda *_: 1.0)
    with pytest.raises(SystemExit, match="give --root"):
        prefetching_main(["--root", str(tmp_path), *FEW])


@pytest.mark.slow
def test_segments_are_found_on_each_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(segments, "DOCUMENTS", 4)
    monkeypatch.setattr(segments, "KEYS_SHAPE", (2, 64, 2, 128))
    assert segments.main(["--tokens", "2000", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("any offset") == 3 and "through a worker" in printed and printed.count("interleaved") == 3
    monkeypatch.setattr(Segments, "find", lambda *_, **__: [])
    with pytest.raises(WrongBytes, match="0 tokens of 1280"):
        segments.main(["--tokens", "2000", "--rounds", "1"])
