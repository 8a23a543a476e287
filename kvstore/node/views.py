"""Held chunks as arrays without a copy: verified images in memory, or files mapped from the root.

Separate from reading, because its results outlive the call: an array keeps its chunk in memory, or its file mapped, for
as long as the array or any slice of it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Borrowed, cut_evenly
from kvstore.counts import NodeCount
from kvstore.keyset import ChunkKeys
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.lanes import Deadline, Lanes, group_size
from kvstore.node.memory_tier import MemoryTier, Slots
from kvstore.node.reader import Groups, gaps, read_chunks, verified
from kvstore.node.tier_stack import TierStack


class Views:
    """Makes views of the chunks of one node."""

    def __init__(
        self, chunks: Chunks, lanes: Lanes, counters: Counters, tiers: TierStack | None, open_files_max: int
    ) -> None:
        self._chunks = chunks
        self._lanes = lanes
        self._copiers = tiers.copiers if tiers is not None else lanes
        self._counters = counters
        self._memory = tiers.memory if tiers is not None else None
        self._open_files_max = open_files_max

    def of(self, chain: ChunkKeys, deadline: Deadline) -> list[npt.NDArray[Any]]:
        """Returns read-only arrays of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)``; fewer after a loss."""
        found = self._in_memory(self._memory, chain, deadline) if self._memory is not None else {}
        mapped = self._mapped(chain, deadline, found) if len(found) < len(chain) else found
        layout = chain.namespace.layout
        arrays: list[npt.NDArray[Any]] = []
        while (array := mapped.get(len(arrays))) is not None:
            arrays.append(array.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens)))
        return arrays

    def _in_memory(self, memory: MemoryTier, chain: ChunkKeys, deadline: Deadline) -> dict[int, npt.NDArray[np.uint8]]:
        """Returns payloads in memory, each of which keeps its chunk there; as many as may be leased (rule L1)."""
        leased: list[tuple[int, Slots]] = []
        for index in range(len(chain)):
            slots = memory.refer(chain, index, 1)
            if slots.entries[0] is not None and memory.lease(slots):
                leased.append((index, slots))
            else:
                slots.release()
        indexes = [index for index, _ in leased]
        images = [slots.image(index) for index, slots in leased]
        right = verified(chain, indexes, images, self._copiers, deadline)
        self._counters.add(NodeCount.MEMORY_HITS, sum(right))
        self._counters.add(NodeCount.MEMORY_BYTES, sum(right) * chain.namespace.layout.chunk_bytes)
        found: dict[int, npt.NDArray[np.uint8]] = {}
        for (index, slots), image, is_right in zip(leased, images, right, strict=True):
            # The tier verifies a wrong image once more and drops it (rule I1). Not past the deadline: this one thread
            # would then verify everything that was not verified by then.
            if is_right or (not deadline.passed and memory.view(slots, index) is not None):
                found[index] = _leased(chain.payload_of(index, image), slots.release)
            else:
                slots.release()
        return found

    def _mapped(
        self, chain: ChunkKeys, deadline: Deadline, found: dict[int, npt.NDArray[np.uint8]]
    ) -> dict[int, npt.NDArray[np.uint8]]:
        """Returns the other payloads, mapped from the root if possible, copied otherwise."""
        layout, count = chain.namespace.layout, len(chain)
        payloads: list[memoryview | None] = [None] * count
        can_map = self._chunks.root.traits.mapped
        run = self._chunks.runs.of(chain, 0, count) if can_map else None
        # A mapping made by Python keeps a file descriptor. Beyond the limit, copy, or the engine would run out of
        # descriptors.
        mapped_max = self._open_files_max if can_map and run is None else 0

        def read(index: int, borrowed: Borrowed) -> bool:
            if index in found:
                return True
            payloads[index] = self._copied(chain, index)
            if payloads[index] is not None:
                return True
            expected = chain.expected(index)
            if index < mapped_max:
                payloads[index] = self._chunks.map(expected)
                return payloads[index] is not None
            memory = memoryview(bytearray(layout.chunk_bytes))
            payloads[index] = memory.toreadonly()
            return self._chunks.read(expected, cut_evenly(memory, layout.section_bytes), borrowed)

        groups = None
        if run is not None:

            def map_group(start: int, stop: int, _: Borrowed) -> npt.NDArray[np.bool_]:
                done = np.array([index in found for index in range(start, stop)], np.bool_)
                for at, end in gaps(done):
                    part = slice(start + at, start + end)
                    done[at:end], payloads[part] = self._chunks.runs.map(run, part.start, part.stop)
                return done

            groups = Groups(group_size(count, layout.chunk_bytes, self._lanes.width), count, map_group)
        done = read_chunks(self._lanes, self._counters, count, read, deadline, groups=groups)
        arrays = {
            index: np.frombuffer(payload, np.uint8)
            for index, payload in enumerate(payloads)
            if payload is not None and done[index]
        }
        return arrays | found

    def _copied(self, chain: ChunkKeys, index: int) -> memoryview | None:
        """Returns a copy of a chunk that memory has and may not lease (rule L1): the root may not have it yet."""
        if self._memory is None:
            return None
        with self._memory.refer(chain, index, 1) as slots:
            payload = self._memory.view(slots, index)
            return None if payload is None else memoryview(bytes(payload))


def _leased(payload: memoryview, release: Callable[[], None]) -> npt.NDArray[np.uint8]:
    """Returns an array over ``payload``; ``release`` is called when neither it nor any slice of it lives any more."""
    array = np.frombuffer(payload, np.uint8)
    # Every slice of it has this very array as its base: numpy follows bases up to the last one that is an array.
    weakref.finalize(array, release).atexit = False
    return array
