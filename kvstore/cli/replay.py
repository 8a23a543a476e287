"""``kvstore replay``: a trace against a store, every byte compared."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import Access, access_options, open_store
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import DURABILITY, completes, flag, json_option, option, takes
from kvstore.cli.output import print_json, print_pairs, progress_bar
from kvstore.cli.signals import exits_on_sigterm

if TYPE_CHECKING:
    from kvstore.layout import Layout
    from kvstore.replay import Report

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Callers:
    """The options of a replay beside the trace and the store."""

    durability: str = option("--durability", **DURABILITY)
    bytes_per_token: int = option(
        "--bytes-per-token",
        type=int,
        default=64,
        show_default=True,
        metavar="N",
        help="KV bytes of one token, a multiple of 4; real models have tens of thousands.",
    )
    requests_max: int | None = option(
        "--requests", type=click.IntRange(min=1), metavar="N", help="Only the first N requests."
    )
    threads: int = option("--threads", type=int, default=1, show_default=True, metavar="N", help="Concurrent callers.")
    namespace: str | None = option(
        "--namespace", metavar="NAME", help="The namespace to use; a fresh one if not given."
    )
    keep: bool = flag("--keep", help="Leave the chunks in the store.")


@click.command(cls=Command, short_help="Replay a trace and compare every byte.")
@click.argument("trace", metavar="TRACE", shell_complete=completes("file"))
@access_options
@takes("callers", Callers)
@json_option
def replay(trace: str, access: Access, callers: Callers, as_json: bool) -> None:
    """Replay TRACE, a file of JSON lines as Mooncake publishes them, and compare every byte with the expected one.

    Each request is matched, its hits are read and compared, its misses are put. With one caller every hit must be the
    one that the trace implies. With several the order is undefined, and each chunk must be written exactly once. Puts
    wait for the root, so that every worker finds them.
    Without --root, --connect or --etcd it uses a temporary root in this process.

    Exit codes: 0 everything as expected, 1 a wrong byte or an unexpected hit, 2 could not run.

    \b
    Examples:
      kvstore replay conversation_trace.jsonl
      kvstore replay conversation_trace.jsonl --connect 10.0.0.7:7070,10.0.0.8:7070 --requests 1000
      kvstore replay conversation_trace.jsonl --root /mnt/kv --etcd 10.0.0.5:2379 --threads 4 --json
    """
    from kvstore.replay import Plan, load_trace, replay_layout
    from kvstore.replay import replay as run

    name = callers.namespace or f"replay-{os.urandom(4).hex()}"
    plan = Plan(name, callers.bytes_per_token, callers.threads)
    requests = load_trace(trace, callers.requests_max)
    with exits_on_sigterm(), ExitStack() as undo:
        if not access.is_given:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-replay-"))
            access = Access(root=folder)
        elif not callers.keep:
            undo.enter_context(_cleared(access, name, replay_layout(callers.bytes_per_token)))
        with progress_bar("requests", len(requests)) as moved:
            report = run(requests, functools.partial(open_store, access, callers.durability), plan, moved)
    print_report(report, as_json, {"trace": trace, "namespace": name, "bytes_per_token": callers.bytes_per_token})


def print_report(report: Report, as_json: bool, about: Mapping[str, Any]) -> None:
    """Prints the figures, and failures on standard error; exits with 1 if there are any."""
    if as_json:
        print_json({**about, **report.to_dict()})
    else:
        _print_table(report)
    for line in (*report.failures, *report.tally.differences):
        print(f"FAILED: {line}", file=sys.stderr)
    if not report.ok:
        check_failed()


def _print_table(report: Report) -> None:
    tally = report.tally
    expected = "undefined (several callers)" if report.tokens_expected is None else f"{report.tokens_expected:,}"
    rows = [
        ("requests", f"{tally.requests:,}"),
        ("tokens", f"{tally.tokens:,}"),
        ("tokens matched", f"{tally.tokens_matched:,}"),
        ("tokens expected to match", expected),
        ("hit ratio", f"{report.hit_ratio:.1%}"),
        ("chunks written", f"{tally.chunks_written:,}"),
        ("GiB put", f"{tally.bytes_put / GIB:.3f}"),
        ("GiB got", f"{tally.bytes_got / GIB:.3f}"),
        ("MiB/s put", f"{report.put_mib_per_s:,.0f}"),
        ("MiB/s get", f"{report.get_mib_per_s:,.0f}"),
        ("callers", f"{report.threads}"),
        ("time", f"{report.seconds:.1f} s"),
        ("wrong bytes", f"{tally.wrong_bytes:,}"),
    ]
    print_pairs(rows)
    if not report.ok:
        verdict = "FAILED"
    elif report.tokens_expected is None:
        verdict = "every byte was compared, each chunk was written once, nothing is missing"
    else:
        verdict = "every byte was compared, every hit is as the trace contains it"
    print(f"wrong bytes: {tally.wrong_bytes}; {verdict}")


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
