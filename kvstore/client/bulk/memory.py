"""The memory of a worker on this host, mapped once for all connections to it, and leases on parts of it.

The mapping is read-only. The worker may change a part of it once nobody has a lease on that part. The file is sealed,
so the mapping outlives the worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.format.header import PAGE_BYTES
from kvstore.memory.arena import follow, map_arena
from kvstore.node.images import ImagesIn

LEASES_MAX = 256
"""Maximum of leases on one worker's memory at once, one file descriptor each; further views are copies."""


class WorkerMemory:
    """The whole mapping. ``id`` is the worker's name for its memory; ``leases`` are those alive."""

    def __init__(self, fd: int, size_bytes: int, id: bytes) -> None:
        """Maps the file and closes ``fd``. Raises Unavailable if it cannot be mapped or could shrink."""
        self.id = id
        self.leases: set[int] = set()
        self._closing = threading.Event()
        self._unread: list[int] = [fd]
        """The file, until the first read: a client that only asks needs no pages of it."""
        try:
            self._bytes = map_arena(fd, size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def has_lease(self) -> bool:
        """True if one more lease may be kept."""
        return len(self.leases) < LEASES_MAX

    def close(self) -> None:
        """Stops background work. Arrays that refer to the mapping keep it alive. Idempotent."""
        self._closing.set()
        with suppress(IndexError):  # a read took it
            os.close(self._unread.pop())

    def images(self, offsets: Sequence[int], sizes_bytes: Sequence[int]) -> ImagesIn:
        """Images of these sizes at these offsets. Raises InvalidRequest where one is not all in the memory."""
        if any(offset % PAGE_BYTES for offset in offsets):
            raise InvalidRequest(f"images are said to be at {offsets}: expected multiples of {PAGE_BYTES}")
        self._follow()
        return ImagesIn(self._bytes, offsets, sizes_bytes)

    def _follow(self) -> None:
        """Maps pages ahead from the first read on."""
        try:
            fd = self._unread.pop()
        except IndexError:
            return  # done, or another thread does it
        try:
            # Without descriptors or threads the first read of each page takes longer.
            with suppress(OSError, RuntimeError):
                follow(self._bytes, fd, self._closing)
        finally:
            os.close(fd)


class Lease:
    """Keeps the worker from reusing leased chunks until it is closed. It is our end of a pipe.

    Closed by its user, or with the last array that refers to it. That may happen in any thread at any point, so closing
    takes no lock: it is one system call, and the kernel tells the worker. A forked child inherits it.
    """

    __slots__ = ("_fd", "_live")

    def __init__(self, fd: int, live: set[int]) -> None:
        """Takes over ``fd``, and stays in ``live`` until it is closed."""
        self._fd = fd
        self._live = live
        live.add(fd)

    def close(self) -> None:
        """Closes our end of the pipe. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._live.discard(fd)
            with suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


class Leased:
    """Part of a worker's memory as numpy takes it: the base of arrays, which keep mapping and lease alive."""

    __slots__ = ("__array_interface__", "_alive")

    def __init__(self, part: memoryview, lease: Lease) -> None:
        at = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
        # Read-only: the array does not own its memory, so numpy refuses to make it writable.
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (len(part),), "data": (at, True)}
        self._alive = (part, lease)

    def array(self) -> npt.NDArray[Any]:
        """Returns the bytes as an array."""
        return np.asarray(self)
