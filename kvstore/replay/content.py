"""Tokens and KV of a trace: pure functions of its hash ids, so that a store's answers can be checked byte by byte.

A block's tokens follow from its hash id alone, so that prompts that share a prefix in the trace share one here. Its KV
follows from its id and all ids before it, as in a real model, so that a chunk served under another prefix shows.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.layout import Layout
from kvstore.replay.trace import BLOCK_TOKENS, Request
from kvstore.tokens import TokenArray

Words = npt.NDArray[np.uint64]
KvBytes = npt.NDArray[np.int8]

SECTIONS = 4
"""K and V of two layers: the smallest geometry in which sections and layers can be mixed up."""
BYTES_PER_TOKEN_MAX = 1 << 16

# The finaliser of splitmix64 (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_POSITIONS = np.arange(BLOCK_TOKENS, dtype=np.uint64)[None, :]
_VOCABULARY_SHIFT = np.uint64(64 - 17)
"""Leaves 17 bits: token ids from 0 to 131,071."""


def replay_layout(bytes_per_token: int) -> Layout:
    """A layout whose KV has ``bytes_per_token`` bytes a token and whose chunks are a trace's blocks.

    Raises InvalidRequest unless it is a multiple of 4 (K and V of two layers) from 4 to 65,536.
    """
    if not 0 < bytes_per_token <= BYTES_PER_TOKEN_MAX or bytes_per_token % SECTIONS:
        raise InvalidRequest(
            f"bytes per token {bytes_per_token}: expected a multiple of {SECTIONS} up to {BYTES_PER_TOKEN_MAX}"
        )
    return Layout(layers=2, kv_heads=1, head_dim=bytes_per_token // SECTIONS, dtype="int8", chunk_tokens=BLOCK_TOKENS)


class Content:
    """The tokens and the KV of a trace's ids; they differ by ``seed``. Immutable, thread-safe."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.layout = layout
        self._key = seed.to_bytes(8, "little")
        self._words = layout.section_bytes // 8
        self._table: Words = np.random.Generator(np.random.Philox(seed)).integers(
            0, 1 << 64, size=(SECTIONS, 1, self._words), dtype=np.uint64
        )

    @property
    def block_words(self) -> int:
        """Number of 8-byte words in the KV of one block."""
        return SECTIONS * self._words

    def tokens(self, request: Request) -> TokenArray:
        """Returns all ``input_length`` tokens of a prompt, including a part block."""
        ids = np.array(request.hash_ids, dtype=np.uint64)[:, None]
        mixed = ids * np.uint64(BLOCK_TOKENS) + _POSITIONS
        mixed *= _GOLDEN
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX_1
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX_2
        mixed >>= _VOCABULARY_SHIFT
        return mixed.astype(np.uint32).reshape(-1)[: request.input_length]

    def seeds(self, request: Request) -> Words:
        """Returns one pair of words per full block, of shape ``(full_blocks, 2)``, chained over the ids up to it."""
        state, packed = self._key, bytearray()
        for hash_id in request.hash_ids[: request.full_blocks]:
            state = blake2b(state + hash_id.to_bytes(8, "little"), digest_size=16, person=b"kvstore.replay").digest()
            packed += state
        return np.frombuffer(bytes(packed), dtype="<u8").reshape(-1, 2)

    def fill(self, seeds: Words, out: Words) -> None:
        """Writes the KV of the blocks with these seeds to ``out``, of shape ``(4, len(seeds), words a section)``.

        Word j of a block is ``table[j] * (a | 1) + b``: with the table fixed and random, blocks of different seeds
        differ in every place, and so do the places of one block.
        """
        np.multiply(self._table, (seeds[:, 0] | np.uint64(1))[None, :, None], out=out)
        out += seeds[:, 1][None, :, None]

    def shaped(self, words: Words) -> KvBytes:
        """Views words ``(4, n, words a section)`` as KV of shape ``(2, 2, n * 512, 1, head_dim)``, without a copy."""
        return words.view(np.int8).reshape(self.layout.shape(words.shape[1] * BLOCK_TOKENS))

    def wrong_bytes(self, seeds: Words, got: Words) -> int:
        """Returns the number of bytes in ``got``, shaped as in ``fill``, that differ from those of the seeds."""
        wrong = 0
        step = max(1, (1 << 20) // (8 * self.block_words))
        scratch = np.empty((SECTIONS, step, self._words), np.uint64)
        for start in range(0, len(seeds), step):
            part = seeds[start : start + step]
            expected, found = scratch[:, : len(part)], got[:, start : start + len(part)]
            self.fill(part, expected)
            if not np.array_equal(expected, found):
                wrong += int(np.count_nonzero(expected.view(np.uint8) != found.view(np.uint8)))
        return wrong


class Scratch:
    """Memory for the KV of one request at a time, reused between requests; for one thread."""

    def __init__(self, content: Content) -> None:
        self._block_words = content.block_words
        self._flat: Words = np.empty(0, np.uint64)

    def blocks(self, count: int) -> Words:
        """Returns room for ``count`` blocks, of shape ``(4, count, words a section)``, with arbitrary content."""
        size = count * self._block_words
        if size > len(self._flat):
            self._flat = np.empty(size + size // 4, np.uint64)
        return self._flat[:size].reshape(SECTIONS, count, self._block_words // SECTIONS)
