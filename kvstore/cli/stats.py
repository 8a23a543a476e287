"""``kvstore stats``: what workers did since they started, or how full a root is."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.table import Table

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command
from kvstore.cli.options import json_option
from kvstore.cli.output import console, print_json, print_pairs
from kvstore.cli.selectors import identified
from kvstore.counts import GROWING, NODE_GAUGES, WORKER_GAUGES, ClientCount, NodeCount, WorkerCount
from kvstore.errors import KVStoreError
from kvstore.text import size

GROUPS = (
    ("requests", ("requests_", "tokens_")),
    ("chunks and bytes", ("chunks_", "bytes_")),
    ("misses", ("miss_", "damage_")),
    ("set aside as damaged", ("quarantine",)),
    ("recency", ("refresh",)),
    ("memory", ("memory_", "leases")),
    ("written behind", ("behind_",)),
    ("peers' memory", ("peers_",)),
    ("local disk", ("disk_",)),
    ("trouble", ("put_failed", "holds_expired", "sessions_lost", "root_hangs")),
)
"""Counters by what their names begin with; any other is listed under "now"."""

FIRST = frozenset(
    {
        *("workers", "requests_match", "requests_get", "requests_put", "tokens_asked", "tokens_matched"),
        *("chunks_read", "chunks_written", "bytes_read", "bytes_written", "root_free_bytes", "root_total_bytes"),
        *(
            "bound_bytes",
            "memory_hits",
            "memory_bytes",
            "memory_size_bytes",
            "memory_held_bytes",
            "disk_held_bytes",
            "disk_bytes_max",
            "behind_bytes",
        ),
        *("calls_in_flight", "client_holds", "holds", "root_full", "root_hangs", "draining"),
    }
)
"""The figures to look at first. Trouble is printed beside them, where there was any."""
TROUBLE = (
    *("damage_", "quarantine", "put_failed", "put_refused", "miss_shed", "miss_deadline", "miss_unreadable"),
    *("sessions_lost", "behind_lost", "behind_shed", "holds_expired", "disk_failed", "disk_damaged", "memory_damaged"),
    *("peers_failed", "peers_damaged", "calls_refused", "calls_failed", "denied", "quota_refused", "audit_lost"),
    *("bulk_refused", "wire_damaged", "client_misses", "client_set_aside", "operations_failed"),
)
"""Prefixes of the names of counters of trouble."""


@click.command(cls=Command, short_help="What the workers did; how full a root is.")
@access_options
@click.option("--all", "is_full", is_flag=True, help="Print every counter, those that are 0 too.")
@json_option
def stats(access: Access, is_full: bool, as_json: bool) -> None:
    """Print the summed counters of the workers behind --connect or --etcd since they started.

    Those to look at first, and trouble; --all and --json have every counter. With --root alone, print the root's id and
    how full its file system is.

    \b
    Examples:
      kvstore stats --connect 10.0.0.7:7070
      kvstore stats --etcd 10.0.0.5:2379 --json
      kvstore stats --root /mnt/kv
    """
    if access.root is not None and access.etcd is None:
        _root(access, as_json)
        return
    with access.open_workers() as store:
        found, each = store.stats(), store.stats_each()
    for worker, told in each.items():
        if isinstance(told, KVStoreError):
            click.echo(f"kvstore stats: without worker {worker}, which does not answer: {told}", err=True)
    if as_json:
        print_json(found)
        return
    shown = {name: value for name, value in found.items() if is_full or (value and _is_first(name))}
    left = dict(shown)
    for title, prefixes in GROUPS:
        names = [name for name in left if name.startswith(prefixes)]
        _print_group(title, {name: left.pop(name) for name in names})
    _print_group("now", left)
    if len(shown) < len(found):
        console().print(f"{len(found) - len(shown)} more: --all prints them")


def _is_first(name: str) -> bool:
    return name in FIRST or name.startswith(TROUBLE)


def _print_group(title: str, counts: dict[str, int | float]) -> None:
    if not counts:
        return
    counters = {count.flat_name: count.about for count in (*NodeCount, *WorkerCount, *ClientCount)}
    said = {**counters, **NODE_GAUGES, **WORKER_GAUGES, **GROWING}
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=24)
    table.add_column(justify="right", min_width=14)
    table.add_column()
    for name, value in sorted(counts.items()):
        shown = size(value) if "bytes" in name.split("_") else f"{value:,}"
        table.add_row(f"  {name}", shown, said.get(name, ""))
    console().print(table)


def _root(access: Access, as_json: bool) -> None:
    assert access.root is not None
    with identified(access.root, access.root_options.read()) as (root, identity):
        space = root.space()
    if as_json:
        print_json(
            {
                "url": root.url,
                "root": identity.root.hex(),
                "version": identity.version,
                "shard_bits": identity.shard_bits,
                **asdict(space),
            }
        )
        return
    rows: list[tuple[str, str]] = [("root", identity.root.hex()), ("url", root.url)]
    if space.total_bytes is not None and space.free_bytes is not None:
        full = 1 - space.free_bytes / space.total_bytes if space.total_bytes else 1.0
        rows.append(("full", f"{100 * full:.1f} % of {size(space.total_bytes)}, {size(space.free_bytes)} free"))
    print_pairs(rows)
