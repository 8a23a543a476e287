"""The KV cache benchmark of MLPerf Storage over kvstore and over its own files, and the replay of its trace.

    python -m benchmarks mlperf --source FOLDER [--model tiny-1b] [--users 2] [--seconds 60] [--capacity-gib 4]
    python -m benchmarks mlperf --trace FILE.csv [--scale 64] [--size-mib 2048]

FOLDER is ``kv_cache_benchmark`` of github.com/mlcommons/storage, which needs numpy and pyyaml. It runs once over the
benchmark's own files and once over kvstore, with fsync in both. Then it records the operations of its first closed
workload, which moves no bytes, and the replay performs these operations in turns on kvstore and on plain files, with
sizes divided by ``--scale``. Every byte of the replay is compared outside the clock. The figures are no submission.
Hypothesis: kvstore, which verifies, reads and writes at 0.9 or more of plain files.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import kvstore
from benchmarks.harness import machine
from benchmarks.harness.load import Bytes, WrongBytes, check_equal, poison, random_bytes
from benchmarks.harness.machine import GIB, MIB, percentile, timed
from benchmarks.harness.options import Options, show_progress
from benchmarks.harness.result import Cell, Result, Table
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest

HYPOTHESIS = "kvstore, verification included, reads and writes at 0.9 or more of plain files in the replay"
PART_BYTES = 32 << 20
"""Entries reach 3 GiB, and a block has at most 1 GiB."""
CLOSED = ("--model", "llama3.1-8b", "--num-users", "200", "--max-concurrent-allocs", "16")
"""The first closed workload of MLPerf Storage 3.0, but for its time."""
COMMON = (
    "--log-level",
    "WARNING",
    "--gpu-mem-gb",
    "0",
    "--cpu-mem-gb",
    "0",
    "--generation-mode",
    "none",
    "--seed",
    "42",
)
SPACE = 1.5
"""Space of kvstore, in that of the benchmark: eviction runs in the background, after the benchmark's delete."""
TRACE_S = 8
RUN_S_MAX = 3600
COLUMNS = ("store", "write GiB/s", "read GiB/s", "read p50 ms", "read p95 ms", "write / files", "read / files")


class Timing(NamedTuple):
    """The benchmark's ``IOTiming``, in seconds."""

    total: float
    device: float
    host: float


class Blocks:
    """Entries of any size under string keys, as blocks of one namespace."""

    def __init__(self, store: Store) -> None:
        self._blocks = store.namespace("mlperf", kvstore.Layout(layers=1, kv_heads=1, head_dim=1)).blocks

    def write(self, key: str, data: Bytes) -> None:
        """Stores an entry. Raises OSError if a part was refused."""
        stored = self._blocks.put(_keys(key, len(data)), _parts(data))
        if not all(stored):
            raise OSError(f"{key}: {stored.count(False)} of {len(stored)} parts were not stored")

    def read(self, key: str, out: Bytes) -> None:
        """Fills ``out``. Raises KeyError on a miss."""
        if not all(self._blocks.get(_keys(key, len(out)), _parts(out))):
            raise KeyError(key)

    def delete(self, key: str, size: int) -> None:
        """Leaves the entry to the collector."""


class Files:
    """A file for each entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def write(self, key: str, data: Bytes) -> None:
        with (self._folder / key).open("wb", buffering=0) as file:
            for part in _parts(data):
                file.write(part)

    def read(self, key: str, out: Bytes) -> None:
        with (self._folder / key).open("rb", buffering=0) as file:
            for part in _parts(out):
                file.readinto(part)


class Backend:
    """kvstore as the benchmark's storage tier: the four methods of its ``StorageBackend``."""

    def __init__(self, base_path: str) -> None:
        self.base_path = Path(base_path)
        self.misses = 0
        self._store = kvstore.open(base_path, durability="fsync", max_bytes=int(os.environ["KVSTORE_MLPERF_BYTES"]))
        self._blocks = Blocks(self._store)
        self._shapes: dict[str, tuple[Any, Any, int]] = {}

    def write(self, key: str, data: Any) -> Timing:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        taken_s = timed(lambda: self._blocks.write(key, flat)).wall_s
        self._shapes[key] = (data.shape, data.dtype, data.nbytes)
        return Timing(taken_s, taken_s, 0.0)

    def read(self, key: str) -> tuple[Any, Timing]:
        """The benchmark counts a failed read as a hit, so misses are counted here."""
        shape, dtype, size = self._shapes[key]
        out = np.empty(size, np.uint8)
        began_s = time.perf_counter()
        try:
            self._blocks.read(key, out)
        except KeyError:
            self.misses += 1
            raise
        taken_s = time.perf_counter() - began_s
        return out.view(dtype).reshape(shape), Timing(taken_s, taken_s, 0.0)

    def delete(self, key: str) -> None:
        if shape := self._shapes.pop(key, None):
            self._blocks.delete(key, shape[2])

    def clear(self) -> None:
        self._shapes.clear()

    def close(self) -> None:
        """Closes the store."""
        self._store.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's place and size, and those of the replay."""
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="kv_cache_benchmark of mlcommons/storage")
    parser.add_argument("--model", default="tiny-1b", help="of the benchmark (default: %(default)s)")
    parser.add_argument("--users", type=int, default=2, help="of the benchmark (default: %(default)s)")
    parser.add_argument("--seconds", type=int, help="of each run of the benchmark (default: 60; with --quick 12)")
    parser.add_argument("--capacity-gib", type=float, default=4, help="of the benchmark's storage (%(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this one (made by its --io-trace-log)")
    parser.add_argument("--scale", type=int, default=64, help="divide sizes of the trace by this (%(default)s)")
    parser.add_argument("--size-mib", type=int, help="end the replay after so many written (2048; with --quick 256)")


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """The benchmark over both stores, and the replay. Without its source or a trace nothing is measured."""
    about, tables = machine.describe(), list[Table]()
    skipped = ["give --source FOLDER (kv_cache_benchmark of github.com/mlcommons/storage), or --trace FILE"]
    if arguments is None or not (arguments.source or arguments.trace):
        return Result("mlperf", HYPOTHESIS, (), about, [], skipped)
    size_mib = arguments.size_mib or (256 if options.quick else 2048)
    with options.folder(on_disk=True) as folder:
        trace = arguments.trace
        if arguments.source:
            show_progress("mlperf: the benchmark over files, and over kvstore")
            tables.append(_benchmarked(folder, arguments, arguments.seconds or (12 if options.quick else 60)))
            if trace is None:
                trace = folder / "trace.csv"
                sizes = ["--duration", str(TRACE_S), "--output", str(folder / "trace.json")]
                _call(arguments.source, folder, [*CLOSED, *sizes, "--io-trace-log", str(trace)])
        show_progress("mlperf: the replay")
        tables.append(replay(options, list(operations(trace, arguments.scale)), size_mib * MIB, arguments.scale))
    conditions = (
        f"the benchmark on {machine.file_system(options.disk)}, its files with fsync, kvstore with durability fsync",
        f"the replay on {machine.file_system(options.directory)}, warm, without fsync",
        f"kvstore may use {SPACE:g} times the capacity, because it deletes in the background; misses are its evictions",
        "an adapted run, no MLPerf submission",
    )
    return Result("mlperf", HYPOTHESIS, conditions, about, tables)


def _benchmarked(folder: Path, asked: argparse.Namespace, seconds: int) -> Table:
    """The benchmark's own figures."""
    rows: list[list[Cell]] = []
    for name in ("files", "kvstore"):
        output, place = folder / f"{name}.json", folder / name
        sizes = ["--model", asked.model, "--num-users", str(asked.users), "--duration", str(seconds)]
        sizes += ["--max-concurrent-allocs", "1", "--storage-capacity-gb", str(asked.capacity_gib)]
        sizes += ["--cache-dir", str(place), "--output", str(output)]
        _call(asked.source, folder, sizes, name == "kvstore", int(SPACE * asked.capacity_gib * GIB))
        found = json.loads(output.read_text())
        stats = found["summary"]["cache_stats"]
        misses = int((folder / "misses").read_text()) if name == "kvstore" else 0
        row: list[Cell] = [name, found["summary"]["total_requests"]]
        row += [stats.get(f"tier_storage_{kind}_bandwidth_gbps") for kind in ("write", "read")]
        rows.append([*row, stats.get("storage_read_p95_ms"), misses])
    columns = ("store", "requests", "write GiB/s of wall time", "read GiB/s of wall time", "read p95 ms", "misses")
    return Table(f"MLPerf Storage KV cache, {asked.model}, {asked.users} users, {seconds} s", columns, rows)


def _call(source: Path, folder: Path, arguments: Sequence[str], ours: bool = False, capacity: int = 0) -> None:
    """Runs the benchmark. Raises CalledProcessError."""
    command = [sys.executable, "kv-cache.py"] if not ours else [sys.executable, "-m", "benchmarks.mlperf"]
    environ = {**os.environ, "KVSTORE_MLPERF_BYTES": str(capacity), "KVSTORE_MLPERF_MISSES": str(folder / "misses")}
    places = [str(source), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command += ["--config", "config.yaml", *COMMON, *arguments]
    # Its progress is dropped: standard output is for the tables.
    subprocess.run(command, cwd=source, env=environ, stdout=subprocess.DEVNULL, timeout=RUN_S_MAX, check=True)


@dataclass(frozen=True)
class Operation:
    """One line of a trace."""

    is_read: bool
    size: int
    key: str


def operations(trace: Path, scale: int) -> Iterator[Operation]:
    """The operations on storage, sizes divided by ``scale``; reads of entries from before the trace are left out."""
    written = set[str]()
    with trace.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["Tier"] != "Tier-2":
                continue
            is_read, key = row["Operation"] == "Read", row["Key"].replace("/", "_")
            if is_read and key not in written:
                continue
            written.add(key)
            yield Operation(is_read, max(4096, int(row["Object_Size_Bytes"]) // scale), key)


class Contender(Protocol):
    def write(self, key: str, data: Bytes) -> None: ...
    def read(self, key: str, out: Bytes) -> None: ...


def replay(options: Options, trace: Sequence[Operation], size_max: int, scale: int) -> Table:
    """Each operation on both stores, in alternating order, until ``size_max`` were written. Raises WrongBytes."""
    if not trace:
        raise InvalidRequest("the trace has no writes to storage (Tier-2)")
    source = random_bytes(max(each.size for each in trace), 1)
    target = np.empty_like(source)
    sizes: dict[str, int] = {}
    taken: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    written = count = 0
    with options.folder() as folder, ExitStack() as undo:
        store = undo.enter_context(kvstore.open(folder / "root", max_bytes=None))
        stores: dict[str, Contender] = {"kvstore": Blocks(store), "files": Files(folder / "files")}
        for count, each in enumerate(trace, 1):
            if not each.is_read:
                if each.key in sizes:
                    continue
                sizes[each.key] = each.size
                written += each.size
            size = sizes[each.key]
            _stamp(source[:size], each.key)
            for name in [*stores][:: 1 if count % 2 else -1]:
                taken_s = _timed(stores[name], each, source[:size], target[:size])
                taken.setdefault((name, each.is_read), []).append((size, taken_s))
            if written >= size_max:
                break
    rates = {of: sum(size for size, _ in calls) / GIB / sum(s for _, s in calls) for of, calls in taken.items()}
    rows: list[list[Cell]] = []
    for name in stores:
        reads_ms = [1e3 * s for _, s in taken.get((name, True), [])]
        latencies = [percentile(reads_ms, share) if reads_ms else None for share in (0.5, 0.95)]
        speeds = [rates.get((name, is_read)) for is_read in (False, True)]
        ratios = [rates[name, r] / rates["files", r] if (name, r) in rates else None for r in (False, True)]
        rows.append([name, *speeds, *latencies, *ratios])
    note = f"{count:,} operations, {len(sizes):,} entries, {written / GIB:.1f} GiB written, sizes divided by {scale}"
    return Table("The replay of its trace", COLUMNS, rows, note)


def _timed(store: Contender, each: Operation, source: Bytes, target: Bytes) -> float:
    if not each.is_read:
        return timed(lambda: store.write(each.key, source)).wall_s
    poison(target)
    try:
        taken_s = timed(lambda: store.read(each.key, target)).wall_s
    except KeyError as error:
        raise WrongBytes(f"{error} is a miss") from error
    check_equal(target, source, each.key)
    return taken_s


def _stamp(data: Bytes, key: str) -> None:
    """Makes each part an entry's own."""
    digest = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.uint8)
    for part in range(0, len(data), PART_BYTES):
        data[part : part + len(digest)] = digest


def _keys(key: str, size: int) -> list[bytes]:
    head = hashlib.sha256(key.encode()).digest()[:28]
    return [head + part.to_bytes(4, "little") for part in range(-(-size // PART_BYTES))]


def _parts(data: Bytes) -> list[memoryview]:
    return [data[at : at + PART_BYTES].data for at in range(0, len(data), PART_BYTES)]


def _program() -> None:
    """The benchmark's command with kvstore in place of its files."""
    made: list[Backend] = []

    def backend(base_path: str) -> Backend:
        made.append(Backend(base_path))
        return made[-1]

    importlib.import_module("kv_cache.cache").NVMeBackend = backend  # type: ignore[attr-defined]
    importlib.import_module("kv_cache.cli").main()
    for each in made:
        each.close()
    Path(os.environ["KVSTORE_MLPERF_MISSES"]).write_text(str(sum(each.misses for each in made)))


if __name__ == "__main__":
    _program()
