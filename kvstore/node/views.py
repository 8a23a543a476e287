"""Held chunks as arrays that nothing was copied into: images in memory, or files mapped from the root, verified.

Apart from reading, because what it gives outlives the call: an array keeps its chunk in memory, or its file mapped, for
as long as the array or anything cut from it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed
from kvstore.format.header import expected_chunk
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import Lanes
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.reading import Groups, group_size, read_chunks


class Views:
    """Makes views of the chunks of one node."""

    def __init__(
        self, chunks: Chunks, lanes: Lanes, counters: Counters, memory: MemoryTier | None, open_files_max: int
    ) -> None:
        self._chunks = chunks
        self._lanes = lanes
        self._counters = counters
        self._memory = memory
        self._open_files_max = open_files_max

    def of(self, chain: Chain, deadline: Deadline) -> list[npt.NDArray[Any]]:
        """Read-only arrays of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)``; fewer where one was lost."""
        found = self._in_memory(self._memory, chain) if self._memory is not None else {}
        mapped = self._mapped(chain, deadline, found) if len(found) < len(chain) else found
        layout = chain.namespace.layout
        arrays: list[npt.NDArray[Any]] = []
        while (array := mapped.get(len(arrays))) is not None:
            arrays.append(array.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens)))
        return arrays

    def _in_memory(self, memory: MemoryTier, chain: Chain) -> dict[int, npt.NDArray[np.uint8]]:
        """Payloads that lie in memory, each of which keeps its chunk there; as many as may be leased (rule L1)."""
        found: dict[int, npt.NDArray[np.uint8]] = {}
        for index in range(len(chain)):
            slots = memory.refer(chain, index, 1)
            payload = memory.view(slots, index) if memory.lease(slots) else None
            if payload is None:
                slots.release()
            else:
                found[index] = _leased(payload, slots.release)
        return found

    def _mapped(
        self, chain: Chain, deadline: Deadline, found: dict[int, npt.NDArray[np.uint8]]
    ) -> dict[int, npt.NDArray[np.uint8]]:
        """The others, mapped from the root where it can be mapped; copies beyond so many files."""
        layout, count = chain.namespace.layout, len(chain)
        payloads: list[memoryview | None] = [None] * count
        mapped_max = min(count, self._open_files_max) if self._chunks.root.traits.mapped else 0
        run = self._chunks.runs.of(chain, 0, mapped_max)

        def read(index: int, borrowed: Borrowed) -> bool:
            if index in found:
                return True
            expected = expected_chunk(chain, index)
            # Each mapping keeps a file descriptor; beyond the limit they are copies, or the engine would run out.
            if index < mapped_max:
                payloads[index] = self._chunks.map(expected)
                return payloads[index] is not None
            memory = memoryview(bytearray(layout.chunk_bytes))
            size = layout.section_bytes
            sections = [memory[start : start + size] for start in range(0, len(memory), size)]
            payloads[index] = memory.toreadonly()
            return self._chunks.read(expected, sections, borrowed)

        groups = None
        if run is not None and not found:

            def map_group(start: int, stop: int, _: Borrowed) -> npt.NDArray[np.bool_]:
                done = np.zeros(stop - start, np.bool_)
                end = min(stop, mapped_max)
                if start < end:
                    done[: end - start], payloads[start:end] = self._chunks.runs.map(run, start, end, chain.addresses)
                return done

            groups = Groups(group_size(count, layout.chunk_bytes, self._lanes.width), count, map_group)
        done = read_chunks(self._lanes, self._counters, count, read, deadline, groups=groups)
        arrays = {
            index: np.frombuffer(payload, np.uint8)
            for index, payload in enumerate(payloads)
            if payload is not None and done[index]
        }
        return arrays | found


def _leased(payload: memoryview, release: Callable[[], None]) -> npt.NDArray[np.uint8]:
    """An array over ``payload``; ``release`` is called when neither it nor anything cut from it lives any more."""
    array = np.frombuffer(payload, np.uint8)
    # Whatever is cut from it has this very array as its base: numpy follows bases up to the last one that is an array.
    weakref.finalize(array, release).atexit = False
    return array
