"""Tables as SVG, by hand: lines over numbers, bars over names. A drawing library would be the larger dependency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.result import Cell, Plot, Table

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 40, 52
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#00798c", "#8d5524", "#595959")
TICKS = 5


@dataclass(frozen=True)
class Line:
    """One line or one row of bars."""

    name: str
    points: list[tuple[Cell, float]]


def svg(table: Table) -> str:
    """The picture of a table that has a plot."""
    plot = table.plot
    assert plot is not None, table.title
    lines = lines_of(table, plot)
    values = [value for line in lines for _, value in line.points]
    names = list(dict.fromkeys(x for line in lines for x, _ in line.points))
    up = _Scale.over(values, HEIGHT - BOTTOM, TOP, log=plot.log_y and min(values) > 0)
    body = [_grid(up)]
    numbers = [x for x in names if isinstance(x, int | float)]
    if len(numbers) == len(names) and len(names) > 1:
        across = _Scale.over(numbers, LEFT, WIDTH - RIGHT, log=plot.log_x and min(numbers) > 0, from_zero=False)
        body += [_text(across.at(x), HEIGHT - BOTTOM + 18, f"{x:,g}", "middle") for x in _spread(numbers)]
        body += [_path(line, across.at, up, number) for number, line in enumerate(lines)]
    else:
        body += _bars(lines, names, up)
    for number, line in enumerate(lines):
        at = TOP + 18 * number
        body.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{at - 9}" width="10" height="10" fill="{_colour(number)}"/>')
        body.append(_text(WIDTH - RIGHT + 30, at, line.name))
    body.append(_text(LEFT, 20, table.title, weight="bold"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, plot.x, "middle"))
    body.append(_text(LEFT - 6, TOP - 8, plot.unit, "end"))
    height = max(HEIGHT, TOP + 18 * len(lines))  # the legend may be longer than the picture
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def lines_of(table: Table, plot: Plot) -> list[Line]:
    """The lines of a plot: one for each column, and for each value of the series column."""
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


@dataclass(frozen=True)
class _Scale:
    """A map from values to places, linear or by powers."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool, from_zero: bool = True) -> _Scale:
        low, high = min(values), max(values)
        if log:
            low, high = (
                (10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))) if from_zero else (low, high)
            )
        elif from_zero:
            low, high = min(0.0, low), high * 1.05
        return cls(low, high if high > low else low + 1, start, end, log)

    def at(self, value: float) -> float:
        share = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.log
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        rough = (self.high - self.low) / TICKS
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        return [number * step for number in range(math.ceil(self.low / step), int(self.high / step) + 1)]


def _grid(up: _Scale) -> str:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:,g}", "end"))
    return "\n".join(parts)


def _path(line: Line, across: Callable[[float], float], up: _Scale, number: int) -> str:
    places = [(across(float(x)), up.at(y)) for x, y in line.points if isinstance(x, int | float)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(number)}"/>' for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="2"/>{dots}'


def _bars(lines: Sequence[Line], names: Sequence[Cell], up: _Scale) -> list[str]:
    room = (WIDTH - LEFT - RIGHT) / len(names)
    width = room * 0.8 / len(lines)
    parts = []
    for place, name in enumerate(names):
        left = LEFT + place * room + room * 0.1
        parts.append(_text(left + room * 0.4, HEIGHT - BOTTOM + 18, str(name), "middle"))
        for number, line in enumerate(lines):
            for x, value in line.points:
                if x == name:
                    top, foot = up.at(value), up.at(max(up.low, 0.0) if not up.log else up.low)
                    parts.append(
                        f'<rect x="{left + number * width:.1f}" y="{top:.1f}" width="{width:.1f}" '
                        f'height="{max(0.0, foot - top):.1f}" fill="{_colour(number)}"/>'
                    )
    return parts


def _spread(numbers: Sequence[float]) -> list[float]:
    """The values to name below the axis: all, or every other one where there are many."""
    ordered = sorted(set(numbers))
    return ordered[:: 1 + len(ordered) // 12]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
