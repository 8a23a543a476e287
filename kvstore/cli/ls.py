"""``kvstore ls``: namespaces, pins, workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command
from kvstore.cli.options import json_option
from kvstore.cli.output import print_rows, progress_to
from kvstore.cli.selectors import check_pins_known, identified
from kvstore.core.namespace import NamespaceId
from kvstore.errors import InvalidRequest, KVStoreError

TIMEOUT_S = 10.0


@click.command(cls=Command, short_help="List namespaces, pins or workers.")
@click.option("--pins", "what", flag_value="pins", help="List live pins instead.")
@click.option("--workers", "what", flag_value="workers", help="List live workers instead; needs --etcd.")
@access_options
@json_option
def ls(what: str | None, access: Access, as_json: bool) -> None:
    """List namespaces with their layout and, with --root, how much each has stored.

    \b
    Examples:
      kvstore ls --root /mnt/kv
      kvstore ls --pins --connect 10.0.0.7:7070
      kvstore ls --workers --etcd 10.0.0.5:2379 --json
    """
    lists = {"pins": _pins, "workers": _workers}
    lists.get(what or "", _namespaces)(access, as_json)


def _namespaces(access: Access, as_json: bool) -> None:
    with access.open() as store:
        found = store.namespaces()
    usage = None
    if access.root is not None:
        usage = _usage(access.root, access.root_options.read())
    rows: list[dict[str, Any]] = []
    for each in found:
        chunks, size_bytes = (None, None) if usage is None else usage.get(each.id, (0, 0))
        rows.append(
            {
                "name": each.name,
                "tenant": each.tenant,
                "fingerprint": each.fingerprint,
                "attributes": dict(each.attributes),
                "digest": each.digest.hex(),
                "layout": each.layout.to_dict(),
                "chunks": chunks,
                "bytes": size_bytes,
            }
        )
    named = {each.id for each in found}
    unnamed = sum(chunks for id, (chunks, _) in (usage or {}).items() if id not in named)
    if unnamed:
        print(
            f"{unnamed} chunks are of namespaces that no record describes: kvstore fsck ROOT names them",
            file=sys.stderr,
        )
    if not as_json:
        short = {each.digest.hex(): each.layout.short for each in found}
        rows = [{**row, "fingerprint": row["fingerprint"][:16], "layout": short[row["digest"]]} for row in rows]
    shares = () if usage is None else ("chunks", "bytes")
    print_rows("namespaces", rows, ("name", "tenant", "fingerprint", "layout", *shares), as_json)
    if usage is None and not as_json and sys.stdout.isatty():
        print("how much each has stored is on the root: kvstore ls --root URL", file=sys.stderr)


def _usage(url: str, options: Mapping[str, Any]) -> dict[NamespaceId, tuple[int, int]]:
    """Chunks and bytes (headers included) by namespace id. Names carry the namespace, so no file is opened."""
    from kvstore.census.walk import walk

    def fail(error: KVStoreError) -> None:
        raise error

    found: dict[NamespaceId, tuple[int, int]] = {}
    with identified(url, options) as (root, identity), progress_to("counting chunks, shards") as show:
        for each in walk(root, identity.shard_bits, trouble=fail, shard_done=show):
            chunks, size_bytes = found.get(each.namespace, (0, 0))
            found[each.namespace] = (chunks + 1, size_bytes + each.size_bytes)
    return found


def _pins(access: Access, as_json: bool) -> None:
    with access.open() as store:
        check_pins_known(store)
        found = store.pins()
    fields = ("id", "owner", "namespace", "tokens", "expires_s")
    print_rows("pins", [{name: getattr(each, name) for name in fields} for each in found], fields, as_json)


def _workers(access: Access, as_json: bool) -> None:
    if access.etcd is None:
        raise InvalidRequest("workers are registered in etcd: give --etcd ENDPOINTS")
    from kvstore.meta.cluster import known_roots
    from kvstore.meta.keys import Keys
    from kvstore.meta.workers import WorkerRegistry

    rows: list[dict[str, Any]] = []
    with closing(access.etcd.open()) as meta:
        for root in known_roots(meta, TIMEOUT_S):
            found = WorkerRegistry(meta, Keys(root)).list(TIMEOUT_S)
            rows += (
                {
                    **{name: getattr(record, name) for name in ("address", "host", "pid", "version")},
                    "root": root.hex(),
                    "session": session.hex(),
                }
                for session, record in sorted(found.items(), key=lambda pair: pair[1].address)
            )
    print_rows("workers", rows, ("address", "host", "pid", "version", "root"), as_json)
