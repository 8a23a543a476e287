"""``kvstore clear``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import click

from kvstore.census.selection import Selection
from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.ops import follow
from kvstore.cli.options import json_option
from kvstore.cli.output import print_json
from kvstore.cli.selectors import Asked, check_pins_known, selection_options
from kvstore.errors import InvalidRequest
from kvstore.operations import OperationState
from kvstore.text import size

COUNTS = ("chunks", "bytes", "pinned", "failed", "unconfirmed")
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

    Ctrl-C cancels it; what it has deleted stays deleted. Exit code 1 if something could not be deleted, or a node did
    not confirm in time: run it again.

    \b
    Examples:
      kvstore clear llama-3.1-8b --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear llama-3.1-8b --root /mnt/kv --ignore-pins
      kvstore clear --written-by label=canary --dry-run --connect 10.0.0.7:7070
      kvstore clear --written-by version=0.2.0 --since 2026-11-21T10:00 --yes --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear --tenant alice --older-than 30d --yes --connect 10.0.0.7:7070
    """
    with access.open() as store:
        if not ignore_pins:
            check_pins_known(store, instead=IGNORED)
        selection = asked.selection(store)
        _ask(f"Delete all chunks of {_named(asked, selection)}?", yes or dry_run)
        status = follow(store.clear(selection, dry_run=dry_run, pinned=pinned))
    counts = {name: status.counts.get(name, 0) for name in COUNTS}
    if as_json:
        print_json({"namespace": asked.name, "dry_run": dry_run, "message": status.message, **counts})
    else:
        _print(counts, status.message, dry_run)
    if status.state is OperationState.CANCELLED or counts["failed"] or counts["unconfirmed"]:
        check_failed()


def _named(asked: Asked, selection: Selection) -> str:
    if asked.is_namespace_alone:
        return f"namespace {asked.name!r} (tenant {asked.tenant or ''!r})"
    return selection.describe()


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest("clear deletes, and there is no terminal to ask on: give --yes")
    if not click.confirm(question, err=True):
        raise InvalidRequest("nothing was deleted")


def _print(counts: Mapping[str, int], message: str, dry_run: bool) -> None:
    print(f"{counts['chunks']} chunks {'would be ' if dry_run else ''}deleted, {size(counts['bytes'])}")
    if counts["pinned"]:
        print(
            f"{counts['pinned']} pinned chunks stay: --pinned deletes them too, kvstore ls --pins says whose they are"
        )
    if message:
        print(message, file=sys.stderr)
