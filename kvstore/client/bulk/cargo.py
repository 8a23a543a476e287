"""The chunks of an array, or engine-hashed blocks, that a put sends over a bulk connection, run by run.

Separate from sending, which is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Pieces, Planes
from kvstore.layout import Layout
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import RUN_BYTES
from kvstore.wire.bulk.runs import send_run
from kvstore.wire.bulk.sums import block_sums
from kvstore.writes import RUNS_IN_MEMORY

ARENA_RUNS = RUNS_IN_MEMORY + 1
"""Number of runs that an arena must have room for: those that need memory, and one more because the end of the ring may
be too short for a run.
"""
BLOCKS_BYTES = 32 << 20
"""Size of a run of blocks in the arena. Each run costs one hand-over, and we copy the next run while the worker writes
this one: on two cores runs of 8 MiB took four times as long.
"""

Addresses = npt.NDArray[np.uint64]
Copy = Callable[[Addresses, Addresses, int, object], None]
"""Copies rows of ``row_bytes`` from one list of addresses to another; the last argument stays alive meanwhile."""


class Cargo(ABC):
    """The ``count`` chunks or blocks that a caller puts, addressed by their index in what is wanted."""

    count: int
    largest_bytes: int
    """Size of the largest chunk."""
    placed_bytes: int
    """Size of a run in the arena, if the arena has room for it."""

    @abstractmethod
    def size_bytes(self, first: int, count: int) -> int:
        """Size of ``count`` chunks from index ``first`` on."""

    @abstractmethod
    def sums_count(self, count: int) -> int:
        """Number of checksums that go with a run of ``count`` chunks."""

    @abstractmethod
    def place(self, first: int, count: int, target: npt.NDArray[np.uint8], copy: Copy) -> None:
        """Copies a run into ``target``, which has its size."""

    @abstractmethod
    def send(self, channel: Channel, first: int, count: int) -> None:
        """Sends the bytes of a run and its checksums."""


class ChunkCargo(Cargo):
    """The first ``count`` chunks of a prompt, as far as ``planes`` have them."""

    def __init__(self, planes: Planes, layout: Layout, count: int) -> None:
        self.count = count
        self.largest_bytes = layout.chunk_bytes
        self.placed_bytes = max(RUN_BYTES, layout.chunk_bytes)
        self._planes = planes
        self._layout = layout

    def size_bytes(self, first: int, count: int) -> int:
        return count * self._layout.chunk_bytes

    def sums_count(self, count: int) -> int:
        return self._layout.section_count

    def place(self, first: int, count: int, target: npt.NDArray[np.uint8], copy: Copy) -> None:
        planes, size = self._planes, target.nbytes // self._layout.section_count
        assert planes.covers(first, count) and planes.is_contiguous
        start: int = target.__array_interface__["data"][0]
        to = np.arange(start, start + target.nbytes, size, dtype=np.uint64)
        copy(to, planes.addresses() + np.uint64(planes.offset(first)), size, (target, planes))

    def send(self, channel: Channel, first: int, count: int) -> None:
        send_run(channel, self._planes, first, count)


class BlockCargo(Cargo):
    """Engine-hashed blocks."""

    def __init__(self, buffers: Pieces) -> None:
        self.count = len(buffers)
        self.largest_bytes = max(map(len, buffers), default=0)
        self.placed_bytes = max(BLOCKS_BYTES, self.largest_bytes)
        self._buffers = buffers
        self._ends = np.cumsum([0, *map(len, buffers)]).tolist()

    def size_bytes(self, first: int, count: int) -> int:
        size: int = self._ends[first + count] - self._ends[first]
        return size

    def sums_count(self, count: int) -> int:
        return count

    def place(self, first: int, count: int, target: npt.NDArray[np.uint8], copy: Copy) -> None:
        arrays = [np.frombuffer(block, np.uint8) for block in self._buffers[first : first + count]]
        addresses = np.fromiter((each.__array_interface__["data"][0] for each in arrays), np.uint64, count)
        sizes = np.fromiter(map(len, arrays), np.uint64, count)
        to = np.uint64(target.__array_interface__["data"][0]) + np.cumsum(sizes) - sizes
        for size in np.unique(sizes):
            same = sizes == size
            copy(to[same], addresses[same], int(size), (target, arrays))

    def send(self, channel: Channel, first: int, count: int) -> None:
        blocks = self._buffers[first : first + count]
        channel.send_bytes([*blocks, memoryview(np.array(block_sums(blocks), "<u8").tobytes())])
