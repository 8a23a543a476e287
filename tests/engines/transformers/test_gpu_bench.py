"""The benchmark of a GPU runs small on a CPU, and finds wrong KV."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.harness import report


def test_it_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    told = ["--rounds", "1", "--tokens", "512", "--blended", "1024", "--root", str(tmp_path), "--save", str(results)]
    assert gpu.main(["--small", *told]) == 0
    printed = capsys.readouterr().out
    assert "pages in" in printed and "| 512 |" in printed.replace("|    512 |", "| 512 |")
    assert list(tmp_path.iterdir()) == [results]
    (results / "gpu-small.json").rename(results / "gpu.json")
    assert report.main([str(results)]) == 0
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## gpu-small" in page and "pages out" in page and "Hypothesis.** pages come and go" in page
