"""The workload: the KV of one prompt, in memory that all contenders share.

Separate from the rest because it also runs in the peers' environments: numpy and the standard library alone.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PAGE_WORDS = 512
"""Words of 8 bytes in a page of memory."""


@dataclass(frozen=True)
class Workload:
    """A prompt of ``chunk_count`` chunks; ``tensor_bytes`` is K (or V) of one token in one layer."""

    name: str
    layers: int
    tensor_bytes: int
    chunk_tokens: int
    chunk_count: int
    long_prompt: bool = False
    """A prompt of many small tensors, where what a store does for each token counts; not all contenders take part."""

    @property
    def token_bytes(self) -> int:
        """KV of one token, all layers."""
        return self.layers * 2 * self.tensor_bytes

    @property
    def chunk_bytes(self) -> int:
        """KV of one chunk."""
        return self.chunk_tokens * self.token_bytes

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.chunk_count * self.chunk_tokens

    @property
    def size_bytes(self) -> int:
        """KV of the prompt."""
        return self.chunk_count * self.chunk_bytes

    def prompt(self, turn: int) -> list[int]:
        """The token ids of one turn, 0 <= id < 2**31: another prompt each turn, so nobody may remember the last."""
        found: list[int] = np.random.default_rng(turn).integers(0, 1 << 31, self.tokens).tolist()
        return found

    def keys(self, turn: int) -> list[bytes]:
        """A key of 16 bytes for each chunk, for contenders that know keys, not tokens."""
        return [turn.to_bytes(8, "big") + index.to_bytes(8, "big") for index in range(self.chunk_count)]


class Memory:
    """The shared mapping: ``source`` is what to store, ``target`` where reads go, each of the prompt's size."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self._mapping = mmap.mmap(descriptor, 2 * size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        both = np.frombuffer(self._mapping, np.uint8)
        self.source: Bytes = both[:size_bytes]
        self.target: Bytes = both[size_bytes:]

    @classmethod
    def of(cls, size_bytes: int) -> Memory:
        """New memory with random content. Its descriptor is for the children; ``close`` closes it."""
        descriptor = os.memfd_create("kvstore-peers")
        os.ftruncate(descriptor, 2 * size_bytes)
        memory = cls(descriptor, size_bytes)
        memory.source[:] = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
        return memory

    def renew(self, turn: int) -> None:
        """Makes every page of the source another one than in any other turn."""
        words = self.source.view(np.uint64)[::PAGE_WORDS]
        words[:] = (np.uint64(turn) << np.uint64(32)) + np.arange(len(words), dtype=np.uint64)

    def wipe(self) -> None:
        """Clears the memory that reads fill."""
        self.target[:] = 0xA5

    def is_right(self) -> bool:
        """True if the target holds the source's bytes."""
        return np.array_equal(self.source.view(np.uint64), self.target.view(np.uint64))

    def pieces(self, array: Bytes, piece_bytes: int) -> list[memoryview]:
        """One half of it in contiguous pieces."""
        return [array[at : at + piece_bytes].data for at in range(0, len(array), piece_bytes)]

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with the last array on it."""
        os.close(self.descriptor)
