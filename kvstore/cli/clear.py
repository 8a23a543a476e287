"""``kvstore clear``: deletes the chunks of one namespace, or whatever a selection names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvstore.census.selection import Selection
from kvstore.cli.access import Access
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.options import access_options, json_option
from kvstore.cli.output import print_json, progress_to, size
from kvstore.cli.prefix import open_cache
from kvstore.cli.selecting import Asked, selection_options
from kvstore.errors import InvalidRequest
from kvstore.results import Cleared

if TYPE_CHECKING:
    from kvstore.client.store import Store


@click.command(cls=Command, no_args_is_help=True, short_help="Delete stored chunks, by namespace, writer, age, ...")
@selection_options
@click.option("--pinned", is_flag=True, help="Pinned chunks too; their pins stay, over nothing.")
@click.option("--dry-run", is_flag=True, help="Only count what would be deleted.")
@click.option(
    "--ignore-pins", is_flag=True, help="With --root and without --etcd, where nobody can tell what is pinned."
)
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask on.")
@access_options
@json_option
def clear(
    asked: Asked,
    pinned: bool,
    dry_run: bool,
    ignore_pins: bool,
    yes: bool,
    access: Access,
    as_json: bool,
) -> None:
    """Delete the stored chunks of the namespace NAME, or those that all given options hold of, except pinned ones.

    They are gone from the root and from the memory and local disks of all nodes when this returns, so one command
    takes back what a bad roll-out wrote. Stop its writers first (kvstore drain): what they write meanwhile stays. Twice
    is harmless. Whoever reads a chunk at that moment has a miss and computes it again. Namespaces stay.

    What others computed on top of a prefix that was wrong is theirs, not its writer's: where prompts of a bad roll-out
    were continued by good engines, clear the namespace, or everything since then (--since).

    Exit code 1 where something could not be deleted, or a node did not say in time that it obeyed: run it again.

    \b
    Examples:
      kvstore clear llama-3.1-8b --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear llama-3.1-8b --root /mnt/kv --ignore-pins
      kvstore clear --written-by label=canary --dry-run --connect 10.0.0.7:7070
      kvstore clear --written-by version=0.2.0 --since 2026-11-21T10:00 --yes --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear --tenant alice --older-than 30d --yes --connect 10.0.0.7:7070
    """
    if access.root is not None and access.etcd is None and not ignore_pins:
        raise InvalidRequest(
            "pins live in etcd, and without it clear would delete pinned chunks too: "
            "give --etcd, or --ignore-pins where this root has no cluster"
        )
    if asked.is_namespace_alone and not pinned and not dry_run:
        _clear_namespace(asked, yes, access, as_json)
        return
    if access.root is None:
        from kvstore.cli.tickets import begin_and_follow

        begin_and_follow(
            access,
            as_json,
            True,
            lambda store, control: control.clear(_sure(asked, store, yes or dry_run), dry_run=dry_run, pinned=pinned),
        )
        return
    with access.open() as store:
        selection = _sure(asked, store, yes or dry_run)
        with progress_to("clear, shards") as show:
            cleared = store.clear(selection, progress=show, dry_run=dry_run, pinned=pinned)
    _print(cleared, dry_run, as_json)
    if cleared.failed or cleared.unconfirmed:
        click.get_current_context().exit(CHECK_FAILED)


def _sure(asked: Asked, store: Store, yes: bool) -> Selection:
    """What is meant, after it was asked whether it is."""
    selection = asked.selection(store)
    _ask(f"Delete all chunks of {selection.describe()}?", yes)
    return selection


def _clear_namespace(asked: Asked, yes: bool, access: Access, as_json: bool) -> None:
    name, tenant = asked.name or "", asked.tenant or ""
    with access.open() as store:
        cache = open_cache(store, name, tenant, asked.fingerprint or None)
        _ask(f"Delete all chunks of namespace {name!r} (tenant {tenant!r})?", yes)
        cleared = cache.clear()
    if as_json:
        print_json(
            {
                "namespace": name,
                "chunks": cleared.chunks,
                "bytes": cleared.bytes,
                "unconfirmed": list(cleared.unconfirmed),
            }
        )
    else:
        print(f"{cleared.chunks} chunks deleted, {size(cleared.bytes)}")
        _warn(cleared)
    if cleared.unconfirmed:
        click.get_current_context().exit(CHECK_FAILED)


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest("clear deletes, and there is no terminal to ask on: give --yes")
    if not click.confirm(question, err=True):
        raise InvalidRequest("nothing was deleted")


def _print(cleared: Cleared, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "chunks": cleared.chunks,
                "bytes": cleared.bytes,
                "pinned": cleared.pinned,
                "failed": cleared.failed,
                "unconfirmed": list(cleared.unconfirmed),
                "dry_run": dry_run,
            }
        )
        return
    print(f"{cleared.chunks} chunks {'would be ' if dry_run else ''}deleted, {size(cleared.bytes)}")
    if cleared.pinned:
        print(f"{cleared.pinned} pinned chunks stay: --pinned deletes them too, kvstore ls --pins says whose they are")
    if cleared.failed:
        print(f"{cleared.failed} could not be looked at or deleted: run it again", file=sys.stderr)
    _warn(cleared)


def _warn(cleared: Cleared) -> None:
    for session in cleared.unconfirmed:
        print(f"session {session} did not answer: its node may still serve them from memory", file=sys.stderr)
