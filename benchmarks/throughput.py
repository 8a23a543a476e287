"""In-process put and get against fio on the same directory, in the same minute: the ratio is the figure.

Hypothesis: the store moves chunks at 0.8 of what fio (psync, same block size) reads and writes, verification
included. Cache state: warm page cache, no fsync.  Each round runs fio and the store one after the other and takes
their ratio; the result is the median over the rounds, so that a noisy neighbour hits both.  Every byte is compared
outside the clock.

    python -m benchmarks.throughput [--directory DIR] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.node.limits import Limits

GIB = 1 << 30
TOKEN_BYTES = 131_072
"""KV of one token of Llama-3.1-8B: 32 layers, 8 heads of 128, bfloat16."""


@dataclass(frozen=True)
class Figure:
    """Medians over the rounds, GiB/s; ``ratio`` is the median of each round's ratio to fio with ``jobs`` jobs."""

    path: str
    chunk_mib: float
    jobs: int
    fio: float
    memcpy: float
    kvstore: float
    ratio: float


def main() -> int:
    """Runs the benchmark; 0 when it ran and every byte was right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where both write (default: %(default)s)")
    parser.add_argument("--size-mib", type=int, default=512, help="bytes moved in one round (default: %(default)s MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is not installed, and it is the baseline: apt-get install fio", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=arguments.directory))
    try:
        figures = [
            figure
            for chunk_mib in arguments.chunk_mib
            for figure in measure(folder, chunk_mib, arguments.size_mib << 20, arguments.rounds)
        ]
        match_ms = measure_match(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps({"machine": machine(), "figures": [asdict(one) for one in figures], **match_ms}, indent=2))
    else:
        show(figures, match_ms)
    return 0


def measure(folder: Path, chunk_mib: int, size_bytes: int, rounds: int) -> list[Figure]:
    """Put and get of ``size_bytes`` in chunks of ``chunk_mib``, beside fio with one job and with as many as lanes."""
    layout = Layout(32, 8, 128, "bfloat16", chunk_tokens=(chunk_mib << 20) // TOKEN_BYTES)
    tokens = size_bytes // layout.chunk_bytes * layout.chunk_tokens
    size_bytes = tokens * layout.kv_bytes_per_token
    random = np.random.default_rng(1)
    kv = random.integers(0, 256, (*layout.shape(tokens)[:-1], 256), dtype=np.uint8).view(layout.numpy_dtype)
    out = np.zeros_like(kv)
    limits = Limits()
    samples: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with kvstore.open(str(folder / f"root-{chunk_mib}"), limits=limits) as store:
        cache = store.namespace("bench", layout)
        for round_number in range(rounds + 1):  # the first warms up the guest's memory, and is not counted
            prompt = random.integers(0, 1 << 32, tokens)
            for jobs in (1, limits.width):
                with_fio = {kind: fio(folder, kind, layout.chunk_bytes, size_bytes, jobs) for kind in ("write", "read")}
                copied = rate(size_bytes, lambda: np.copyto(out.view(np.uint8), kv.view(np.uint8)))
                cache.clear()  # as fio's files are deleted: just before, so that both find memory that was just freed
                done = {
                    "write": rate(size_bytes, partial(cache.put, prompt, kv)),
                    "read": rate(size_bytes, partial(cache.get, prompt, out)),
                }
                assert np.array_equal(out.view(np.uint8), kv.view(np.uint8)), "wrong bytes"
                if round_number:
                    for kind, figure in done.items():
                        samples.setdefault((kind, jobs), []).append((with_fio[kind], copied, figure))
    return [
        Figure(
            {"write": "put", "read": "get"}[kind],
            layout.chunk_bytes / (1 << 20),
            jobs,
            statistics.median(row[0] for row in rows),
            statistics.median(row[1] for row in rows),
            statistics.median(row[2] for row in rows),
            statistics.median(ours / theirs for theirs, _, ours in rows),
        )
        for (kind, jobs), rows in samples.items()
    ]


def measure_match(folder: Path) -> dict[str, float]:
    """Milliseconds to match a prompt of 131,072 tokens in chunks of 256: all stored, none stored, remembered or not."""
    layout = Layout(1, 1, 16, "int8", 256)
    tokens = np.random.default_rng(2).integers(0, 1 << 32, 131_072)
    other = tokens[::-1].copy()
    root = str(folder / "match")
    with kvstore.open(root) as store:
        cache = store.namespace("match", layout)
        cache.put(tokens, np.zeros(layout.shape(len(tokens)), np.int8))
        remembered = median_ms(lambda: cache.match(tokens))
        absent = median_ms(lambda: cache.match(other))

    def cold() -> None:
        with kvstore.open(root) as store:
            cache = store.namespace("match", layout)
            began_s = time.perf_counter()
            assert cache.match(tokens) == len(tokens)
            colds.append((time.perf_counter() - began_s) * 1e3)

    colds: list[float] = []
    for _ in range(5):
        cold()
    return {
        "match_128k_remembered_ms": remembered,
        "match_128k_absent_ms": absent,
        "match_128k_cold_ms": statistics.median(colds),
    }


def fio(folder: Path, kind: str, block_bytes: int, size_bytes: int, jobs: int) -> float:
    """GiB/s of fio with psync on files of its own in ``folder``."""
    target = folder / "fio"
    target.mkdir(exist_ok=True)
    command = [
        "fio", "--name=j", f"--directory={target}", "--ioengine=psync", f"--rw={kind}", f"--bs={block_bytes}",
        f"--size={size_bytes // jobs // block_bytes * block_bytes}", f"--numjobs={jobs}", "--group_reporting",
        "--output-format=json", "--fallocate=none", "--invalidate=0",
    ]  # fmt: skip
    if kind == "write":
        for old in target.iterdir():
            old.unlink()
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)["jobs"][0]
    return float(found[kind]["bw_bytes"]) / GIB


def rate(size_bytes: int, work: Callable[[], object]) -> float:
    """GiB/s of one call."""
    began_s = time.perf_counter()
    work()
    return size_bytes / GIB / (time.perf_counter() - began_s)


def median_ms(work: Callable[[], object], times: int = 11) -> float:
    """Median milliseconds of one call."""
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(taken)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def show(figures: list[Figure], match_ms: dict[str, float]) -> None:
    """The table, for people."""
    about = machine()
    print(f"{about['cores']} cores, Linux {about['kernel']}, Python {about['python']}; warm page cache, no fsync")
    print(f"{'path':<5}{'chunk':>8}{'fio jobs':>10}{'fio':>8}{'memcpy':>8}{'kvstore':>9}{'ratio':>7}   (GiB/s)")
    for one in figures:
        print(
            f"{one.path:<5}{one.chunk_mib:>5.0f}MiB{one.jobs:>10}{one.fio:>8.2f}{one.memcpy:>8.2f}"
            f"{one.kvstore:>9.2f}{one.ratio:>7.2f}"
        )
    for name, taken in match_ms.items():
        print(f"{name.replace('_', ' '):<32}{taken:>8.2f}")


if __name__ == "__main__":
    sys.exit(main())
