"""``kvstore demo``: a small cluster on a temporary root, a trace through it, every byte verified, nothing left."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import Access, open_store
from kvstore.cli.children import Program, gc_command, kvstore_command, stop_all
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.options import json_option
from kvstore.cli.output import progress_bar, size
from kvstore.cli.replayed import print_report
from kvstore.cli.signals import Interrupts

if TYPE_CHECKING:
    from kvstore.replay import Request

WORKERS_COUNT = 2
REQUESTS = 600
SEED = 7
BYTES_PER_TOKEN = 256
GC_INTERVAL = "2s"
STOP_S = 10.0
SHM = Path("/dev/shm")


@click.command(cls=Command, short_help="A small cluster, a trace through it, every byte checked.")
@click.option("--trace", metavar="PATH", help="Replay this trace (Mooncake's JSON lines) instead of a generated one.")
@click.option(
    "--requests", "requests_max", type=click.IntRange(min=1), default=REQUESTS, show_default=True, metavar="N",
    help="How many requests.",
)  # fmt: skip
@json_option
def demo(trace: str | None, requests_max: int, as_json: bool) -> None:
    """Start a small cluster, replay a trace through it with every byte verified, print a table, stop everything.

    Starts the bundled etcd, two workers and kvstore-gc on a temporary root, and speaks to them over gRPC. Nothing it
    started is left running, and no file is left behind, however it ends.

    \b
    Examples:
      kvstore demo
      kvstore demo --trace conversation_trace.jsonl --requests 1000 --json
    """
    from kvstore.replay import Plan, generate, load_trace, replay

    requests = load_trace(trace, requests_max) if trace else generate(requests_max, seed=SEED)
    started_s = time.monotonic()
    with Interrupts() as interrupts, ExitStack() as undo:
        folder = undo.enter_context(interrupts.guard(_folder(_stored_bytes(requests))))
        cluster = undo.enter_context(interrupts.guard(_running(folder)))
        addresses = cluster.wait_ready()
        _tell(f"etcd and {len(addresses)} workers serve {folder} ({time.monotonic() - started_s:.1f} s)")
        access = Access(connect=tuple(addresses))
        with progress_bar("requests", len(requests)) as moved:
            report = replay(requests, functools.partial(open_store, access), Plan("demo", BYTES_PER_TOKEN), moved)
    _tell(f"everything is stopped, nothing is left ({time.monotonic() - started_s:.1f} s)")
    about = {"trace": trace or f"generated, seed {SEED}", "bytes_per_token": BYTES_PER_TOKEN, "workers": WORKERS_COUNT}
    print_report(report, as_json, about)
    if not report.ok:
        click.get_current_context().exit(CHECK_FAILED)


class _Cluster:
    """Workers and a garbage collector on a root in ``folder``, with the etcd that is at ``endpoints``."""

    def __init__(self, folder: Path, endpoints: str) -> None:
        common = ["--root", str(folder / "root"), "--etcd", endpoints]
        worker = kvstore_command(
            "worker", *common, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--drain", "5s"
        )
        self._workers = [
            Program(f"worker {number}", worker, messages=folder / f"worker-{number}.log")
            for number in range(WORKERS_COUNT)
        ]
        collector = gc_command(*common, "--interval", GC_INTERVAL)
        self._collectors = [Program("gc", collector, messages=folder / "gc.log")] if collector else []

    def start(self) -> None:
        """Starts the workers."""
        for program in self._workers:
            program.start()

    def wait_ready(self) -> list[str]:
        """The workers' addresses once they serve; starts the garbage collector then, which needs a root."""
        addresses = [program.wait_ready()["grpc"] for program in self._workers]
        for program in self._collectors:
            program.start()
        return addresses

    def stop(self) -> None:
        """Ends them all."""
        stop_all([*self._workers, *self._collectors], STOP_S)


@contextmanager
def _running(folder: Path) -> Iterator[_Cluster]:
    """A cluster that runs meanwhile, with an etcd of its own."""
    from kvstore.meta.server import EmbeddedEtcd

    with EmbeddedEtcd(folder / "etcd") as server:
        cluster = _Cluster(folder, server.endpoints)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def _folder(needed_bytes: int) -> Iterator[Path]:
    """A temporary folder, in memory where there is plenty of it, gone afterwards."""
    in_memory = SHM.is_dir() and os.access(SHM, os.W_OK) and _available_bytes() > 4 * needed_bytes
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=SHM if in_memory else None) as path:
        _tell(f"temporary root for {size(needed_bytes)} of KV in {path}")
        yield Path(path)


def _available_bytes() -> int:
    """What both the file system in memory and the machine's memory have left."""
    left = shutil.disk_usage(SHM).free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(left, *found) if found else 0


def _stored_bytes(requests: Sequence[Request]) -> int:
    from kvstore.replay import expect
    from kvstore.replay.trace import BLOCK_TOKENS

    return expect(requests).chunks_unique * (BLOCK_TOKENS * BYTES_PER_TOKEN + 4096)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
