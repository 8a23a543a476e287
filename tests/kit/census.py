"""Nodes with a model each on one root and one metadata store, all in this process.

Separate from the tests, which say what must be left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.census.selection import Selection
from kvstore.census.walk import ChunkFile, walk
from kvstore.client.cache import Cache
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.engine.open import join
from kvstore.engine.settings import NodeOptions, TierSettings
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from tests.kit.patience import PATIENCE_S, stretched
from tests.kit.stores import kv_of
from tests.kit.tiers import QUICK

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=32)
SIZE = LAYOUT.chunk_tokens


class ModelNode:
    """One node, which writes the KV of its own model and reads that of all."""

    def __init__(
        self,
        root: Root,
        store: MemoryStore,
        model: str,
        disk: Path | None = None,
        clear_answer_s: float = PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        clock, ids = clock or SystemClock(), RandomIds()
        limits = stretched(QUICK, "match_deadline_s", "read_deadline_s", "write_deadline_s", "stall_s")
        limits = replace(limits, clear_answer_s=clear_answer_s)
        self.root = root
        self.model = model
        settings = TierSettings(16 << 20, str(disk) if disk else "", (64 << 20) if disk else 0)
        self.member = join(
            root,
            create_or_open(root, ids),
            MemoryMetadata(store, clock=clock),
            limits=limits,
            clock=clock,
            ids=ids,
            in_cluster=True,
            options=NodeOptions(tiers=settings),
        )
        self.node = self.member.node
        self._store = Store(LocalTransport(self.member))
        self.cache = self._store.namespace(model, LAYOUT)
        self.selection = Selection(namespace=self.cache.namespace.digest)

    @property
    def session(self) -> bytes:
        return self.member.presence.current().id

    def kv(self, number: int, chunks: int) -> npt.NDArray[np.float16]:
        made = kv_of(LAYOUT, tokens(number, chunks)).view(np.uint16) ^ np.uint16(len(self.model))
        return made.view(np.float16)

    def put(self, number: int, chunks: int = 4) -> None:
        assert self.cache.put(tokens(number, chunks), self.kv(number, chunks)).tokens_present == chunks * SIZE

    def drain(self) -> None:
        self.node.drain()

    def cache_of(self, wrote: ModelNode) -> Cache:
        return self._store.namespace(wrote.model, LAYOUT)

    def match(self, number: int, wrote: ModelNode, chunks: int = 4) -> int:
        return self.cache_of(wrote).match(tokens(number, chunks)) // SIZE

    def serves(self, number: int, wrote: ModelNode, chunks: int = 4) -> int:
        """Returns the number of leading chunks that a get finds, all as ``wrote`` wrote them."""
        count, kv = self.cache_of(wrote).get(tokens(number, chunks))
        assert kv.tobytes() == np.ascontiguousarray(wrote.kv(number, chunks)[:, :, :count]).tobytes(), "another's bytes"
        return count // SIZE

    def chain(self, number: int, chunks: int = 4) -> ChunkKeys:
        return ChunkKeys.of(self.cache.namespace, np.asarray(tokens(number, chunks), np.uint32))

    def in_memory(self, number: int, wrote: ModelNode, chunks: int = 4) -> int:
        assert self.node.memory is not None
        return self.node.memory.leading(wrote.chain(number, chunks))

    def on_root(self) -> list[ChunkFile]:
        return list(walk(self.root, self.node.identity.shard_bits))

    def close(self) -> None:
        self.member.close()


def tokens(number: int, chunks: int = 4) -> npt.NDArray[np.int64]:
    return np.arange(chunks * SIZE) + number * 1_000_000


@contextmanager
def closing(*nodes: ModelNode) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.close()
