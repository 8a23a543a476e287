"""The speed of garbage collection, its memory, and its effect on a reader beside it.

Hypotheses: a cycle lists at the speed of listing (``os.scandir`` and a ``stat`` each); memory grows by about 110 bytes
for each chunk, up to two million; a ``get`` loop beside a collector that works all the time loses less than a tenth.
Every figure is a ratio to a baseline in the same run: listing and unlinking the same number of files by hand, and the
same loop without a collector, in alternating rounds.  Cache state: warm.

    python -m benchmarks gc [--chunks 1000000] [--directory DIR] [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.core.clock import RandomIds
from kvstore.core.recency import stamp_ns
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.root.identity import create_or_open
from kvstore.root.posix import PosixRoot

GIB = 1 << 30
FOREIGN_SPACE = b"bench..."
OLDEST_S = 7 * 86_400
HOT = Layout(layers=32, kv_heads=2, head_dim=128, dtype="bfloat16", chunk_tokens=64)
"""Chunks of 2 MiB."""
HOT_CHUNKS = 64
STARTED_S = 3.0
"""After which a collector's program has started, which is not what is measured."""


@dataclass(frozen=True)
class Figures:
    """Rates per second, memory in MiB; ``ratio`` is to the baseline of the same run."""

    chunks: int
    listed_per_s: float
    listed_ratio: float
    reaped_per_s: float
    reaped_ratio: float
    memory_mib: float
    memory_small_mib: float
    get_gib_s: float
    get_beside_gib_s: float
    get_ratio: float


def main(given: Sequence[str] | None = None) -> int:
    """Runs it all; 0 when every check held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gc")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="where the root is made (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-s", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(given)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-collecting-", dir=arguments.directory))
    try:
        with EmbeddedEtcd(folder / "etcd") as server:
            figures = measure(folder, server.endpoints, arguments.chunks, arguments.rounds, arguments.round_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(asdict(figures)))
    else:
        for name, value in asdict(figures).items():
            print(f"{name:20} {value:>14,.2f}")
    return 0


def measure(folder: Path, endpoints: str, chunks: int, rounds: int, round_s: float) -> Figures:
    """All figures."""
    small = Path(folder) / "small"
    fill(small, max(1000, chunks // 100))
    memory_small = collect(small, endpoints, "--dry-run", "--ttl", "1d")["memory_mib"]
    shutil.rmtree(small)
    big = Path(folder) / "big"
    fill(big, chunks)
    began_s = time.perf_counter()
    assert sum(1 for _ in entries(big)) == chunks
    by_hand = chunks / (time.perf_counter() - began_s)
    dry = collect(big, endpoints, "--dry-run", "--ttl", f"{OLDEST_S + 7 * 86_400}s")
    assert dry["scanned"]["chunks"] == chunks
    listed = chunks / dry["seconds"]["survey"]
    swept = collect(big, endpoints, "--ttl", f"{int(OLDEST_S * 0.9)}s")
    taken = swept["reaped"]["chunks"]
    assert 0.05 * chunks < taken < 0.15 * chunks, taken
    reaped = taken / sum(swept["seconds"].get(phase, 0.0) for phase in ("condemn", "grace", "reap", "close"))
    began_s, gone = time.perf_counter(), 0
    for entry in entries(big):
        os.unlink(entry)
        gone += 1
        if gone == taken:
            break
    unlinked = gone / (time.perf_counter() - began_s)
    alone, beside = foreground(big, endpoints, rounds, round_s)
    ratios = [2 * one / (before + after) for one, before, after in zip(beside, alone, alone[1:], strict=False)]
    return Figures(
        chunks,
        listed,
        listed / by_hand,
        reaped,
        reaped / unlinked,
        max(dry["memory_mib"], swept["memory_mib"]),
        memory_small,
        statistics.median(alone),
        statistics.median(beside),
        statistics.median(ratios),
    )


def fill(folder: Path, count: int) -> None:
    """Makes a root with small files under chunks' names, last used evenly over a week."""
    folder.mkdir(parents=True)
    create_or_open(PosixRoot(folder), RandomIds(), shard_bits=8)
    for shard in range(256):
        (folder / places.shard_folder(shard)).mkdir(parents=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        per_shard = [count // 256 + (shard < count % 256) for shard in range(256)]
        list(pool.map(_fill_shard, [str(folder)] * 256, range(256), per_shard))


def _fill_shard(folder: str, shard: int, count: int) -> None:
    now_s, content = int(time.time()), bytearray(FIXED_BYTES)
    for number in range(count):
        address = bytes([shard]) + os.urandom(15)
        content[104:120] = os.urandom(16)
        path = f"{folder}/{places.shard_folder(shard)}/{address.hex()}.{FOREIGN_SPACE.hex()}"
        with open(path, "wb", buffering=0) as file:
            file.write(content)
        used_s = (now_s - 300 - OLDEST_S * number // max(1, count)) // 60 * 60
        stamp = stamp_ns(used_s, 0)
        os.utime(path, ns=(stamp, stamp))


def entries(folder: Path) -> Iterator[str]:
    """Every chunk file, as listing by hand finds it, each with its stat."""
    for shard in os.scandir(folder / places.CHUNKS):
        for entry in os.scandir(shard):
            entry.stat(follow_symlinks=False)
            yield entry.path


def collect(root: Path, endpoints: str, *options: str) -> dict[str, Any]:
    """Runs the collector once; returns its output and its largest memory."""
    command = [
        sys.executable,
        "-m",
        "kvstore_gc",
        "--root",
        str(root),
        "--etcd",
        endpoints,
        "--once",
        "--json",
        *options,
    ]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    printed = program.stdout.read()
    _, status, usage = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    assert program.returncode == 0, f"kvstore-gc ended with {program.returncode}"
    found: dict[str, Any] = json.loads(printed)
    return found | {"memory_mib": usage.ru_maxrss / 1024}


def foreground(root: Path, endpoints: str, rounds: int, round_s: float) -> tuple[list[float], list[float]]:
    """GiB/s of a get loop alone and beside a collector that surveys and sweeps all the time, by turns."""
    store = kvstore.open(str(root), etcd=endpoints)
    cache = store.namespace("hot", HOT)
    tokens = np.arange(HOT_CHUNKS * HOT.chunk_tokens, dtype=np.uint32)
    kv = np.random.default_rng(1).integers(0, 255, HOT.shape(len(tokens)), dtype=np.uint8).astype(HOT.numpy_dtype)
    assert cache.put(tokens, kv).tokens_present == len(tokens)
    memory = np.empty_like(kv)
    age_s = int(OLDEST_S * 0.85)
    loop(cache, tokens, memory, round_s)
    # A busy host drifts by more than is to be seen: each loop beside a collector lies between two without one, and
    # the reader never pauses.
    alone, beside = [loop(cache, tokens, memory, round_s)], []
    for _ in range(rounds):
        command = [sys.executable, "-m", "kvstore_gc", "--root", str(root), "--etcd", endpoints]
        # Each round takes another twentieth of what is left, so that there is always something to sweep.
        age_s = int(age_s * 0.95)
        collector = subprocess.Popen(
            [*command, "--interval", "1", "--ttl", f"{age_s}s"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            loop(cache, tokens, memory, STARTED_S)
            beside.append(loop(cache, tokens, memory, round_s))
            assert collector.poll() is None, "the collector ended by itself"
        finally:
            collector.terminate()
            collector.wait()
        alone.append(loop(cache, tokens, memory, round_s))
    assert memory.tobytes() == kv.tobytes()
    store.close()
    return alone, beside


def loop(cache: Any, tokens: Any, memory: Any, seconds: float) -> float:
    """GiB/s of gets into one array."""
    began_s, count = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        assert cache.get(tokens, out=memory) == len(tokens)
        count += 1
    moved_bytes: int = count * memory.nbytes
    return moved_bytes / GIB / (time.perf_counter() - began_s)
