"""``kvstore stats``, ``health``, ``limits`` and ``ops``: about running workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import COULD_NOT_RUN, Command, check_failed
from kvstore.cli.options import json_option, worker_option
from kvstore.cli.output import operation_values, print_json, print_rows, print_table, print_values
from kvstore.cli.selectors import identified
from kvstore.core.metrics import GROWING, NODE_GAUGES, WORKER_GAUGES, ClientCount, NodeCount, WorkerCount
from kvstore.core.validate import shown, size
from kvstore.errors import InvalidRequest, KVStoreError


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


@click.command(cls=Command, short_help="Show or change limits of running workers.")
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
@worker_option
@access_options
@json_option
def limits(changes: tuple[str, ...], worker: str | None, access: Access, as_json: bool) -> None:
    """Show or change the limits that can change while a worker runs. Each worker changes all given limits or none.

    A change lasts until the worker ends, and does not affect calls in progress.

    Exit codes: 0 done, 1 a worker refused, 2 no worker has a limit of that name.

    \b
    Examples:
      kvstore limits --connect 10.0.0.7:7070
      kvstore limits calls_max=128 log_level=debug --connect 10.0.0.7:7070
      kvstore limits behind_share=0.25 --etcd 10.0.0.5:2379 --worker 10.0.0.7:7070
    """
    wanted = dict(_pair(change) for change in changes)
    with access.open_workers() as store:
        control = store.control
        found = control.limits()
        if wanted:
            _check_names(wanted, found)
            found = control.set_limits(wanted, worker)
    if worker is not None and worker not in found:
        raise InvalidRequest(f"worker {worker!r} is not one of {', '.join(found)}")
    if worker is not None:
        found = {address: each for address, each in found.items() if address == worker}
    refused = {address: str(each) for address, each in found.items() if isinstance(each, KVStoreError)}
    rows = [
        {"worker": address, "limit": name, "value": value}
        for address, limits in found.items()
        if not isinstance(limits, KVStoreError)
        for name, value in limits.items()
        if not wanted or name in wanted
    ]
    if as_json:
        workers: dict[str, Any] = {address: {"error": why} for address, why in refused.items()}
        for row in rows:
            workers.setdefault(row["worker"], {})[row["limit"]] = row["value"]
        print_json({"workers": workers})
    else:
        print_rows("limits", rows, ("worker", "limit", "value"), as_json)
        for address, why in refused.items():
            click.echo(f"{address}: {why}", err=True)
    if refused or not found:
        check_failed()


@click.command(cls=Command, short_help="The health of workers, root, etcd and queues.")
@access_options
@json_option
def health(access: Access, as_json: bool) -> None:
    """Show the state of each worker, its root, its etcd, its memory and its queues.

    Exit codes: 0 no problems, 1 a worker has a problem or does not answer, 2 none answers.

    \b
    Examples:
      kvstore health --connect 10.0.0.7:7070
      kvstore health --etcd 10.0.0.5:2379 --json
    """
    with access.open_workers() as store:
        found = store.control.health()
    if as_json:
        workers = {at: {"error": str(each)} if isinstance(each, KVStoreError) else each for at, each in found.items()}
        print_json({"workers": workers})
    else:
        for address, each in found.items():
            _print_health(address, each)
    answered = [each for each in found.values() if not isinstance(each, KVStoreError)]
    if not answered:
        click.get_current_context().exit(COULD_NOT_RUN)
    if len(answered) < len(found) or not all(each["healthy"] for each in answered):
        check_failed()


def _print_health(address: str, found: dict[str, Any] | KVStoreError) -> None:
    if isinstance(found, KVStoreError):
        print(f"{address}  does not answer: {found}")
        return
    worker, root, etcd, memory, queues = (found[name] for name in ("worker", "root", "etcd", "memory", "queues"))
    about = f"version {worker['version'] or '-'}, host {worker['host']}, pid {worker['pid']}"
    state = "well" if found["healthy"] else "has problems"
    print(f"{address}  {state}: up {worker['uptime_s']:.0f} s, {about}")
    for problem in found["problems"]:
        print(f"  ! {shown(problem)}")
    room = f", {size(root['free_bytes'])} of {size(root['total_bytes'])} free" if root["total_bytes"] else ""
    print(f"  root    {_answer(root)}{room}  {root['url']}")
    if etcd["used"]:
        session = "alive" if etcd["session_alive"] else "lost"
        print(f"  etcd    {_answer(etcd)}, session {session}, lease {etcd['lease_margin_s']:.1f} s")
    if memory is not None:
        print(
            f"  memory  {size(memory['held_bytes'])} of {size(memory['size_bytes'])}, "
            f"{size(memory['dirty_bytes'])} dirty, {memory['peers']} peers"
        )
    print(
        f"  queues  {queues['calls']} of {queues['calls_max']} calls, {size(queues['bytes_in_flight'])} in flight, "
        f"{queues['root_queue']} wait for the root, {size(queues['behind_bytes'])} to be written, "
        f"{queues['operations_running']} operations"
    )


def _answer(look: dict[str, Any]) -> str:
    return f"answers in {look['look_s'] * 1000:.0f} ms" if look["answers"] else "does not answer"


def _check_names(wanted: Mapping[str, str], found: Mapping[str, dict[str, str] | KVStoreError]) -> None:
    """Raises InvalidRequest for a name that no worker has: workers of another version may have others than this one."""
    names = list(
        dict.fromkeys(name for limits in found.values() if not isinstance(limits, KVStoreError) for name in limits)
    )
    unknown = [name for name in wanted if name not in names]
    if names and unknown:
        raise InvalidRequest(f"no worker has a limit {', '.join(unknown)}: expected one of {', '.join(names)}")


def _pair(change: str) -> tuple[str, str]:
    name, equals, value = change.partition("=")
    if not equals or not name or not value:
        raise InvalidRequest(f"{change!r}: expected NAME=VALUE, such as calls_max=128")
    return name, value


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
