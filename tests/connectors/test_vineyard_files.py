"""KVCache over files (FileCacheConfig): the results of Vineyard's file mode, except its defects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.connectors.vineyard import GATHER_BYTES, FileCacheConfig, KVCache
from tests.kit.tensors import asking, bytes_in, kv_of, over

LAYERS, SIZE, CHUNK = 2, 16, 4
TOKENS = list(range(1, 13))


def cache_at(root: Path, **settings: Any) -> KVCache:
    return KVCache(FileCacheConfig(chunk_size=CHUNK, root=str(root)), SIZE, layer=LAYERS, **settings)


@pytest.fixture
def cache(tmp_root: Path) -> Iterator[KVCache]:
    with cache_at(tmp_root / "a" / "b") as opened:
        yield opened


def test_prefix_by_prefix_and_an_empty_prefix_is_none(cache: KVCache) -> None:
    kv, out = kv_of(TOKENS, LAYERS, SIZE), np.zeros((12, LAYERS, 2, SIZE), np.uint8)
    for at in range(0, 12, CHUNK):
        part = np.ascontiguousarray(kv[at : at + CHUNK])
        assert cache.update(TOKENS[:at], TOKENS[at : at + CHUNK], over(part)) == CHUNK
    assert cache.query(TOKENS[:CHUNK], TOKENS[CHUNK:], over(out[CHUNK:])) == 8
    assert np.array_equal(out[CHUNK:], kv[CHUNK:])
    assert not out[:CHUNK].any()


def test_a_query_of_any_length_returns_full_chunks(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    for length, matched in ((3, 0), (4, 4), (7, 4), (11, 8), (12, 12)):
        out = np.zeros((length, LAYERS, 2, SIZE), np.uint8)
        assert cache.query(None, TOKENS[:length], over(out)) == matched
        assert np.array_equal(out[:matched], kv[:matched])
        assert not out[matched:].any(), "memory behind the match is not touched"
    longer = [*TOKENS, 99, 98, 97, 96]
    assert cache.query(None, longer, over(np.zeros((16, LAYERS, 2, SIZE), np.uint8))) == 12


def test_memory_is_given_where_empty_tensors_are_passed(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    asked = asking(14, LAYERS)
    assert cache.query(None, [*TOKENS, 98, 99], asked) == 12
    assert np.array_equal(bytes_in(asked[:12]), kv)
    assert asked[12][0][0].length == 0


def test_an_update_larger_than_one_part_is_stored_part_by_part(tmp_root: Path) -> None:
    size = GATHER_BYTES // (16 * 2 * LAYERS)
    tokens = list(range(40))  # 16 of them are a part
    kv = kv_of(tokens, LAYERS, size)
    config = FileCacheConfig(chunk_size=CHUNK, root=str(tmp_root))
    with KVCache(config, size, layer=LAYERS) as cache:
        assert cache.update(None, tokens[:8], over(kv[:8])) == 8
        assert cache.update(tokens[:4], tokens[4:], over(kv[4:])) == 36
        out = np.zeros_like(kv)
        assert cache.query(None, tokens, over(out)) == 40
        assert np.array_equal(out, kv)
