"""Tables as SVG pictures: lines over numbers, bars over names.

matplotlib is imported where a picture is drawn: most commands draw none, and its import takes as long as they do.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.result import Cell, Plot, Table

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
                said = "" if kind is None else f", {plot.series} {kind:,}" if isinstance(kind, int) else f", {kind}"
                lines.append(Line(column + said, points))
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
        beside = (number - (len(lines) - 1) / 2) * width
        axes.bar([names.index(x) + beside for x, _ in line.points], [y for _, y in line.points], width, label=line.name)
    axes.set_xticks(range(len(names)), [str(name) for name in names])
