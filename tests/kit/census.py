"""Nodes of two roll-outs on one root and one metadata store, all in this process.

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
from kvstore.census.walk import ChunkFile, walk
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.engine.coordination import Coordination
from kvstore.engine.open import join
from kvstore.engine.settings import NodeOptions, TierSettings
from kvstore.format.header import lineage_id, written
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from tests.kit.patience import PATIENCE_S, eventually, stretched
from tests.kit.stores import kv_of
from tests.kit.tiers import QUICK

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=32)
SIZE = LAYOUT.chunk_tokens


class RolledOut:
    """One node of a roll-out: its KV differs from that of others for the same tokens."""

    def __init__(
        self,
        root: Root,
        store: MemoryStore,
        label: str,
        disk: Path | None = None,
        clear_answer_s: float = PATIENCE_S,
    ) -> None:
        clock, ids = SystemClock(), RandomIds()
        limits = stretched(QUICK, "match_deadline_s", "read_deadline_s", "write_deadline_s", "stall_s")
        limits = replace(limits, clear_answer_s=clear_answer_s)
        self.root = root
        self.label = label
        settings = TierSettings(16 << 20, str(disk) if disk else "", (64 << 20) if disk else 0)
        self.member = join(
            root,
            create_or_open(root, ids),
            MemoryMetadata(store, clock=clock),
            limits=limits,
            clock=clock,
            ids=ids,
            sharing=Coordination.CLUSTER,
            options=NodeOptions(tiers=settings, label=label),
        )
        self.node = self.member.node
        self.cache = Store(LocalTransport(self.member)).namespace("m", LAYOUT)

    @property
    def session(self) -> bytes:
        return self.member.presence.current().id

    def kv(self, number: int, chunks: int) -> npt.NDArray[np.float16]:
        """Another roll-out has other bytes: which are right is the engine's affair, never the store's."""
        made = kv_of(LAYOUT, tokens(number, chunks)).view(np.uint16) ^ np.uint16(len(self.label))
        return made.view(np.float16)

    def put(self, number: int, chunks: int = 4) -> None:
        assert self.cache.put(tokens(number, chunks), self.kv(number, chunks)).tokens_present == chunks * SIZE

    def drain(self) -> None:
        self.node.drain()
        # One lane writes the record; another one may publish, and end the put, before it has.
        eventually(lambda: not self.node.incarnations.owes_record)

    def match(self, number: int, chunks: int = 4) -> int:
        return self.cache.match(tokens(number, chunks)) // SIZE

    def serves(self, number: int, wrote: RolledOut, chunks: int = 4) -> int:
        """Returns the number of leading chunks that a get finds, all as ``wrote`` wrote them."""
        count, kv = self.cache.get(tokens(number, chunks))
        assert kv.tobytes() == np.ascontiguousarray(wrote.kv(number, chunks)[:, :, :count]).tobytes(), "another's bytes"
        return count // SIZE

    def chain(self, number: int, chunks: int = 4) -> ChunkKeys:
        return ChunkKeys.of(self.cache.namespace, np.asarray(tokens(number, chunks), np.uint32))

    def in_memory(self, number: int, chunks: int = 4) -> int:
        assert self.node.memory is not None
        return self.node.memory.leading(self.chain(number, chunks))

    def on_root(self) -> list[ChunkFile]:
        return list(walk(self.root, self.node.identity.shard_bits, headers=True))

    def wrote(self, found: ChunkFile) -> bool:
        assert found.header is not None
        said = written(found.header.incarnation)
        return said is not None and said.lineage == lineage_id(self.session)

    def close(self) -> None:
        self.member.close()


def tokens(number: int, chunks: int = 4) -> npt.NDArray[np.int64]:
    return np.arange(chunks * SIZE) + number * 1_000_000


@contextmanager
def closing(*nodes: RolledOut) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.close()
