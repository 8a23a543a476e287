"""``kvstore ops``, and how a command follows an operation to its end."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command
from kvstore.cli.options import json_option
from kvstore.cli.output import moment, print_json, print_table, progress_to
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.operations import OperationState, OperationStatus

if TYPE_CHECKING:
    from kvstore.client.operation import Operation

UPDATE_S = 0.2
"""Interval between two updates of the progress."""
CANCEL_S = 5.0
"""How long Ctrl-C waits for the end of the operation that it cancels."""


@click.command(cls=Command, short_help="List or cancel long-running operations.")
@click.argument("act", metavar="[cancel ID]", type=click.Choice(["cancel"]), required=False)
@click.argument("id", metavar="", required=False)
@access_options
@json_option
def ops(act: str | None, id: str | None, access: Access, as_json: bool) -> None:
    """List the operations of workers (prefetch, clear), unfinished and lately finished; or cancel one.

    Each worker keeps its last 100 finished operations in memory; a restart loses them. What a cancelled operation has
    done stays done.

    \b
    Examples:
      kvstore ops --connect 10.0.0.7:7070
      kvstore ops cancel 4f0c7a1e9b2d4c3f --etcd 10.0.0.5:2379
    """
    if (act is None) != (id is None):
        raise InvalidRequest("which operation? give its id: kvstore ops cancel ID")
    with access.open_workers() as store:
        found = store.operations()
        if id is not None:
            found = [each for each in found if each.id == id]
            if not found:
                raise InvalidRequest(f"no worker has an operation {id!r}: kvstore ops lists them")
            found[0].cancel()
    rows = [each.last for each in found]
    if as_json:
        print_json({"operations": [as_values(each) for each in rows]})
        return
    print_table(
        ("id", "kind", "about", "state", "done", "began", "took", "by", "worker", "message"),
        [
            (
                each.id,
                each.kind,
                each.about,
                each.state.value,
                _how_far(each),
                moment(each.began_s),
                f"{(each.ended_s or time.time()) - each.began_s:.1f} s",
                each.identity or "-",
                each.worker,
                each.message,
            )
            for each in rows
        ],
    )


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
        print(f"{last.kind} {operation.last.state.value} after {_how_far(operation.last)}", file=sys.stderr)
        raise
    if operation.last.state is OperationState.FAILED:
        raise Unavailable(operation.last.message)
    return operation.last


def as_values(status: OperationStatus) -> dict[str, Any]:
    """An operation for JSON: numbers that are unknown yet are None."""
    names = ("id", "kind", "about", "identity", "began_s", "done", "unit", "message", "worker")
    return {
        **{name: getattr(status, name) for name in names},
        "state": status.state.value,
        "ended_s": status.ended_s or None,
        "total": status.total or None,
        "counts": dict(status.counts),
    }


def _how_far(status: OperationStatus) -> str:
    return f"{status.done:,} of {status.total:,} {status.unit}" if status.total else f"{status.done:,} {status.unit}"
