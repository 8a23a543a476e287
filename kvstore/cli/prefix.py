"""``kvstore match``, ``pin``, ``unpin``, ``prefetch``, ``move`` and ``release``: one prompt's prefix, by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.choosing import Prompt, prompt_options
from kvstore.cli.command import Command, check_failed
from kvstore.cli.kinds import DURATION
from kvstore.cli.options import json_option, no_wait_option
from kvstore.cli.output import print_json, progress_bar
from kvstore.cli.rooted import check_pins_known
from kvstore.cli.tickets import begin_and_follow
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.client.cache import Cache
    from kvstore.client.control import Control, ControlTicket
    from kvstore.client.tickets import Ticket
    from kvstore.node.moves import AheadName, LevelName

LOOK_S = 0.2
"""Between two looks at the progress of a move."""


@click.command(cls=Command, short_help="How many leading tokens of a prompt are stored.")
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
@no_wait_option
@access_options
@json_option
def prefetch(prompt: Prompt, tier: AheadName, no_wait: bool, access: Access, as_json: bool) -> None:
    """Bring the longest stored prefix of a prompt into a worker's memory, or onto its local disk, ahead of its use.

    Needs a worker with --memory; of several workers, the one that would serve the prompt does it. Ctrl-C cancels it;
    chunks already brought stay.

    \b
    Examples:
      kvstore prefetch llama-3.1-8b --tokens-file next_prompt.txt --connect 10.0.0.7:7070
      kvstore prefetch llama-3.1-8b 101,2023,2003 --tier disk --connect 10.0.0.7:7070
    """
    if no_wait:
        _leave(prompt, access, as_json, lambda control, cache, ids: control.prefetch(cache, [ids], tier))
    else:
        _follow("prefetched", prompt, access, as_json, lambda cache, ids: cache.prefetch(ids, tier))


@click.command(cls=Command, short_help="Move a stored prefix to another tier of a worker.")
@prompt_options
@click.option("--tier", type=click.Choice(["memory", "disk", "root"]), required=True, help="Where to.")
@no_wait_option
@access_options
@json_option
def move(prompt: Prompt, tier: LevelName, no_wait: bool, access: Access, as_json: bool) -> None:
    """Move the longest stored prefix of a prompt to a tier, and drop it from the nearer tiers.

    Chunks that are not on the root yet are written there first. Chunks in use stay where they are.

    \b
    Examples:
      kvstore move llama-3.1-8b --tokens-file prompt.txt --tier root --connect 10.0.0.7:7070
      kvstore move llama-3.1-8b 101,2023,2003 --tier disk --connect 10.0.0.7:7070
    """
    if no_wait:
        _leave(prompt, access, as_json, lambda control, cache, ids: control.move(cache, [ids], tier))
    else:
        _follow("moved", prompt, access, as_json, lambda cache, ids: cache.move(ids, tier))


@click.command(cls=Command, short_help="Evict a prompt first when a worker needs room.")
@prompt_options
@no_wait_option
@access_options
@json_option
def release(prompt: Prompt, no_wait: bool, access: Access, as_json: bool) -> None:
    """Mark a prompt as not needed soon: it is evicted first when memory or the local disk needs room.

    Nothing is lost, and the next use of the prompt ends the mark.

    \b
    Example:
      kvstore release llama-3.1-8b --tokens-file prompt.txt --connect 10.0.0.7:7070
    """
    if no_wait:
        _leave(prompt, access, as_json, lambda control, cache, ids: control.release(cache, [ids]))
    else:
        _follow("released", prompt, access, as_json, lambda cache, ids: cache.release(ids))


def _leave(
    prompt: Prompt, access: Access, as_json: bool, begin: Callable[[Control, Cache, list[int]], ControlTicket]
) -> None:
    """Begins a move and leaves it to the worker."""
    _needs_worker(access)
    ids = prompt.ids()
    begin_and_follow(access, as_json, False, lambda store, control: begin(control, prompt.cache(store), ids))


def _follow(
    done: str, prompt: Prompt, access: Access, as_json: bool, begin: Callable[[Cache, list[int]], Ticket]
) -> None:
    """Begins a move, shows its progress until it ends, and prints how many tokens were ``done``."""
    _needs_worker(access)
    ids = prompt.ids()
    with access.open() as store:
        cache = prompt.cache(store)
        stored = cache.match(ids)
        # As a context: Ctrl-C cancels it at the worker.
        with begin(cache, ids) as ticket, progress_bar(f"{done}, tokens", stored) as show:
            shown = 0
            while not ticket.done:
                at = ticket.wait(LOOK_S)
                show(at - shown)
                shown = at
            count, error = ticket.tokens, ticket.error
    if as_json:
        print_json(
            {
                "namespace": prompt.name,
                "tokens": len(ids),
                "tokens_matched": stored,
                f"tokens_{done}": count,
                "error": str(error) if error is not None else None,
            }
        )
    else:
        print(f"{done} {count} of {stored} stored tokens")
        if error is not None:
            print(f"it ended early: {error}", file=sys.stderr)
    if error is not None:
        check_failed()


def _needs_worker(access: Access) -> None:
    if access.root is not None:
        raise InvalidRequest(
            "a root opened by this command has no memory that outlives it: give --connect HOST:PORT or --etcd"
        )
