"""The benchmark of what a run brings ahead: every way has a figure, and a root that stays cached is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import caching, prefetching
from benchmarks.prefetching import main

TINY = ["--groups", "3", "--prefix", "512", "--rounds", "1"]


@pytest.mark.slow
def test_each_way_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(caching, "emptied", lambda *_: 0.0)  # a file system in memory cannot be emptied
    assert main(["--root", str(tmp_path), *TINY]) == 0
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("in memory", "from the root", "brought ahead"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_root_that_stays_in_the_page_cache_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "emptied", lambda *_: 1.0)
    with pytest.raises(SystemExit, match="give --root"):
        main(["--root", str(tmp_path), *TINY])
    assert prefetching.CACHED_SHARE_MAX < 1
