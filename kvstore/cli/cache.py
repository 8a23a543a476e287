"""``kvstore match``, ``pin``, ``unpin``, ``prefetch`` and ``clear``: about stored chunks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvstore.census.selection import Selection
from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import DURATION, json_option, worker_option
from kvstore.cli.output import follow, operation_values, print_json
from kvstore.cli.selectors import Prompt, Selected, check_pins_known, prompt_options, selection_options
from kvstore.core.operations import OperationState
from kvstore.core.validate import size
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.core.validate import TierName

COUNTS = ("chunks", "bytes", "pinned", "failed", "unconfirmed")
IGNORED = "; or --ignore-pins, which deletes pinned chunks too"


@click.command(cls=Command, short_help="Count the leading tokens of a prompt that are stored.")
@prompt_options
@access_options
@json_option
def match(prompt: Prompt, access: Access, as_json: bool) -> None:
    """Print how many leading tokens of a prompt are stored. Exit code 1 where none is.

    NAME is a namespace, as `kvstore ls` lists it; TOKENS are token ids separated by commas. A file or standard input
    may also separate them by spaces, or be a JSON list.

    \b
    Examples:
      kvstore match llama-3.1-8b 101,2023,2003 --root /mnt/kv
      tokenize prompt.txt | kvstore match llama-3.1-8b --tokens-file - --connect 10.0.0.7:7070
    """
    ids = prompt.ids()
    with access.open() as store:
        matched = prompt.cache(store).match(ids)
    if as_json:
        print_json({"namespace": prompt.name, "tokens": len(ids), "tokens_matched": matched})
    else:
        print(f"{matched} of {len(ids)} tokens")
    if not matched:
        check_failed()


@click.command(cls=Command, short_help="Protect a stored prefix from garbage collection.")
@prompt_options
@click.option("--ttl", type=DURATION, default="1h", show_default=True, help="The pin ends by itself after this time.")
@click.option("--owner", default="", help="Who pins, as `kvstore ls --pins` shows it; by default the host's name.")
@access_options
@json_option
def pin(prompt: Prompt, ttl: float, owner: str, access: Access, as_json: bool) -> None:
    """Protect a stored prefix from garbage collection, and print the pin's id.

    A pin outlives this command, and ends with its TTL: it is a lease in etcd, or a file on a root of one host. Exit
    code 1 if nothing of the prefix is stored.

    \b
    Examples:
      kvstore pin llama-3.1-8b --tokens-file system_prompt.txt --ttl 7d --connect 10.0.0.7:7070
      kvstore pin llama-3.1-8b 101,2023 --root /mnt/kv --etcd 10.0.0.5:2379
    """
    ids = prompt.ids()
    with access.open() as store:
        check_pins_known(store)
        record = prompt.cache(store).pin(ids, ttl=ttl, owner=owner).record
    if as_json:
        print_json(
            {"id": record.id, "owner": record.owner, "tokens_pinned": record.tokens, "expires_s": record.expires_s}
        )
    elif record.id:
        print(f"{record.id}  {record.tokens} of {len(ids)} tokens")
    else:
        print("nothing of it is stored: nothing is pinned", file=sys.stderr)
    if not record.id:
        check_failed()


@click.command(cls=Command, short_help="End a pin.")
@click.argument("pin_id", metavar="ID")
@access_options
@json_option
def unpin(pin_id: str, access: Access, as_json: bool) -> None:
    """End a pin by its id, as `kvstore pin` and `kvstore ls --pins` print it. Exit code 1 if there is none.

    \b
    Example:
      kvstore unpin host-7/5f0c7a1e9b2d4c3f8a6e1d2c3b4a5968 --connect 10.0.0.7:7070
    """
    with access.open() as store:
        check_pins_known(store)
        ended = store.unpin(pin_id)
    if as_json:
        print_json({"id": pin_id, "ended": ended})
    else:
        print("ended" if ended else "there is no such pin, or it has ended")
    if not ended:
        check_failed()


@click.command(cls=Command, short_help="Bring a stored prefix into a worker's memory.")
@prompt_options
@click.option("--tier", type=click.Choice(["memory", "disk"]), default="memory", show_default=True, help="Where to.")
@worker_option
@click.option("--no-wait", is_flag=True, help="Print the operation's id and return; kvstore ops lists it.")
@access_options
@json_option
def prefetch(prompt: Prompt, tier: TierName, worker: str | None, no_wait: bool, access: Access, as_json: bool) -> None:
    """Bring the longest stored prefix of a prompt into a worker's memory, or onto its local disk, ahead of its use.

    Needs a worker with --memory; of several workers, the one that would serve the prompt does it. Ctrl-C cancels it;
    chunks already brought stay.

    \b
    Examples:
      kvstore prefetch llama-3.1-8b --tokens-file next_prompt.txt --connect 10.0.0.7:7070
      kvstore prefetch llama-3.1-8b 101,2023,2003 --tier disk --connect 10.0.0.7:7070
    """
    if access.root is not None:
        raise InvalidRequest(
            "a root opened by this command has no memory that outlives it: give --connect HOST:PORT or --etcd"
        )
    ids = prompt.ids()
    with access.open() as store:
        operation = prompt.cache(store).prefetch(ids, tier, worker)
        status = operation.last if no_wait else follow(operation)
    if as_json:
        print_json({"namespace": prompt.name, "tokens": len(ids), **operation_values(status)})
    elif no_wait:
        print(status.id)
    else:
        print(f"prefetched {status.done} of {status.total} stored tokens")
    if status.state is OperationState.CANCELLED:
        check_failed()


@click.command(cls=Command, short_help="Delete the stored chunks of a namespace, a tenant or one set of weights.")
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
    selected: Selected, pinned: bool, dry_run: bool, ignore_pins: bool, yes: bool, access: Access, as_json: bool
) -> None:
    """Delete the stored chunks of the namespace NAME, or those that match all given options, except pinned ones.

    Deletes them on the root and in the memory and local disks of all nodes before it returns. Stop its writers first:
    chunks written during the clear stay. Readers get a miss and compute the chunk again. Namespaces stay. Running it
    twice is harmless. `kvstore-gc --once --ttl` deletes by age.

    Ctrl-C cancels it; what it has deleted stays deleted. Exit code 1 if something could not be deleted, or a node did
    not confirm in time: run it again.

    \b
    Examples:
      kvstore clear llama-3.1-8b --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear llama-3.1-8b --root /mnt/kv --ignore-pins
      kvstore clear --tenant alice --dry-run --connect 10.0.0.7:7070
      kvstore clear --fingerprint 3f9a --yes --root /mnt/kv --etcd 10.0.0.5:2379
    """
    with access.open() as store:
        if not ignore_pins:
            check_pins_known(store, instead=IGNORED)
        selection = selected.selection(store)
        _ask(f"Delete all chunks of {_named(selected, selection)}?", yes or dry_run)
        status = follow(store.clear(selection, dry_run=dry_run, pinned=pinned))
    counts = {name: status.counts.get(name, 0) for name in COUNTS}
    if as_json:
        print_json({"namespace": selected.name, "dry_run": dry_run, "message": status.message, **counts})
    else:
        print(f"{counts['chunks']} chunks {'would be ' if dry_run else ''}deleted, {size(counts['bytes'])}")
        if counts["pinned"]:
            print(f"{counts['pinned']} pinned chunks stay: --pinned deletes them too, kvstore ls --pins lists the pins")
        if status.message:
            print(status.message, file=sys.stderr)
    if status.state is OperationState.CANCELLED or counts["failed"] or counts["unconfirmed"]:
        check_failed()


def _named(selected: Selected, selection: Selection) -> str:
    if selected.name is not None:
        return f"namespace {selected.name!r} (tenant {selected.tenant or ''!r})"
    return selection.describe()


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest("clear deletes, and there is no terminal to ask on: give --yes")
    if not click.confirm(question, err=True):
        raise InvalidRequest("nothing was deleted")
