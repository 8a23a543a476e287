"""``kvstore demo``, ``replay`` and ``bench``: traces through a store with every byte compared, and benchmarks."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kvstore
from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import FILE, flag, json_option, option, takes
from kvstore.cli.output import print_values, progress_bar
from kvstore.cli.signals import exits_on_sigterm
from kvstore.core.process import Program, gc_command, kvstore_command, stop_all
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from kvstore.core.layout import Layout
    from kvstore.replay import ReplayReport

SOURCE = Path(kvstore.__file__).resolve().parents[1]
WORKERS_COUNT = 2
REQUESTS = 600
SEED = 7
BYTES_PER_TOKEN = 256
GC_INTERVAL = "2s"
STOP_S = 10.0


@click.command(cls=Command, short_help="Run a trace through a small cluster, and check every byte.")
@click.option("--trace", metavar="PATH", help="Replay this trace (Mooncake's JSON lines) instead of a generated one.")
@click.option(
    "--requests",
    "requests_max",
    type=click.IntRange(min=1),
    default=REQUESTS,
    show_default=True,
    metavar="N",
    help="How many requests.",
)
@json_option
def demo(trace: str | None, requests_max: int, as_json: bool) -> None:
    """Start a small cluster, replay a trace through it with every byte verified, print a table, stop everything.

    Starts an etcd, two workers and kvstore-gc on a temporary root, and speaks to them over gRPC. Nothing it
    started is left running, and no file is left behind.

    \b
    Examples:
      kvstore demo
      kvstore demo --trace conversation_trace.jsonl --requests 1000 --json
    """
    from kvstore.replay import ReplayPlan, generate, load_trace, replay

    requests = load_trace(trace, requests_max) if trace else generate(requests_max, seed=SEED)
    started_s = time.monotonic()
    with (
        exits_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder,
        _demo_cluster(Path(folder)) as addresses,
    ):
        _note(f"etcd and {len(addresses)} workers serve {folder} ({time.monotonic() - started_s:.1f} s)")
        access = Access(connect=tuple(addresses))
        with progress_bar("requests", len(requests)) as moved:
            report = replay(requests, partial(access.open, create=True), ReplayPlan("demo", BYTES_PER_TOKEN), moved)
    _note(f"everything is stopped, nothing is left ({time.monotonic() - started_s:.1f} s)")
    about = {"trace": trace or f"generated, seed {SEED}", "bytes_per_token": BYTES_PER_TOKEN, "workers": WORKERS_COUNT}
    _print_report(report, as_json, about)


@contextmanager
def _demo_cluster(folder: Path) -> Iterator[list[str]]:
    """Runs a cluster with its own etcd on a root in ``folder``; yields the addresses of the workers."""
    from kvstore.meta.embedded_etcd import EmbeddedEtcd

    with EmbeddedEtcd(folder / "etcd") as server:
        common = ["--root", str(folder / "root"), "--etcd", server.endpoints]
        here = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--drain", "5s"]
        programs = [
            Program(
                f"worker {number}",
                kvstore_command("worker", *common, *here),
                messages=folder / f"worker-{number}.log",
            )
            for number in range(WORKERS_COUNT)
        ]
        try:
            for program in programs:
                program.start()
            addresses = [program.wait_ready()["grpc"] for program in programs]
            collector = gc_command(*common, "--interval", GC_INTERVAL)  # after the workers, who make the root
            if collector is not None:
                programs.append(Program("gc", collector, messages=folder / "gc.log"))
                programs[-1].start()
            yield addresses
        finally:
            stop_all(programs, STOP_S)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Callers:
    """The options of a replay other than the trace and the store."""

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
@click.argument("trace", metavar="TRACE", type=FILE)
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
    from kvstore.replay import ReplayPlan, load_trace, replay_layout
    from kvstore.replay import replay as run

    name = callers.namespace or f"replay-{os.urandom(4).hex()}"
    plan = ReplayPlan(name, callers.bytes_per_token, callers.threads)
    requests = load_trace(trace, callers.requests_max)
    with exits_on_sigterm(), ExitStack() as undo:
        if not access.is_given:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-replay-"))
            access = Access(root=folder)
        elif not callers.keep:
            undo.enter_context(_cleared(access, name, replay_layout(callers.bytes_per_token)))
        with progress_bar("requests", len(requests)) as moved:
            report = run(requests, partial(access.open, create=True), plan, moved)
    _print_report(report, as_json, {"trace": trace, "namespace": name, "bytes_per_token": callers.bytes_per_token})


def _print_report(report: ReplayReport, as_json: bool, about: Mapping[str, Any]) -> None:
    """Prints the figures, and failures on standard error; exits with 1 if there are any."""
    print_values({**about, **report.to_dict()}, as_json)
    for line in (*report.failures, *report.tally.differences):
        print(f"FAILED: {line}", file=sys.stderr)
    if not report.ok:
        check_failed()
    if not as_json:
        hits = "each chunk was written once" if report.tokens_expected is None else "every hit was as expected"
        print(f"wrong bytes: 0; every byte was compared, {hits}")


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


@click.command(
    cls=Command,
    add_help_option=False,
    short_help="Compare the store with fio, memory copies and other stores.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Run one benchmark, or all that make the results page; `kvstore bench list` lists them.

    The benchmarks are part of the source, not of an installed package: run it from a checkout, as `make bench` does, or
    as .venv/bin/kvstore after `make setup`.

    \b
    Examples:
      kvstore bench --quick
      kvstore bench throughput --workers 1,8,32 --chunk-mib 2,32 --cache cold
      kvstore bench throughput --help
    """
    if not (SOURCE / "benchmarks" / "__main__.py").is_file():
        raise Unavailable(
            "the benchmarks are in the source, not in the installed package: run make bench in a checkout"
        )
    os.chdir(SOURCE)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *arguments])
