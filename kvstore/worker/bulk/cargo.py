"""The chunks or blocks of a bulk put: the size of a run, and the position of each chunk in it."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from kvstore.address import Chain
from kvstore.buffers import cut_evenly
from kvstore.node.wanted import Wanted, sizes_of
from kvstore.sections import Buffers, Planes, Sections
from kvstore.wire.bulk.frames import RUN_BYTES
from kvstore.wire.statuses import BrokenTransfer
from kvstore.writes import RUNS_IN_MEMORY


class Cargo:
    """The ``count`` chunks or blocks of a put, from index ``first`` on."""

    run_bytes = RUN_BYTES
    """Limit of several chunks in one run that comes as bytes."""

    def __init__(self, wanted: Wanted, first: int, count: int) -> None:
        self._wanted = wanted
        self._ends = [0, *accumulate(sizes_of(wanted)[first : first + count])]
        self.first = first
        self.count = count

    @property
    def in_memory_bytes(self) -> int:
        """Memory for the runs that are here at once, if they come as bytes."""
        largest = max((b - a for a, b in pairwise(self._ends)), default=0)
        return min(self._ends[-1], RUNS_IN_MEMORY * max(self.run_bytes, largest))

    def size_bytes(self, first: int, count: int) -> int:
        """Size of ``count`` chunks from index ``first`` on."""
        return self._ends[first + count - self.first] - self._ends[first - self.first]

    def sums_count(self, count: int) -> int:
        """Number of checksums that come with a run of ``count`` chunks."""
        return self._wanted.namespace.layout.section_count if isinstance(self._wanted, Chain) else count

    def pieces(self, first: int, count: int, memory: memoryview) -> list[memoryview]:
        """Returns the parts of a run that have a checksum each: planes, or blocks."""
        if isinstance(self._wanted, Chain):
            return cut_evenly(memory, len(memory) // self._wanted.namespace.layout.section_count)
        ends = self._ends[first - self.first : first - self.first + count + 1]
        return [memory[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]

    def sections(self, first: int, count: int, memory: memoryview) -> Sections:
        """Returns the sections of a run that is here."""
        if not isinstance(self._wanted, Chain):
            return Buffers(self.pieces(first, count, memory), first)
        layout = self._wanted.namespace.layout
        return Planes(np.frombuffer(memory, np.uint8).reshape(layout.layers, 2, -1), layout.section_bytes, first)

    def broken(self, first: int, count: int) -> BrokenTransfer:
        """Returns the error for a run that does not match its checksums."""
        unit = "chunks" if isinstance(self._wanted, Chain) else "blocks"
        return BrokenTransfer(
            f"{unit} {first} to {first + count - 1} do not match their checksums: bytes changed on the way; "
            "repeat the call"
        )
