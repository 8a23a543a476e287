"""``kvstore prefetch``, ``move`` and ``release``: one prompt's prefix, brought nearer or let go, by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import Access
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.naming import namespace_options
from kvstore.cli.options import access_options, json_option
from kvstore.cli.prefix import open_cache, read_tokens, tokens_argument, tokens_file_option
from kvstore.cli.tickets import begin_and_follow
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.client.cache import Cache
    from kvstore.client.control import Control, ControlTicket
    from kvstore.client.tickets import Ticket

LOOK_S = 0.2
"""Between two looks at how far it is."""

no_wait_option = click.option(
    "--no-wait", is_flag=True, help="Have the worker go on by itself; print the ticket's id, which kvstore tickets has."
)


@click.command(cls=Command, no_args_is_help=True, short_help="Bring a stored prefix into a worker's memory.")
@click.argument("name")
@tokens_argument
@tokens_file_option
@click.option("--tier", type=click.Choice(["memory", "disk"]), default="memory", show_default=True, help="Where to.")
@no_wait_option
@namespace_options
@access_options
@json_option
def prefetch(
    name: str,
    tokens: str | None,
    tokens_file: str | None,
    tier: str,
    tenant: str,
    fingerprint: str | None,
    no_wait: bool,
    access: Access,
    as_json: bool,
) -> None:
    """Bring the longest stored prefix of a prompt into a worker's memory, or onto its local disk, ahead of its use.

    Needs a worker with --memory. Of several workers it is the one that the prompt would be read from. Ctrl-C ends it;
    what is there by then stays.

    \b
    Examples:
      kvstore prefetch llama-3.1-8b --tokens-file next_prompt.txt --connect 10.0.0.7:7070
      kvstore prefetch llama-3.1-8b 101,2023,2003 --tier disk --connect 10.0.0.7:7070
    """
    _run(
        "prefetched", name, tokens, tokens_file, tenant, fingerprint, no_wait, access, as_json,
        lambda cache, ids: cache.prefetch(ids, tier),
        lambda control, cache, ids: control.prefetch(cache, [ids], tier),
    )  # fmt: skip


@click.command(cls=Command, no_args_is_help=True, short_help="Move a stored prefix to another tier of a worker.")
@click.argument("name")
@tokens_argument
@tokens_file_option
@click.option("--tier", type=click.Choice(["memory", "disk", "root"]), required=True, help="Where to.")
@no_wait_option
@namespace_options
@access_options
@json_option
def move(
    name: str,
    tokens: str | None,
    tokens_file: str | None,
    tier: str,
    tenant: str,
    fingerprint: str | None,
    no_wait: bool,
    access: Access,
    as_json: bool,
) -> None:
    """Move the longest stored prefix of a prompt to a tier, and away from those that are nearer.

    What the root does not have yet is written there first, and what others use stays where it is.

    \b
    Examples:
      kvstore move llama-3.1-8b --tokens-file prompt.txt --tier root --connect 10.0.0.7:7070
      kvstore move llama-3.1-8b 101,2023,2003 --tier disk --connect 10.0.0.7:7070
    """
    _run(
        "moved", name, tokens, tokens_file, tenant, fingerprint, no_wait, access, as_json,
        lambda cache, ids: cache.move(ids, tier),
        lambda control, cache, ids: control.move(cache, [ids], tier),
    )  # fmt: skip


@click.command(cls=Command, no_args_is_help=True, short_help="Let a prompt go first when a worker needs room.")
@click.argument("name")
@tokens_argument
@tokens_file_option
@no_wait_option
@namespace_options
@access_options
@json_option
def release(
    name: str,
    tokens: str | None,
    tokens_file: str | None,
    tenant: str,
    fingerprint: str | None,
    no_wait: bool,
    access: Access,
    as_json: bool,
) -> None:
    """Say that a prompt will not be needed soon: it goes first when memory or the local disk needs room.

    Nothing is lost, and whoever uses it ends this.

    \b
    Example:
      kvstore release llama-3.1-8b --tokens-file prompt.txt --connect 10.0.0.7:7070
    """
    _run(
        "released", name, tokens, tokens_file, tenant, fingerprint, no_wait, access, as_json,
        lambda cache, ids: cache.release(ids),
        lambda control, cache, ids: control.release(cache, [ids]),
    )  # fmt: skip


def _run(
    done: str,
    name: str,
    tokens: str | None,
    tokens_file: str | None,
    tenant: str,
    fingerprint: str | None,
    no_wait: bool,
    access: Access,
    as_json: bool,
    begin: Callable[[Cache, list[int]], Ticket],
    leave: Callable[[Control, Cache, list[int]], ControlTicket],
) -> None:
    if access.root is not None:
        raise InvalidRequest(
            "a root opened by this command has no memory that outlives it: give --connect HOST:PORT or --etcd"
        )
    ids = read_tokens(tokens, tokens_file)
    from kvstore.cli.output import print_json, progress_bar

    if no_wait:
        begin_and_follow(
            access, as_json, False,
            lambda store, control: leave(control, open_cache(store, name, tenant, fingerprint), ids),
        )  # fmt: skip
        return
    with access.open() as store:
        cache = open_cache(store, name, tenant, fingerprint)
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
                "namespace": name,
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
        click.get_current_context().exit(CHECK_FAILED)
