"""``kvstore compress``, ``decompress`` and ``reencrypt``: stored chunks written again in another encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstore.census.selection import Selection
from kvstore.cli.access import Access
from kvstore.cli.command import Command
from kvstore.cli.options import access_options, json_option
from kvstore.cli.selecting import Asked, selection_options
from kvstore.cli.tickets import begin_and_follow

if TYPE_CHECKING:
    from kvstore.client.control import Control, ControlTicket

F = TypeVar("F", bound=Callable[..., Any])


def _options(command: F) -> F:
    """Which chunks, which worker, whether to wait."""
    for option in (
        click.option("--worker", metavar="HOST:PORT", help="Which worker does it, of several."),
        click.option("--no-wait", is_flag=True, help="Print the ticket's id and return; kvstore tickets has it."),
        selection_options,
    ):
        command = option(command)
    return command


@click.command(cls=Command, no_args_is_help=True, short_help="Compress stored chunks on the root.")
@_options
@access_options
@json_option
def compress(**asked: Any) -> None:
    """Write the chunks of the namespace NAME, or those that all given options hold of, again on the root, compressed
    (byte planes apart, then zstd) where that makes them smaller.

    Lossless: whoever reads them has the same bytes. A worker does it, at a pace (`kvstore limits
    recode_bytes_per_s_max=...`), and goes on when this command is ended. New chunks are not compressed.

    \b
    Examples:
      kvstore compress llama-3.1-8b --older-than 1d --connect 10.0.0.7:7070
      kvstore compress --tenant acme --no-wait --etcd 10.0.0.5:2379
    """
    _run(lambda control, selection, worker: control.compress(selection, worker=worker), **asked)


@click.command(cls=Command, no_args_is_help=True, short_help="Decompress stored chunks on the root.")
@_options
@access_options
@json_option
def decompress(**asked: Any) -> None:
    """Write compressed chunks of the namespace NAME, or those that all given options hold of, as they were.

    \b
    Example:
      kvstore decompress llama-3.1-8b --connect 10.0.0.7:7070
    """
    _run(lambda control, selection, worker: control.decompress(selection, worker=worker), **asked)


@click.command(cls=Command, no_args_is_help=True, short_help="Encrypt stored chunks with the current keys.")
@_options
@access_options
@json_option
def reencrypt(**asked: Any) -> None:
    """Write the chunks of the namespace NAME, or those that all given options hold of, again with the keys that the
    worker's key file (--keys) says now: plain ones are encrypted, those of an old key get the current one, and those of
    a tenant whose current key is null become plain.

    An old key may go once this is done, its ticket counts no chunks_no_key, and every worker has the new key file.

    \b
    Example:
      kvstore reencrypt --tenant acme --connect 10.0.0.7:7070
    """
    _run(lambda control, selection, worker: control.reencrypt(selection, worker=worker), **asked)


def _run(
    begin: Callable[[Control, Selection, str | None], ControlTicket],
    *,
    asked: Asked,
    no_wait: bool,
    worker: str | None,
    access: Access,
    as_json: bool,
) -> None:
    begin_and_follow(
        access, as_json, not no_wait, lambda store, control: begin(control, asked.selection(store), worker)
    )
