"""The arena: one anonymous file in memory that a node writes images into and that others of its host map for reading.

Separate from the inventory, which is pure: only here is memory of the system asked for, and only the two functions here
know by which seals readers are safe from the writer, and the writer from readers (``MEMORY.md``, A1 and A2).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from contextlib import suppress

import numpy as np

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.memory.host import memory_free_bytes, memory_most_bytes
from kvstore.waiting import Flag

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
STEP_BYTES = 16 << 20
BLOCK_BYTES = 512
"""Of ``st_blocks``."""
LOOK_PERIOD_S, LOOKS_MAX = 0.05, 1200
"""How often, for a minute, it is looked whether the other end has taken its pages."""
F_SEAL_FUTURE_WRITE = 0x0010
"""From ``linux/fcntl.h``; the standard library has no name for it. Linux 5.1 and newer."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class Arena:
    """``size_bytes`` of memory, a multiple of 4 KiB, that only this process can write.

    Its pages are taken from the system in the background as soon as it is open, where it has as many free, else as they
    are written, and kept until it is closed.  They are
    pages of a memfd: a container without ``/dev/shm``, or with a small one, has as much of it as any other.  They count
    as the worker's memory in its cgroup, whose limit needs room for the whole arena; past it the system kills the
    process that writes, as for any other memory.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises InvalidRequest for another size."""
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise InvalidRequest(f"an arena of {size_bytes} bytes: expected a multiple of {PAGE_BYTES}, more than 0")
        self.size_bytes = size_bytes
        self.fd = -1
        """For handing over: whoever gets it can map it for reading only."""
        self.memory = memoryview(bytearray())
        """All of it, writable; empty before ``open`` and after ``close``. Parts of it stay readable after that."""
        self._closing = Flag()
        self._filling: threading.Thread | None = None

    def open(self) -> Arena:
        """Makes and maps it.

        Raises InvalidRequest where this host or container never has so much, Unavailable where it gives no such memory.
        """
        most = memory_most_bytes()
        if self.size_bytes > most:
            raise InvalidRequest(
                f"memory of {self.size_bytes} bytes: this host or container has at most {most} bytes for it; give less"
            )
        try:
            self.fd = os.memfd_create("kvstore-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.size_bytes)
            mapped = mmap.mmap(self.fd, self.size_bytes)
            # After mapping: this seal leaves the mappings that there are writable, and allows no other.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, ValueError, OverflowError) as cause:
            self.close()
            raise Unavailable(
                f"no arena of {self.size_bytes} bytes ({cause}): give less memory, or Linux 5.1 or newer"
            ) from cause
        with suppress(OSError, ValueError):
            # Only where the system's administrator lets shared memory have huge pages.
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(mapped)
        free = memory_free_bytes()
        if free is not None and self.size_bytes > free:
            # Taken now they would cost some process its life, this one or another; later there may be room.
            log.warning(
                "memory.scarce asked_bytes=%d free_bytes=%d: the system may kill a process when it fills; give less",
                self.size_bytes,
                free,
            )
            return self
        self._filling = threading.Thread(target=populate, args=(self.memory, True, self._closing), daemon=True)
        self._filling.start()
        return self

    def close(self) -> None:
        """Lets go of it; its pages go when the last view and the last mapping of another process have. Idempotent."""
        self._closing.set()
        if self._filling is not None:
            self._filling.join(1.0)
        fd, self.fd = self.fd, -1
        self.memory = memoryview(bytearray())
        if fd >= 0:
            os.close(fd)


def populate(memory: memoryview, writing: bool, closing: Flag) -> None:
    """Has the system take the pages of a mapping now, for reading or ``writing``, bit by bit until ``closing`` is set.

    Whoever touches a page first waits for it otherwise: in a virtual machine twenty times as long as copying takes.
    Nothing is changed, and nothing said where the system cannot (before Linux 5.14).
    """
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    madvise = ctypes.CDLL(None).madvise  # mmap's own keeps the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advice = MADV_POPULATE_WRITE if writing else MADV_POPULATE_READ
    for start in range(0, len(memory), STEP_BYTES):
        if closing.is_set() or madvise(address + start, min(STEP_BYTES, len(memory) - start), advice):
            return


def follow(memory: memoryview, fd: int, closing: Flag) -> None:
    """Has the page tables of a mapping of ``fd`` made as soon as whoever made that file has taken its pages.

    In a thread that ends with ``closing``; ``fd`` stays the caller's.

    The first reading of a page costs more than twice what copying it does otherwise.  Not before: pages count as memory
    of whoever takes them, and these are the other's.
    """
    own = os.dup(fd)
    try:
        threading.Thread(target=_follow, args=(memory, own, closing), name="kvstore-pages", daemon=True).start()
    except BaseException:
        os.close(own)
        raise


def _follow(memory: memoryview, fd: int, closing: Flag) -> None:
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
    """An arena that came over a socket, mapped for reading; ``fd`` stays the caller's, to be closed.

    It stays readable when the worker is gone. Raises Unavailable where it is not what a worker hands over: without its
    seals a worker that fails could take pages away that are being read, which would kill this process.
    """
    try:
        seals, found_bytes = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or found_bytes != size_bytes:
            raise ValueError(f"it has seals {seals:#x} and {found_bytes} bytes, expected {_SEALS:#x} and {size_bytes}")
        return memoryview(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError, OverflowError) as cause:
        raise Unavailable(f"the worker's memory cannot be mapped ({cause}): read over the connection") from cause
