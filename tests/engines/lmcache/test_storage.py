"""LMCache's real storage, its controllers and host memory, with our adapter as L2: the work of a server per request."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache.objects import key, plugin
from tests.kit.stores import chunk_files

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size((2, 4, 64, 128))], dtypes=[torch.bfloat16])
COUNT = 12
KEYS = [key(number) for number in range(COUNT)]


@contextmanager
def storage(root: Path) -> Iterator[Any]:
    memory = L1MemoryManagerConfig(
        size_in_bytes=64 << 20,
        use_lazy=False,
        init_size_in_bytes=64 << 20,
        shm_name=f"kvstore_test_{os.getpid()}_{time.monotonic_ns()}",
    )
    manager = StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig([plugin(root=str(root))]),
        )
    )
    try:
        yield manager
    finally:
        manager.close()


def prefetched(manager: Any, keys: list[Any]) -> int:
    """Returns the number of leading objects in LMCache's host memory after it looked in our store."""
    spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
    handle = manager.submit_prefetch_task(spec)
    assert manager.wait_prefetch_status(handle, 30.0)
    result = manager.query_prefetch_status(handle)
    return sum(row.popcount() for row in result.l2_hit_cells)


def fill(manager: Any, keys: list[Any]) -> None:
    reserved = manager.reserve_write(keys, LAYOUT)
    assert set(reserved) == set(keys)
    for number, each in enumerate(keys):
        reserved[each].tensor.fill_(number + 1)
    manager.finish_write(keys)


@pytest.mark.slow
def test_what_one_lmcache_stored_another_prefetches(tmp_root: Path) -> None:
    with storage(tmp_root) as manager:
        fill(manager, KEYS)
        ends_s = time.monotonic() + 30
        while len(chunk_files(tmp_root)) < COUNT:
            assert time.monotonic() < ends_s, "it was not stored"
            time.sleep(0.02)
    chunk_files(tmp_root)[0].unlink()
    with storage(tmp_root) as manager:
        hits = [prefetched(manager, [each]) for each in KEYS]
        assert sum(hits) == COUNT - 1
        for number, each in enumerate(KEYS):
            if hits[number]:
                with manager.read_prefetched_results([each]) as objects:
                    assert torch.all(objects[0].tensor == number + 1)
        missing = hits.index(0)
    with storage(tmp_root) as manager:
        assert prefetched(manager, KEYS) == missing, "as far as there is no hole"
