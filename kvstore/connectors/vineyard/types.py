"""Vineyard's types: configurations, tensors and errors."""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    Overloaded,
    PermissionDenied,
    RootMismatch,
    SessionLost,
    Unavailable,
)
from kvstore.format.header import PAGE_BYTES, header_bytes
from kvstore.layout import Layout
from kvstore.memory.arena import memory_there_bytes
from kvstore.node.settings import MEMORY_BYTES_MIN

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
    ``{socket}.kvstore`` beside the path of Vineyard's socket. No server is needed: all processes that name the same
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
