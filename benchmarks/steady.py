"""A full store beside an unlimited one, in the same run: what is stored and refused, latency, and the peak.

A cache that has run for a day is full, and then every put evicts. Writers put prompts without a pause, each one once.

    python -m benchmarks steady [--capacities 1,8] [--prompts 4,16,64] [--writers 1,4] [--ways embedded,worker,memory]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvstore
from benchmarks.harness import machine
from benchmarks.harness.machine import GIB, MIB, percentile
from benchmarks.harness.options import Options, numbers, show_progress
from benchmarks.harness.result import Cell, Plot, Result, Table
from kvstore import Layout
from kvstore.core.process import Program

HYPOTHESIS = (
    "a full store stores 0.8 or more of what an unlimited one does, and refuses nothing; the 99th percentile of a put "
    "is at most 3 times that of the unlimited one; the files never take more than 1.02 of the capacity"
)
LAYOUT = Layout(layers=16, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=16)
TOKEN_BYTES = LAYOUT.chunk_bytes // LAYOUT.chunk_tokens
WAYS = ("embedded", "worker", "memory")
UNLIMITED_SHARE = 2.0
"""An unlimited store is measured until it has so much of the capacity, or for SECONDS."""
SECONDS, SECONDS_QUICK = 20.0, 6.0
GAUGE_S = 0.05
COLUMNS = (
    *("way", "capacity MiB", "prompt MiB", "writers", "stored MiB/s", "of unlimited", "refused %"),
    *("p50 ms", "p99 ms", "p99 of unlimited", "peak of capacity"),
)


@dataclass(frozen=True)
class Case:
    """One row. ``way``: embedded, or through a worker without memory, or through one with memory (put behind)."""

    way: str
    capacity_mib: int
    prompt_mib: int
    writers: int


@dataclass(frozen=True)
class Figures:
    """Of one store, limited or not."""

    rate: float
    refused: float
    p50_ms: float
    p99_ms: float
    peak_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The choice of rows."""
    parser.add_argument("--capacities", type=numbers, metavar="GIB,...")
    parser.add_argument("--prompts", type=numbers, metavar="MIB,...")
    parser.add_argument("--writers", type=numbers, metavar="N,...")
    parser.add_argument("--ways", type=lambda text: text.split(","), metavar="WAY,...", help=", ".join(WAYS))


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """The table."""
    capacities = (arguments and arguments.capacities) or ([1] if options.quick else [1, 8])
    prompts = (arguments and arguments.prompts) or ([64] if options.quick else [4, 16, 64])
    writers = (arguments and arguments.writers) or ([1] if options.quick else [1, 4])
    ways = (arguments and arguments.ways) or WAYS
    rows: list[list[Cell]] = []
    for way in ways:
        for capacity in capacities:
            for prompt in prompts:
                for count in writers:
                    case = Case(way, capacity * GIB // MIB, prompt, count)
                    show_progress(f"steady: {case}")
                    rows.append(row(options, case))
    conditions = (
        machine.file_system(options.directory),
        "writers are processes; each prompt is put once, without a pause; the limited store is full from the beginning",
    )
    plot = Plot("prompt MiB", ("of unlimited",), series="way")
    return Result(
        "steady", HYPOTHESIS, conditions, machine.describe(), [Table("A full store", COLUMNS, rows, plot=plot)]
    )


def row(options: Options, case: Case) -> list[Cell]:
    """One case, with the unlimited store first."""
    seconds = SECONDS_QUICK if options.quick else SECONDS
    free = measured(options, case, seconds, limited=False)
    full = measured(options, case, seconds, limited=True)
    return [
        *(case.way, case.capacity_mib, case.prompt_mib, case.writers, round(full.rate)),
        *(round(full.rate / free.rate, 2), round(100 * full.refused, 1), round(full.p50_ms, 1), round(full.p99_ms, 1)),
        *(round(full.p99_ms / free.p99_ms, 1), round(full.peak_bytes / (case.capacity_mib * MIB), 3)),
    ]


def measured(options: Options, case: Case, seconds: float, *, limited: bool) -> Figures:
    """Fills a store, then measures it."""
    capacity = case.capacity_mib * MIB
    with options.folder() as folder, opened(case, folder / "root", capacity if limited else None) as place:
        used = used_bytes(folder)
        if limited:
            write(case, place, 0, seconds=600.0, bytes_max=int(1.1 * capacity))
        bytes_max = None if limited else int(UNLIMITED_SHARE * capacity) // case.writers
        command = [sys.executable, "-m", "benchmarks.steady", json.dumps([vars_of(case), place, seconds, bytes_max])]
        crew = [subprocess.Popen([*command, str(1 + at)], stdout=subprocess.PIPE) for at in range(case.writers)]
        peak = 0
        while any(each.poll() is None for each in crew):
            peak = max(peak, used_bytes(folder) - used)
            time.sleep(GAUGE_S)
        found = [json.loads(each.communicate()[0]) for each in crew]
        took_ms = sorted(1000 * one for each in found for one in each["took_s"])
        puts, whole = sum(len(each["took_s"]) for each in found), sum(each["whole"] for each in found)
        rate = sum(each["whole"] * case.prompt_mib / each["seconds"] for each in found)
        return Figures(rate, 1 - whole / puts, percentile(took_ms, 0.5), percentile(took_ms, 0.99), peak)


@contextmanager
def opened(case: Case, root: Path, max_bytes: int | None) -> Iterator[str]:
    """A store, and how writers reach it: its folder, or a worker's address."""
    if case.way == "embedded":
        with kvstore.open(str(root), max_bytes=max_bytes):  # its collector is our child
            yield f"{root}:{max_bytes or 0}"
        return
    command = [sys.executable, "-m", "kvstore.cli.main", "up", "--root", str(root), "--listen", "127.0.0.1:0"]
    command += ["--max-bytes", str(max_bytes)] if max_bytes else ["--no-gc"]
    command += ["--memory", "1GiB"] if case.way == "memory" else []
    with ExitStack() as undo:
        up = Program("up", command, messages=root.parent / "messages")
        up.start()
        undo.callback(up.stop)
        yield up.wait_ready()["grpc"]


def write(case: Case, place: str, seed: int, seconds: float, bytes_max: int | None) -> dict[str, object]:
    """Puts prompts until the time is over, or ``bytes_max`` were put."""
    tokens_count = case.prompt_mib * MIB // TOKEN_BYTES
    kv = np.random.default_rng(seed).integers(0, 1 << 16, LAYOUT.shape(tokens_count), np.uint16).view(np.float16)
    took_s: list[float] = []
    whole = 0
    if case.way == "embedded":
        folder, _, max_bytes = place.rpartition(":")
        store = kvstore.open(folder, max_bytes=int(max_bytes) or None)
    else:
        store = kvstore.connect(place)
    with store:
        cache = store.namespace("steady", LAYOUT, fingerprint="none")
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds and (
            bytes_max is None or len(took_s) * case.prompt_mib * MIB < bytes_max
        ):
            first = (seed << 24) + len(took_s) * tokens_count
            put_s = time.perf_counter()
            result = cache.put(np.arange(first, first + tokens_count, dtype=np.uint32), kv)
            took_s.append(time.perf_counter() - put_s)
            whole += result.tokens_present == tokens_count
        return {"took_s": took_s, "whole": whole, "seconds": time.monotonic() - began_s}


def used_bytes(folder: Path) -> int:
    """Bytes that the file system of a folder has in use."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def vars_of(case: Case) -> list[object]:
    """The fields of a case, in order."""
    return [case.way, case.capacity_mib, case.prompt_mib, case.writers]


if __name__ == "__main__":
    fields, where, time_s, most = json.loads(sys.argv[1])
    print(json.dumps(write(Case(*fields), where, int(sys.argv[2]), time_s, most)))
