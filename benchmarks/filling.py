"""The bytes by which writers pass the capacity of a root, while others use the same file system.

Hypothesis: whatever others do, used bytes stay below 1.02 of the limit plus one put of each writer (gc/PROTOCOL.md,
section 6).
Real nodes, a real collector and a real etcd, on a tmpfs of its own (mounting one needs root).  ``peak`` is the most
that all files of the root ever took, staged ones and trash too, looked at all the time.

    python -m benchmarks.filling [--cap-mib 256] [--seconds 15] [--writers 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.errors import KVStoreError
from kvstore.meta.server import EmbeddedEtcd

Work = TypeVar("Work", bound=Callable[[], None])

MIB = 1 << 20
LAYOUT = Layout(layers=8, kv_heads=4, head_dim=128, dtype="int8", chunk_tokens=32)
PROMPT_CHUNKS = 16
PROMPT_BYTES = PROMPT_CHUNKS * LAYOUT.chunk_bytes
BACKOFF_S = 0.02
GAUGE_S = 0.01
OTHERS_S = 0.5


@dataclass(frozen=True)
class Case:
    """One row: a limit, and who writes and deletes meanwhile. Rates in bytes per second."""

    others: str
    rate: float
    """All writers together; 0: as fast as they can."""


@dataclass(frozen=True)
class Figures:
    """The figures of one case."""

    others: str
    asked_mib_s: float
    written_mib_s: float
    shed_puts: int
    peak_mib: float
    peak_ratio: float
    others_mib: float
    """Written or deleted by others."""


OTHERS = ("nothing", "delete", "write", "both")


def main() -> int:
    """Runs it all; 0 where the bound held in each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.filling", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cap-mib", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--rates-mib", type=float, nargs="+", default=[50, 0], help="0: as fast as they can")
    parser.add_argument("--others", nargs="+", choices=OTHERS, default=OTHERS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", nargs=4, metavar=("ROOT", "ETCD", "RATE", "SECONDS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        return write(given.write[0], given.write[1], float(given.write[2]), float(given.write[3]))
    bound = 1.02 * given.cap_mib + given.writers * PROMPT_BYTES / MIB
    if not given.json:
        puts = f"{given.writers} writers, puts of {PROMPT_BYTES / MIB:g} MiB"
        print(f"cap {given.cap_mib} MiB, {puts}, bound {bound:g} MiB")
        print("| others | asked MiB/s | written MiB/s | puts shed | others' MiB | peak MiB | peak / cap |")
        print("|---|---|---|---|---|---|---|", flush=True)
    found = []
    for rate in given.rates_mib:
        for others in given.others:
            found.append(measured(Case(others, rate * MIB), given.cap_mib * MIB, given.writers, given.seconds))
            if not given.json:
                print(row(found[-1]), flush=True)
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    return int(any(each.peak_mib > bound for each in found))


def row(figures: Figures) -> str:
    """The row of the table."""
    asked = f"{figures.asked_mib_s:.0f}" if figures.asked_mib_s else "all they can"
    return (
        f"| {figures.others} | {asked} | {figures.written_mib_s:.0f} | {figures.shed_puts} | {figures.others_mib:.0f} "
        f"| {figures.peak_mib:.0f} | {figures.peak_ratio:.3f} |"
    )


def measured(case: Case, cap_bytes: int, writers_count: int, seconds: float) -> Figures:
    """One case, on a file system of its own with room for the root and as much of others twice."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-filling-")))
        volume = undo.enter_context(_mounted(folder / "volume", 6 * cap_bytes))
        server = undo.enter_context(EmbeddedEtcd(folder / "etcd"))
        root = volume / "root"
        kvstore.open(str(root), shard_bits=4).close()
        others = _Others(case.others, volume / "others", 2 * cap_bytes)
        command = [sys.executable, "-m", "kvstore_gc", "--root", str(root), "--etcd", server.endpoints, "--json"]
        command += ["--interval", "2s", "--max-bytes", str(cap_bytes)]
        collector = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        undo.callback(_end, collector)
        assert collector.stdout is not None and collector.stdout.readline(), "the collector ended by itself"
        rate = str(case.rate / writers_count)
        myself = [sys.executable, "-m", "benchmarks.filling", "--write", str(root), server.endpoints]
        gauge = undo.enter_context(_repeated(_Gauge(root), GAUGE_S))
        undo.enter_context(_repeated(others, OTHERS_S))
        writers = [
            subprocess.Popen([*myself, rate, str(seconds)], stdout=subprocess.PIPE) for _ in range(writers_count)
        ]
        done = [json.loads(each.communicate()[0]) for each in writers]
        return Figures(
            case.others,
            case.rate / MIB,
            sum(each["puts"] for each in done) * PROMPT_BYTES / MIB / seconds,
            sum(each["shed"] for each in done),
            gauge.most / MIB,
            gauge.most / cap_bytes,
            others.moved_bytes / MIB,
        )


class _Gauge:
    """The most bytes of the root's files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.most = 0

    def __call__(self) -> None:
        self.most = max(self.most, _used_bytes(str(self._root)))


class _Others:
    """A file beside the root that grows, shrinks, or both in turns."""

    def __init__(self, what: str, path: Path, size_bytes: int) -> None:
        self._what = what
        self._path = path
        self._size_bytes = size_bytes
        self.moved_bytes = 0
        path.write_bytes(b"")
        if what in ("delete", "both"):
            self._fill(size_bytes)

    def __call__(self) -> None:
        """A sixteenth of it at a time; of both, all of it."""
        now, step = self._path.stat().st_size, self._size_bytes // 16
        if self._what == "write" and now < self._size_bytes:
            self._fill(now + step)
            self.moved_bytes += step
        elif self._what == "delete" and now:
            os.truncate(self._path, now - step)
            self.moved_bytes += step
        elif self._what == "both":
            self._fill(0 if now else self._size_bytes)
            self.moved_bytes += self._size_bytes

    def _fill(self, size_bytes: int) -> None:
        with self._path.open("r+b") as file:
            file.truncate(size_bytes)
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)


def _used_bytes(folder: str) -> int:
    total = 0
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                total += _used_bytes(entry.path)
            else:
                stat = entry.stat(follow_symlinks=False)
                total += stat.st_size // stat.st_nlink  # staged and published at once: one file
    except OSError:
        pass  # gone since it was listed
    return total


@contextmanager
def _repeated(work: Work, every_s: float) -> Iterator[Work]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join()


@contextmanager
def _mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.communicate()


def write(root: str, etcd: str, rate: float, seconds: float) -> int:
    """One writer: new prompts, so many bytes a second, until the time is over. Backs off where it is told to."""
    tokens = np.zeros(PROMPT_CHUNKS * LAYOUT.chunk_tokens, np.uint32)
    kv = np.random.default_rng(1).integers(-128, 128, LAYOUT.shape(len(tokens)), np.int8)
    puts = shed = 0
    with kvstore.open(root, etcd) as store:
        cache = store.namespace("filling", LAYOUT)
        due_s = began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            tokens[0], tokens[1] = os.getpid(), puts
            try:
                cache.put(tokens, kv)
                puts += 1
            except KVStoreError:
                shed += 1
                time.sleep(BACKOFF_S)
            if rate:
                due_s = max(due_s + PROMPT_BYTES / rate, time.monotonic())
                time.sleep(max(0.0, due_s - time.monotonic()))
    print(json.dumps({"puts": puts, "shed": shed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
