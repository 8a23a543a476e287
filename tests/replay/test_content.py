"""Tokens and KV of a trace: what they depend on, and that a difference of one byte is found."""

from __future__ import annotations

import numpy as np

from kvstore.replay.runner import Content, replay_layout
from kvstore.replay.trace import BLOCK_TOKENS, TraceRequest
from tests.kit.cases import for_each

CONTENT = Content(replay_layout(64))


def request(*ids: int, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(0, 0, len(ids) * BLOCK_TOKENS if tokens is None else tokens, 1, ids)


def kv(*ids: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    memory = CONTENT.blocks(len(ids))
    CONTENT.fill(CONTENT.seeds(request(*ids)), memory)
    return memory


def test_tokens_of_a_block_follow_from_its_id_alone() -> None:
    one, other = CONTENT.tokens(request(5, 9)), CONTENT.tokens(request(7, 9))
    assert np.array_equal(one[BLOCK_TOKENS:], other[BLOCK_TOKENS:])
    assert not np.array_equal(one[:BLOCK_TOKENS], other[:BLOCK_TOKENS])
    assert np.array_equal(CONTENT.tokens(request(5, 9, tokens=600)), one[:600])


def test_kv_of_a_block_depends_on_all_blocks_before_it() -> None:
    one, other = kv(5, 9), kv(7, 9)
    assert not np.any(one[:, 1] == other[:, 1])
    assert np.array_equal(kv(5, 9, 11)[:, :2], one)


@for_each("place", [0, 40_000, 4 * 40 * 1024 * 8 - 1])
def test_one_flipped_bit_anywhere_is_one_wrong_byte(place: int) -> None:
    seeds = CONTENT.seeds(request(*range(40)))
    memory = CONTENT.blocks(40)
    CONTENT.fill(seeds, memory)
    assert CONTENT.wrong_bytes(seeds, memory) == 0
    memory.reshape(-1).view(np.uint8)[place] ^= 0x10
    assert CONTENT.wrong_bytes(seeds, memory) == 1
