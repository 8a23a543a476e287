"""KVCache over files: wrong calls, damage, other geometry, a full disk, long prompts, threads, and closing."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.connectors.vineyard import FileCacheConfig, KVCache, KVTensor
from tests.kit.cases import for_each
from tests.kit.heartbeat import others_run_during
from tests.kit.patience import PATIENCE_S
from tests.kit.tensors import asking, bytes_in, kv_of, over

LAYERS, SIZE, CHUNK = 2, 16, 4
TOKENS = list(range(1, 13))


def cache_at(root: Path, **settings: Any) -> KVCache:
    return KVCache(FileCacheConfig(chunk_size=CHUNK, root=str(root)), SIZE, layer=LAYERS, **settings)


@pytest.fixture
def cache(tmp_root: Path) -> Iterator[KVCache]:
    with cache_at(tmp_root / "a" / "b") as opened:
        yield opened


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


def test_a_query_behind_a_part_of_a_chunk_is_refused(cache: KVCache) -> None:
    with pytest.raises(RuntimeError, match="prefix has 3 tokens: expected a multiple of chunk_size"):
        cache.query([1, 2, 3], [4], asking(1, LAYERS))


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


def test_a_chunk_that_vanished_from_a_known_prefix_is_written_again(cache: KVCache, tmp_root: Path) -> None:
    """The node remembers the chunk; an update does not rely on that."""
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    files = sorted((tmp_root / "a" / "b" / "chunks").rglob("*.*"), key=lambda path: path.stat().st_mtime_ns)
    files[1].unlink()  # a child is staler than its parent, so this is the middle one of three
    assert cache.update(TOKENS[:8], TOKENS[8:], over(kv[8:])) == 0, "the prefix has a hole"
    assert cache.update(None, TOKENS, over(kv)) == 12
    out = np.zeros_like(kv)
    assert cache.query(None, TOKENS, over(out)) == 12
    assert np.array_equal(out, kv)


@pytest.mark.parametrize("damage", ["flip", "truncate", "zero", "empty"])
def test_a_damaged_file_is_a_miss_and_the_next_update_repairs_it(cache: KVCache, tmp_root: Path, damage: str) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    cache.update(None, TOKENS, over(kv))
    files = sorted((tmp_root / "a" / "b" / "chunks").rglob("*.*"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(files[0].read_bytes())  # the last chunk
    content[-1] ^= 1
    changed = {"flip": bytes(content), "truncate": bytes(content[:-9]), "zero": bytes(len(content)), "empty": b""}
    files[0].write_bytes(changed[damage])
    out = np.zeros_like(kv)
    assert cache.query(None, TOKENS, over(out)) == 8
    assert np.array_equal(out[:8], kv[:8]) and not out[8:].any()
    assert cache.update(TOKENS[:8], TOKENS[8:], over(kv[8:])) == 4
    assert cache.query(None, TOKENS, over(out)) == 12
    assert np.array_equal(out, kv)


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


def test_a_dropped_cache_ends_its_threads(tmp_root: Path) -> None:
    before = set(threading.enumerate())
    dropped = weakref.ref(cache_at(tmp_root))
    gc.collect()
    assert dropped() is None
    deadline = time.monotonic() + PATIENCE_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


@pytest.mark.slow
def test_a_million_tokens_in_one_call(tmp_root: Path) -> None:
    """Vineyard stored nothing of more than 65,536 tokens, and returned 0."""
    count, chunk = 1_000_000, 1000
    k, v = np.arange(SIZE, dtype=np.uint8), np.arange(SIZE, 2 * SIZE, dtype=np.uint8)
    kv_list = [[(KVTensor(k.ctypes.data, SIZE), KVTensor(v.ctypes.data, SIZE))]] * count
    tokens = np.arange(count)
    with KVCache(FileCacheConfig(chunk_size=chunk, root=str(tmp_root)), SIZE) as cache:
        assert cache.update(None, tokens, kv_list) == count
        assert cache.query(tokens[: count - chunk], tokens[count - chunk :], asked := asking(chunk, 1)) == chunk
        assert (bytes_in(asked) == np.stack([k, v])).all()
        with pytest.raises(RuntimeError, match="over the limit"):
            cache.update(None, np.zeros(5_000_000, np.int32), [kv_list[0]] * 5_000_000)


def test_a_full_disk_is_an_error_and_no_short_count(small_root: Path) -> None:
    """Vineyard returned a smaller number. Ours is Overloaded, and a RuntimeError as all of Vineyard's are."""
    size, tokens = 262_144, list(range(16))  # 8 MiB, on 4
    kv = np.ones((16, 1, 2, size), np.uint8)
    with KVCache(FileCacheConfig(chunk_size=2, root=str(small_root)), size) as cache:
        with pytest.raises(RuntimeError, match="No space left") as full:
            cache.update(None, tokens, over(kv))
        assert isinstance(full.value, errors.Overloaded)
        out = np.zeros_like(kv)
        matched = cache.query(None, tokens, over(out))
        assert matched < 16  # how much fits depends on which lane the disk fills up under
        assert out[:matched].all() and not out[matched:].any()
    assert not [path for path in (small_root / "staging").rglob("*") if path.is_file()]


def test_other_threads_run_while_bytes_move(tmp_root: Path) -> None:
    """Vineyard held the GIL for the whole call."""
    size, numbers = 8192, itertools.count()
    kv_list = over(kv := np.zeros((512, 8, 2, size), np.uint8))  # 64 MiB
    with KVCache(FileCacheConfig(chunk_size=512, root=str(tmp_root)), size, layer=8) as cache:

        def tokens(number: int) -> list[int]:
            return [1000 + number, *range(511)]

        assert others_run_during(lambda: cache.update(None, tokens(next(numbers)), kv_list))
        assert others_run_during(lambda: cache.query(None, tokens(0), kv_list))
    assert not kv.any()
