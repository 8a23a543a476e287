"""KVCache through a worker: FileCacheConfig with filesystem_type VINEYARD and an rpc_endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import errors
from kvstore.connectors.vineyard import FileCacheConfig, FilesystemType, KVCache
from kvstore.root.posix import PosixRoot
from kvstore.worker.server import Worker
from tests.kit.stores import member_on
from tests.kit.tensors import kv_of, over

pytestmark = pytest.mark.slow

LAYERS, SIZE, CHUNK = 2, 16, 4
TOKENS = list(range(1, 13))


@pytest.fixture(scope="module")
def endpoint(module_root: Path) -> Iterator[str]:
    member = member_on(PosixRoot(module_root))
    worker = Worker(member, "127.0.0.1:0")
    try:
        yield worker.start()
    finally:
        worker.stop()
        member.close()


def cache_at(endpoint: str, root: str, rank: int | None = None) -> KVCache:
    config = FileCacheConfig(
        chunk_size=CHUNK,
        root=root,
        filesystem_type=FilesystemType.VINEYARD,
        socket="/tmp/vineyard.sock",
        rpc_endpoint=endpoint,
    )
    return KVCache(config, SIZE, layer=LAYERS, rank=rank, world_size=2)


def test_a_batched_round_trip_as_in_vineyards_own_test(endpoint: str) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    with cache_at(endpoint, "batched") as cache:
        assert cache.batched_update(TOKENS, over(kv)) == 12
        assert cache.batched_update(TOKENS, over(kv)) == 0
        out = np.zeros_like(kv)
        assert cache.batched_query(TOKENS, over(out)) == 12
        assert np.array_equal(out, kv)


def test_roots_and_ranks_are_apart_on_one_worker(endpoint: str) -> None:
    kv = kv_of(TOKENS, LAYERS, SIZE)
    with cache_at(endpoint, "one", 0) as zero, cache_at(endpoint, "one", 1) as one, cache_at(endpoint, "two", 0) as two:
        assert zero.update(None, TOKENS, over(kv)) == 12
        assert [cache.query(None, TOKENS, over(np.zeros_like(kv))) for cache in (zero, one, two)] == [12, 0, 0]


def test_a_worker_that_is_not_there_is_unavailable(tmp_root: Path) -> None:
    with pytest.raises(RuntimeError) as refused:
        cache_at("127.0.0.1:1", str(tmp_root))
    assert isinstance(refused.value, errors.Unavailable)
