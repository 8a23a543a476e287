"""KVCache over files (FileCacheConfig): results of Vineyard's file mode, except its defects, and refusals. KVTensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.connectors.vineyard import GATHER_BYTES, FileCacheConfig, KVCache, KVTensor
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


@for_each(
    "ids", [[2**31, 0, 0, 0], [-(2**31) - 1, 0, 0, 0], [2**70, 0, 0, 0], [1.5, 0, 0, 0], ["a"] * 4, [[1], [2, 3]]]
)
def test_ids_that_are_none_are_refused(cache: KVCache, ids: Any) -> None:
    kv = np.zeros((len(ids), LAYERS, 2, SIZE), np.uint8)
    with pytest.raises(RuntimeError, match=r"^tokens (are|have|hold)"):
        cache.update(None, ids, over(kv))
    with pytest.raises(errors.InvalidRequest):
        cache.query(ids, [1, 2, 3, 4], over(kv))


@for_each("prefix, tokens, entries", [(0, 5, 5), (3, 4, 4), (0, 4, 3), (0, 4, 5), (4, 4, 8)])
def test_lengths_that_do_not_fit_are_refused_as_vineyard_does(
    cache: KVCache, prefix: int, tokens: int, entries: int
) -> None:
    kv = np.zeros((entries, LAYERS, 2, SIZE), np.uint8)
    with pytest.raises(RuntimeError, match=r"expected a multiple of chunk_size|entries for") as refused:
        cache.update(TOKENS[:prefix], TOKENS[prefix : prefix + tokens], over(kv))
    assert isinstance(refused.value, errors.InvalidRequest) and isinstance(refused.value, ValueError)


def test_tensors_of_another_shape_are_refused_and_not_a_silent_miss(cache: KVCache) -> None:
    good = np.zeros((4, LAYERS, 2, SIZE), np.uint8)
    small, layers = np.zeros((4, LAYERS, 2, 8), np.uint8), np.zeros((4, 3, 2, SIZE), np.uint8)
    three: Any = [[(*pair, pair[0]) for pair in row] for row in over(good)]
    arrays: Any = [[(good[i, j, 0], good[i, j, 1]) for j in range(LAYERS)] for i in range(4)]
    mixed = [[(pair[0], KVTensor(0, 0)) for pair in row] for row in over(good)]
    no_address = [[(KVTensor(0, SIZE), KVTensor(0, SIZE))] * LAYERS] * 4
    far: Any = [[(KVTensor(2**64 - 1, SIZE), pair[1]) for pair in row] for row in over(good)]
    lists: list[Any] = [over(small), over(layers), three, arrays, mixed, no_address, far, [5] * 4, [[7, 7]] * 4]
    for call in (cache.update, cache.query):
        for wrong in lists:
            with pytest.raises(RuntimeError, match=r"KVTensor|kv_cache_list") as refused:
                call(None, TOKENS[:4], wrong)
            assert isinstance(refused.value, errors.InvalidRequest)
    with pytest.raises(RuntimeError, match="expected the tensors to store"):
        cache.update(None, TOKENS[:4], asking(4, LAYERS))
    assert cache.query(None, TOKENS[:4], over(good)) == 0


@pytest.mark.parametrize(("layers", "size", "chunk"), [(3, SIZE, CHUNK), (LAYERS, 32, CHUNK), (LAYERS, SIZE, 2)])
def test_another_geometry_on_the_same_root_is_a_miss(
    cache: KVCache, tmp_root: Path, layers: int, size: int, chunk: int
) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    theirs = kv_of(TOKENS, layers, size)
    with KVCache(FileCacheConfig(chunk_size=chunk, root=str(tmp_root / "a" / "b")), size, layer=layers) as other:
        out = np.zeros_like(theirs)
        assert other.query(None, TOKENS, over(out)) == 0
        assert other.update(None, TOKENS, over(theirs)) == 12
        assert other.query(None, TOKENS, over(out)) == 12
        assert np.array_equal(out, theirs)
    mine = np.zeros_like(kv)
    assert cache.query(None, TOKENS, over(mine)) == 12
    assert np.array_equal(mine, kv)


def test_after_close_every_call_raises_and_closing_again_is_fine(cache: KVCache) -> None:
    cache.kv_cache_manager.close()
    cache.close()
    kv = over(np.zeros((4, LAYERS, 2, SIZE), np.uint8))
    calls: list[Any] = [
        lambda: cache.update(None, TOKENS[:4], kv),
        lambda: cache.query(None, TOKENS[:4], kv),
        lambda: cache.batched_update(TOKENS[:4], kv),
        lambda: cache.batched_query(TOKENS[:4], kv),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_reads_the_callers_memory_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor: Any = KVTensor(array.ctypes.data, array.nbytes)
    seen = np.frombuffer(tensor, dtype=np.float32).reshape(2, 3)
    array[1, 2] = -7.0
    assert np.array_equal(seen, array)
    assert (tensor.data, tensor.length) == (array.ctypes.data, 24)


@for_each("data, length", [("0", 4), (0, 4.0), (None, 4), (0, None)])
def test_anything_but_integers_is_a_type_error(data: object, length: object) -> None:
    with pytest.raises(TypeError):
        KVTensor(data, length)  # type: ignore[arg-type]


def test_a_negative_length_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        KVTensor(0, -1)
