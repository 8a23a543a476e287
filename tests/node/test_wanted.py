"""Chains and blocks have the same addresses in both forms, packed and as objects."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.keyset import BlockKeys, ChunkKeys
from kvstore.layout import Layout
from kvstore.namespace import Namespace

SPACE = Namespace.of("m", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=2))
KEYS = [bytes([number]) * 32 for number in range(5)]
BLOCKS = BlockKeys.of(SPACE, KEYS)
CHAIN = ChunkKeys.of(SPACE, np.arange(11, dtype=np.uint32))


@pytest.mark.parametrize("wanted", [CHAIN, BLOCKS])
def test_addresses_are_the_same_packed_and_as_objects(wanted: ChunkKeys | BlockKeys) -> None:
    assert len(wanted) == len(wanted.addresses) == 5
    assert b"".join(wanted.addresses) == wanted.packed_addresses
    for count in range(6):
        part = wanted.leading(count)
        assert len(part) == count and part.packed_addresses == wanted.packed_addresses[: 16 * count]
        assert list(part.addresses) == list(wanted.addresses[:count])


def test_the_form_that_is_not_there_yet_is_made_once() -> None:
    blocks, chain = BLOCKS.take(range(5)), ChunkKeys.of(SPACE, np.arange(11, dtype=np.uint32))
    assert blocks.packed_addresses is blocks.packed_addresses
    assert chain.addresses is chain.addresses
    assert not hasattr(chain, "keys") and not hasattr(blocks, "tokens")


def test_threads_that_ask_for_it_at_once_find_the_same() -> None:
    for _ in range(50):
        chain = ChunkKeys.of(SPACE, np.arange(200, dtype=np.uint32))
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda each: each.addresses, [chain] * 4))
        assert found == [chain.addresses] * 4
