"""The results page and its plots, from the raw figures that ``python -m benchmarks --save`` kept.

    python -m benchmarks.harness.report [FOLDER]

matplotlib is imported where a picture is drawn: most commands draw none, and its import takes as long as they do.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.result import Cell, Plot, Result, Table, markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INCHES = (7.6, 3.6)
BARS_SHARE = 0.8
TICKS_MAX = 12


@dataclass(frozen=True)
class Line:
    """One line or one row of bars."""

    name: str
    points: list[tuple[Cell, float]]


def svg(table: Table) -> str:
    """Returns the picture of a table that has a plot."""
    from matplotlib import rc_context

    text = io.StringIO()
    # Text stays text, and ids are the same in every run: a picture changes only with its figures.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvstore", "font.size": 8.0}):
        drawn(table).savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def drawn(table: Table) -> Figure:
    """Draws a table that has a plot."""
    from matplotlib.figure import Figure

    plot = table.plot
    assert plot is not None, table.title
    lines = lines_of(table, plot)
    figure = Figure(figsize=INCHES)
    axes = figure.subplots()
    axes.set_title(table.title, loc="left", fontweight="bold")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.unit)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    xs = list(dict.fromkeys(x for line in lines for x, _ in line.points))
    if len(xs) > 1 and all(isinstance(x, int | float) for x in xs):
        _draw_lines(axes, lines, log=plot.log_x)
    else:
        _draw_bars(axes, lines, xs)
    if plot.log_y and min(y for line in lines for _, y in line.points) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def lines_of(table: Table, plot: Plot) -> list[Line]:
    """Returns the lines of a plot: one for each column, and for each value of the series column."""
    xs = table.column(plot.x)
    kinds = table.column(plot.series) if plot.series else [None] * len(xs)
    lines = []
    for kind in dict.fromkeys(kinds):
        for column in plot.y:
            if column not in table.columns:
                continue
            rows = zip(xs, kinds, table.column(column), strict=True)
            points = [(x, float(y)) for x, of, y in rows if of == kind and isinstance(y, int | float)]
            if points:
                suffix = "" if kind is None else f", {plot.series} {kind:,}" if isinstance(kind, int) else f", {kind}"
                lines.append(Line(column + suffix, points))
    return lines


def _draw_lines(axes: Axes, lines: Sequence[Line], *, log: bool) -> None:
    for line in lines:
        points = [(float(x), y) for x, y in line.points if isinstance(x, int | float)]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=line.name)
    numbers = sorted({float(x) for line in lines for x, _ in line.points if isinstance(x, int | float)})
    if log and numbers[0] > 0:
        axes.set_xscale("log")
    shown = numbers[:: 1 + len(numbers) // TICKS_MAX]
    axes.set_xticks(shown, [f"{x:,.10g}" for x in shown])
    axes.set_xticks([], minor=True)


def _draw_bars(axes: Axes, lines: Sequence[Line], names: Sequence[Cell]) -> None:
    width = BARS_SHARE / len(lines)
    for number, line in enumerate(lines):
        offset = (number - (len(lines) - 1) / 2) * width
        axes.bar([names.index(x) + offset for x, _ in line.points], [y for _, y in line.points], width, label=line.name)
    axes.set_xticks(range(len(names)), [str(name) for name in names])


HERE = Path(__file__).parents[1]
RESULTS = HERE / "results"
ORDER = ("throughput", "memcpy", "engine", "match", "steady", "competitors", "gpu", "blending", "segments")
HEAD = """\
# Results

`make results` makes this page from `results/*.json`, and draws plots into `results/plots/`; do not edit it.
Times mean little on other machines; ratios to a memory copy and to fio, measured in the same run, mean more.
[README.md](README.md) lists the benchmarks, [performance notes](../docs/performance-notes.md) what limits a path.
`make results` leaves out `gpu`, `blending` and `segments`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the page is written; 2: there is nothing to write it from."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.report", description="Writes the results page.")
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="the raw figures (default: results)")
    asked = parser.parse_args(arguments)
    results = load(asked.folder)
    if not results:
        print(f"{asked.folder} has no raw figures: python -m benchmarks all --save {asked.folder}", file=sys.stderr)
        return 2
    write(results, asked.folder)
    draw(results, asked.folder / "plots")
    return 0


def load(folder: Path) -> list[Result]:
    """All results in a folder, in the order of the page."""
    paths = (folder / f"{name}.json" for name in ORDER)
    return [Result.from_json(json.loads(path.read_text())) for path in paths if path.is_file()]


def write(results: Sequence[Result], folder: Path) -> None:
    """Writes RESULTS.md next to the folder."""
    (folder.parent / "RESULTS.md").write_text("\n".join([HEAD, *map(_section, results)]))


def draw(results: Sequence[Result], folder: Path) -> None:
    """Draws the plots of all tables; what an earlier run left is deleted."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for result in results:
        for table in result.tables:
            if table.plot is not None and _is_drawable(table):
                title = re.sub("[^a-z0-9]+", "-", table.title.lower()).strip("-")
                (folder / f"{result.benchmark}-{title}.svg").write_text(svg(table))


def _section(result: Result) -> str:
    machine = result.machine
    states = {True: "quiet before the run", False: "SHARED with other work"}
    quiet = states.get(machine["quiet"], "unknown")
    about = (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python "
        f"{machine['python']}, numpy {machine['numpy']}, fio {machine['fio']}, native data path {machine['native']}, "
        f"load {machine['load_before']} ({quiet})"
    )
    lines = [
        f"## {result.benchmark}\n",
        f"**Hypothesis.** {result.hypothesis.rstrip('.')}.\n",
        f"**Machine.** {about}. **Commit** {machine['commit']}. **Took** {result.wall_s:.0f} s.\n",
        *(f"- {line}" for line in result.conditions),
        "",
    ]
    for table in result.tables:
        lines += [f"### {table.title}\n", markdown(table), ""]
        if table.note:
            lines += [f"{table.note.rstrip('.')}.\n"]
    lines += [f"- Not measured: {line}" for line in result.skipped]
    return "\n".join(lines) + "\n"


def _is_drawable(table: Table) -> bool:
    """True if there is anything to compare."""
    assert table.plot is not None
    return len(table.rows) > 1 and any(name in table.columns for name in table.plot.y)


if __name__ == "__main__":
    sys.exit(main())
