"""Bytes over a bulk connection are compared with their checksums, whichever bit is flipped, and with its limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.buffers import Pieces
from kvstore.format.header import Damaged
from kvstore.format.keyset import ChunkKeys
from kvstore.transport.images import fill_verified
from tests.kit.images import chain_of, made
from tests.kit.stores import SMALL, kv_of

COUNT = 3
CHAIN = chain_of(SMALL, COUNT)


def given(content: bytes) -> Callable[[Pieces], int]:
    """Fills pieces with the arriving bytes, 1,000 at a time."""
    at = 0

    def fill(pieces: Pieces) -> int:
        nonlocal at
        piece = pieces[0][:1000]
        piece[:] = content[at : at + len(piece)]
        at += len(piece)
        return len(piece)

    return fill


def received(chain: ChunkKeys, index: int, content: bytes) -> bytes:
    sections = [memoryview(bytearray(SMALL.section_bytes)) for _ in range(SMALL.section_count)]
    fill_verified(given(content), chain.expected(index), sections)
    return b"".join(sections)


def test_i1_a_file_with_a_bit_turned_is_not_received() -> None:
    for place in (60, 4090, 4096, 4096 + SMALL.section_bytes, -1):
        kv = kv_of(SMALL, CHAIN.tokens)
        content = bytearray(made(CHAIN, kv)[1])
        assert received(CHAIN, 1, bytes(content)) == bytes(content[4096:])
        content[place] ^= 1
        with pytest.raises(Damaged):
            received(CHAIN, 1, bytes(content))


def test_i1_another_chunks_file_is_not_received() -> None:
    with pytest.raises(Damaged):
        received(CHAIN, 1, bytes(made(CHAIN, kv_of(SMALL, CHAIN.tokens))[2]))
