"""``kvstore clear``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvstore.brief import size
from kvstore.census.selection import Selection
from kvstore.cli.access import Access, access_options
from kvstore.cli.choosing import Asked, open_cache, selection_options
from kvstore.cli.command import Command, check_failed
from kvstore.cli.options import json_option
from kvstore.cli.output import print_json, progress_to
from kvstore.cli.rooted import check_pins_known
from kvstore.cli.tickets import begin_and_follow
from kvstore.errors import InvalidRequest
from kvstore.results import Cleared

if TYPE_CHECKING:
    from kvstore.client.store import Store
    from kvstore.tickets import Ticket

IGNORED = "; or --ignore-pins, which deletes pinned chunks too"


@click.command(cls=Command, short_help="Delete stored chunks, by namespace, writer, age, ...")
@selection_options
@click.option("--pinned", is_flag=True, help="Delete pinned chunks too; their pins remain and protect nothing.")
@click.option("--dry-run", is_flag=True, help="Only count what would be deleted.")
@click.option(
    "--ignore-pins", is_flag=True, help="Delete even if the pins of --root are unknown; then they are not respected."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@access_options
@json_option
def clear(
    asked: Asked, pinned: bool, dry_run: bool, ignore_pins: bool, yes: bool, access: Access, as_json: bool
) -> None:
    """Delete the stored chunks of the namespace NAME, or those that match all given options, except pinned ones.

    Deletes them on the root and in the memory and local disks of all nodes before it returns, so one command removes
    the chunks of a bad roll-out. Stop its writers first (kvstore drain): chunks written meanwhile stay. Readers get a
    miss and compute the chunk again. Namespaces stay. Running it twice is harmless.

    A chunk that a good engine computed after a wrong prefix counts as the good engine's. If good engines continued
    prompts of a bad roll-out, clear the namespace, or everything since then (--since).

    Exit code 1 if something could not be deleted, or a node did not confirm in time: run it again.

    \b
    Examples:
      kvstore clear llama-3.1-8b --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear llama-3.1-8b --root /mnt/kv --ignore-pins
      kvstore clear --written-by label=canary --dry-run --connect 10.0.0.7:7070
      kvstore clear --written-by version=0.2.0 --since 2026-11-21T10:00 --yes --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear --tenant alice --older-than 30d --yes --connect 10.0.0.7:7070
    """
    if asked.is_namespace_alone and not pinned and not dry_run:
        _clear_namespace(asked, yes, access, as_json, ignore_pins=ignore_pins)
        return
    if access.root is None:
        begin_and_follow(
            access,
            as_json,
            True,
            lambda store, control: control.clear(_sure(asked, store, yes or dry_run), dry_run=dry_run, pinned=pinned),
            # What failed or was not confirmed is in the ticket's message.
            lambda ended: _print_chunks(_cleared(ended), dry_run),
        )
        return
    with access.open() as store:
        if not ignore_pins:
            check_pins_known(store, instead=IGNORED)
        selection = _sure(asked, store, yes or dry_run)
        with progress_to("clear, shards") as show:
            cleared = store.clear(selection, progress=show, dry_run=dry_run, pinned=pinned)
    if as_json:
        print_json({**asdict(cleared), "dry_run": dry_run})
    else:
        _print(cleared, dry_run)
    if cleared.failed or cleared.unconfirmed:
        check_failed()


def _sure(asked: Asked, store: Store, yes: bool) -> Selection:
    """The selection, after the user has confirmed it."""
    selection = asked.selection(store)
    _ask(f"Delete all chunks of {selection.describe()}?", yes)
    return selection


def _clear_namespace(asked: Asked, yes: bool, access: Access, as_json: bool, *, ignore_pins: bool) -> None:
    name, tenant = asked.name or "", asked.tenant or ""
    with access.open() as store:
        if not ignore_pins:
            check_pins_known(store, instead=IGNORED)
        cache = open_cache(store, name, tenant, asked.fingerprint or None)
        _ask(f"Delete all chunks of namespace {name!r} (tenant {tenant!r})?", yes)
        cleared = cache.clear()
    if as_json:
        print_json({"namespace": name, **asdict(cleared)})
    else:
        _print(cleared, dry_run=False)
    if cleared.unconfirmed:
        check_failed()


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest("clear deletes, and there is no terminal to ask on: give --yes")
    if not click.confirm(question, err=True):
        raise InvalidRequest("nothing was deleted")


def _cleared(ended: Ticket) -> Cleared:
    chunks, size_bytes, pinned = (ended.counts.get(name, 0) for name in ("chunks", "bytes", "pinned_chunks"))
    return Cleared(chunks, size_bytes, pinned)


def _print_chunks(cleared: Cleared, dry_run: bool) -> None:
    print(f"{cleared.chunks} chunks {'would be ' if dry_run else ''}deleted, {size(cleared.bytes)}")
    if cleared.pinned:
        print(f"{cleared.pinned} pinned chunks stay: --pinned deletes them too, kvstore ls --pins says whose they are")


def _print(cleared: Cleared, dry_run: bool) -> None:
    _print_chunks(cleared, dry_run)
    if cleared.failed:
        print(f"{cleared.failed} could not be looked at or deleted: run it again", file=sys.stderr)
    for session in cleared.unconfirmed:
        print(f"session {session} did not answer: its node may still serve them from memory", file=sys.stderr)
