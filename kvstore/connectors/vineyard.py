"""Vineyard's LLM KV cache API over kvstore, so that programs written for it change one import.

    from kvstore.connectors.vineyard import KVCache, KVTensor, FileCacheConfig, VineyardCacheConfig

Parameters, defaults and return values are those of ``vineyard.llm`` 0.24.  What differs on purpose:

* Failed writes raise (a full root, no permission, a root that does not answer) instead of returning a smaller number;
  every error is one of ``kvstore.errors`` and a RuntimeError too, which is what Vineyard raised.
* Caches of another layer count, tensor size or chunk size on one root do not see each other.
* Up to 4,194,304 tokens a call; ``batched_update`` and ``batched_query`` work in every mode.
* In ``query``, ``KVTensor(0, 0)`` asks for memory in every mode; the tensors that take its place own theirs.
* Tensors after the matched ones are never written to, and a list shorter than the match counts only what it holds.
* ``KVTensor.data`` and ``.length`` are read-only.
* Memory (``VineyardCacheConfig``) is a process's own, above a folder that processes share and that keeps what does not
  fit: an update is seen by others when it returns, and outlives the process.
* Garbage collection is a service of its own, ``kvstore-gc``, which knows what all processes use and write.  It deletes
  what was last used ``ttl`` ago, not what was written then; the other settings for it are accepted without effect.
"""

from __future__ import annotations

import ctypes
import enum
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.client import Store
from kvstore.core.address import TokenArray
from kvstore.core.layout import Layout
from kvstore.core.validate import kind_of
from kvstore.core.write_mode import WriteMode
from kvstore.engine.settings import MEMORY_BYTES_MIN
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    Overloaded,
    PermissionDenied,
    RootMismatch,
    SessionLost,
    StoreFull,
    Unavailable,
)
from kvstore.format.header import PAGE_BYTES, header_bytes
from kvstore.tiers.arena import memory_there_bytes

__all__ = ["FileCacheConfig", "FilesystemType", "KVCache", "KVTensor", "VineyardCacheConfig"]

# The memory that a cache in shared memory takes of its process: its capacity in bytes.


TOKEN_ID_BYTES = 4
SHARE_MAX = 1 / 4
"""Share of this process's memory that it may take, so that a capacity copied from Vineyard cannot exhaust it."""


def memory_bytes(layout: Layout, capacity_tokens: int) -> int:
    """Returns the memory for the chunks of this many tokens: at least 16 MiB, at most a quarter of all there is."""
    chunk_bytes = header_bytes(TOKEN_ID_BYTES * layout.chunk_tokens, layout.section_count) + layout.chunk_bytes
    chunks = -(-capacity_tokens // layout.chunk_tokens)
    wanted = min(chunks * _whole_pages(chunk_bytes), int(memory_there_bytes() * SHARE_MAX))
    return max(MEMORY_BYTES_MIN, _whole_pages(wanted))


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


# The two configurations of a Vineyard cache, and the one from the environment.


ENV_SHARED_MEMORY = "VINEYARD_LLM_CACHE_SHARED_MEMORY"
ENV_FILESYSTEM = "VINEYARD_LLM_CACHE_FILESYSTEM"


class FilesystemType(enum.IntEnum):
    """The process that reads and writes the files."""

    LOCAL = 0
    """This process opens ``root`` itself."""
    VINEYARD = 1
    """A kvstore worker at ``rpc_endpoint`` opens it."""


@dataclass
class VineyardCacheConfig:
    """A cache that matches token by token, as Vineyard's in shared memory does.

    The memory of this process serves as many tokens as ``KVCache`` has ``cache_capacity``, above a store in the folder
    ``{socket}.kvstore``, next to Vineyard's socket. No server is needed: all processes that name the same
    socket share that folder. Caches with another ``llm_cache_object_name`` are separate.

    ``sync_interval`` is the number of seconds after which others see an update at the latest. They see it when it
    returns, which is always sooner: it is in memory and in the folder by then. With ``KVCache(..., write="behind")`` an
    update returns when it is in memory, several times as fast; others then see it once it is written, soon but without
    a promise, and it is lost if this process is killed before.

    ``block_size`` is how many tokens Vineyard keeps in one blob, and changes no result there. Here every token is a
    chunk: larger chunks would match up to ``block_size - 1`` tokens less of each prompt. The other two names have no
    meaning here.
    """

    socket: str
    block_size: int = 5
    sync_interval: int = 3
    llm_cache_sync_lock: str = "llmCacheSyncLock"
    llm_cache_object_name: str = "llm_cache_object"
    llm_ref_cnt_object_name: str = "llm_refcnt_object"


@dataclass
class FileCacheConfig:
    """A cache on a file system, in chunks of ``chunk_size`` tokens.

    LOCAL: ``root`` is a folder (made if it does not exist, and best empty: files of Vineyard itself have another
    format) or any URL that ``kvstore.open`` takes. VINEYARD: ``rpc_endpoint`` is ``HOST:PORT`` of a kvstore worker, and
    ``root`` a name that keeps caches on it apart.

    ``ttl`` is in seconds since the last use, rounded up to 5 min, 30 min, 2 h, 12 h, 3 days or 30 days: after that the
    collector, ``kvstore-gc``, deletes what was written, whether or not the writer lives.

    Accepted without effect: ``hash_chunk_size`` (the store lays out its own files), ``socket`` and ``rdma_endpoint``,
    and the other settings of garbage collection, which the collector has itself.
    """

    chunk_size: int = 16
    hash_chunk_size: int = 2
    root: str = "/tmp/vineyard/llm_cache"
    filesystem_type: FilesystemType = FilesystemType.LOCAL
    gc_interval: int = 30 * 60
    ttl: int = 30 * 60
    enable_global_gc: bool = False
    global_gc_interval: int = 3 * 60 * 60
    global_ttl: int = 3 * 60 * 60
    socket: str = ""
    rpc_endpoint: str = ""
    rdma_endpoint: str = ""


def config_from_environment(
    environment: Mapping[str, str] = os.environ,
) -> FileCacheConfig | VineyardCacheConfig | None:
    """Returns the configuration in the environment, files before shared memory; None if there is none.

    ``VINEYARD_LLM_CACHE_FILESYSTEM`` with ``..._CHUNK_SIZE``, ``..._HASH_CHUNK_SIZE``, ``..._ROOT``, or
    ``VINEYARD_LLM_CACHE_SHARED_MEMORY`` with ``..._SOCKET``, ``..._BLOCK_SIZE``, ``..._SYNC_INTERVAL``. Raises
    ValueError for a wrong number, or a missing socket.
    """

    def number(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"environment variable {name}={text!r}: expected a whole number") from None

    if ENV_FILESYSTEM in environment:
        default = FileCacheConfig()
        return FileCacheConfig(
            chunk_size=number(f"{ENV_FILESYSTEM}_CHUNK_SIZE", default.chunk_size),
            hash_chunk_size=number(f"{ENV_FILESYSTEM}_HASH_CHUNK_SIZE", default.hash_chunk_size),
            root=environment.get(f"{ENV_FILESYSTEM}_ROOT", default.root),
        )
    if ENV_SHARED_MEMORY in environment:
        socket = environment.get(f"{ENV_SHARED_MEMORY}_SOCKET")
        if not socket:
            raise ValueError(f"{ENV_SHARED_MEMORY} is set without {ENV_SHARED_MEMORY}_SOCKET: set it to a path")
        return VineyardCacheConfig(
            socket=socket,
            block_size=number(f"{ENV_SHARED_MEMORY}_BLOCK_SIZE", VineyardCacheConfig.block_size),
            sync_interval=number(f"{ENV_SHARED_MEMORY}_SYNC_INTERVAL", VineyardCacheConfig.sync_interval),
        )
    return None


# The store's errors as RuntimeErrors too: the only class that Vineyard raised, and so what its users catch.


class InvalidCall(InvalidRequest, RuntimeError):
    """InvalidRequest, as a RuntimeError."""


_TWINS: dict[type[KVStoreError], type[KVStoreError]] = {
    InvalidRequest: InvalidCall,
    **{
        kind: type(kind.__name__, (kind, RuntimeError), {"__doc__": f"{kind.__name__}, as a RuntimeError."})
        for kind in (Unavailable, Overloaded, PermissionDenied, RootMismatch, LayoutMismatch, SessionLost)
    },
}
"""The RuntimeError for each error of the store, and for its subclasses."""


@contextmanager
def as_runtime_errors() -> Iterator[None]:
    """Turns each error of the store into its twin, which is a RuntimeError too."""
    try:
        yield
    except KVStoreError as error:
        if isinstance(error, RuntimeError):
            raise
        for kind, twin in _TWINS.items():
            if isinstance(error, kind):
                raise twin(*error.args) from error
        raise


# KVTensor: an address and a length, readable through the buffer protocol.
#
# A ctypes array, because before Python 3.12 no class written in Python can export a buffer of its own.


LENGTHS_MAX = 1024
"""Maximum of cached array types, one for each length in use; a dropped one is made again."""


class KVTensor(ctypes.Array[ctypes.c_char]):
    """``length`` bytes at the address ``data``, which the caller keeps alive: ``KVTensor(k.ctypes.data, k.nbytes)``.

    Exports the buffer protocol (``np.frombuffer(tensor, dtype)``), one dimension of bytes, without a copy.
    ``KVTensor(0, 0)`` in a query asks the cache for memory; the tensor that takes its place owns that memory. Raises
    TypeError if an argument is not an integer, ValueError for a negative length.
    """

    _type_ = ctypes.c_char
    _length_ = 0

    def __new__(cls, data: int, length: int) -> KVTensor:
        """Makes a tensor over the caller's memory; nothing is read yet."""
        tensor: KVTensor = tensor_type(index(length)).from_address(index(data))
        return tensor

    def __init__(self, data: int, length: int) -> None:
        # ctypes would take the arguments for the first items of the array, and write them.
        pass

    @property
    def data(self) -> int:
        """The address."""
        return ctypes.addressof(self)

    @property
    def length(self) -> int:
        """Length in bytes."""
        return len(self)

    def __repr__(self) -> str:
        return f"KVTensor(data={self.data:#x}, length={self.length})"


@lru_cache(LENGTHS_MAX)
def tensor_type(length: int) -> Any:
    """Returns the type of tensors of ``length`` bytes: a ctypes array has its length in its type."""
    return type("KVTensor", (KVTensor,), {"_type_": ctypes.c_char, "_length_": length, "__module__": __name__})


# KVCache: Vineyard's calls on a kvstore namespace.


# The caller's tensors, scattered over its memory, as one array: gathered before a put, scattered after a get.
#
# Both are one numpy call over all tensors, which runs at the speed of a memory copy and without the GIL. It treats
# memory as an array of overlapping rows, one starting at every byte, and picks those that begin at the tensors'
# addresses.


ByteArray = npt.NDArray[np.int8]
KVCacheList = list[list[tuple[KVTensor, KVTensor]]]
"""``kv_cache_list[i][j]`` is K and V of token i at layer j."""

ROW_BYTES_MAX = 16_384
"""Larger tensors are copied one by one: a call for each costs little then, and numpy limits rows times row size."""


class Tensors:
    """K and V of each token and layer, by address."""

    def __init__(self, kv_cache_list: Any, layers: int, tensor_bytes: int) -> None:
        """Takes the addresses out of the list; raises InvalidCall for another shape or other tensors."""
        self._tensor_bytes = tensor_bytes
        flat = _flattened(kv_cache_list, layers)
        lengths = _lengths(flat)
        self.count = len(kv_cache_list)
        self.wants_memory = lengths == {0}
        """True if every tensor is ``KVTensor(0, 0)``."""
        try:
            addresses = np.fromiter(map(ctypes.addressof, flat), np.intp, len(flat))
        except OverflowError:
            raise InvalidCall(
                "a KVTensor points outside of memory: expected an address such as array.ctypes.data"
            ) from None
        if not self.wants_memory:
            if lengths != {tensor_bytes}:
                raise InvalidCall(
                    f"KVTensors have lengths {sorted(lengths)}: expected {tensor_bytes} for all, as tensor_nbytes says"
                )
            if addresses.min() <= 0:
                raise InvalidCall("a KVTensor has no address: expected one such as array.ctypes.data")
        self._addresses = addresses.reshape(self.count, layers, 2)

    def gather(self, first: int, end: int) -> ByteArray:
        """Copies tokens ``first`` to ``end`` into one array of shape ``(layers, 2, end - first, 1, tensor_bytes)``."""
        addresses = self._by_plane(first, end)
        if addresses.size and self._tensor_bytes <= ROW_BYTES_MAX:
            rows, low = _rows(addresses, self._tensor_bytes)
            gathered = rows[addresses - low][..., np.newaxis].view(np.int8)
        else:
            gathered = np.empty((*addresses.shape, self._tensor_bytes), np.int8)
            for address, target in zip(addresses.flat, gathered.reshape(-1, self._tensor_bytes), strict=True):
                np.copyto(target, _at(int(address), self._tensor_bytes))
        return gathered[:, :, :, np.newaxis]

    def scatter(self, values: ByteArray) -> None:
        """Copies ``values``, of shape ``(layers, 2, n, 1, tensor_bytes)``, into the tensors of the first n tokens."""
        addresses = self._by_plane(0, values.shape[2])
        source = values[:, :, :, 0]
        if self._tensor_bytes <= ROW_BYTES_MAX:
            rows, low = _rows(addresses, self._tensor_bytes)
            rows[addresses - low] = source.view(rows.dtype)[..., 0]
        else:
            for place in np.ndindex(*addresses.shape):
                np.copyto(_at(int(addresses[place]), self._tensor_bytes), source[place])

    def _by_plane(self, first: int, end: int) -> npt.NDArray[np.intp]:
        return np.ascontiguousarray(self._addresses[first:end].transpose(1, 2, 0))


def give_memory(kv_cache_list: KVCacheList, values: ByteArray) -> None:
    """Puts tensors over ``values``, of shape ``(layers, 2, n, 1, tensor_bytes)``, into the list's first n entries.

    The tensors keep the memory alive until the last of them, and of the arrays made over them, is gone.
    """
    values = np.ascontiguousarray(values)
    layers, _, count, _, tensor_bytes = values.shape
    over = tensor_type(tensor_bytes).from_buffer
    plane_bytes = count * tensor_bytes
    filled: set[int] = set()
    for token in range(count):
        offsets = range(token * tensor_bytes, values.nbytes, plane_bytes)
        row = [(over(values, offsets[2 * layer]), over(values, offsets[2 * layer + 1])) for layer in range(layers)]
        given = kv_cache_list[token]
        if isinstance(given, list) and id(given) not in filled:
            filled.add(id(given))
            given[:] = row
        else:
            # One inner list may stand for several tokens, as in [row] * n: each token gets its own list.
            kv_cache_list[token] = row


class _MemoryRows:
    """Memory from ``low`` on, as an array whose element i is the row of ``row_bytes`` bytes at ``low + i``."""

    def __init__(self, low: int, count: int, row_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (low, False),
            "typestr": f"|V{row_bytes}",
            "shape": (count,),
            "strides": (1,),
        }


def _rows(addresses: npt.NDArray[np.intp], row_bytes: int) -> tuple[npt.NDArray[np.void], int]:
    """Returns rows that cover all addresses, and the address of row 0. Only the picked rows are ever touched."""
    low, high = int(addresses.min()), int(addresses.max())
    return np.asarray(_MemoryRows(low, high - low + 1, row_bytes)), low


def _at(address: int, size: int) -> ByteArray:
    return np.frombuffer(memoryview(KVTensor(address, size)), np.int8)


def _flattened(kv_cache_list: Any, layers: int) -> list[Any]:
    """Returns all tensors in one list: token by token, layer by layer, K then V."""
    try:
        if set(map(len, kv_cache_list)) != {layers}:
            token = next(at for at, row in enumerate(kv_cache_list) if len(row) != layers)
            raise InvalidCall(
                f"kv_cache_list[{token}] has {len(kv_cache_list[token])} entries: expected {layers}, one per layer"
            )
        pairs = list(chain.from_iterable(kv_cache_list))
        if set(map(len, pairs)) != {2}:
            raise InvalidCall("an entry of kv_cache_list is not a pair: expected (K, V), two KVTensors")
        return list(chain.from_iterable(pairs))
    except TypeError as cause:
        raise InvalidCall(f"kv_cache_list is not a list of lists of pairs (K, V): {cause}") from cause


def _lengths(flat: list[Any]) -> set[int]:
    """Returns the distinct lengths; a ctypes array's length is part of its type, so few types need a look."""
    lengths = set()
    for kind in set(map(type, flat)):
        if not issubclass(kind, KVTensor):
            raise InvalidCall(f"kv_cache_list holds a {kind.__name__}: expected KVTensor")
        lengths.add(kind._length_)
    return lengths


TokenIds = Sequence[int] | npt.NDArray[Any]

GATHER_BYTES = 64 << 20
"""Bytes copied together for one put: this much memory is needed in addition to the caller's own."""
GATHER_PARTS_MAX = 32
"""Limit on the parts of one update, since each put checks all chunks before its own; large updates take large parts."""
HOLES_MAX = 8
"""Retries of one update for chunks that garbage collection took, or that memory had no room for."""


class KVCache:
    """KV of one model in a store, by tokens. Thread-safe. Close it, or use it as a context; a dropped one closes too.

    ``tensor_nbytes`` is the size of K, and of V, of one token at one layer; ``layer`` is the number of layers.
    ``cache_capacity`` is how many tokens a VineyardCacheConfig keeps in the memory of this process, at least 16 MiB and
    at most a quarter of all there is; the folder below it keeps the others. With a FileCacheConfig it has no effect:
    the size of a root is a setting of garbage collection (``kvstore-gc``). ``rank`` with ``world_size`` keeps the ranks
    of a parallel run apart, in ``{root}/{world_size}-{rank}``; ``cache_config.root`` of this object has that path, the
    caller's configuration is unchanged. ``fingerprint`` (a digest of the weights) and ``tenant`` keep models and users
    apart, as in ``Store.namespace``. Further keyword arguments go to ``kvstore.open`` (``etcd``, ``durability``,
    ``memory``, ``write``) or ``kvstore.connect``.

    Without ``cache_config`` the environment says where the cache is (``config_from_environment``).

    Raises ValueError if there is no configuration. Every error of the store is raised as its class in
    ``kvstore.errors`` and as RuntimeError: RootMismatch, PermissionDenied, Unavailable, InvalidRequest for sizes that
    are not positive.
    """

    def __init__(
        self,
        cache_config: FileCacheConfig | VineyardCacheConfig | None = None,
        tensor_nbytes: int = 1024,
        cache_capacity: int = 1024,
        layer: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        fingerprint: str = "",
        tenant: str = "",
        **kwargs: Any,
    ) -> None:
        config = config_from_environment() if cache_config is None else cache_config
        if not isinstance(config, FileCacheConfig | VineyardCacheConfig):
            raise ValueError(
                f"cache_config is {kind_of(config)}: give a FileCacheConfig or a VineyardCacheConfig, "
                f"or set {ENV_FILESYSTEM} or {ENV_SHARED_MEMORY}"
            )
        if isinstance(config, FileCacheConfig) and rank is not None and world_size is not None:
            config = replace(config, root=f"{config.root.rstrip('/')}/{world_size}-{rank}")
        _check_sizes(config, cache_capacity)
        self.cache_config = config
        self.tensor_nbytes = tensor_nbytes
        self.cache_capacity = cache_capacity
        self.layer = layer
        # Vineyard's shared memory matches single tokens, so its block size says nothing about what is found.
        self._chunk_tokens = config.chunk_size if isinstance(config, FileCacheConfig) else 1
        self._ttl_s = max(1, config.ttl) if isinstance(config, FileCacheConfig) else None
        self.chunk_size = config.chunk_size if isinstance(config, FileCacheConfig) else config.block_size
        with as_runtime_errors():
            layout = Layout(layer, 1, tensor_nbytes, "int8", self._chunk_tokens)
            self._store = _open(config, layout, cache_capacity, kwargs)
            # At exit too, and before the interpreter freezes the store's threads, which __del__ would wait for.
            self._closing = weakref.finalize(self, _close_quietly, self._store, os.getpid())
            # The geometry is in the name: another one on the same root is another namespace, not a LayoutMismatch.
            name = f"vineyard-{layer}x{tensor_nbytes}-{self._chunk_tokens}"
            try:
                self._cache = self._store.namespace(name, layout, fingerprint, tenant, _attributes(config))
            except KVStoreError:
                self.close()
                raise

    @property
    def kv_cache_manager(self) -> KVCache:
        """This object; Vineyard's programs close the cache by ``cache.kv_cache_manager.close()``."""
        return self

    def update(self, prefix: TokenIds | None, tokens: TokenIds, kv_cache_list: KVCacheList) -> int:
        """Stores the KV of ``tokens``, which follow ``prefix``; returns how many of ``tokens`` are in the cache now.

        ``kv_cache_list[i][j]`` is K and V of token i at layer j, KVTensors of ``tensor_nbytes`` bytes. Existing tokens
        are not replaced, but count. If a token of ``prefix`` is missing nothing is stored, and the result is 0. With a
        FileCacheConfig both lengths are multiples of ``chunk_size``. Token ids are signed 32-bit integers.

        Fewer are counted if the store refuses some: it is full, or has too much to do. Raises InvalidRequest,
        PermissionDenied or Unavailable; each is a RuntimeError too.
        """
        with as_runtime_errors():
            return self._update(prefix, tokens, kv_cache_list)[0]

    @as_runtime_errors()
    def query(self, prefix: TokenIds | None, tokens: TokenIds, kv_cache_list: KVCacheList) -> int:
        """Reads the KV of ``tokens``, which follow ``prefix``, as far as it is stored; returns how many were read.

        ``kv_cache_list[i][j]`` is the target of K and V of token i at layer j: the caller's memory, ``tensor_nbytes``
        bytes each, or ``KVTensor(0, 0)``, which is replaced in the list by a tensor that has memory. At most as many
        tokens are read as the list has entries. Memory of tokens that did not match is not touched. With a
        FileCacheConfig the prefix is a multiple of ``chunk_size``, and so is the result.

        Raises InvalidRequest, also a RuntimeError. A root that fails or does not answer in time is a miss.
        """
        ids, skipped = self._checked_ids(prefix, tokens)
        count = min(len(ids) - skipped, _length(kv_cache_list)) // self._chunk_tokens * self._chunk_tokens
        if not count:
            return 0
        tensors = Tensors(kv_cache_list[:count], self.layer, self.tensor_nbytes)
        if tensors.wants_memory and not isinstance(kv_cache_list, list):
            raise InvalidCall(f"kv_cache_list is {kind_of(kv_cache_list)}: expected a list, to put tensors into")
        matched, values = self._cache.get(ids[: skipped + count])
        if matched <= skipped:
            return 0
        if tensors.wants_memory:
            give_memory(kv_cache_list, values[:, :, skipped:])
        else:
            tensors.scatter(values[:, :, skipped:])
        return matched - skipped

    def batched_update(self, tokens: TokenIds, kv_cache_list: KVCacheList) -> int:
        """Updates without a prefix; returns how many tokens were not in the cache before."""
        with as_runtime_errors():
            return self._update(None, tokens, kv_cache_list)[1]

    def batched_query(self, tokens: TokenIds, kv_cache_list: KVCacheList) -> int:
        """Queries without a prefix."""
        return self.query(None, tokens, kv_cache_list)

    def close(self) -> None:
        """Ends threads and connections; everything else raises afterwards. Idempotent, never raises."""
        self._closing()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"KVCache(cache_config={self.cache_config}, tensor_nbytes={self.tensor_nbytes}, "
            f"cache_capacity={self.cache_capacity}, layer={self.layer})"
        )

    def _update(self, prefix: TokenIds | None, tokens: TokenIds, kv_cache_list: KVCacheList) -> tuple[int, int]:
        """Returns how many of ``tokens`` are in the store now, and how many of them were written."""
        ids, skipped = self._checked_ids(prefix, tokens)
        if (len(ids) - skipped) % self._chunk_tokens:
            raise InvalidCall(f"{len(ids) - skipped} tokens: expected a multiple of chunk_size ({self._chunk_tokens})")
        if _length(kv_cache_list) != len(ids) - skipped:
            raise InvalidCall(f"kv_cache_list has {len(kv_cache_list)} entries for {len(ids) - skipped} tokens")
        if len(ids) == skipped:
            return 0, 0
        tensors = Tensors(kv_cache_list, self.layer, self.tensor_nbytes)
        if tensors.wants_memory:
            raise InvalidCall("the KVTensors of an update are KVTensor(0, 0): expected the tensors to store")
        present, written = self._put(ids, skipped, tensors)
        return max(0, present - skipped), written

    def _put(self, ids: TokenArray, skipped: int, tensors: Tensors) -> tuple[int, int]:
        """Stores missing tokens part by part; returns how many leading tokens are stored now, and how many were new."""
        layout, size = self._cache.layout, self._chunk_tokens
        part_bytes = max(GATHER_BYTES, layout.kv_bytes_per_token * len(ids) // GATHER_PARTS_MAX)
        step = max(size, part_bytes // layout.kv_bytes_per_token // size * size)
        at = max(skipped, self._cache.match(ids, counts=False))
        write: WriteMode | None = None
        written = holes = 0
        while True:
            # Even with nothing left to write: a put checks the prefix, and renews its recency.
            end = min(at + step, len(ids))
            kv = tensors.gather(at - skipped, end - skipped)
            result = self._cache.put(ids[:end], kv, prefix=at, ttl=self._ttl_s, write=write)
            written += result.chunks_written * size
            if result.tokens_present >= end:
                at = end
                if at == len(ids):
                    return at, written
            elif result.reason != StoreFull.reason and result.tokens_present >= skipped and holes < HOLES_MAX:
                # Behind, memory may have had no room for it; waiting for the root always helps.
                at, holes, write = result.tokens_present, holes + 1, WriteMode.THROUGH
            else:
                return result.tokens_present, written

    def _checked_ids(self, prefix: TokenIds | None, tokens: TokenIds) -> tuple[TokenArray, int]:
        """Returns prefix and tokens as one array of ids, and the length of the prefix."""
        if not self._closing.alive:
            raise InvalidCall("the cache is closed: open it again")
        before = _ids("prefix", () if prefix is None else prefix)
        if len(before) % self._chunk_tokens:
            raise InvalidCall(
                f"prefix has {len(before)} tokens: expected a multiple of chunk_size ({self._chunk_tokens})"
            )
        after = _ids("tokens", tokens)
        return (np.concatenate((before, after)) if len(before) else after), len(before)


def _length(kv_cache_list: KVCacheList) -> int:
    try:
        return len(kv_cache_list)
    except TypeError as cause:
        raise InvalidCall(f"kv_cache_list is {kind_of(kv_cache_list)}: expected a list") from cause


def _ids(what: str, tokens: TokenIds) -> TokenArray:
    """Returns ids as the store has them. Vineyard's are signed, so a negative one becomes its two's complement."""
    try:
        if not len(tokens):
            return np.empty(0, np.uint32)
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as cause:
        raise InvalidCall(f"{what} are not a flat sequence of integers: {cause}") from cause
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidCall(
            f"{what} have type {array.dtype} and shape {array.shape}: expected a flat sequence of integers"
        )
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise InvalidCall(f"{what} hold ids from {array.min()} to {array.max()}: expected {limits.min} to {limits.max}")
    return array.astype("<i4").view("<u4")


def _open(
    config: FileCacheConfig | VineyardCacheConfig, layout: Layout, capacity_tokens: int, settings: dict[str, Any]
) -> Store:
    if isinstance(config, VineyardCacheConfig):
        # Through: other processes see an update that returned, it outlives this one, and it raises if it failed.
        tiers = {"memory": memory_bytes(layout, capacity_tokens), "write": "through"}
        return _open_folder(f"{config.socket}.kvstore", {**tiers, **settings})
    if config.filesystem_type == FilesystemType.LOCAL:
        return _open_folder(config.root, settings)
    host, colon, port = config.rpc_endpoint.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise InvalidCall(
            f"rpc_endpoint={config.rpc_endpoint!r}: filesystem_type VINEYARD needs HOST:PORT of a kvstore worker"
        )
    return kvstore.connect(config.rpc_endpoint, **settings)


def _open_folder(root: str, settings: dict[str, Any]) -> Store:
    """Opens a root; makes the folders above it as Vineyard does."""
    try:
        return kvstore.open(root, **settings)
    except RootMismatch:
        # Only after the store has looked, under its deadline: a mount that hangs must not be touched here.
        parent = os.path.dirname(os.path.abspath(os.path.expanduser(root)))
        if "://" in root or os.path.isdir(parent):
            raise
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as cause:
        kind = PermissionDenied if isinstance(cause, PermissionError) else Unavailable
        raise kind(f"root {root}: could not make {parent}: {cause.strerror}; make it, or name another root") from cause
    return kvstore.open(root, **settings)


def _attributes(config: FileCacheConfig | VineyardCacheConfig) -> dict[str, str]:
    """Returns attributes that keep caches of one store apart: the object's name, or the root's behind a worker."""
    if isinstance(config, VineyardCacheConfig):
        return {"llm_cache_object_name": config.llm_cache_object_name}
    return {"root": config.root} if config.filesystem_type == FilesystemType.VINEYARD else {}


def _check_sizes(config: FileCacheConfig | VineyardCacheConfig, cache_capacity: int) -> None:
    if isinstance(config, FileCacheConfig):
        sizes = {"chunk_size": config.chunk_size, "hash_chunk_size": config.hash_chunk_size, "root": config.root}
    else:
        sizes = {"block_size": config.block_size, "sync_interval": config.sync_interval, "socket": config.socket}
    for name, size in {**sizes, "cache_capacity": cache_capacity}.items():
        is_path = isinstance(size, str) and (size or name == "root")
        if is_path if name in ("root", "socket") else isinstance(size, int) and size > 0:
            continue
        raise InvalidCall(f"{name}={size!r}: expected {'a path' if name in ('root', 'socket') else 'a number over 0'}")


def _close_quietly(store: Store, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has none of the store's threads, and would wait for them
    with suppress(KVStoreError):
        store.close()
