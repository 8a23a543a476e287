"""Processes that share a folder of one host, its collectors, and a gauge of the bytes that the folder takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvstore.client.store import Store
from kvstore.errors import Overloaded
from kvstore.host.eviction import Evicted
from kvstore.root.fences import RESERVE_BYTES
from kvstore_gc.config import Config
from kvstore_gc.host import opened
from tests.kit.host_process import LARGE, LAYOUT, large_kv, large_tokens, tokens
from tests.kit.patience import PATIENCE_S, eventually, returns

MIB = 1 << 20
LIMIT_BYTES = 16 * MIB
TICK_S = 0.02
"""More than a tick of the clock that stamps files: what was written in the tick of a listing counts as used since."""
RECORDS_BYTES = RESERVE_BYTES + (2 << 20)
"""The reserve, the mapped files, small records in pages: none of them counts."""


class Neighbour:
    """A process of ``host_process`` that has begun."""

    def __init__(self, root: Path, role: str, max_bytes: int | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.kit.host_process",
            str(root),
            role,
            *([str(max_bytes)] if max_bytes else []),
        ]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "begun"

    def stats(self) -> tuple[bool, int]:
        """Returns whether its child collects, and how many prompts it stored."""
        self._send("stats")
        is_collecting, stored = self._line().split()
        return is_collecting == "1", int(stored)

    def end(self) -> None:
        """Ends it orderly."""
        self._send("end")
        assert self._line() == "done"
        assert self.child.wait(PATIENCE_S) == 0

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()
        self.child.wait(PATIENCE_S)

    def _send(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()

    def _line(self) -> str:
        assert self.child.stdout is not None
        return returns(self.child.stdout.readline).strip()


@contextmanager
def neighbours(root: Path, role: str, count: int = 1, max_bytes: int | None = None) -> Iterator[list[Neighbour]]:
    """Processes of one role; killed at the end."""
    with ExitStack() as undo:
        started = []
        for _ in range(count):
            one = Neighbour(root, role, max_bytes)
            undo.callback(one.child.communicate)
            undo.callback(one.child.kill)
            started.append(one)
        yield started


def collectors(root: Path) -> list[int]:
    """The processes of this host that run a collector for this root."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"kvstore_gc.host" in words and str(root).encode() in words:
                found.append(int(path.parent.name))
    return found


def collected(root: Path) -> Evicted:
    """One round of a collector of this process, which evicts all that is not in use."""
    time.sleep(TICK_S)
    with opened(str(root), Config(max_bytes=1), {}, wait_s=PATIENCE_S) as collector:
        return collector.once()


def chunks_count(root: Path) -> int:
    """The number of chunks on the root."""
    return sum(1 for _ in (root / "chunks").glob("*/*"))


def used_bytes(root: Path) -> int:
    """The bytes of the chunks on the root."""
    found = 0
    for path in (root / "chunks").glob("*/*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


class Gauge:
    """Follows the most used bytes of a file system."""

    def __init__(self, mount: Path) -> None:
        self.most = 0
        self._mount = mount
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            found = os.statvfs(self._mount)
            self.most = max(self.most, (found.f_blocks - found.f_bfree) * found.f_frsize)


def matched(store: Store, prompt: int) -> int:
    """The tokens of a small prompt that are stored."""
    return store.namespace("model", LAYOUT).match(tokens(prompt))


def put_large(store: Store, number: int, *, required: bool = False) -> None:
    """Puts a large prompt."""
    store.namespace("large", LARGE).put(large_tokens(0, number), large_kv(), required=required)


def put_until(store: Store, holds: Callable[[], bool]) -> None:
    """Puts large prompts until it holds."""
    numbers = iter(range(1 << 16))

    def put() -> bool:
        with suppress(Overloaded):
            put_large(store, next(numbers))
        return holds()

    eventually(put, "the last of the puts")
