"""``kvstore clear``: deletes the chunks of one namespace."""

from __future__ import annotations

import sys

import click

from kvstore.cli.access import Access
from kvstore.cli.command import Command
from kvstore.cli.naming import namespace_options
from kvstore.cli.options import access_options, json_option
from kvstore.cli.output import print_json, size
from kvstore.cli.prefix import open_cache
from kvstore.errors import InvalidRequest


@click.command(cls=Command, no_args_is_help=True, short_help="Delete the stored chunks of a namespace.")
@click.argument("name")
@namespace_options
@click.option(
    "--ignore-pins", is_flag=True, help="With --root and without --etcd, where nobody can tell what is pinned."
)
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask on.")
@access_options
@json_option
def clear(
    name: str, tenant: str, fingerprint: str | None, ignore_pins: bool, yes: bool, access: Access, as_json: bool
) -> None:
    """Delete the stored chunks of a namespace, except pinned ones.

    Whoever reads one at that moment has a miss and computes it again. The namespace itself stays.

    \b
    Examples:
      kvstore clear llama-3.1-8b --root /mnt/kv --etcd 10.0.0.5:2379
      kvstore clear llama-3.1-8b --root /mnt/kv --ignore-pins
      kvstore clear llama-3.1-8b --tenant alice --yes --connect 10.0.0.7:7070
    """
    if access.root is not None and access.etcd is None and not ignore_pins:
        raise InvalidRequest(
            "pins live in etcd, and without it clear would delete pinned chunks too: "
            "give --etcd, or --ignore-pins where this root has no cluster"
        )
    with access.open() as store:
        cache = open_cache(store, name, tenant, fingerprint)
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidRequest("clear deletes, and there is no terminal to ask on: give --yes")
            if not click.confirm(f"Delete all chunks of namespace {name!r} (tenant {tenant!r})?", err=True):
                raise InvalidRequest("nothing was deleted")
        cleared = cache.clear()
    if as_json:
        print_json({"namespace": name, "chunks": cleared.chunks, "bytes": cleared.bytes})
    else:
        print(f"{cleared.chunks} chunks deleted, {size(cleared.bytes)}")
