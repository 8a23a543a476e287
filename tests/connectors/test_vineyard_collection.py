"""Vineyard's tests of garbage collection (local_file_storage_gc_test, kv_cache_radix_tree_test) with our collector.

The collector runs once, beside caches that go on working, on a root of few shards. Time passes by setting back the
chunks' last use: the shortest ttl that a chunk keeps is five minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.connectors.vineyard import FileCacheConfig, KVCache
from kvstore.meta.etcd import EtcdMeta
from kvstore_gc.collector import Collector, opened
from kvstore_gc.config import Config
from tests.kit.etcd import running_etcd
from tests.kit.tensors import kv_of, over

pytestmark = pytest.mark.slow

LAYERS, SIZE, CHUNK = 2, 16, 4


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server.endpoints


@pytest.fixture
def root(tmp_root: Path, etcd: str) -> Path:
    kvstore.open(str(tmp_root / "kv"), etcd=etcd, shard_bits=2).close()
    return tmp_root / "kv"


def cache_on(root: Path, etcd: str, ttl: int = 300) -> KVCache:
    config = FileCacheConfig(chunk_size=CHUNK, root=str(root), ttl=ttl, enable_global_gc=True)
    return KVCache(config, SIZE, layer=LAYERS, etcd=etcd)


def prompt(number: int, chunks: int = 1) -> list[int]:
    return [number * 1000 + each for each in range(chunks * CHUNK)]


def update(cache: KVCache, tokens: list[int]) -> None:
    assert cache.update(None, tokens, over(kv_of(tokens, LAYERS, SIZE))) == len(tokens)


def matched(cache: KVCache, tokens: list[int]) -> int:
    """Tokens that a query finds, each with its bytes."""
    kv = kv_of(tokens, LAYERS, SIZE)
    out = np.zeros_like(kv)
    count = cache.query(None, tokens, over(out))
    assert np.array_equal(out[:count], kv[:count])
    return count


def files(root: Path) -> list[Path]:
    return [*(root / "chunks").glob("*/*")]


def pass_time(root: Path, minutes: int) -> None:
    """Sets the last use of every chunk back by this long."""
    for file in files(root):
        ns = file.stat().st_mtime_ns - minutes * 60 * 10**9
        os.utime(file, ns=(ns, ns))


def collect(root: Path, etcd: str, **limits: Any) -> None:
    """One round of ``kvstore-gc``."""
    with opened(str(root), {}, EtcdMeta(etcd)) as site:
        assert Collector(site, Config(**limits), threading.Event().wait).once(lambda shard: None) is not None


def test_files_live_for_their_ttl_and_are_gone_after_it(root: Path, etcd: str) -> None:
    """(a) and (b): there after two thirds of the time, gone after all of it; a longer ttl outlives it."""
    with cache_on(root, etcd) as cache, cache_on(root, etcd, ttl=1800) as longer:
        for number in range(20):
            update(cache, prompt(number))
        update(longer, prompt(99))
        pass_time(root, 3)
        collect(root, etcd)
        assert len(files(root)) == 21
        pass_time(root, 5)
        collect(root, etcd)
        assert len(files(root)) == 1
        assert [matched(cache, prompt(number)) for number in range(20)] == [0] * 20
        assert matched(cache, prompt(99)) == CHUNK
        update(cache, prompt(0))
        assert matched(cache, prompt(0)) == CHUNK, "what is gone can be stored again"


def test_files_of_an_instance_that_is_gone_are_collected(root: Path, etcd: str) -> None:
    """(d): another process, the collector here, cleans up behind a dead one."""
    with cache_on(root, etcd) as cache:
        update(cache, prompt(1, chunks=4))
    pass_time(root, 8)
    collect(root, etcd)
    assert files(root) == []
