"""Vineyard's LLM KV cache in file mode: one update and one query for the whole prompt, a tensor each token and layer.

It takes nested lists of tensors.  ``Vineyard`` makes them once, as an engine could that moves its KV through one fixed
buffer; ``VineyardLists`` makes them for each call, as one must whose KV lies elsewhere each time.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.competitors.contender import Bytes, Contender, Memory, Workload, expect

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
