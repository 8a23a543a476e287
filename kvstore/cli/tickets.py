"""``kvstore tickets``: long-running operations of workers, and following one to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvstore.brief import size
from kvstore.cli.access import Access, access_options
from kvstore.cli.command import Command, check_failed
from kvstore.cli.options import json_option
from kvstore.cli.output import print_json, print_table, progress_to
from kvstore.errors import InvalidRequest
from kvstore.tickets import State, Ticket

if TYPE_CHECKING:
    from kvstore.client.control import Control, ControlTicket
    from kvstore.client.store import Store

LEFT = ("failed_chunks", "unconfirmed_nodes")
"""Counts of chunks that a clear could not delete, and of nodes that did not confirm it."""


@click.command(cls=Command, short_help="List, watch or cancel long-running operations.")
@click.option("--watch", "watched", metavar="ID", help="Follow one until it ends; Ctrl-C only stops following.")
@click.option("--cancel", "cancelled", metavar="ID", help="End one; what it has done stays done.")
@access_options
@json_option
def tickets(watched: str | None, cancelled: str | None, access: Access, as_json: bool) -> None:
    """List long-running operations of workers: clear, prefetch, move, release.

    Each worker keeps its last 100 tickets in memory; a restart loses them. With --watch, exit code 1 if the ticket
    failed or was cancelled, or is a clear that left something behind.

    \b
    Examples:
      kvstore tickets --connect 10.0.0.7:7070
      kvstore tickets --watch 4f0c7a1e9b2d4c3f --etcd 10.0.0.5:2379
      kvstore tickets --cancel 4f0c7a1e9b2d4c3f --connect 10.0.0.7:7070,10.0.0.8:7070
    """
    if watched and cancelled:
        raise InvalidRequest("--watch follows a ticket, --cancel ends it: give one of them")
    with access.open_workers() as store:
        control = store.control
        if watched:
            follow(control.ticket(watched), as_json)
            return
        if cancelled:
            found = [control.ticket(cancelled).cancel()]
        else:
            found = control.tickets()
    if as_json:
        print_json({"tickets": [as_values(each) for each in found]})
        return
    print_table(
        ("id", "act", "about", "state", "done", "began", "took", "by", "worker", "message"),
        [
            (
                each.id,
                each.act,
                each.about,
                each.state.value,
                _how_far(each),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.began_s)),
                _took(each),
                each.identity or "-",
                each.worker,
                each.message or _came(each),
            )
            for each in found
        ],
    )


def follow(ticket: ControlTicket, as_json: bool, say: Callable[[Ticket], None] | None = None) -> None:
    """Follows a ticket to its end, with progress on a terminal, and prints its result; ``say`` does, if it is done.

    Ctrl-C leaves the operation running and says how to follow it again. Exit code 1 if it failed, was cancelled, or
    left something, so that it must be repeated.
    """
    if not as_json:
        print(f"ticket {ticket.id} at {ticket.last.worker}", file=sys.stderr)
    try:
        with progress_to(f"{ticket.last.act}, {ticket.last.unit}") as show:
            ended = ticket.follow(lambda now: show(now.done, now.total))
    except KeyboardInterrupt:
        print(
            f"it goes on: kvstore tickets --watch {ticket.id} follows it, --cancel {ticket.id} ends it", file=sys.stderr
        )
        raise
    if as_json:
        print_json(as_values(ended))
    else:
        came, failed = _came(ended), ended.state is State.FAILED and ended.message
        if ended.message:
            print(f"{ended.act} failed: {ended.message}" if failed else ended.message, file=sys.stderr)
        if say is not None and ended.state is State.DONE:
            say(ended)
        elif came or not failed:
            print(f"{ended.act} {ended.state.value}: {came or _how_far(ended)}")
    if ended.state is not State.DONE or any(ended.counts.get(name) for name in LEFT):
        check_failed()


def begin_and_follow(
    access: Access,
    as_json: bool,
    is_followed: bool,
    begin: Callable[[Store, Control], ControlTicket],
    say: Callable[[Ticket], None] | None = None,
) -> None:
    """Begins an operation at a worker, and follows it (``follow``) unless only its id is wanted."""
    with access.open_workers() as store:
        ticket = begin(store, store.control)
        if is_followed:
            follow(ticket, as_json, say)
        elif as_json:
            print_json(as_values(ticket.last))
        else:
            print(ticket.id)


def as_values(ticket: Ticket) -> dict[str, Any]:
    """A ticket for JSON: numbers that are not there yet are None."""
    names = ("id", "act", "about", "identity", "began_s", "done", "unit", "message", "worker")
    return {
        **{name: getattr(ticket, name) for name in names},
        "state": ticket.state.value,
        "ended_s": ticket.ended_s or None,
        "total": ticket.total or None,
        "counts": dict(ticket.counts),
    }


def _came(ticket: Ticket) -> str:
    """The result: chunks by kind, then bytes."""
    said = []
    for name, count in sorted(ticket.counts.items(), key=lambda item: (item[0].startswith("bytes"), item[0])):
        if name.startswith("bytes"):
            said.append(f"{size(count)}{name.removeprefix('bytes').replace('_', ' ')}")
        elif count or name == "chunks":
            said.append(f"{count:,} {name.replace('_', ' ')}")
    return ", ".join(said)


def _how_far(ticket: Ticket) -> str:
    return f"{ticket.done:,} of {ticket.total:,} {ticket.unit}" if ticket.total else f"{ticket.done:,} {ticket.unit}"


def _took(ticket: Ticket) -> str:
    return f"{(ticket.ended_s or time.time()) - ticket.began_s:.1f} s"
