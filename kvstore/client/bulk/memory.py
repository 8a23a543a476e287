"""The memory of a worker on this host, mapped once for all connections to it, and leases on parts of it.

Read-only, and of the worker: what lies in it changes as soon as nobody has a lease on it.  Its file is sealed, so the
mapping outlives the worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.format.header import PAGE_BYTES
from kvstore.memory.arena import follow, map_arena
from kvstore.node.images import ImagesIn
from kvstore.waiting import Flag


class WorkerMemory:
    """All of it. ``id`` is the worker's name for it, ``leases`` are those that are alive."""

    def __init__(self, fd: int, size_bytes: int, id: bytes) -> None:
        """Maps the file and closes ``fd``. Raises Unavailable where it cannot be mapped, or could shrink."""
        self.id = id
        self.leases: set[int] = set()
        self._closing = Flag()
        try:
            self._bytes = map_arena(fd, size_bytes)
            follow(self._bytes, fd, self._closing)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is done for it in the background any more; what refers to it keeps it mapped. Idempotent."""
        self._closing.set()

    def images(self, offsets: Sequence[int], sizes_bytes: Sequence[int]) -> ImagesIn:
        """Images of these sizes at these offsets. Raises InvalidRequest where one is not all in the memory."""
        if any(offset % PAGE_BYTES for offset in offsets):
            raise InvalidRequest(f"images are said to be at {offsets}: expected multiples of {PAGE_BYTES}")
        return ImagesIn(self._bytes, offsets, sizes_bytes)


class Lease:
    """While it is not closed the worker leaves alone what it said lies in its memory: our end of a pipe.

    Closed by whoever is done, or with the last array that refers to it.  That may happen in any thread at any point, so
    closing takes no lock: one system call, which the worker is told of by the kernel.  A child of ours has it too.
    """

    __slots__ = ("_fd", "_live")

    def __init__(self, fd: int, live: set[int]) -> None:
        """Takes ``fd`` over; it is in ``live`` until it is closed."""
        self._fd = fd
        self._live = live
        live.add(fd)

    def close(self) -> None:
        """Idempotent."""
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
        # Read-only, and numpy refuses to make it anything else: it is not an array of its own.
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (len(part),), "data": (at, True)}
        self._alive = (part, lease)

    def array(self) -> npt.NDArray[Any]:
        """Its bytes."""
        return np.asarray(self)
