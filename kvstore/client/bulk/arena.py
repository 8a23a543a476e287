"""The arena: memory that a client shares with a worker for puts. It is a ring; the worker says which part is free."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.memory.arena import populate
from kvstore.wire.bulk.ledger import LEDGER_BYTES, released_count

ARENA_BYTES_MIN = 16 << 20


@dataclass(frozen=True, slots=True)
class _Region:
    start: int
    end: int
    upto: int
    """This region is free once the first ``upto`` chunks of the put are released."""


class Ledger:
    """The worker's account of the arena: a page that the worker writes and we read."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``. Raises OSError or ValueError if it is not a ledger."""
        try:
            # Sealed against shrinking: reading past a shortened file would kill us (SIGBUS).
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the ledger is not sealed against shrinking")
            mapped = mmap.mmap(fd, LEDGER_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._entry = np.frombuffer(mapped, np.uint64)

    def released(self, request: int) -> int:
        """Number of leading chunks of a put that the worker no longer needs in the arena."""
        return released_count(int(self._entry[0]), request)


class Arena:
    """A ring of ``size_bytes``. Regions are taken in order and become free in order."""

    def __init__(self, size_bytes: int, ledger: Ledger) -> None:
        """Raises OSError if there is no memory."""
        self.size_bytes = size_bytes
        self._ledger = ledger
        self.fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[Any] = np.frombuffer(mapped, np.uint8)
        # Pages are allocated ahead of the first put while it is copied, so no later put waits for them.
        self._closing = threading.Event()
        pages = memoryview(mapped)
        threading.Thread(target=populate, args=(pages, True, self._closing), name="kvstore-arena", daemon=True).start()
        self._request = 0
        self._regions: deque[_Region] = deque()

    def begin(self, request: int) -> None:
        """Begins a put. The worker has answered the one before, and needs nothing of it."""
        self._request = request
        self._regions.clear()

    def take(self, size_bytes: int, upto: int) -> int | None:
        """Returns the offset of a region for chunks of the put; it is free once its first ``upto`` are released.

        None if there is no room now.
        """
        self._collect()
        start = self._place(size_bytes)
        if start is not None:
            self._regions.append(_Region(start, start + size_bytes, upto))
        return start

    def bytes_at(self, offset: int, size_bytes: int) -> npt.NDArray[Any]:
        """Returns the memory of a region."""
        return self._bytes[offset : offset + size_bytes]

    def close(self) -> None:
        """Closes the file; the worker keeps its own mapping of it. Idempotent."""
        self._closing.set()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._bytes = np.empty(0, np.uint8)

    def _collect(self) -> None:
        while self._regions and self._ledger.released(self._request) >= self._regions[0].upto:
            self._regions.popleft()

    def _place(self, size_bytes: int) -> int | None:
        if not self._regions:
            return 0 if size_bytes <= self.size_bytes else None
        tail, head = self._regions[0].start, self._regions[-1].end
        if head > tail:
            if head + size_bytes <= self.size_bytes:
                return head
            return 0 if size_bytes <= tail else None
        return head if head + size_bytes <= tail else None
