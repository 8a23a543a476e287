"""``kvstore demo``: a small cluster on a temporary root, a trace through it, every byte verified, nothing left."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.children import Program, gc_command, stop_all
from kvstore.cli.access import Access, open_store
from kvstore.cli.app import Command
from kvstore.cli.options import json_option
from kvstore.cli.output import progress_bar
from kvstore.cli.replay import print_report
from kvstore.cli.signals import exits_on_sigterm
from kvstore.cli.supervisor import kvstore_command
from kvstore.memory.arena import memory_free_bytes
from kvstore.text import size

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
    from kvstore.replay import Plan, generate, load_trace, replay

    requests = load_trace(trace, requests_max) if trace else generate(requests_max, seed=SEED)
    started_s = time.monotonic()
    with exits_on_sigterm(), _folder(_stored_bytes(requests)) as folder, _running(folder) as addresses:
        _tell(f"etcd and {len(addresses)} workers serve {folder} ({time.monotonic() - started_s:.1f} s)")
        access = Access(connect=tuple(addresses))
        with progress_bar("requests", len(requests)) as moved:
            report = replay(requests, functools.partial(open_store, access), Plan("demo", BYTES_PER_TOKEN), moved)
    _tell(f"everything is stopped, nothing is left ({time.monotonic() - started_s:.1f} s)")
    about = {"trace": trace or f"generated, seed {SEED}", "bytes_per_token": BYTES_PER_TOKEN, "workers": WORKERS_COUNT}
    print_report(report, as_json, about)


@contextmanager
def _running(folder: Path) -> Iterator[list[str]]:
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


@contextmanager
def _folder(needed_bytes: int) -> Iterator[Path]:
    """Makes a temporary folder, in memory if there is plenty of it, and removes it afterwards."""
    in_memory = SHM.is_dir() and os.access(SHM, os.W_OK)
    in_memory = in_memory and min(shutil.disk_usage(SHM).free, memory_free_bytes() or 0) > 4 * needed_bytes
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=SHM if in_memory else None) as path:
        _tell(f"temporary root for {size(needed_bytes)} of KV in {path}")
        yield Path(path)


def _stored_bytes(requests: Sequence[Request]) -> int:
    from kvstore.replay import expect
    from kvstore.replay.trace import BLOCK_TOKENS

    return expect(requests).chunks_unique * (BLOCK_TOKENS * BYTES_PER_TOKEN + 4096)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
