"""The arena: one anonymous file in memory that a node writes images into and that processes of its host map for
reading.

Only ``SealedArena.open`` and ``map_arena`` know which seals protect readers from the writer, and the writer from
readers (``MEMORY.md``, A1 and A2).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvstore.core.validate import size
from kvstore.errors import InvalidRequest, Unavailable

# Extents: which parts of a fixed size are taken. Best fit over pages; free neighbours join.


PAGE_BYTES = 4096


class Extents:
    """Runs of pages of ``size_bytes``, as a ``Room``; a partial last page is never given out.

    Taking and giving cost a bisection of the free runs. Not thread-safe.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < PAGE_BYTES:
            raise InvalidRequest(f"room of {size_bytes} bytes: expected at least one page of {PAGE_BYTES} bytes")
        self._pages_count = size_bytes // PAGE_BYTES
        self._free_pages = self._pages_count
        self._taken: dict[int, int] = {}
        # Each free run is kept three times: by its first page, by the page after it, and in order of size, lowest
        # first.
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: list[tuple[int, int]] = []
        self._add_free(0, self._pages_count)

    @property
    def size_bytes(self) -> int:
        """The whole room, in whole pages."""
        return self._pages_count * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes that are not taken, in however many pieces."""
        return self._free_pages * PAGE_BYTES

    def take(self, size_bytes: int) -> int | None:
        """Takes ``size_bytes`` bytes (1 or more); returns their offset, or None if no free run is long enough."""
        if size_bytes < 1:
            raise InvalidRequest(f"room for {size_bytes} bytes: expected at least 1")
        pages = -(-size_bytes // PAGE_BYTES)
        place = bisect_left(self._sizes, (pages, 0))
        if place == len(self._sizes):
            return None
        count, first = self._sizes[place]
        self._remove_free(first, count)
        if count > pages:
            self._add_free(first + pages, count - pages)
        self._taken[first] = pages
        self._free_pages -= pages
        return first * PAGE_BYTES

    def give(self, offset: int) -> None:
        """Gives back what was taken at ``offset``. Raises InvalidRequest if nothing is taken there."""
        first = offset // PAGE_BYTES
        if offset % PAGE_BYTES or first not in self._taken:
            raise InvalidRequest(f"nothing is taken at offset {offset}: give back what take() returned, once")
        count = self._taken.pop(first)
        self._free_pages += count
        before = self._ends.get(first)
        after = self._free.get(first + count)
        if after is not None:
            self._remove_free(first + count, after)
            count += after
        if before is not None:
            count += first - before
            self._remove_free(before, first - before)
            first = before
        self._add_free(first, count)

    def _add_free(self, first: int, count: int) -> None:
        self._free[first] = count
        self._ends[first + count] = first
        insort(self._sizes, (count, first))

    def _remove_free(self, first: int, count: int) -> None:
        del self._free[first]
        del self._ends[first + count]
        del self._sizes[bisect_left(self._sizes, (count, first))]


# The memory of the host, or the limit of this process's container (the cgroup).
#
# A number that is too large must be an error where it is given: otherwise it shows only when the memory is written,
# and then the system kills a process.


CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SPARE_BYTES_MAX = 1 << 30
SPARE_SHARE = 8


def memory_there_bytes() -> int:
    """Returns all memory of the host, or the lowest limit of this process's cgroups."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limits():
        with suppress(OSError, ValueError):  # not a cgroup of its own, or no limit ("max")
            there = min(there, int(path.read_text()))
    return there


def memory_most_bytes() -> int:
    """Returns what arenas of this host or container may have: it leaves an eighth, or 1 GiB, to everything else."""
    there = memory_there_bytes()
    return there - min(there // SPARE_SHARE, SPARE_BYTES_MAX)


def memory_free_bytes() -> int | None:
    """Returns what the host can give now without taking it from other processes; None if the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _limits() -> Iterator[Path]:
    """Yields the files that may limit this process: its cgroup of either version, and all cgroups around it."""
    yield CGROUPS / "memory.max"
    yield CGROUPS / "memory" / "memory.limit_in_bytes"
    with suppress(OSError, ValueError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
            at = folder / inside.strip("/")
            while at != folder and folder in at.parents:
                yield at / name
                at = at.parent


log = logging.getLogger(__name__)

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
STEP_BYTES = 16 << 20
BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""
LOOK_PERIOD_S, LOOKS_MAX = 0.05, 1200
"""How often, for a minute, a reader looks whether the worker has taken its pages."""
F_SEAL_FUTURE_WRITE = 0x0010
"""Defined in ``linux/fcntl.h``; the standard library has no name for it. Linux 5.1 and newer."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SealedArena:
    """``size_bytes`` of memory, a multiple of 4 KiB, that only this process can write.

    If the system has enough free pages, the arena takes them in the background as soon as it is open; otherwise they
    are taken as they are written. They are kept until it is closed. They are pages of a memfd: a container without
    ``/dev/shm``, or with a small one, has as much of it as any other. They count as the worker's memory in its cgroup,
    whose limit needs room for the whole arena; past it the system kills the process that writes, as for any other
    memory.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises InvalidRequest for another size."""
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise InvalidRequest(f"an arena of {size_bytes} bytes: expected a multiple of {PAGE_BYTES}, more than 0")
        self.size_bytes = size_bytes
        self.fd = -1
        """The descriptor to hand over: a process that gets it can map it for reading only."""
        self.memory = memoryview(bytearray())
        """The whole arena, writable; empty before ``open`` and after ``close``. Its parts stay readable after that."""
        self._closing = threading.Event()
        self._filling: threading.Thread | None = None

    def open(self) -> SealedArena:
        """Makes and maps the arena.

        Raises InvalidRequest if this host or container never has so much, Unavailable if it does not give such memory.
        """
        most = memory_most_bytes()
        if self.size_bytes > most:
            raise InvalidRequest(
                f"memory of {size(self.size_bytes)}: this host or container has at most {size(most)} for it; give less"
            )
        try:
            self.fd = os.memfd_create("kvstore-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.size_bytes)
            mapped = mmap.mmap(self.fd, self.size_bytes)
            # Seal after mapping: this seal leaves existing mappings writable, and allows no new ones.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, ValueError, OverflowError) as cause:
            self.close()
            raise Unavailable(
                f"cannot make an arena of {size(self.size_bytes)} ({cause}): give less memory, or Linux 5.1 or newer"
            ) from cause
        with suppress(OSError, ValueError):
            # Has an effect only if the administrator allows huge pages for shared memory.
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(mapped)
        free = memory_free_bytes()
        if free is not None and self.size_bytes > free:
            # Taking the pages now would make the system kill this process or another; later there may be room.
            log.warning(
                "memory.scarce asked_bytes=%d free_bytes=%d: the system may kill a process when it fills; give less",
                self.size_bytes,
                free,
            )
            return self
        with suppress(RuntimeError):  # no more threads: then the first writes wait for their pages
            filling = threading.Thread(target=populate, args=(self.memory, True, self._closing), daemon=True)
            filling.start()
            self._filling = filling
        return self

    def close(self) -> None:
        """Gives it up; its pages go with the last view, and the last mapping in another process. Idempotent."""
        self._closing.set()
        if self._filling is not None:
            self._filling.join(1.0)
        fd, self.fd = self.fd, -1
        self.memory = memoryview(bytearray())
        if fd >= 0:
            os.close(fd)


def populate(memory: memoryview, writing: bool, closing: threading.Event) -> None:
    """Makes the system take the pages of a mapping now, for reading or ``writing``, bit by bit until ``closing`` is
    set.

    Otherwise the first access to a page waits for it: in a virtual machine twenty times as long as copying takes. It
    changes nothing, and logs nothing if the system cannot do it (before Linux 5.14).
    """
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    madvise = ctypes.CDLL(None).madvise  # the method of mmap keeps the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advice = MADV_POPULATE_WRITE if writing else MADV_POPULATE_READ
    for start in range(0, len(memory), STEP_BYTES):
        if closing.is_set() or madvise(address + start, min(STEP_BYTES, len(memory) - start), advice):
            return


def follow(memory: memoryview, fd: int, closing: threading.Event) -> None:
    """Maps the pages of ``fd`` ahead, as soon as the process that made the file has taken them.

    Works in a thread that ends with ``closing``; the caller keeps ``fd``.

    Otherwise the first read of a page costs more than twice as much as copying it. Not before the owner took them:
    pages count as memory of the process that takes them, and these belong to the other one.
    """
    own = os.dup(fd)
    try:
        threading.Thread(target=_follow, args=(memory, own, closing), name="kvstore-pages", daemon=True).start()
    except BaseException:
        os.close(own)
        raise


def _follow(memory: memoryview, fd: int, closing: threading.Event) -> None:
    try:
        for _ in range(LOOKS_MAX):
            if os.fstat(fd).st_blocks * BLOCK_BYTES >= len(memory):
                populate(memory, False, closing)
                return
            if closing.wait(LOOK_PERIOD_S):
                return
    finally:
        os.close(fd)


def map_arena(fd: int, size_bytes: int) -> memoryview:
    """Maps for reading an arena that came over a socket; the caller keeps ``fd`` and closes it.

    The memory stays readable when the worker is gone. Raises Unavailable if it is not what a worker hands over: without
    its seals, a failing worker could take away pages that are being read, which would kill this process (SIGBUS).
    """
    try:
        seals, found_bytes = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or found_bytes != size_bytes:
            raise ValueError(f"it has seals {seals:#x} and {found_bytes} bytes, expected {_SEALS:#x} and {size_bytes}")
        return memoryview(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError, OverflowError) as cause:
        raise Unavailable(f"the worker's memory cannot be mapped ({cause}): read over the connection") from cause
