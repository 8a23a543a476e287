"""The benchmark of the real vLLM gives a figure for every way, and refuses one that loaded nothing."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import serving
from benchmarks.contents import WrongBytes
from benchmarks.options import Options
from benchmarks.serving import WAYS, Took, Way

WAYS_HERE = ["none", "sync", "fs"]


def test_each_way_has_its_figures(tmp_path: Path) -> None:
    result = serving.run(Options(tmp_path, tmp_path, 1, True), Namespace(ways=WAYS_HERE, tokens=256))
    cold, warm = result.tables
    assert cold.column("way") == warm.column("way") == WAYS_HERE
    assert all(isinstance(each, float) and each > 0 for each in cold.column("first token s") + warm.column("CPU s"))
    assert not list(tmp_path.iterdir())


def test_a_warm_request_that_loaded_nothing_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def forget(self) -> None:
            pass

    monkeypatch.setattr(Way, "_timed", lambda *_: (Took(1.0, 1.0), 0))
    with pytest.raises(WrongBytes, match="0 of 64 stored tokens"):
        Way("async", Engine(), tmp_path, ()).warm([1] * 65, 2)  # type: ignore[arg-type]
    assert set(serving.ABOUT) == set(WAYS)
