"""The result of a benchmark: tables of raw figures, with the hypothesis and the conditions.

Separate from measuring and from drawing, so that the terminal, the results page, the plots and the JSON files all show
the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class Plot:
    """The plot of a table: one line (or row of bars) for each column of ``y``, once for each value of ``series``."""

    x: str
    y: tuple[str, ...]
    series: str | None = None
    unit: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of raw figures; the column names carry the units. None: not measured, see ``Result.skipped``."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""
    plot: Plot | None = None

    def column(self, name: str) -> list[Cell]:
        """One column, top down."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]


@dataclass(frozen=True)
class Result:
    """One benchmark's outcome. ``skipped`` lists what was not measured, and why."""

    benchmark: str
    hypothesis: str
    conditions: tuple[str, ...]
    machine: dict[str, Any]
    tables: list[Table]
    skipped: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Result:
        """The inverse of ``to_json``."""
        tables = [
            Table(
                **{
                    **each,
                    "columns": tuple(each["columns"]),
                    "plot": Plot(**{**each["plot"], "y": tuple(each["plot"]["y"])}) if each["plot"] else None,
                }
            )
            for each in found["tables"]
        ]
        return cls(**{**found, "tables": tables, "conditions": tuple(found["conditions"])})


def save(result: Result, folder: Path) -> None:
    """Keeps the raw figures in a file of the benchmark's name, to five digits."""
    tables = [replace(table, rows=[[_rounded(cell) for cell in row] for row in table.rows]) for table in result.tables]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(replace(result, tables=tables).to_json(), indent=1)
    (folder / f"{result.benchmark}.json").write_text(text + "\n")


def _rounded(cell: Cell) -> Cell:
    return float(f"{cell:.5g}") if isinstance(cell, float) else cell


def markdown(table: Table) -> str:
    """The table as Markdown; numbers to three digits or so, aligned to the right."""
    columns = list(table.columns)
    texts = [[_text(cell) for cell in row] for row in table.rows]
    numeric = [any(isinstance(row[at], int | float) for row in table.rows) for at in range(len(columns))]
    widths = [max([len(columns[at]), 3, *(len(row[at]) for row in texts)]) for at in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join(
        "-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)
    )
    return "\n".join([line(columns), rule + "|", *(line(row) for row in texts)])


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    size = abs(cell)
    if size >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if size >= 10 else f"{cell:.2f}" if size >= 0.1 or not size else f"{cell:.3g}"
