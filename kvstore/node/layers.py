"""Reads a held prefix layer by layer, and reads the next layers while the engine uses this one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.buffers import Borrowed, Pieces
from kvstore.counts import NodeCount
from kvstore.errors import HoldBroken
from kvstore.format.header import Header
from kvstore.keyset import ChunkKeys
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.images import addresses_of, copy_sections
from kvstore.node.lanes import Deadline, Lanes, files_at_most, group_size
from kvstore.node.reader import Groups, Reading
from kvstore.node.settings import Limits
from kvstore.node.tier_stack import TierStack
from kvstore.results import LayerMemory
from kvstore.root.interface import Reader

MemoryOf = Callable[[int], LayerMemory]
"""The memory that a layer is read into."""

LIMIT_PER_READ = 4
"""Share of the process's limit of open files that one read keeps open."""


@dataclass(frozen=True, slots=True)
class Bands:
    """Layers that are read together: fewer calls, and larger parts of files."""

    size: int = 1
    ahead: int = 2
    """Bands that are read at once, beside that of the layer in use: lanes go on with the next while one ends."""

    def of(self, layers: int) -> list[range]:
        """Returns the layers of each band."""
        return [range(first, min(first + self.size, layers)) for first in range(0, layers, self.size)]


SINGLY = Bands()


class LayerReader:
    """The open files of one layer-by-layer read, up to a limit; other files are reopened for each layer."""

    def __init__(
        self,
        chunks: Chunks,
        lanes: Lanes,
        counters: Counters,
        chain: ChunkKeys,
        count: int,
        limits: Limits,
        tiers: TierStack | None = None,
        bands: Bands = SINGLY,
    ) -> None:
        self._ahead = bands.ahead
        self._bands = bands.of(chain.namespace.layout.layers)
        self._chunks = chunks
        self._memory = tiers.memory if tiers is not None else None
        # Keep them in memory as long as this reads: a chunk that only memory has must not vanish between two layers.
        self._slots = self._memory.refer(chain, 0, count) if self._memory is not None else None
        # If memory has all of it, use lanes that work even if every other lane waits for a root that hangs.
        is_near = self._slots is not None and None not in self._slots.entries
        self._lanes = tiers.copiers if tiers is not None and is_near else lanes
        self._counters = counters
        self._chain = chain
        self._count = count
        self._files_max = files_at_most(limits.open_files_max, LIMIT_PER_READ)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Reader, Header]] = {}
        self._closed = False
        self._size = group_size(
            bands.ahead * count, 2 * bands.size * chain.namespace.layout.section_bytes, self._lanes.width
        )
        images = np.zeros(count, np.uint64)
        if self._slots is not None and self._slots.referred:
            present = [index for index, entry in enumerate(self._slots.entries) if entry is not None]
            images[present] = addresses_of(self._slots.present_images())
        self._run = chunks.runs.of_layers(chain, images, self._size, self._files_max, bands.ahead)
        """All chunks for native code; None if they must be read one by one."""
        self._readings: deque[Reading] = deque()

    def read(self, memory: MemoryOf, deadline: Callable[[], Deadline]) -> Generator[tuple[int, LayerMemory]]:
        """Yields each layer once it is in ``memory(layer)``, verified; the next ones are read then.

        Raises HoldBroken if a chunk was lost: the layers yielded so far stay valid for the tokens before it.
        """
        filled: deque[list[LayerMemory]] = deque()
        try:
            for number in range(min(self._ahead, len(self._bands))):
                filled.append(self._begin(number, memory))
            for number, layers in enumerate(self._bands):
                self._wait(deadline())
                if number + self._ahead < len(self._bands):
                    filled.append(self._begin(number + self._ahead, memory))
                yield from zip(layers, filled.popleft(), strict=True)
        finally:
            self.close()

    def close(self) -> None:
        """Closes all files; nobody writes into the memory any more. Idempotent."""
        for reading in self._readings:
            reading.withdraw()
        with self._lock:
            self._closed = True
            readers = [reader for reader, _ in self._open.values()]
            self._open.clear()
        for reader in readers:
            reader.close()
        if self._run is not None:
            self._run.close()
        if self._slots is not None:
            self._slots.release()

    def _begin(self, number: int, memory: MemoryOf) -> list[LayerMemory]:
        """Begins to read a band into the memory of each of its layers, and returns that."""
        layers, section_bytes, run = self._bands[number], self._chain.namespace.layout.section_bytes, self._run
        memories, groups = [memory(layer) for layer in layers], None

        def read(index: int, borrowed: Borrowed) -> bool:
            part = slice(index * section_bytes, (index + 1) * section_bytes)
            sections = [plane[part] for each in memories for plane in (each.k, each.v)]
            return self._read_part(index, layers.start, sections, borrowed)

        if run is not None:
            run.begin(number, memories)
            read_group = partial(self._chunks.runs.read_layers, run, number, layers, self._chain.addresses)
            groups = Groups(self._size, self._count, read_group)
        self._readings.append(Reading(self._lanes, self._counters, self._count, read, groups=groups))
        return memories

    def _wait(self, deadline: Deadline) -> None:
        """Waits for the first band in progress. Raises HoldBroken."""
        lost_at = self._readings[0].wait(deadline).find(0)
        self._readings.popleft()
        if lost_at < 0:
            return
        if deadline.passed:
            raise HoldBroken(
                "a layer was not read in time: compute all tokens again; check the mount (kvstore check-root)", 0
            )
        size = self._chain.namespace.layout.chunk_tokens
        raise HoldBroken(
            f"the chunk of tokens {lost_at * size} to {(lost_at + 1) * size} was lost while its layers were read: "
            f"compute from token {lost_at * size} on",
            lost_at * size,
        )

    def _read_part(self, index: int, layer: int, sections: Pieces, borrowed: Borrowed) -> bool:
        expected = self._chain.expected(index)
        if self._slots is not None and self._slots.entries[index] is not None:
            image = self._slots.image(index)
            if copy_sections(self._chain, index, image, 2 * layer, sections, borrowed):
                self._counters.add(NodeCount.MEMORY_HITS, 0 if layer else 1)
                self._counters.add(NodeCount.MEMORY_BYTES, sum(map(len, sections)))
                return True
            # The tier verifies it once more and drops it if it is wrong (rule I1); the root decides.
            assert self._memory is not None
            with self._memory.refer(self._chain, index, 1) as slots:
                self._memory.verified(slots)
        with self._lock:
            opened = self._open.pop(index, None)  # taken out, so that only one thread at a time uses a reader
        opened = opened or self._chunks.open(expected)
        if opened is None:
            return False
        reader, header = opened
        try:
            return self._chunks.read_range(reader, header, expected, 2 * layer, sections, borrowed)
        finally:
            with self._lock:
                # Two layers of one chunk may be read at once: the other one's reader may be kept already.
                keep = not self._closed and index not in self._open and len(self._open) < self._files_max
                if keep:
                    self._open[index] = opened
            if not keep:
                reader.close()
