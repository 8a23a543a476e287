"""The two configurations of a Vineyard cache, and the one from the environment."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

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
