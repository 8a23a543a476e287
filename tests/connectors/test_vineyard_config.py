"""Vineyard's parameters, defaults, environment variables and ranks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.connectors.vineyard import FileCacheConfig, FilesystemType, KVCache, VineyardCacheConfig
from tests.kit.cases import for_each
from tests.kit.tensors import kv_of, over

ENVIRONMENT = "VINEYARD_LLM_CACHE_SHARED_MEMORY", "VINEYARD_LLM_CACHE_FILESYSTEM"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for front in ENVIRONMENT:
        for end in ("", "_SOCKET", "_BLOCK_SIZE", "_SYNC_INTERVAL", "_CHUNK_SIZE", "_HASH_CHUNK_SIZE", "_ROOT"):
            monkeypatch.delenv(front + end, raising=False)


def parameters(of: Any) -> dict[str, object]:
    found = inspect.signature(of).parameters.values()
    return {each.name: each.default for each in found if each.kind is each.POSITIONAL_OR_KEYWORD}


def test_parameters_and_defaults_are_vineyards_in_its_order() -> None:
    assert list(parameters(FileCacheConfig).items()) == [
        ("chunk_size", 16),
        ("hash_chunk_size", 2),
        ("root", "/tmp/vineyard/llm_cache"),
        ("filesystem_type", FilesystemType.LOCAL),
        ("gc_interval", 1800),
        ("ttl", 1800),
        ("enable_global_gc", False),
        ("global_gc_interval", 10800),
        ("global_ttl", 10800),
        ("socket", ""),
        ("rpc_endpoint", ""),
        ("rdma_endpoint", ""),
    ]
    assert list(parameters(VineyardCacheConfig).items()) == [
        ("socket", inspect.Parameter.empty),
        ("block_size", 5),
        ("sync_interval", 3),
        ("llm_cache_sync_lock", "llmCacheSyncLock"),
        ("llm_cache_object_name", "llm_cache_object"),
        ("llm_ref_cnt_object_name", "llm_refcnt_object"),
    ]
    assert list(parameters(KVCache).items()) == [
        ("cache_config", None),
        ("tensor_nbytes", 1024),
        ("cache_capacity", 1024),
        ("layer", 1),
        ("rank", None),
        ("world_size", None),
    ]
    for call in ("update", "query"):
        assert list(parameters(getattr(KVCache, call)))[1:] == ["prefix", "tokens", "kv_cache_list"]
    for call in ("batched_update", "batched_query"):
        assert list(parameters(getattr(KVCache, call)))[1:] == ["tokens", "kv_cache_list"]


def test_without_any_configuration_it_says_where_to_give_one() -> None:
    with pytest.raises(ValueError, match="VINEYARD_LLM_CACHE_FILESYSTEM"):
        KVCache()
    with pytest.raises(ValueError, match="dict"):
        KVCache({"root": "/tmp"})  # type: ignore[arg-type]


def test_the_environment_describes_a_cache_of_files(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VINEYARD_LLM_CACHE_FILESYSTEM", "1")
    monkeypatch.setenv("VINEYARD_LLM_CACHE_FILESYSTEM_CHUNK_SIZE", "8")
    monkeypatch.setenv("VINEYARD_LLM_CACHE_FILESYSTEM_HASH_CHUNK_SIZE", "3")
    monkeypatch.setenv("VINEYARD_LLM_CACHE_FILESYSTEM_ROOT", str(tmp_root / "env"))
    with KVCache() as cache:
        assert cache.cache_config == FileCacheConfig(8, 3, str(tmp_root / "env"))


def test_the_environment_describes_shared_memory_and_files_win(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VINEYARD_LLM_CACHE_SHARED_MEMORY", "1")
    with pytest.raises(ValueError, match="_SOCKET"):
        KVCache()
    monkeypatch.setenv("VINEYARD_LLM_CACHE_SHARED_MEMORY_SOCKET", str(tmp_root / "socket"))
    monkeypatch.setenv("VINEYARD_LLM_CACHE_SHARED_MEMORY_BLOCK_SIZE", "7")
    monkeypatch.setenv("VINEYARD_LLM_CACHE_SHARED_MEMORY_SYNC_INTERVAL", "1")
    with KVCache() as cache:
        assert cache.cache_config == VineyardCacheConfig(str(tmp_root / "socket"), 7, 1)
    monkeypatch.setenv("VINEYARD_LLM_CACHE_FILESYSTEM", "1")
    monkeypatch.setenv("VINEYARD_LLM_CACHE_FILESYSTEM_ROOT", str(tmp_root / "files"))
    with KVCache() as cache:
        assert isinstance(cache.cache_config, FileCacheConfig)


def test_ranks_are_apart_and_the_callers_configuration_stays_as_it_is(tmp_root: Path) -> None:
    config = FileCacheConfig(chunk_size=2, root=str(tmp_root / "kv"))
    kv = kv_of([1, 2], 1, 16)
    with KVCache(config, 16, 1024, 1, rank=0, world_size=2) as zero, KVCache(config, 16, rank=1, world_size=2) as one:
        assert config.root == str(tmp_root / "kv")
        assert isinstance(zero.cache_config, FileCacheConfig) and isinstance(one.cache_config, FileCacheConfig)
        assert zero.cache_config.root == str(tmp_root / "kv" / "2-0")
        assert one.cache_config.root == str(tmp_root / "kv" / "2-1")
        assert zero.update(None, [1, 2], over(kv)) == 2
        out = np.zeros_like(kv)
        assert one.query(None, [1, 2], over(out)) == 0
        assert zero.query(None, [1, 2], over(out)) == 2
        assert np.array_equal(out, kv)


def test_models_and_tenants_are_apart(tmp_root: Path) -> None:
    config, kv = FileCacheConfig(chunk_size=2, root=str(tmp_root / "kv")), kv_of([1, 2], 1, 16)
    with (
        KVCache(config, 16, fingerprint="weights a") as a,
        KVCache(config, 16, fingerprint="weights b") as b,
        KVCache(config, 16, fingerprint="weights a", tenant="other") as c,
    ):
        assert a.update(None, [1, 2], over(kv)) == 2
        assert [each.query(None, [1, 2], over(np.zeros_like(kv))) for each in (a, b, c)] == [2, 0, 0]


@for_each("sizes", [{"chunk_size": 0}, {"hash_chunk_size": 0}, {"chunk_size": -3}, {"root": None}])
def test_sizes_that_make_no_sense_are_refused_as_vineyard_does(tmp_root: Path, sizes: dict[str, Any]) -> None:
    config = FileCacheConfig(**{"root": str(tmp_root / "kv"), **sizes})
    with pytest.raises(RuntimeError, match=next(iter(sizes))) as refused:
        KVCache(config)
    assert isinstance(refused.value, errors.InvalidRequest)


def test_a_folder_of_vineyards_own_files_is_not_taken_for_a_root(tmp_root: Path) -> None:
    (tmp_root / "kv" / "44").mkdir(parents=True)
    (tmp_root / "kv" / "44" / "45").write_bytes(b"\4\0\0\0")
    with pytest.raises(RuntimeError) as refused:
        KVCache(FileCacheConfig(root=str(tmp_root / "kv")))
    assert isinstance(refused.value, errors.RootMismatch)
    assert sorted(path.name for path in (tmp_root / "kv").iterdir()) == ["44"]
