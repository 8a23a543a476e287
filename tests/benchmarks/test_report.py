"""The results page: the same numbers everywhere, with hypothesis, machine, cache state and commit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, machine, report
from benchmarks.result import Plot, Result, Table, markdown, save

TABLE = Table(
    "Speeds & sizes",
    ("workers", "write", "read", "path"),
    [[1, 0.5, 1.25, "shared"], [32, 1234.5, None, "tcp"]],
    "as fast as that",
    Plot("workers", ("write", "read"), "path", "GiB/s", log_x=True),
)


def result(**changed: Any) -> Result:
    about = {**machine.describe(), "commit": "abc123", "quiet": False, "load_before": 7.5}
    whole = Result("workers", "it is fast", ("warm page cache on tmpfs",), about, [TABLE], ["cold: no device"], 12.0)
    return replace(whole, **changed)


def test_a_table_is_markdown_with_short_numbers() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[0].split() == ["|", "workers", "|", "write", "|", "read", "|", "path", "|"]
    assert lines[2].split() == ["|", "1", "|", "0.50", "|", "1.25", "|", "shared", "|"]
    assert lines[3].split() == ["|", "32", "|", "1,234", "|", "-", "|", "tcp", "|"]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split("|")[1].endswith(":") and lines[1].split("|")[4].endswith("-")


def test_the_page_says_all_that_a_figure_needs(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "stale.svg").write_text("old")
    save(result(), folder)
    assert report.main([str(folder)]) == 0
    page = (tmp_path / "RESULTS.md").read_text()
    for words in ("it is fast", "abc123", "warm page cache", "SHARED", "cold: no device", "as fast as that", "1,234"):
        assert words in page
    (plot,) = folder.glob("*.svg")
    assert f"results/{plot.name}" in page


def test_the_command_prints_json_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    benchmark = command.Benchmark("", lambda options, arguments: result(skipped=[]))
    monkeypatch.setattr(command, "BENCHMARKS", {"workers": benchmark})
    assert command.main(["--json", "--save", str(tmp_path)]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "workers.json").read_text())
    assert printed["tables"][0]["rows"][0] == [1, 0.5, 1.25, "shared"] == kept["tables"][0]["rows"][0]
    assert command.main(["workers"]) == 0
    assert "shared with others (load 7.5" in capsys.readouterr().out
