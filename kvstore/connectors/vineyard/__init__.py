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

from kvstore.connectors.vineyard.cache import KVCache
from kvstore.connectors.vineyard.types import FileCacheConfig, FilesystemType, KVTensor, VineyardCacheConfig

__all__ = ["FileCacheConfig", "FilesystemType", "KVCache", "KVTensor", "VineyardCacheConfig"]
