"""Processes that write into a bounded folder, their collectors, and a gauge of what the folder takes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.client.store import Store
from kvstore.format.places import METADATA, METADATA_LOGS
from kvstore.results import PutResult
from kvstore.root.reserve import RESERVE_BYTES
from tests.kit.bound_process import CHUNKS, LAYOUT, kv, tokens
from tests.kit.etcd import frozen
from tests.kit.patience import PATIENCE_S, eventually, returns

MIB = 1 << 20
BOUND_BYTES = 16 * MIB
RECORDS_BYTES = RESERVE_BYTES + (512 << 10)
"""The reserve, plans, small records in pages: nobody counts them."""
TOKENS_COUNT = CHUNKS * LAYOUT.chunk_tokens
NEVER = "3600"


class Writer:
    """A process of ``bound_process``."""

    def __init__(self, root: Path, max_bytes: int | str = BOUND_BYTES, start_s: str = "0") -> None:
        command = [sys.executable, "-m", "tests.kit.bound_process", str(root), str(max_bytes), start_s]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._said() == "begun"

    def stats(self) -> tuple[bool, int]:
        """Returns whether it runs the collector, and how many prompts it stored."""
        self.tell("stats")
        is_collecting, stored = self._said().split()
        return is_collecting == "1", int(stored)

    def tell(self, what: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what}\n")
        self.child.stdin.flush()

    def end(self) -> None:
        self.tell("end")
        assert self._said() == "done"
        assert self.child.wait(PATIENCE_S) == 0

    def _said(self) -> str:
        assert self.child.stdout is not None
        return returns(self.child.stdout.readline).strip()


@contextmanager
def writing(root: Path, count: int = 1, **options: Any) -> Iterator[list[Writer]]:
    """Processes that write as fast as they can."""
    with ExitStack() as undo:
        writers = []
        for _ in range(count):
            writer = Writer(root, **options)
            undo.callback(writer.child.communicate)
            undo.callback(writer.child.kill)
            writers.append(writer)
        yield writers


def collectors(root: Path) -> list[int]:
    """The processes of this host that run a collector for this root."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvstore_gc.host" in words and str(root).encode() in words:
            found.append(int(path.parent.name))
    return found


def collector(root: Path) -> int:
    """The one collector of this root. It is known to its store a moment before it runs the program."""
    found = list[int]()

    def is_one() -> bool:
        found[:] = collectors(root)  # a second look may miss it: /proc is no snapshot
        return len(found) == 1

    eventually(is_one, "one collector runs")
    return found[0]


@contextmanager
def stopped_between_writes(root: Path, pids: list[int]) -> Iterator[None]:
    """Processes that do not run, none of them in the middle of a write of metadata.

    One that is stops all writers until it goes on (gc/PROTOCOL.md, section 1): nobody could take over from it.
    """

    with ExitStack() as stopped:

        def stop() -> bool:
            for pid in pids:
                stopped.enter_context(frozen(pid))
            if not _is_writable(root):
                stopped.close()
                return False
            return True

        eventually(stop, "they are stopped between writes")
        yield


def _is_writable(root: Path) -> bool:
    """True unless one process has the metadata's lock for long."""
    with closing(sqlite3.connect(root / METADATA, timeout=1.0, isolation_level=None)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


def prompts(root: Path) -> int:
    """The chunks on the root."""
    return sum(1 for _ in (root / "chunks").glob("*/*"))


class Gauge:
    """Follows the used bytes of a root on a file system of its own, without the metadata."""

    def __init__(self, mount: Path) -> None:
        self.most = 0
        self._mount = mount
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        # The last store that closes unlinks the log, and frees its bytes a moment later: not before it is closed here.
        self._logs = dict[int, int]()

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for log in self._logs.values():
            os.close(log)

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            before = self._metadata_bytes()
            found = os.statvfs(self._mount)
            # The log may grow between two looks, more so on a busy machine.
            beside = max(before, self._metadata_bytes())
            self.most = max(self.most, (found.f_blocks - found.f_bfree) * found.f_frsize - beside)

    def _metadata_bytes(self) -> int:
        root, found = self._mount / "root", 0
        with suppress(FileNotFoundError):
            found += os.stat(root / METADATA).st_blocks * 512
        with suppress(FileNotFoundError):
            path = root / METADATA_LOGS[0]
            if os.stat(path).st_ino not in self._logs:
                log = os.open(path, os.O_RDONLY)
                self._logs[os.fstat(log).st_ino] = log
        return found + sum(os.fstat(log).st_blocks * 512 for log in self._logs.values())


def put(store: Store, number: int, *, required: bool = False) -> PutResult:
    return store.namespace("model", LAYOUT).put(tokens(0, number), kv(), required=required)


def put_until(store: Store, holds: Callable[[], bool]) -> int:
    """Puts new prompts until it holds; returns how many were stored."""
    ends_s, number = time.monotonic() + PATIENCE_S, 0
    while not holds():
        assert time.monotonic() < ends_s, "it did not happen"
        if put(store, number).reason:
            time.sleep(0.01)
        else:
            number += 1
    return number


def matched(store: Store, number: int) -> int:
    return store.namespace("model", LAYOUT).match(tokens(0, number))
