"""Prints results as JSON or as tables on standard output, and progress on standard error where that is a terminal.

rich is imported where something is drawn: importing it takes as long as the rest of a collector's own modules, and a
collector that an embedded store starts draws nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvstore.core.operations import OperationState, OperationStatus
from kvstore.core.validate import shown, size
from kvstore.errors import KVStoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.client.operation import Operation

PIPE_COLUMNS = 200
"""Width of a table that is not drawn on a terminal, so that nothing is cut."""
EPOCH_S_MIN = 1e9
"""A number of seconds above it is a wall time."""
UPDATE_S = 0.2
"""Interval between two updates of the progress."""
CANCEL_S = 5.0
"""How long Ctrl-C waits for the end of the operation that it cancels."""


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps(value, indent=2))  # ASCII: names of files may be no text


def print_values(values: Mapping[str, Any], as_json: bool) -> None:
    """Prints one result, as a JSON document or as names and values; nested values are in the document alone."""
    if as_json:
        print_json(values)
    else:
        plain = {name: value for name, value in values.items() if not isinstance(value, (dict, list))}
        print_table(None, [(name.replace("_", " "), _cell(value, name)) for name, value in plain.items()])


def print_rows(
    name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool, **more: object
) -> None:
    """Prints several results, as a JSON document with ``more``, or as a table of some of their columns."""
    if as_json:
        print_json({name: rows, **more})
        return
    titles = [each.removesuffix("_s").replace("_", " ") for each in columns]
    cells = [[_shown_or_number(row[each], each) for each in columns] for row in rows]
    print_table(titles, cells)


def print_table(columns: Sequence[str] | None, rows: Sequence[Sequence[object]]) -> None:
    """Prints a table, without a head if ``columns`` is None; numbers are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=columns is not None,
    )
    for at, name in enumerate(columns or (rows[0] if rows else ())):
        numeric = bool(rows) and all(isinstance(row[at], (int, float)) for row in rows)
        table.add_column(str(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    # Markup is off, because names are users' text.
    Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False).print(table)


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


def follow(operation: Operation) -> OperationStatus:
    """Waits for the end of an operation, with progress on a terminal; returns its status, done or cancelled.

    Ctrl-C cancels it. Raises Unavailable if it failed.
    """
    last = operation.last
    try:
        with progress_to(f"{last.kind}, {last.unit}") as show:
            while not operation.wait(UPDATE_S):
                show(operation.last.done, operation.last.total)
    except KeyboardInterrupt:
        with suppress(KVStoreError):
            operation.cancel()
            operation.wait(CANCEL_S)
        last = operation.last
        print(f"{last.kind} {last.state.value} after {last.done:,} of {last.total:,} {last.unit}", file=sys.stderr)
        raise
    if operation.last.state is OperationState.FAILED:
        raise Unavailable(operation.last.message)
    return operation.last


def operation_values(status: OperationStatus) -> dict[str, Any]:
    """An operation for JSON: numbers that are unknown yet are None."""
    names = ("id", "kind", "about", "identity", "began_s", "done", "unit", "message", "worker")
    return {
        **{name: getattr(status, name) for name in names},
        "state": status.state.value,
        "ended_s": status.ended_s or None,
        "total": status.total or None,
        "counts": dict(status.counts),
    }


def _shown_or_number(value: object, name: str) -> object:
    """A cell of the column ``name``; numbers that are only counted stay numbers, for their alignment."""
    is_count = isinstance(value, int) and "bytes" not in name and not name.endswith("_s")
    return value if is_count else _cell(value, name)


def _cell(value: object, name: str = "") -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, map(str, value))) or "-"
    if isinstance(value, int) and "bytes" in name.split("_"):
        return size(value)
    if isinstance(value, (int, float)) and name.endswith(("_s", "_timestamp_seconds")) and not name.endswith("_per_s"):
        return moment(value) if value >= EPOCH_S_MIN else f"{value:.1f} s"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else shown(str(value))
