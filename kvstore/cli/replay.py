"""``kvstore replay``: a trace against a store, every byte compared."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import Access, open_store
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.options import access_options, durability_option, json_option
from kvstore.cli.replayed import print_report
from kvstore.cli.signals import Interrupts

if TYPE_CHECKING:
    from kvstore.layout import Layout


@click.command(cls=Command, no_args_is_help=True, short_help="Replay a trace and compare every byte.")
@click.argument("trace", metavar="TRACE")
@access_options
@durability_option
@click.option(
    "--bytes-per-token",
    type=int,
    default=64,
    show_default=True,
    metavar="N",
    help="KV bytes of one token, a multiple of 4; real models have tens of thousands.",
)
@click.option("--requests", "requests_max", type=click.IntRange(min=1), metavar="N", help="Only the first N requests.")
@click.option("--processes", type=int, default=1, show_default=True, metavar="N", help="Engines: processes at once.")
@click.option("--threads", type=int, default=1, show_default=True, metavar="N", help="Callers at once in each.")
@click.option("--namespace", metavar="NAME", help="The namespace to use; a fresh one if not given.")
@click.option("--keep", is_flag=True, help="Leave the chunks in the store.")
@json_option
def replay(
    trace: str,
    access: Access,
    durability: str,
    bytes_per_token: int,
    requests_max: int | None,
    processes: int,
    threads: int,
    namespace: str | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Replay TRACE, a file of JSON lines as Mooncake publishes them, and compare every byte with what it determines.

    Each request is matched, what hit is read and compared, what missed is put. With one caller every hit must be as the
    trace contains it; with several the order is undefined, and each chunk must have been written exactly once. Without
    --root, --connect or --etcd a temporary root in this process is used.

    Exit codes: 0 all right, 1 a wrong byte or an unexpected hit, 2 could not run.

    \b
    Examples:
      kvstore replay conversation_trace.jsonl
      kvstore replay conversation_trace.jsonl --connect 10.0.0.7:7070,10.0.0.8:7070 --requests 1000
      kvstore replay conversation_trace.jsonl --root /mnt/kv --etcd 10.0.0.5:2379 --processes 4 --json
    """
    from kvstore.cli.output import progress_bar
    from kvstore.replay import Plan, load_trace, replay_layout
    from kvstore.replay import replay as run

    name = namespace or f"replay-{os.urandom(4).hex()}"
    plan = Plan(name, bytes_per_token, processes, threads)
    requests = load_trace(trace, requests_max)
    with Interrupts() as interrupts, ExitStack() as undo:
        if access.is_given:
            access = replace(access, durability=durability)
            if not keep:
                undo.enter_context(interrupts.guard(_cleared(access, name, replay_layout(bytes_per_token))))
        else:
            folder = undo.enter_context(interrupts.guard(tempfile.TemporaryDirectory(prefix="kvstore-replay-")))
            access = Access(root=folder, durability=durability)
        with progress_bar("requests", len(requests)) as moved:
            report = run(requests, functools.partial(open_store, access, create=True), plan, moved)
    print_report(report, as_json, {"trace": trace, "namespace": name, "bytes_per_token": bytes_per_token})
    if not report.ok:
        click.get_current_context().exit(CHECK_FAILED)


@contextmanager
def _cleared(access: Access, name: str, layout: Layout) -> Iterator[None]:
    """Deletes the namespace's chunks afterwards, but never those of a namespace that was there before."""
    with access.open(create=True) as store:
        is_new = all(each.name != name for each in store.namespaces())
    try:
        yield
    finally:
        if is_new:
            with access.open() as store:
                store.namespace(name, layout).clear()
