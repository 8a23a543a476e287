"""LMCache inside the engine: the store as one of its ``remote_storage_plugins``, the older interface.

A full chunk is one block. A part chunk (``save_unfull_chunk``) has a second block that stores its length, because
LMCache asks for a key without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.client import Cache
from kvstore.connectors.common import LazyStore, RateLimitedLog, block_key, leading, match, text
from kvstore.connectors.lmcache_keys import LMCacheSettings, bytes_of, tensors
from kvstore.errors import InvalidRequest, KVStoreError

log = logging.getLogger(__name__)

PLUGIN = "kvstore"
"""Its name in ``remote_storage_plugins``; ``kvstore.NAME`` for a second one."""
LENGTH_BYTES = 8


class KVStoreConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector from LMCache's ``extra_config``."""

    def __init__(self) -> None:
        super().__init__(f"{PLUGIN}://")

    def can_parse(self, url: str) -> bool:
        kind, _, rest = url.partition("://")
        return kind == PLUGIN or (kind == "plugin" and extract_plugin_type(rest) == PLUGIN)

    def create_connector(self, context: ConnectorContext) -> KVStoreRemoteConnector:
        return KVStoreRemoteConnector(
            context.loop, context.local_cpu_backend, context.config, context.plugin_name or PLUGIN
        )


class KVStoreRemoteConnector(RemoteConnector):  # type: ignore[misc]
    """The connector. Its settings are those of ``kvstore.connectors.lmcache_keys.LMCacheSettings``, in
    ``extra_config``.

    A setting given as ``remote_storage_plugin.NAME.KEY`` wins; NAME is the plug-in's name. A store that fails or does
    not answer in time is a miss. Raises InvalidRequest for invalid settings, and if LMCache's hashes would differ in
    the next process; and what ``kvstore.open`` raises.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any, plugin_name: str = PLUGIN
    ) -> None:
        config = config if config is not None else local_cpu_backend.config
        super().__init__(config, local_cpu_backend.metadata)
        _check(config)
        self._memory = local_cpu_backend
        settings = LMCacheSettings.of(_given(config.extra_config or {}, plugin_name), "extra_config")
        self._store = LazyStore(settings)
        self._trouble = RateLimitedLog(log, "lmcache.call_failed")
        self._made_of = tensors(self.meta_shapes, self.meta_dtypes)

    # Looking up

    async def exists(self, key: Any) -> bool:
        return await asyncio.to_thread(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """Returns the number of leading keys in the store."""
        if not keys:
            return 0
        names = [self._name(key) for key in keys]
        return self._trouble.or_miss(lambda: match(self._cache(keys[0]).blocks, names), 0)

    def support_batched_async_contains(self) -> bool:
        return True

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """Counts as ``batched_contains`` does. Nothing is pinned: a block collected before it is read is a miss."""
        return await asyncio.to_thread(self.batched_contains, keys)

    # Reading

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        return await asyncio.to_thread(self._get, keys)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """Returns the objects of the leading keys that could be read."""
        made = await self.batched_get(keys)
        count = leading([each is not None for each in made])
        for each in made[count:]:
            if each is not None:
                each.ref_count_down()
        return made[:count]

    def _get(self, keys: list[Any]) -> list[Any]:
        # With LMCache's default, busy_loop, a call waits for ever for memory that this one has taken.
        made = [self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False) for _ in keys]
        wanted = [at for at, each in enumerate(made) if each is not None]
        hits = [False] * len(keys)
        try:
            if wanted:
                cache = self._cache(keys[0])
                names = [self._name(keys[at]) for at in wanted]
                read = cache.blocks.get(names, [bytes_of(made[at]) for at in wanted])
                for at, hit in zip(wanted, read, strict=True):
                    hits[at] = hit
                if not all(read):  # the last chunk of a prompt may be a part, and nothing counts behind the first miss
                    first = read.index(False)
                    hits[wanted[first]] = self._get_part(cache, names[first], made[wanted[first]])
        except KVStoreError as error:
            self._trouble.failed(error)
        finally:
            for at, each in enumerate(made):
                if each is not None and not hits[at]:
                    each.ref_count_down()
                    made[at] = None
        return made

    def _get_part(self, cache: Cache, name: bytes, made: Any) -> bool:
        """Reads a part chunk, and sets the object's length."""
        length = bytearray(LENGTH_BYTES)
        if not cache.blocks.get([_length_name(name)], [memoryview(length)])[0]:
            return False
        size_bytes = int.from_bytes(length, "little")
        if not 0 < size_bytes < self.full_chunk_size_bytes or size_bytes % self.single_token_size:
            return False
        return cache.blocks.get([name], [bytes_of(made)[:size_bytes]])[0] and bool(
            self.reshape_partial_chunk(made, size_bytes)
        )

    # Storing

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        await asyncio.to_thread(self._put, keys, memory_objs)

    def _put(self, keys: list[Any], made: list[Any]) -> None:
        names, buffers = [], []
        for key, each in zip(keys, made, strict=True):
            name, memory = self._name(key), bytes_of(each)
            if len(memory) < self.full_chunk_size_bytes:
                names.append(_length_name(name))
                buffers.append(memoryview(len(memory).to_bytes(LENGTH_BYTES, "little")))
            names.append(name)
            buffers.append(memory)
        if names:
            self._trouble.or_miss(lambda: self._cache(keys[0]).blocks.put(names, buffers), None)

    # The rest

    async def list(self) -> list[str]:
        """Returns an empty list: the store knows only digests of the keys."""
        return []

    def remove_sync(self, key: Any) -> bool:
        """Returns False: the store's garbage collection decides what goes."""
        return False

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """Returns 0 if the store answers."""
        try:
            await asyncio.to_thread(lambda: self._store.store().stats())
        except KVStoreError:
            return 1
        return 0

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)

    def _cache(self, key: Any) -> Cache:
        return self._store.model("lmcache", key.model_name, {"engine": "lmcache", "interface": "remote"})

    def _name(self, key: Any) -> bytes:
        """Names a block by every field of LMCache's key, each encoded alone: users may write separators into tags."""
        fields = [
            key.model_name,
            str(key.world_size),
            str(key.worker_id),
            key.chunk_hash_hex,
            str(key.dtype),
            self._made_of,
        ]
        fields += [part for tag, value in key.tags or () for part in (tag, str(value))]
        return block_key(*map(text, fields))


def _given(extra: Mapping[str, Any], plugin: str) -> dict[str, Any]:
    """Our settings out of LMCache's, where others have theirs too."""
    given = {key: value for key, value in extra.items() if key in LMCacheSettings.names()}
    prefix = f"remote_storage_plugin.{plugin}."
    theirs = {"module_path", "class_name"}
    given.update((key[len(prefix) :], each) for key, each in extra.items() if key.startswith(prefix))
    return {key: value for key, value in given.items() if key not in theirs}


def _check(config: Any) -> None:
    """Raises InvalidRequest if this interface cannot be served."""
    if config.use_layerwise:
        raise InvalidRequest(
            "use_layerwise: kvstore stores whole chunks here; use LMCache's server mode, or switch it off"
        )
    if config.remote_serde not in (None, "naive"):
        raise InvalidRequest(
            f"remote_serde={config.remote_serde}: kvstore stores chunks as they are here; leave it out"
        )
    algorithm = str(getattr(config, "pre_caching_hash_algorithm", "builtin"))
    if algorithm == "builtin" and not os.environ.get("PYTHONHASHSEED"):
        raise InvalidRequest(
            "LMCache's builtin hashes differ in every process, so nothing that this one stores would be found: set "
            "pre_caching_hash_algorithm to sha256_cbor, or PYTHONHASHSEED to the same number in every engine"
        )


def _length_name(name: bytes) -> bytes:
    return block_key(name, b"length")
