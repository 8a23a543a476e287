"""LMCache asks for a part chunk by the size of a full one: to its connectors a block of another size is a miss."""

from __future__ import annotations

from pathlib import Path

import kvstore
from kvstore.connectors.lmcache_keys import read_blocks
from kvstore.layout import Layout

KEYS = [bytes([number]) * 32 for number in range(3)]


def test_a_part_chunk_is_missed_and_the_others_are_read(tmp_root: Path) -> None:
    with kvstore.open(tmp_root) as store:
        blocks = store.namespace("m", Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=4)).blocks
        assert all(blocks.put(KEYS, [b"full", b"pt", b"more"]))
        buffers = [bytearray(4) for _ in KEYS]
        assert read_blocks(blocks.get, KEYS, [memoryview(each) for each in buffers]) == [True, False, True]
        assert (bytes(buffers[0]), bytes(buffers[2])) == (b"full", b"more")
        with blocks.hold(KEYS) as hold:
            assert read_blocks(hold.get, KEYS, [memoryview(each) for each in buffers]) == [True, False, True]
