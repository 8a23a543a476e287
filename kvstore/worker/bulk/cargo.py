"""The chunks or blocks of a bulk put: the size of a run, and the position of each chunk in it.

Separate from how runs arrive and where they go, which is the same for both.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from kvstore.address import Chain
from kvstore.buffers import Buffers, Planes, Sections
from kvstore.node.memory_puts import Room
from kvstore.node.wanted import Wanted, section_bytes, sizes_of
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import RUN_BYTES, RUN_BYTES_MAX
from kvstore.wire.bulk.runs import PARTS_BYTES, receive_sections
from kvstore.wire.bulk.sums import block_sums, plane_sums
from kvstore.wire.statuses import BrokenTransfer
from kvstore.writes import RUNS_IN_MEMORY


class Cargo:
    """The ``count`` chunks or blocks of a put, from index ``first`` on."""

    def __init__(self, wanted: Wanted, first: int, count: int, room_bytes: int = 0) -> None:
        """``room_bytes`` is the size of a run that the node's memory has room for."""
        self._wanted = wanted
        self._ends = [0, *accumulate(sizes_of(wanted)[first : first + count])]
        self.first = first
        self.count = count
        self.run_bytes = min(max(RUN_BYTES, room_bytes), RUN_BYTES_MAX)
        """Limit of several chunks in one run that comes as bytes."""

    @property
    def all_bytes(self) -> int:
        """Size of all chunks."""
        return self._ends[-1]

    @property
    def in_memory_bytes(self) -> int:
        """Memory for the runs that are here at once, if they come as bytes."""
        largest = max((b - a for a, b in pairwise(self._ends)), default=0)
        return min(self.all_bytes, RUNS_IN_MEMORY * max(self.run_bytes, largest))

    def size_bytes(self, first: int, count: int) -> int:
        """Size of ``count`` chunks from index ``first`` on."""
        return self._ends[first + count - self.first] - self._ends[first - self.first]

    def sums_count(self, count: int) -> int:
        """Number of checksums that come with a run of ``count`` chunks."""
        return self._wanted.namespace.layout.section_count if isinstance(self._wanted, Chain) else count

    def suits_room(self, first: int, count: int) -> bool:
        """True if native code can receive a run section by section: they have one size, and it suits the checksums."""
        sizes = {b - a for a, b in pairwise(self._ends[first - self.first : first - self.first + count + 1])}
        is_chain = isinstance(self._wanted, Chain)
        return len(sizes) == 1 and (
            section_bytes(self._wanted, first) % PARTS_BYTES == 0 if is_chain and count > 1 else min(sizes) > 0
        )

    def receive(self, channel: Channel, room: Room) -> None:
        """Receives a run into its room, with the checksums of its sections. Raises BrokenTransfer as ``sections`` does,
        LinkBroken, LinkLate.
        """
        count, is_chain = len(room.slots), isinstance(self._wanted, Chain)
        size = section_bytes(self._wanted, room.first)
        sums = receive_sections(channel, room.bases(), size, count if is_chain else 1)
        if sums is None:
            raise _broken("chunks" if is_chain else "blocks", room.first, count)
        room.sums = sums

    def sections(self, first: int, count: int, memory: memoryview, sums: tuple[int, ...]) -> Sections:
        """Returns the sections of a run that is here. Raises BrokenTransfer if they do not match its checksums."""
        return (
            self._planes(self._wanted, first, count, memory, sums)
            if isinstance(self._wanted, Chain)
            else self._blocks(first, count, memory, sums)
        )

    def _planes(self, chain: Chain, first: int, count: int, memory: memoryview, sums: tuple[int, ...]) -> Planes:
        layout = chain.namespace.layout
        array = np.frombuffer(memory, np.uint8).reshape(layout.layers, 2, -1)
        planes = Planes(array, layout.section_bytes, first)
        if sums and sums != plane_sums(planes, first, count):
            raise _broken("chunks", first, count)
        return planes

    def _blocks(self, first: int, count: int, memory: memoryview, sums: tuple[int, ...]) -> Buffers:
        ends = self._ends[first - self.first : first - self.first + count + 1]
        buffers = [memory[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]
        if sums and sums != block_sums(buffers):
            raise _broken("blocks", first, count)
        return Buffers(buffers, first)


def _broken(unit: str, first: int, count: int) -> BrokenTransfer:
    return BrokenTransfer(
        f"{unit} {first} to {first + count - 1} do not match their checksums: bytes changed on the way; repeat the call"
    )
