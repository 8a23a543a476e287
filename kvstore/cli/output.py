"""Prints JSON or tables on standard output, and progress on standard error where that is a terminal.

rich is imported where something is drawn: importing it takes as long as the rest of a collector's own modules, and a
collector that an embedded store starts draws nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.text import shown

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 200
"""Width of a table that is not drawn on a terminal, so that nothing is cut."""


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Prints a table; numbers are aligned to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[at], (int, float)) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Prints names and values under each other, values aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", overflow="fold")
    for name, value in pairs:
        table.add_row(shown(name), shown(value))
    console().print(table)


def console() -> Console:
    """Standard output; markup is off, because names are users' text."""
    from rich.console import Console

    tty = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if tty else PIPE_COLUMNS, markup=False, highlight=False, emoji=False)


def moment(when_s: float) -> str:
    """A wall time in this host's time zone; ``-`` for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when_s)) if when_s else "-"


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while on a terminal; yields a function that moves it on."""
    done = 0

    def move(count: int) -> None:
        nonlocal done
        done += count
        show(done, total or 0)

    with progress_to(what) as show:
        show(0, total or 0)
        yield move


@contextmanager
def progress_to(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar as ``progress_bar`` does; yields a function that takes done and total. A total of 0 is unknown."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return shown(str(value))
