"""``kvstore stats``, ``health``, ``ops`` and ``ls``: workers, their operations, namespaces and pins."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import COULD_NOT_RUN, Command, check_failed
from kvstore.cli.options import json_option
from kvstore.cli.output import operation_values, print_json, print_rows, print_table, print_values, progress_to
from kvstore.cli.selectors import check_pins_known, identified
from kvstore.core.metrics import GROWING, NODE_GAUGES, WORKER_GAUGES, ClientCount, NodeCount, WorkerCount
from kvstore.core.namespace import NamespaceId
from kvstore.core.validate import size
from kvstore.dashboard.workers import problems_of
from kvstore.errors import InvalidRequest, KVStoreError

HEALTH = ("calls_in_flight", "root_queue", "memory_held_bytes", "behind_bytes")
"""Gauges of a worker that ``health`` shows."""
TIMEOUT_S = 10.0


@click.command(cls=Command, short_help="Show what the workers have done, and how full a root is.")
@access_options
@click.option("--all", "is_full", is_flag=True, help="Print the counters that are 0 too.")
@json_option
def stats(access: Access, is_full: bool, as_json: bool) -> None:
    """Print the summed counters of the workers behind --connect or --etcd since they started.

    With --root alone, print the root's id and how full its file system is.

    \b
    Examples:
      kvstore stats --connect 10.0.0.7:7070
      kvstore stats --etcd 10.0.0.5:2379 --json
      kvstore stats --root /mnt/kv
    """
    if access.root is not None and access.etcd is None:
        with identified(access.root, access.root_options.read()) as (root, identity):
            about = {"url": root.url, "root": identity.root.hex(), "version": identity.version}
            print_values({**about, "shard_bits": identity.shard_bits, **asdict(root.space())}, as_json)
        return
    with access.open_workers() as store:
        found, each = store.stats(), store.stats_each()
    for worker, answer in each.items():
        if isinstance(answer, KVStoreError):
            click.echo(f"kvstore stats: without worker {worker}, which does not answer: {answer}", err=True)
    if as_json:
        print_json(found)
        return
    meanings = {count.flat_name: count.about for count in (*NodeCount, *WorkerCount, *ClientCount)}
    meanings |= {**NODE_GAUGES, **WORKER_GAUGES, **GROWING}
    counters = {name: value for name, value in sorted(found.items()) if is_full or value}
    rows = [
        (name, size(value) if "bytes" in name.split("_") else value, meanings.get(name, ""))
        for name, value in counters.items()
    ]
    print_table(("counter", "value", "meaning"), rows)
    if len(rows) < len(found):
        print(f"{len(found) - len(rows)} counters are 0: --all prints them")
    others = "" if access.etcd is not None else "; those of others are not in them: --etcd ENDPOINTS finds all"
    print(f"counters of {len(each)} worker{'s' if len(each) > 1 else ''}: {', '.join(each)}{others}")


@click.command(cls=Command, short_help="Show the health of the workers, the root and etcd.")
@access_options
@json_option
def health(access: Access, as_json: bool) -> None:
    """Show whether each worker reaches its root and etcd, and how much it has to do.

    A worker notices a root that hangs or is gone within ten seconds, and an etcd that is gone once its session has
    ended. `kvstore doctor` writes and reads through a worker.

    Exit codes: 0 no problems, 1 a worker has a problem or does not answer, 2 none answers.

    \b
    Examples:
      kvstore health --connect 10.0.0.7:7070
      kvstore health --etcd 10.0.0.5:2379 --json
    """
    with access.open_workers() as store:
        found = store.stats_each()
    rows: list[dict[str, Any]] = []
    for address, counts in found.items():
        problems = problems_of(counts)
        if not isinstance(counts, KVStoreError) and counts.get("root_full"):
            problems.append("the root is full: puts are refused until there is room")
        rows.append({"worker": address, "healthy": not problems, "problems": problems})
        if not isinstance(counts, KVStoreError):
            rows[-1] |= {name: counts.get(name) for name in HEALTH}
    columns = ("worker", "healthy", "problems", *HEALTH)
    print_rows("workers", [dict.fromkeys(columns) | row for row in rows], columns, as_json)
    if all(isinstance(each, KVStoreError) for each in found.values()):
        click.get_current_context().exit(COULD_NOT_RUN)
    if not all(row["healthy"] for row in rows):
        check_failed()


@click.command(cls=Command, short_help="List or cancel long-running operations.")
@click.argument("act", metavar="[cancel ID]", type=click.Choice(["cancel"]), required=False)
@click.argument("id", metavar="", required=False)
@access_options
@json_option
def ops(act: str | None, id: str | None, access: Access, as_json: bool) -> None:
    """List the operations of workers (prefetch, clear), unfinished and lately finished; or cancel one.

    Each worker keeps its last 100 finished operations in memory; a restart loses them. What a cancelled operation has
    done stays done.

    \b
    Examples:
      kvstore ops --connect 10.0.0.7:7070
      kvstore ops cancel 4f0c7a1e9b2d4c3f --etcd 10.0.0.5:2379
    """
    if (act is None) != (id is None):
        raise InvalidRequest("which operation? give its id: kvstore ops cancel ID")
    with access.open_workers() as store:
        found = store.operations()
        if id is not None:
            found = [each for each in found if each.id == id]
            if not found:
                raise InvalidRequest(f"no worker has an operation {id!r}: kvstore ops lists them")
            found[0].cancel()
    rows = [operation_values(each.last) for each in found]
    columns = ("id", "kind", "about", "state", "done", "total", "unit", "began_s", "identity", "worker", "message")
    print_rows("operations", rows, columns, as_json)


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
