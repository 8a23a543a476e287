"""KVCache over files (FileCacheConfig): the results of Vineyard's file mode, except its defects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.connectors.vineyard import FileCacheConfig, KVCache, KVTensor
from kvstore.connectors.vineyard.memory import ROW_BYTES_MAX
from tests.kit.cases import for_each
from tests.kit.tensors import asking, bytes_in, kv_of, over

LAYERS, SIZE, CHUNK = 2, 16, 4
TOKENS = list(range(1, 13))


def cache_at(root: Path, **settings: Any) -> KVCache:
    return KVCache(FileCacheConfig(chunk_size=CHUNK, root=str(root)), SIZE, layer=LAYERS, **settings)


@pytest.fixture
def cache(tmp_root: Path) -> Iterator[KVCache]:
    with cache_at(tmp_root / "a" / "b") as opened:
        yield opened


def test_what_was_updated_is_queried_byte_for_byte(cache: KVCache) -> None:
    kv, out = kv_of(TOKENS, LAYERS, SIZE), np.zeros((12, LAYERS, 2, SIZE), np.uint8)
    assert cache.update(None, TOKENS, over(kv)) == 12
    assert cache.query(None, TOKENS, over(out)) == 12
    assert np.array_equal(out, kv)


def test_prefix_by_prefix_and_an_empty_prefix_is_none(cache: KVCache) -> None:
    kv, out = kv_of(TOKENS, LAYERS, SIZE), np.zeros((12, LAYERS, 2, SIZE), np.uint8)
    for at in range(0, 12, CHUNK):
        part = np.ascontiguousarray(kv[at : at + CHUNK])
        assert cache.update(TOKENS[:at], TOKENS[at : at + CHUNK], over(part)) == CHUNK
    assert cache.query(TOKENS[:CHUNK], TOKENS[CHUNK:], over(out[CHUNK:])) == 8
    assert np.array_equal(out[CHUNK:], kv[CHUNK:])
    assert not out[:CHUNK].any()


def test_the_first_writer_wins_and_the_second_update_counts_what_it_found(cache: KVCache) -> None:
    first, second = kv_of(TOKENS, LAYERS, SIZE), np.full((12, LAYERS, 2, SIZE), 9, np.uint8)
    assert cache.update(None, TOKENS, over(first)) == 12
    assert cache.update(None, TOKENS, over(second)) == 12
    out = np.zeros_like(first)
    assert cache.query(None, TOKENS, over(out)) == 12
    assert np.array_equal(out, first)


def test_an_update_extends_what_another_began(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    assert cache.update(None, TOKENS[:4], over(kv[:4])) == 4
    assert cache.update(None, TOKENS, over(kv)) == 12
    out = np.zeros_like(kv)
    assert cache.query(None, TOKENS, over(out)) == 12
    assert np.array_equal(out, kv)


def test_batched_update_counts_only_what_was_not_there(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    assert cache.batched_update(TOKENS[:8], over(kv[:8])) == 8
    assert cache.batched_update(TOKENS, over(kv)) == 4
    assert cache.batched_update(TOKENS, over(kv)) == 0
    out = np.zeros_like(kv)
    assert cache.batched_query(TOKENS, over(out)) == 12
    assert np.array_equal(out, kv)


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


def test_another_prompt_matches_only_what_it_shares(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    out = np.zeros_like(kv)
    assert cache.query(None, [*TOKENS[:6], 77, *TOKENS[7:]], over(out)) == 4
    assert cache.query(None, [77, *TOKENS[1:]], over(out)) == 0
    assert cache.query(TOKENS[4:8], TOKENS[8:], over(out[8:])) == 0, "the same tokens after another prefix"


def test_a_list_shorter_than_the_match_counts_only_what_it_holds(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    out = np.zeros((6, LAYERS, 2, SIZE), np.uint8)
    assert cache.query(None, TOKENS, over(out[:4])) == 4
    assert cache.query(None, TOKENS, over(out)) == 4
    assert np.array_equal(out[:4], kv[:4])
    assert not out[4:].any()
    assert cache.query(None, TOKENS, []) == 0


def test_nothing_to_do_is_zero(cache: KVCache) -> None:
    assert cache.update(None, [], []) == 0
    assert cache.update(TOKENS[:4], [], []) == 0
    assert cache.query(None, [], []) == 0
    assert cache.query([], [], []) == 0
    assert cache.batched_update([], []) == 0


def test_an_update_behind_a_prefix_that_is_not_there_stores_nothing(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    assert cache.update(TOKENS[:4], TOKENS[4:], over(kv[4:])) == 0
    assert cache.update(None, TOKENS[:4], over(kv[:4])) == 4
    assert cache.query(None, TOKENS, over(np.zeros_like(kv))) == 4


def test_memory_is_given_where_empty_tensors_are_passed(cache: KVCache) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    asked = asking(14, LAYERS)
    assert cache.query(None, [*TOKENS, 98, 99], asked) == 12
    assert np.array_equal(bytes_in(asked[:12]), kv)
    assert asked[12][0][0].length == 0


@pytest.mark.parametrize("ids", [[-1, -2, 3, 4], [2**31 - 1, -(2**31), 0, 1]])
def test_negative_ids_are_ids_of_their_own(cache: KVCache, ids: list[int]) -> None:
    kv, out = kv_of(ids, LAYERS, SIZE), np.zeros((4, LAYERS, 2, SIZE), np.uint8)
    assert cache.update(None, np.array(ids, np.int32), over(kv)) == 4
    assert cache.query(None, np.array(ids, np.int64), over(out)) == 4
    assert np.array_equal(out, kv)
    assert cache.query(None, [abs(ids[0]), *ids[1:]], over(out)) == (4 if ids[0] >= 0 else 0)


def test_tensors_may_lie_anywhere_and_share_memory(cache: KVCache) -> None:
    """K and V of each token and layer in odd places; then one tensor for all layers, as in Vineyard's example."""
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    places = rng.permutation(len(pool) // SIZE - 1)[:16].reshape(4, 2, 2) * SIZE + 3
    base = pool.ctypes.data
    kv_list = [[(KVTensor(base + int(k), SIZE), KVTensor(base + int(v), SIZE)) for k, v in row] for row in places]
    assert cache.update(None, TOKENS[:4], kv_list) == 4
    out = np.zeros((4, LAYERS, 2, SIZE), np.uint8)
    assert cache.query(None, TOKENS[:4], over(out)) == 4
    assert np.array_equal(out, bytes_in(kv_list))
    shared = np.zeros((4, 2, SIZE), np.uint8)
    one = [[(KVTensor(pair[0].ctypes.data, SIZE), KVTensor(pair[1].ctypes.data, SIZE))] * LAYERS for pair in shared]
    assert cache.query(None, TOKENS[:4], one) == 4
    assert all(np.array_equal(shared[i, w], out[i, LAYERS - 1, w]) for i in range(4) for w in range(2))


@for_each("size", [1, ROW_BYTES_MAX, ROW_BYTES_MAX + 1, 100_000])
def test_tensors_of_any_size(tmp_root: Path, size: int) -> None:
    kv = kv_of(TOKENS[:4], LAYERS, size)
    config = FileCacheConfig(chunk_size=2, root=str(tmp_root))
    with KVCache(config, size, layer=LAYERS) as cache:
        assert cache.update(None, TOKENS[:4], over(kv)) == 4
        out = np.zeros_like(kv)
        assert cache.query(TOKENS[:2], TOKENS[2:4], over(out[2:])) == 2
        assert cache.query(None, TOKENS[:2], over(out[:2])) == 2
        assert np.array_equal(out, kv)


def test_an_update_larger_than_one_part_is_stored_part_by_part(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.connectors.vineyard.cache.GATHER_BYTES", 1)
    monkeypatch.setattr("kvstore.connectors.vineyard.cache.GATHER_PARTS_MAX", 1 << 40)
    tokens = list(range(64))
    kv = kv_of(tokens, LAYERS, SIZE)
    with cache_at(tmp_root) as cache:
        assert cache.update(None, tokens[:8], over(kv[:8])) == 8
        assert cache.update(tokens[:4], tokens[4:], over(kv[4:])) == 60
        out = np.zeros_like(kv)
        assert cache.query(None, tokens, over(out)) == 64
        assert np.array_equal(out, kv)


def test_a_new_instance_finds_what_another_left(cache: KVCache, tmp_root: Path) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    cache.close()
    with cache_at(tmp_root / "a" / "b") as again:
        out = np.zeros_like(kv)
        assert again.query(None, TOKENS, over(out)) == 12
        assert np.array_equal(out, kv)
