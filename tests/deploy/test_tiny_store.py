"""The store in 100 lines does what its documents promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.programs import load_program

SHAPE = (2, 1, 4)
TOKENS = list(range(100))
KV = np.random.default_rng(0).standard_normal((2, 2, 100, 1, 4)).astype(np.float16)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return load_program("deploy/examples/tiny_store.py").TinyStore(str(tmp_path), "model", SHAPE, chunk_tokens=16)


def test_get_after_put_returns_the_full_chunks(store: Any) -> None:
    assert store.match(TOKENS) == 0
    assert store.put(TOKENS, KV) == store.put(TOKENS, KV) == store.match(TOKENS) == 96
    count, found = store.get([*TOKENS[:40], 7])
    assert count == 32 and np.array_equal(found, KV[:, :, :32])


def test_get_of_a_corrupt_chunk_misses_until_the_next_put(store: Any) -> None:
    store.put(TOKENS, KV)
    path = store.chunks / store.addresses(TOKENS)[2].hex()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert store.get(TOKENS)[0] == store.match(TOKENS) == 32
    store.put(TOKENS, KV)
    assert np.array_equal(store.get(TOKENS)[1], KV[:, :, :96])


def test_evict_deletes_the_tail_of_the_oldest_prompt_first(store: Any) -> None:
    other = [5000 + token for token in TOKENS]
    store.put(other, KV)
    store.put(TOKENS, KV)
    store.get(other)
    chunk_bytes = next(store.chunks.iterdir()).stat().st_size
    assert store.evict(9 * chunk_bytes) == 3
    assert (store.match(TOKENS), store.match(other)) == (48, 96)


def test_two_models_share_no_chunk(store: Any, tmp_path: Path) -> None:
    store.put(TOKENS, KV)
    assert (
        load_program("deploy/examples/tiny_store.py")
        .TinyStore(str(tmp_path), "other", SHAPE, chunk_tokens=16)
        .match(TOKENS)
        == 0
    )
