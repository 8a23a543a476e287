"""LMCache's own keys, memory objects and factory, and waiting for an adapter as LMCache's controllers do."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

SHAPE = (2, 4, 64, 128)
WAIT_S = 60.0


def key(number: int, **told: Any) -> ObjectKey:
    fields = {"chunk_hash": number.to_bytes(32, "big"), "model_name": "org/model", "kv_rank": 0x01000100, **told}
    return ObjectKey(**fields)


def made(
    seed: int | None = None, dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = SHAPE
) -> TensorMemoryObj:
    """A memory object with values by ``seed``, or zeros."""
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.zeros(size, dtype=torch.uint8)
    if seed is not None:
        raw.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    meta = MemoryObjMetadata(
        shape=torch.Size(shape),
        dtype=dtype,
        address=0,
        phy_size=size,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
        shapes=[torch.Size(shape)],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None)


def layouts(dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = SHAPE) -> dict[int, MemoryLayoutDesc]:
    return {0: MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[dtype])}


def plugin(**params: Any) -> Any:
    """LMCache's configuration of our adapter."""
    names = {"module_path": "kvstore.connectors.lmcache", "class_name": "KVStoreL2Adapter"}
    return get_l2_adapter_config_class("plugin").from_dict({"type": "plugin", **names, "adapter_params": params})


@contextmanager
def adapter(**params: Any) -> Iterator[Any]:
    """Our adapter, made by LMCache's own factory for ``plugin``; closed at the end."""
    made_by_factory = create_l2_adapter_from_registry(plugin(**params))
    try:
        yield made_by_factory
    finally:
        made_by_factory.close()


def waited(fd: int, ask: Callable[[], Any]) -> Any:
    """Polls ``ask`` whenever the descriptor is readable; returns its first result that is not None."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        assert poller.poll(WAIT_S * 1000), "no event came"
        consume_fd(fd)
        result = ask()
        if result is not None:
            return result


def stored(l2: Any, keys: list[Any], objects: list[Any]) -> Any:
    task = l2.submit_store_task(keys, objects)
    return waited(l2.get_store_event_fd(), lambda: l2.pop_completed_store_tasks().get(task))


def found(l2: Any, keys: list[Any], described: dict[int, MemoryLayoutDesc] | None = None) -> list[int]:
    """The places of the keys that are there, and locked now."""
    task = l2.submit_lookup_and_lock_task(keys, layouts() if described is None else described)
    bitmap = waited(l2.get_lookup_and_lock_event_fd(), lambda: l2.query_lookup_and_lock_result(task))
    assert l2.query_lookup_and_lock_result(task) is None
    return list(bitmap.get_indices_list())


def loaded(l2: Any, keys: list[Any], objects: list[Any]) -> list[int]:
    """The places of the keys that were loaded."""
    task = l2.submit_load_task(keys, objects)
    bitmap = waited(l2.get_load_event_fd(), lambda: l2.query_load_result(task))
    assert l2.query_load_result(task) is None
    return list(bitmap.get_indices_list())


def equal(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(left, right, strict=True))
