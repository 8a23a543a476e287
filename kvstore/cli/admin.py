"""``kvstore stats``, ``health`` and ``ops``: about running workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import COULD_NOT_RUN, Command, check_failed
from kvstore.cli.options import json_option
from kvstore.cli.output import operation_values, print_json, print_rows, print_table, print_values
from kvstore.cli.selectors import identified
from kvstore.core.metrics import GROWING, NODE_GAUGES, WORKER_GAUGES, ClientCount, NodeCount, WorkerCount
from kvstore.core.validate import size
from kvstore.dashboard.workers import problems_of
from kvstore.errors import InvalidRequest, KVStoreError

HEALTH = ("calls_in_flight", "lane_queue", "memory_held_bytes", "behind_bytes")
"""Gauges of a worker that ``health`` shows."""


@click.command(cls=Command, short_help="What the workers did; how full a root is.")
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


@click.command(cls=Command, short_help="The health of workers, root and etcd.")
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
