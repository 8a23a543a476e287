"""LMCache's own backends: the L2 adapters ``fs`` and ``fs_native`` of its server, and the local CPU backend.

The adapters are driven as its server does, and as its ``lmcache bench l2`` does: objects that lie in memory already,
tasks submitted and awaited by event descriptors.  ``fs`` works through a task's keys one after the other, so a call is
submitted as one task for each thread.
"""

from __future__ import annotations

import importlib
import os
import select
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.competitors.contender import Bytes, Contender, Lanes, Memory, Workload, expect

MODEL = "model"
TASK_S = 60.0
GIB = 1 << 30


class _Adapter(Contender):
    """An L2 adapter, made by LMCache's factory."""

    kind = ""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        adapters: Any = importlib.import_module("lmcache.v1.distributed.l2_adapters")
        configs: Any = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
        self._key: Any = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
        self._base = folder / "base"
        self._base.mkdir()
        found: Any = configs.get_l2_adapter_config_class(self.kind).from_dict(self._options())
        self._adapter: Any = adapters.create_l2_adapter(found)
        self._source = _objects(memory.source, workload.chunk_bytes)
        self._target = _objects(memory.target, workload.chunk_bytes)
        self._keys: list[Any] = []

    def _options(self) -> dict[str, Any]:
        return {"type": self.kind, "base_path": str(self._base)}

    def prepare(self, turn: int) -> None:
        self._keys = [self._key(chunk_hash=key, model_name=MODEL, kv_rank=0) for key in self.workload.keys(turn)]

    def put(self, turn: int) -> None:
        waiting = {self._adapter.submit_store_task(keys, objects) for keys, objects in self._lots(self._source)}
        while waiting:
            _await(self._adapter.get_store_event_fd())
            for task, result in self._adapter.pop_completed_store_tasks().items():
                waiting.remove(task)
                if not result.is_successful():
                    raise RuntimeError("a store task failed")

    def get(self, turn: int) -> None:
        waiting = {self._adapter.submit_load_task(keys, objects) for keys, objects in self._lots(self._target)}
        loaded = 0
        while waiting:
            _await(self._adapter.get_load_event_fd())
            for task in list(waiting):
                bitmap = self._adapter.query_load_result(task)
                if bitmap is not None:
                    waiting.remove(task)
                    loaded += bitmap.popcount()
        expect(loaded, self.workload.chunk_count, "objects loaded")

    def clear(self) -> None:
        for folder, _, names in os.walk(self._base):
            for name in names:
                os.unlink(Path(folder, name))

    def close(self) -> None:
        self._adapter.close()

    def _lots(self, objects: list[Any]) -> Iterable[tuple[list[Any], list[Any]]]:
        for first in range(self.threads):
            if self._keys[first :: self.threads]:
                yield self._keys[first :: self.threads], objects[first :: self.threads]


class Fs(_Adapter):
    """``fs``: Python, aiofiles."""

    kind = "fs"


class FsNative(_Adapter):
    """``fs_native``: C++ with its own threads."""

    kind = "fs_native"

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "num_workers": self.threads}

    def _lots(self, objects: list[Any]) -> Iterable[tuple[list[Any], list[Any]]]:
        return [(self._keys, objects)]


class LocalCpu(Contender):
    """Objects of its pinned allocator: a put allocates and copies as its engine does, a get copies back."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        torch: Any = importlib.import_module("torch")
        config: Any = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata: Any = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
        backends: Any = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend")
        self._key: Any = importlib.import_module("lmcache.utils").CacheEngineKey
        torch.set_num_threads(1)  # the lanes are the threads
        self._torch = torch
        self._shape = torch.Size([2, workload.layers, workload.chunk_tokens, workload.tensor_bytes])
        room_gib = 1.25 * workload.size_bytes / GIB
        self._backend: Any = backends.LocalCPUBackend(
            config.from_defaults(chunk_size=workload.chunk_tokens, local_cpu=True, max_local_cpu_size=room_gib),
            metadata(
                model_name=MODEL,
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=torch.uint8,
                kv_shape=(workload.layers, 2, workload.chunk_tokens, 1, workload.tensor_bytes),
                chunk_size=workload.chunk_tokens,
            ),
            "cpu",
        )
        shape = (workload.chunk_count, *self._shape)
        self._source = torch.from_numpy(memory.source.reshape(shape))
        self._target = torch.from_numpy(memory.target.reshape(shape))
        self._lanes = Lanes(threads)
        self._keys: list[Any] = []

    def prepare(self, turn: int) -> None:
        self._keys = [
            self._key(MODEL, 1, 0, int.from_bytes(key[4:12], "big") << 20 | index, self._torch.uint8)
            for index, key in enumerate(self.workload.keys(turn))
        ]

    def put(self, turn: int) -> None:
        def store(lot: Iterable[int]) -> None:
            for index in lot:
                held = self._backend.allocate(self._shape, self._torch.uint8)
                if held is None:
                    raise RuntimeError("nothing was allocated")
                held.tensor.copy_(self._source[index])
                self._backend.submit_put_task(self._keys[index], held)
                held.ref_count_down()

        self._lanes.each(store, self.workload.chunk_count)

    def get(self, turn: int) -> None:
        def load(lot: Iterable[int]) -> None:
            for index in lot:
                held = self._backend.get_blocking(self._keys[index])
                if held is None:
                    raise RuntimeError(f"object {index} is missing")
                self._target[index].copy_(held.tensor)
                held.ref_count_down()

        self._lanes.each(load, self.workload.chunk_count)

    def clear(self) -> None:
        for key in self._keys:
            self._backend.remove(key)

    def close(self) -> None:
        self._lanes.close()
        self._backend.close()


def _objects(array: Bytes, chunk_bytes: int) -> list[Any]:
    """The array in objects of LMCache, without a copy."""
    torch: Any = importlib.import_module("torch")
    memory: Any = importlib.import_module("lmcache.v1.memory_management")
    whole = torch.from_numpy(np.asarray(array))
    return [
        memory.TensorMemoryObj(
            raw_data=whole[start : start + chunk_bytes],
            metadata=memory.MemoryObjMetadata(
                shape=torch.Size([chunk_bytes]),
                dtype=torch.uint8,
                address=start,
                phy_size=chunk_bytes,
                fmt=memory.MemoryFormat.KV_2LTD,
                ref_count=1,
            ),
            parent_allocator=None,
        )
        for start in range(0, len(array), chunk_bytes)
    ]


def _await(descriptor: int) -> None:
    ready, _, _ = select.select([descriptor], [], [], TASK_S)
    if not ready:
        raise TimeoutError(f"nothing was done in {TASK_S:g} s")
    os.read(descriptor, 8)
