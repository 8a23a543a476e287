"""``kvstore ls``: namespaces, pins, workers, writers."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command
from kvstore.cli.options import json_option
from kvstore.cli.output import moment, print_json, print_table, progress_bar, progress_to
from kvstore.cli.selectors import check_pins_known, identified, usage_by_namespace
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.namespace import NamespaceId
from kvstore.text import size

if TYPE_CHECKING:
    from kvstore.census.walk import Share

TIMEOUT_S = 10.0
WRITER_FIELDS = ("session", "node", "host", "pid", "version", "label", "identity")


@click.command(cls=Command, short_help="List namespaces, pins, workers or writers.")
@click.option("--pins", "what", flag_value="pins", help="List live pins instead.")
@click.option("--workers", "what", flag_value="workers", help="List live workers instead; needs --etcd.")
@click.option(
    "--lineage", "what", flag_value="lineage", help="List the writers of stored chunks instead; needs --root."
)
@access_options
@json_option
def ls(what: str | None, access: Access, as_json: bool) -> None:
    """List namespaces with their layout and, with --root, how much each has stored.

    \b
    Examples:
      kvstore ls --root /mnt/kv
      kvstore ls --pins --connect 10.0.0.7:7070
      kvstore ls --workers --etcd 10.0.0.5:2379 --json
      kvstore ls --lineage --root /mnt/kv
    """
    lists = {"pins": _pins, "workers": _workers, "lineage": _writers}
    lists.get(what or "", _namespaces)(access, as_json)


def _namespaces(access: Access, as_json: bool) -> None:
    with access.open() as store:
        found = store.namespaces()
    usage = None
    if access.root is not None:
        with progress_bar("counting chunks", None) as moved:
            usage = usage_by_namespace(access.root, access.root_options.read(), moved)
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
    if as_json:
        print_json({"namespaces": rows})
        return
    shares = () if usage is None else ("chunks", "stored")
    print_table(
        ("name", "tenant", "fingerprint", "layout", *shares),
        [
            (
                *(row["name"], row["tenant"] or "-", row["fingerprint"][:16] or "-", each.layout.short),
                *(() if usage is None else (row["chunks"], size(row["bytes"]))),
            )
            for row, each in zip(rows, found, strict=True)
        ],
    )
    if usage is None and sys.stdout.isatty():
        print("how much each has stored is on the root: kvstore ls --root URL", file=sys.stderr)


def _pins(access: Access, as_json: bool) -> None:
    with access.open() as store:
        check_pins_known(store)
        found = store.pins()
    if as_json:
        fields = ("id", "owner", "namespace", "tokens", "expires_s")
        print_json({"pins": [{name: getattr(each, name) for name in fields} for each in found]})
        return
    now_s = time.time()
    print_table(
        ("id", "owner", "namespace", "tokens", "expires", "left"),
        [
            (each.id, each.owner, each.namespace, each.tokens, moment(each.expires_s), _left(each.expires_s - now_s))
            for each in found
        ],
    )


def _workers(access: Access, as_json: bool) -> None:
    if access.etcd is None:
        raise InvalidRequest("workers are registered in etcd: give --etcd ENDPOINTS")
    from kvstore.meta.cluster import known_roots
    from kvstore.meta.keys import Keys
    from kvstore.meta.workers import Workers

    rows: list[dict[str, Any]] = []
    with closing(access.etcd.open()) as meta:
        for root in known_roots(meta, TIMEOUT_S):
            found = Workers(meta, Keys(root)).list(TIMEOUT_S)
            rows += (
                {
                    **{name: getattr(record, name) for name in ("address", "host", "pid", "version")},
                    "root": root.hex(),
                    "session": session.hex(),
                }
                for session, record in sorted(found.items(), key=lambda pair: pair[1].address)
            )
    if as_json:
        print_json({"workers": rows})
        return
    columns = ("address", "host", "pid", "version", "root")
    print_table(columns, [tuple(str(row[name]) for name in columns) for row in rows])


def _writers(access: Access, as_json: bool) -> None:
    """Prints what each writer has, which takes a look at the header of every file."""
    from kvstore.census.walk import by_writer, walk
    from kvstore.root.identity import read_namespaces, read_writers

    if access.root is None:
        raise InvalidRequest(
            "the writer of a chunk is in its file: give --root URL (for one prompt: kvstore lookup); KVSTORE_CONNECT, "
            "where it is set, wins over KVSTORE_ROOT"
        )
    troubles: list[KVStoreError] = []
    with identified(access.root, access.root_options.read()) as (root, identity):
        names = {each.id: each.name for each in read_namespaces(root)}
        with progress_to("reading headers, shards") as show:
            found = walk(root, identity.shard_bits, headers=True, trouble=troubles.append, shard_done=show)
            shares = by_writer(found, read_writers(root))
    if as_json:
        print_json({"writers": [_share(each, names) for each in shares], "unreadable": len(troubles)})
    else:
        print_table(
            ("session", "label", "version", "host", "pid", "first written", "last written", "chunks", "stored", "of"),
            [_share_cells(each, names) for each in shares],
        )
    if troubles:
        print(f"{len(troubles)} files or folders could not be read; the first: {troubles[0]}", file=sys.stderr)


def _share(share: Share, names: dict[NamespaceId, str]) -> dict[str, Any]:
    return {
        **{name: getattr(share.writer, name, None) for name in WRITER_FIELDS},
        "first_written_s": share.first_s or None,
        "last_written_s": share.last_s or None,
        "chunks": share.chunks_count,
        "bytes": share.size_bytes,
        "namespaces": sorted({names.get(id, id.hex()) for id in share.namespaces}),
    }


def _share_cells(share: Share, names: dict[NamespaceId, str]) -> tuple[object, ...]:
    said = _share(share, names)
    return (
        said["session"] or "(no record)",
        *(said[name] or "-" for name in ("label", "version", "host", "pid")),
        moment(share.first_s),
        moment(share.last_s),
        share.chunks_count,
        size(share.size_bytes),
        ", ".join(said["namespaces"]),
    )


def _left(seconds: float) -> str:
    """The time that is left, in the two largest units, such as ``1d 3h``; by this host's clock."""
    left = max(0, round(seconds))
    parts = [(left // 86_400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next((at for at, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2])
