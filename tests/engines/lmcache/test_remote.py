"""The older interface: LMCache's own loading of ``remote_storage_plugins``, with its metadata and host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from kvstore.errors import InvalidRequest
from tests.kit.workers import serving

LAYERS, TOKENS, HEADS, DIM = 4, 64, 2, 32
QUICK = {"lookup_timeout_s": 0.5, "load_timeout_s": 0.5, "store_timeout_s": 0.5}


def key(
    number: int,
    model: str = "org/model",
    worker: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    tags: dict[str, str] | None = None,
) -> CacheEngineKey:
    told = {f"lmcache.tag.{name}": value for name, value in (tags or {}).items()}
    return CacheEngineKey(model, 1, worker, number, dtype, told)


class Remote:
    """LMCache's instrumented connector around ours, and the host memory it allocates from."""

    def __init__(self, settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16, plugin: str = "kvstore") -> None:
        prefix = f"remote_storage_plugin.{plugin}."
        names = {"module_path": "kvstore.connectors.lmcache_remote", "class_name": "KVStoreConnectorAdapter"}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=True,
            max_local_cpu_size=0.0625,
            pre_caching_hash_algorithm=settings.pop("hash", "sha256_cbor"),
            use_layerwise=settings.pop("layerwise", False),
            remote_serde=settings.pop("remote_serde", "naive"),
            remote_storage_plugins=[plugin],
            extra_config={**{prefix + name: value for name, value in names.items()}, **settings},
        )
        metadata = LMCacheMetadata("org/model", 1, 1, 0, 0, dtype, (LAYERS, 2, TOKENS, HEADS, DIM), chunk_size=TOKENS)
        self.loop = asyncio.new_event_loop()
        self.memory = LocalCPUBackend(config, metadata, "cpu")
        self.connector = CreateConnector(
            f"plugin://{plugin}", self.loop, self.memory, config, metadata, plugin_name=plugin
        )

    def do(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def made(self, seed: int, tokens: int = TOKENS) -> Any:
        ours = self.connector.getWrappedConnector()
        made = self.memory.allocate([torch.Size((2, LAYERS, tokens, HEADS * DIM))], ours.meta_dtypes, ours.meta_fmt)
        values = torch.randint(
            0, 256, made.raw_data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        made.raw_data.copy_(values)
        return made

    def close(self) -> None:
        self.do(self.connector.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.memory.close()


@contextmanager
def remote(settings: dict[str, Any], **more: Any) -> Iterator[Remote]:
    opened = Remote(dict(settings), **more)
    try:
        yield opened
    finally:
        opened.close()


def values(made: Any) -> bytes:
    return bytes(memoryview(made.byte_array).cast("B"))


@pytest.mark.parametrize("way", ["root", "worker"])
def test_what_was_put_is_there_after_a_restart(tmp_root: Path, way: str) -> None:
    def run(settings: dict[str, Any]) -> None:
        with remote(settings) as first:
            objects = [first.made(number) for number in range(4)]
            expected = [values(each) for each in objects]
            first.do(first.connector.batched_put([key(number) for number in range(3)], objects[:3]))
            first.do(first.connector.put(key(3), objects[3]))
        with remote(settings) as second:
            every = [key(number) for number in range(4)]
            assert second.connector.batched_contains([*every, key(9)]) == 4
            assert second.do(second.connector.batched_async_contains("look-up", [*every, key(9)])) == 4
            assert second.connector.exists_sync(key(2))
            assert not second.do(second.connector.exists(key(9)))
            assert [values(each) for each in second.do(second.connector.batched_get(every))] == expected
            assert values(second.do(second.connector.get(key(3)))) == expected[3]
            assert second.do(second.connector.get(key(9))) is None
            assert second.do(second.connector.ping()) == 0

    if way == "root":
        run({"root": str(tmp_root)})
    else:
        with serving(tmp_root) as served:
            run({"connect": served.address})


def test_reading_ends_at_the_first_hole_and_gives_back_the_memory_behind_it(tmp_root: Path) -> None:
    with remote({"root": str(tmp_root)}) as opened:
        for number in (0, 1, 3):
            opened.do(opened.connector.put(key(number), opened.made(number)))
        free = opened.memory.memory_allocator.pin_allocator.total_allocated_size
        got = opened.do(opened.connector.batched_get_non_blocking("look-up", [key(number) for number in range(4)]))
        assert len(got) == 2
        for each in got:
            each.ref_count_down()
        assert opened.memory.memory_allocator.pin_allocator.total_allocated_size == free


def test_what_exceeds_the_host_memory_is_not_waited_for(tmp_root: Path) -> None:
    with remote({"root": str(tmp_root)}) as opened:
        opened.do(opened.connector.put(key(0), opened.made(0)))
        got = opened.do(opened.connector.batched_get_non_blocking("look-up", [key(0)] * 1100))
        assert 900 < len(got) < 1100
        for each in got:
            each.ref_count_down()


def test_a_part_chunk_comes_back_as_long_as_it_was(tmp_root: Path) -> None:
    with remote({"root": str(tmp_root)}) as opened:
        part = opened.made(1, tokens=17)
        expected = values(part)
        opened.do(opened.connector.put(key(1), part))
        got = opened.do(opened.connector.get(key(1)))
        assert values(got) == expected
        assert got.meta.shape[2] == 17


def test_another_model_rank_or_type_is_a_miss(tmp_root: Path) -> None:
    with remote({"root": str(tmp_root)}) as opened:
        opened.do(opened.connector.put(key(1), opened.made(1)))
        assert opened.connector.exists_sync(key(1))
        for other in (key(1, model="org/other"), key(1, worker=1), key(1, dtype=torch.float16)):
            assert not opened.connector.exists_sync(other)
            assert opened.do(opened.connector.get(other)) is None
    with remote({"root": str(tmp_root)}, dtype=torch.float16) as opened:
        assert not opened.connector.exists_sync(key(1))


def test_a_user_who_writes_separators_into_a_tag_does_not_find_what_others_stored(tmp_root: Path) -> None:
    others = {"user": "alice", "role": "admin"}
    with remote({"root": str(tmp_root)}) as opened:
        opened.do(opened.connector.put(key(1, tags=others), opened.made(1)))
        assert opened.connector.exists_sync(key(1, tags=others))
        for tags in ({"user": "alice@role%admin"}, {"user@alice": "@role%admin"}, {"user": "alice"}, {}):
            assert not opened.connector.exists_sync(key(1, tags=tags))
        assert not opened.connector.exists_sync(key(1, tags={"user": "\ud800"})), "and no error either"


def test_a_store_that_is_down_is_a_miss() -> None:
    with remote({"connect": "127.0.0.1:1", **QUICK}) as opened:
        assert not opened.connector.exists_sync(key(1))
        assert opened.do(opened.connector.get(key(1))) is None
        opened.do(opened.connector.put(key(1), opened.made(1)))
        assert opened.do(opened.connector.ping()) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hash": "builtin"}, "PYTHONHASHSEED"),
        ({"layerwise": True}, "layerwise"),
        ({"remote_serde": "kivi"}, "as they are"),
    ],
)
def test_what_could_not_be_served_is_refused_when_it_starts(
    tmp_root: Path, wrong: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(InvalidRequest, match=says):
        Remote({"root": str(tmp_root), **wrong})
