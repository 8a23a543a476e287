"""The file ``host/shared``, which all processes of a host map: a few numbers, and the log of evicted chunks.

The log is a ring of addresses. Who evicts appends a batch of victims, advances TAIL, and sets SETTLED to TAIL once it
is done with all of them (``eviction``). Every process reads it, to forget chunks that are gone (``view``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from enum import IntEnum

import numpy as np

from kvstore.address import ADDRESS_BYTES
from kvstore.host.place import FOLDER, HOLDS, SHARED
from kvstore.native import library as native
from kvstore.root.posix import FILE_MODE, FOLDER_MODE

RING = 1 << 16
"""Entries of the log."""
BATCH_MAX = 1 << 12
"""Victims of one batch. Whoever is less than ``RING - BATCH_MAX`` behind reads entries that nobody overwrites."""
PAGE_BYTES = 4096
_own_number = ctypes.c_int64()
_OWN = ctypes.addressof(_own_number)
"""A number of this process alone, for additions whose order is all that counts."""
_MAGIC = int.from_bytes(b"KVHOST1\0", "little")
_BYTES = PAGE_BYTES + RING * ADDRESS_BYTES


class Number(IntEnum):
    """The numbers, by their place. All but the first two count bytes, from the day on which the file was made."""

    MAGIC = 0
    TAIL = 1
    """Entries that were ever appended to the log."""
    SETTLED = 2
    """Entries that are dealt with."""
    USED = 3
    """Bytes of the root's files and of puts that have begun; a listing corrects it."""
    WRITTEN = 4
    DELETED = 5
    LIMIT = 6
    """No put begins that would bring USED above this; 0: nobody limits it."""
    WAKES_AT = 7
    """Above this the collector makes room."""
    FULL = 8
    """When a collector last found that nothing can be evicted, by ``time.monotonic_ns``; 0: it has found room since."""
    CLEARS = 9
    """How many clears were ordered."""
    LISTINGS = 10
    """How many listings have begun."""
    BEATS = 11
    """How often the collector looked."""


class Mapped:
    """Numbers at the beginning of a mapped file. Thread-safe."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._lock = threading.RLock()  # a put that is dropped gives its room back from wherever its thread is
        self.map = mmap.mmap(fd, size_bytes)
        self.numbers = memoryview(self.map)[:PAGE_BYTES].cast("q")
        self._at = np.frombuffer(self.map, np.uint8).ctypes.data

    def __getitem__(self, place: int) -> int:
        return self.numbers[place]

    def __setitem__(self, place: int, value: int) -> None:
        self.numbers[place] = value

    def add(self, place: int, delta: int) -> int:
        """Adds to a number, as one step for all processes; returns the sum."""
        with self._lock:
            if not self._at:
                return 0  # it was unmapped: the store is closed
            return int(native.brief.kv_shared_add(self._fd, self._at + 8 * place, delta))

    def unmap(self) -> None:
        """Gives the memory back: as long as it is mapped, the file system cannot be unmounted. Idempotent."""
        with self._lock:
            self._at = 0
        self.numbers.release()
        with suppress(BufferError):  # somebody has a view of it: then it goes with that
            self.map.close()

    def fence(self) -> None:
        """Orders the loads and stores before it and those after it, for all processes."""
        with self._lock:
            if self._at:
                native.brief.kv_shared_add(self._fd, _OWN, 0)


class Shared(Mapped):
    """The file ``host/shared`` of the root at ``folder``."""

    def __init__(self, folder: str) -> None:
        """Raises OSError, and ValueError for a file that is none."""
        self._fd = -1  # nothing to close yet
        fd = os.open(f"{folder}/{SHARED}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != _BYTES:
                raise ValueError(f"{folder}/{SHARED} has another size")
            super().__init__(fd, _BYTES)
        except BaseException:
            self._fd = -1
            os.close(fd)
            raise
        self._ring = memoryview(self.map)[PAGE_BYTES:]
        if self[Number.MAGIC] != _MAGIC:
            raise ValueError(f"{folder}/{SHARED} is another file")

    def append(self, packed: bytes) -> None:
        """Appends at most BATCH_MAX addresses to the log, one after the other in ``packed``, and advances TAIL."""
        count, tail = len(packed) // ADDRESS_BYTES, self[Number.TAIL]
        assert count <= BATCH_MAX
        at = tail % RING
        first = min(count, RING - at) * ADDRESS_BYTES
        self._ring[at * ADDRESS_BYTES : at * ADDRESS_BYTES + first] = packed[:first]
        self._ring[: len(packed) - first] = packed[first:]
        self.fence()
        self[Number.TAIL] = tail + count

    def entries(self, start: int, stop: int) -> bytes:
        """Returns the packed addresses of some entries of the log, which must not be more than there are."""
        at, count = start % RING, stop - start
        first = self._ring[at * ADDRESS_BYTES : min(RING, at + count) * ADDRESS_BYTES]
        return bytes(first) + bytes(self._ring[: count * ADDRESS_BYTES - len(first)])

    def close(self) -> None:
        """Closes the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._ring.release()
            self.unmap()

    __del__ = close


def is_made(folder: str) -> bool:
    """True if the file is there and of this version. Raises OSError if nobody can tell."""
    try:
        Shared(folder).close()
    except (FileNotFoundError, ValueError):
        return False
    return os.path.isdir(f"{folder}/{HOLDS}")


def make(folder: str, used_bytes: int) -> None:
    """Makes the file anew, while nobody uses the root. All of it gets its room on the disk now: a mapped file that
    lacks room ends the process that writes to it. Raises OSError.
    """
    for made in (FOLDER, HOLDS):
        os.makedirs(f"{folder}/{made}", FOLDER_MODE, exist_ok=True)
    path = f"{folder}/{SHARED}"
    fd = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.posix_fallocate(fd, 0, _BYTES)
        numbers = np.zeros(PAGE_BYTES // 8, "<i8")
        numbers[[Number.MAGIC, Number.USED]] = _MAGIC, used_bytes
        os.pwrite(fd, numbers.tobytes(), 0)
    finally:
        os.close(fd)
    os.rename(f"{path}.new", path)
