"""The results page: the same numbers everywhere, with hypothesis, machine, cache state and commit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from benchmarks import command, machine, plots, report
from benchmarks.contents import WrongBytes
from benchmarks.result import Plot, Result, Table, markdown, save
from tests.kit.cases import for_each

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


def test_raw_figures_come_back_from_json() -> None:
    whole = result()
    assert Result.from_json(json.loads(json.dumps(whole.to_json()))) == whole


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


def test_without_figures_there_is_no_page(tmp_path: Path, capsys: Any) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "no raw figures" in capsys.readouterr().err


@for_each("log_y", [False, True])
@for_each("x", ["workers", "path"])
def test_a_plot_is_well_formed_and_shows_every_value(x: str, log_y: bool) -> None:
    plot = Plot(x, ("write", "read"), None if x == "path" else "path", "GiB/s", log_x=True, log_y=log_y)
    table = replace(TABLE, plot=plot)
    picture = ElementTree.fromstring(plots.svg(table))
    names = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "Speeds & sizes" in names and "GiB/s" in names and x in names
    (axes,) = plots.drawn(table).axes
    if x == "path":
        values = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
    else:
        values = [float(y) for line in axes.lines for y in np.asarray(line.get_ydata())]
    assert sorted(values) == sorted(y for line in plots.lines_of(table, plot) for _, y in line.points)
    low, high = axes.get_ylim()
    assert len(values) == 3 and all(low <= value <= high for value in values)
    assert (axes.get_yscale() == "log") == log_y


def test_a_picture_changes_only_with_its_figures() -> None:
    table = replace(TABLE, plot=Plot("workers", ("write", "read"), "path", "GiB/s"))
    assert plots.svg(table) == plots.svg(table)


def test_the_command_prints_json_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    benchmark = command.Benchmark("", lambda options, arguments: result(skipped=[]))
    monkeypatch.setattr(command, "BENCHMARKS", {"workers": benchmark})
    assert command.main(["--json", "--save", str(tmp_path)]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "workers.json").read_text())
    assert printed["tables"][0]["rows"][0] == [1, 0.5, 1.25, "shared"] == kept["tables"][0]["rows"][0]
    assert command.main(["workers"]) == 0
    assert "shared with others (load 7.5" in capsys.readouterr().out


def test_wrong_bytes_give_no_figures_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def wrong(options: Any, arguments: Any) -> Result:
        raise WrongBytes("get: wrong bytes")

    monkeypatch.setattr(command, "BENCHMARKS", {"workers": command.Benchmark("", wrong)})
    assert command.main(["workers"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "workers: WrongBytes: get: wrong bytes" in said.err


@for_each("wrong", [["pigeons"], ["workers", "--workers", "0"], ["--rounds", "0"]])
def test_wrong_use_is_an_error(wrong: list[str], capsys: Any) -> None:
    try:
        assert command.main(wrong) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert capsys.readouterr().err
