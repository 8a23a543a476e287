"""The other stores: Vineyard, LMCache, Mooncake and Redis, each in an environment of its own.

Their packages are imported where a contender is made.

* Vineyard in file mode takes nested lists of tensors, one for each token and layer: ``Vineyard`` makes the lists once,
  as an engine with one fixed buffer could, ``VineyardLists`` for each call.
* LMCache's L2 adapters are driven as its server does: objects in memory, tasks awaited by event descriptors.  ``fs``
  works through a task's keys one after the other, so a call is submitted as one task for each thread.
* Mooncake has a master of its own and one client that also provides the memory, with buffers registered once.
* Redis is a server without persistence over a unix socket, with a connection for each thread.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.competitors.contender import Bytes, Contender, Lanes, Memory, Workload, expect

NEVER_S = 1 << 30
Lists = list[list[tuple[Any, Any]]]


class Vineyard(Contender):
    """``KVCache`` over ``FileCacheConfig``; its thread pool has as many threads as the machine has cores."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        llm: Any = importlib.import_module("vineyard.llm")
        self._root = folder / "root"
        self._root.mkdir()
        config = llm.FileCacheConfig(
            chunk_size=workload.chunk_tokens, root=str(self._root), gc_interval=NEVER_S, ttl=NEVER_S
        )
        self._cache: Any = llm.KVCache(
            cache_config=config,
            tensor_nbytes=workload.tensor_bytes,
            cache_capacity=workload.tokens,
            layer=workload.layers,
        )
        self._tensor: Any = llm.KVTensor
        self._source: Lists = []
        self._target: Lists = []
        self._prompt: list[int] = []

    def prepare(self, turn: int) -> None:
        self._prompt = self.workload.prompt(turn)
        self._source = self._source or self.tensors(self.memory.source)
        self._target = self._target or self.tensors(self.memory.target)

    def put(self, turn: int) -> None:
        expect(self._cache.update(None, self._prompt, self._source), self.workload.tokens, "tokens stored")

    def get(self, turn: int) -> None:
        expect(self._cache.query(None, self._prompt, self._target), self.workload.tokens, "tokens read")

    def clear(self) -> None:
        shutil.rmtree(self._root)
        self._root.mkdir()

    def close(self) -> None:
        self._cache.kv_cache_manager.close()

    def tensors(self, array: Bytes) -> Lists:
        """For each token, for each layer, K and V, in memory of shape (layers, 2, tokens, tensor_bytes)."""
        work, tensor, size = self.workload, self._tensor, self.workload.tensor_bytes
        planes = np.arange(2 * work.layers).reshape(work.layers, 2) * work.tokens
        places = array.ctypes.data + size * (planes + np.arange(work.tokens)[:, None, None])
        return [[(tensor(k, size), tensor(v, size)) for k, v in layers] for layers in places.tolist()]


class VineyardLists(Vineyard):
    """Vineyard with the lists made inside the clock."""

    def prepare(self, turn: int) -> None:
        self._prompt = self.workload.prompt(turn)

    def put(self, turn: int) -> None:
        self._source = self.tensors(self.memory.source)
        super().put(turn)

    def get(self, turn: int) -> None:
        self._target = self.tensors(self.memory.target)
        super().get(turn)


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


MOONCAKE_START_S = 30.0
BUFFER_BYTES = 64 << 20


class Mooncake(Contender):
    """``batch_put_from`` and ``batch_get_into`` over TCP, as for another host's memory."""

    by_memcpy = False

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        os.environ["MC_STORE_MEMCPY"] = str(int(self.by_memcpy))
        package: Any = importlib.import_module("mooncake")
        port, metrics_port = _free_port(), _free_port()
        program = Path(package.__file__).parent / "mooncake_master"
        self._master = subprocess.Popen(
            [program, f"-rpc_port={port}", f"-metrics_port={metrics_port}", "-rpc_address=127.0.0.1", "-logtostderr"],
            stdin=subprocess.DEVNULL,
        )
        self.servers = [self._master.pid]
        try:
            _await_port(port, self._master)
            self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
            # Room for the prompt as its allocator rounds it, below the share at which it evicts.
            room_bytes = 2 * workload.size_bytes + BUFFER_BYTES
            code = self._store.setup(
                "127.0.0.1", "P2PHANDSHAKE", room_bytes, BUFFER_BYTES, "tcp", "", f"127.0.0.1:{port}"
            )
            expect(int(code), 0, "as the code of setup")
            for half in (memory.source, memory.target):
                expect(int(self._store.register_buffer(half.ctypes.data, half.nbytes)), 0, "as the code of registering")
        except BaseException:
            self._master.kill()
            raise
        self._keys: list[str] = []

    def prepare(self, turn: int) -> None:
        self._keys = [key.hex() for key in self.workload.keys(turn)]

    def put(self, turn: int) -> None:
        done = self._store.batch_put_from(self._keys, self._places(self.memory.source), self._sizes())
        expect(sum(code == 0 for code in done), self.workload.chunk_count, "objects stored")

    def get(self, turn: int) -> None:
        read = self._store.batch_get_into(self._keys, self._places(self.memory.target), self._sizes())
        expect(sum(read), self.workload.size_bytes, "bytes read")

    def clear(self) -> None:
        self._store.remove_all(True)

    def close(self) -> None:
        self._store.close()
        self._master.terminate()
        self._master.wait(MOONCAKE_START_S)

    def _places(self, half: Bytes) -> list[int]:
        start = half.ctypes.data
        return list(range(start, start + half.nbytes, self.workload.chunk_bytes))

    def _sizes(self) -> list[int]:
        return [self.workload.chunk_bytes] * self.workload.chunk_count


class MooncakeOwnMemory(Mooncake):
    """Mooncake by memcpy, as for the client's own memory."""

    by_memcpy = True


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + MOONCAKE_START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("mooncake_master did not start: is libibverbs1 installed?") from None
            time.sleep(0.05)


REDIS_START_S = 20.0
READ_BYTES = 1 << 20


class Redis(Contender):
    """SET and GET by redis-py; the result of GET is copied to the engine's memory."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is not installed: apt-get install redis-server")
        redis: Any = importlib.import_module("redis")
        place = folder / "socket"
        self._server = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", str(place), "--save", "", "--dir", str(folder)],
            stdin=subprocess.DEVNULL,
        )
        self.servers = [self._server.pid]
        # Its default reads 64 KiB at a time, which is slower with values as large as these.
        pool = redis.ConnectionPool(
            connection_class=redis.UnixDomainSocketConnection,
            path=str(place),
            max_connections=threads,
            socket_read_size=READ_BYTES,
        )
        self._client: Any = redis.Redis.from_pool(pool)
        deadline_s = time.monotonic() + REDIS_START_S
        while True:
            try:
                self._client.ping()
                break
            except redis.ConnectionError:
                if self._server.poll() is not None or time.monotonic() > deadline_s:
                    self._server.kill()
                    raise
                time.sleep(0.05)
        self._lanes = Lanes(threads)
        self._source = memory.pieces(memory.source, workload.chunk_bytes)
        self._target = memory.target.reshape(workload.chunk_count, workload.chunk_bytes)
        self._keys: list[bytes] = []

    def prepare(self, turn: int) -> None:
        self._keys = self.workload.keys(turn)

    def put(self, turn: int) -> None:
        def store(lot: Iterable[int]) -> None:
            for index in lot:
                self._client.set(self._keys[index], self._source[index])

        self._lanes.each(store, self.workload.chunk_count)

    def get(self, turn: int) -> None:
        def load(lot: Iterable[int]) -> None:
            for index in lot:
                value = self._client.get(self._keys[index])
                expect(len(value or b""), self.workload.chunk_bytes, "bytes read")
                self._target[index] = np.frombuffer(value, np.uint8)

        self._lanes.each(load, self.workload.chunk_count)

    def clear(self) -> None:
        self._client.flushall()

    def close(self) -> None:
        self._lanes.close()
        self._client.close()
        self._server.terminate()
        self._server.wait(REDIS_START_S)
