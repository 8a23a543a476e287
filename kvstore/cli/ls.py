"""``kvstore ls``: namespaces, pins, workers, writers."""

from __future__ import annotations

import time
from typing import Any

import click

from kvstore.cli.access import Access
from kvstore.cli.command import Command
from kvstore.cli.options import access_options, json_option
from kvstore.cli.output import print_json, print_table, progress_bar, size
from kvstore.errors import InvalidRequest
from kvstore.layout import Layout


@click.command(cls=Command, no_args_is_help=True, short_help="List namespaces, pins, workers or writers.")
@click.option("--pins", "what", flag_value="pins", help="List live pins instead.")
@click.option("--workers", "what", flag_value="workers", help="List live workers instead; needs --etcd.")
@click.option("--lineage", "what", flag_value="lineage", help="List who wrote what is stored instead; needs --root.")
@access_options
@json_option
def ls(what: str | None, access: Access, as_json: bool) -> None:
    """List namespaces with their layout and, where the root is given, how much each has stored.

    \b
    Examples:
      kvstore ls --root /mnt/kv
      kvstore ls --pins --connect 10.0.0.7:7070
      kvstore ls --workers --etcd 10.0.0.5:2379 --json
      kvstore ls --lineage --root /mnt/kv
    """
    if what == "pins":
        _pins(access, as_json)
    elif what == "workers":
        _workers(access, as_json)
    elif what == "lineage":
        from kvstore.cli.lineage import list_writers

        list_writers(access, as_json)
    else:
        _namespaces(access, as_json)


def _namespaces(access: Access, as_json: bool) -> None:
    with access.open() as store:
        found = store.namespaces()
    usage = None
    if access.root is not None:
        from kvstore.cli.usage import usage_by_namespace

        with progress_bar("counting chunks", None) as moved:
            usage = usage_by_namespace(access.root, access.root_options, moved)
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
    if as_json:
        print_json({"namespaces": rows})
        return
    print_table(
        ("name", "tenant", "fingerprint", "layout", "chunks", "stored"),
        [
            (
                row["name"],
                row["tenant"] or "-",
                row["fingerprint"][:16] or "-",
                _layout(each.layout),
                row["chunks"],
                None if row["bytes"] is None else size(row["bytes"]),
            )
            for row, each in zip(rows, found, strict=True)
        ],
    )


def _pins(access: Access, as_json: bool) -> None:
    if access.root is not None and access.etcd is None:
        raise InvalidRequest("pins are in etcd: give --etcd ENDPOINTS beside --root, or --connect HOST:PORT")
    with access.open() as store:
        found = store.pins()
    if as_json:
        fields = ("id", "owner", "namespace", "tokens", "expires_s")
        print_json({"pins": [{name: getattr(each, name) for name in fields} for each in found]})
        return
    now_s = time.time()
    print_table(
        ("id", "owner", "namespace", "tokens", "expires", "left"),
        [
            (each.id, each.owner, each.namespace, each.tokens, _when(each.expires_s), _left(each.expires_s - now_s))
            for each in found
        ],
    )


def _workers(access: Access, as_json: bool) -> None:
    if access.etcd is None:
        raise InvalidRequest("workers are registered in etcd: give --etcd ENDPOINTS")
    from kvstore.cli.registry import workers_by_root

    found = workers_by_root(access.etcd)
    rows = [
        {
            "address": record.address,
            "host": record.host,
            "pid": record.pid,
            "version": record.version,
            "root": root.hex(),
            "session": session.hex(),
        }
        for root, workers in found.items()
        for session, record in sorted(workers.items(), key=lambda pair: pair[1].address)
    ]
    if as_json:
        print_json({"workers": rows})
        return
    columns = ("address", "host", "pid", "version", "root")
    print_table(columns, [tuple(str(row[name]) for name in columns) for row in rows])


def _layout(layout: Layout) -> str:
    return f"{layout.layers}x2x{layout.chunk_tokens}x{layout.kv_heads}x{layout.head_dim} {layout.dtype}"


def _when(expires_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(expires_s))


def _left(seconds: float) -> str:
    """The time that is left, in the two largest units, such as ``1d 3h``; by this host's clock."""
    left = max(0, round(seconds))
    parts = [(left // 86_400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next((at for at, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2])
