"""KVCache with a VineyardCacheConfig: token by token, memory given by the cache."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.connectors.vineyard import KVCache, VineyardCacheConfig
from tests.kit.tensors import array_over, asking, bytes_in, kv_of, over

LAYERS, SIZE = 2, 16
TOKENS = list(range(1, 13))


def cache_at(tmp_root: Path, name: str = "llm_cache_object") -> KVCache:
    config = VineyardCacheConfig(str(tmp_root / "v.sock"), block_size=5, llm_cache_object_name=name)
    return KVCache(config, SIZE, layer=LAYERS)


@pytest.fixture
def cache(tmp_root: Path) -> Iterator[KVCache]:
    with cache_at(tmp_root) as opened:
        yield opened


def test_matches_single_tokens_whatever_the_block_size(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    assert cache.update(None, TOKENS, over(kv)) == 12
    for length in (1, 4, 5, 7, 12):
        asked = asking(length, LAYERS)
        assert cache.query(None, TOKENS[:length], asked) == length
        assert np.array_equal(bytes_in(asked), kv[:length])
    asked = asking(12, LAYERS)
    assert cache.query(None, [*TOKENS[:3], 99, *TOKENS[4:]], asked) == 3
    assert np.array_equal(bytes_in(asked[:3]), kv[:3])
    assert [pair[0].length for row in asked[3:] for pair in row] == [0] * 18


def test_tensors_from_a_query_outlive_the_cache(cache: KVCache) -> None:
    """Vineyard's pointed into memory that its next sync, eviction or close gave away."""
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    asked = asking(12, LAYERS)
    assert cache.query(None, TOKENS, asked) == 12
    array = array_over(asked[0][1][0])
    kept = asked[7]
    cache.close()
    del cache, asked
    gc.collect()
    noise = [np.full(LAYERS * 2 * SIZE * 12, 0xEE, np.uint8) for _ in range(64)]
    assert np.array_equal(array, kv[0, 1, 0])
    assert np.array_equal(bytes_in([kept])[0], kv[7])
    assert len(noise) == 64


def test_batched_calls_work(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    assert cache.batched_update(TOKENS[:5], over(kv[:5])) == 5
    assert cache.batched_update(TOKENS, over(kv)) == 7
    asked = asking(12, LAYERS)
    assert cache.batched_query(TOKENS, asked) == 12
    assert np.array_equal(bytes_in(asked), kv)


def test_another_client_sees_an_update_when_it_returns(cache: KVCache, tmp_root: Path) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    with cache_at(tmp_root) as other:
        assert other.query(None, TOKENS, asking(12, LAYERS)) == 0
        cache.update(None, TOKENS, over(kv))
        asked = asking(12, LAYERS)
        assert other.query(None, TOKENS, asked) == 12
        assert np.array_equal(bytes_in(asked), kv)
