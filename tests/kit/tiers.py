"""A node with memory over any root, and the actions of tests: put prompts, read them, look where they are.

Separate from the tests, which say what the results must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.buffers import planes_of
from kvstore.core.clock import Clock
from kvstore.core.recency import Hints
from kvstore.core.results import PutResult
from kvstore.core.write_mode import Durability, WriteMode
from kvstore.engine.engine import Engine
from kvstore.engine.settings import Limits, TierSettings
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.memory import MemoryMetadata
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.stack import TierStack
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import eventually as eventually
from tests.kit.patience import stretched
from tests.kit.stores import hasty_while_faulty, kv_of, member_on, same

LARGE = Layout(layers=4, kv_heads=4, head_dim=64, dtype="float16", chunk_tokens=64)
"""Chunks of 256 KiB, so that few of them fill a small memory."""
MEMORY_BYTES = 16 << 20
ROOM_CHUNKS = 63
"""Chunks of ``LARGE`` for which there is room in it: each takes 65 pages."""
QUEUE_CHUNKS = 31
"""Those that may wait for the root: half of memory, by the default limits."""
ASKING = tuple("stage publish open stat look touch list".split())
"""What a node asks a root for while it serves; with ``ASKING`` struck it does not answer at all."""
QUICK = Limits(match_deadline_s=0.5, read_deadline_s=1.0, write_deadline_s=1.0, stall_s=0.3, flush_s=10.0)


def quick(**values: Any) -> Limits:
    """Returns short limits, some of them replaced."""
    return replace(QUICK, **values)


class Prompts:
    """Prompts of one layout, each with different KV."""

    def __init__(self, layout: Layout = LARGE) -> None:
        self.layout = layout
        self._made: dict[int, npt.NDArray[Any]] = {}

    def tokens(self, number: int, chunks: int, first: int = 0) -> npt.NDArray[np.int64]:
        """Tokens of chunks ``first`` to ``chunks - 1``."""
        size = self.layout.chunk_tokens
        return np.arange(first * size, chunks * size) + number * 1_000_000

    def kv(self, number: int, chunks: int, first: int = 0) -> npt.NDArray[Any]:
        """Their KV, always the same."""
        made = self._made.get(number)
        if made is None or made.shape[2] < chunks * self.layout.chunk_tokens:
            made = self._made[number] = kv_of(self.layout, self.tokens(number, chunks))
        return made[:, :, first * self.layout.chunk_tokens : chunks * self.layout.chunk_tokens]


class Acting:
    """One member over a root, with what tests ask of it."""

    def __init__(
        self,
        root: Root,
        *,
        write: WriteMode = WriteMode.BEHIND,
        disk: Path | None = None,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = 64 << 20,
        durability: Durability = Durability.NONE,
        limits: Limits = QUICK,
        clock: Clock | None = None,
        layout: Layout = LARGE,
        meta: MemoryMetadata | None = None,
    ) -> None:
        limits = stretched(limits, "match_deadline_s", "read_deadline_s", "write_deadline_s", "stall_s")
        settings = TierSettings(memory_bytes, str(disk) if disk else "", disk_bytes if disk else 0, write)
        self.root = root
        self.member = member_on(root, limits, clock, durability, settings, meta)
        if isinstance(root, FaultyRoot):
            hasty_while_faulty(root, self.member, limits)
        self.node: Engine = self.member.node
        self.identity = self.node.identity
        assert self.node.tiers is not None
        self.tiers: TierStack = self.node.tiers
        self.memory: MemoryTier = self.tiers.memory
        self.store = Store(LocalTransport(self.member))
        self.cache = self.store.namespace("m", layout)
        self.prompts = Prompts(layout)

    def chain(self, number: int, chunks: int) -> ChunkKeys:
        return ChunkKeys.of(self.cache.namespace, np.asarray(self.prompts.tokens(number, chunks), np.uint32))

    def put(
        self, number: int, chunks: int, first: int = 0, write: WriteMode | None = None, hints: Hints | None = None
    ) -> PutResult:
        """Puts chunks ``first`` to ``chunks - 1`` of a prompt."""
        if write is None and hints is None:
            return self.cache.put(
                self.prompts.tokens(number, chunks), self.prompts.kv(number, chunks, first), first * self.size
            )
        sections = planes_of(self.prompts.kv(number, chunks), self.cache.layout)
        return self.node.put(self.chain(number, chunks), first, sections, hints=hints or Hints(), write=write)

    def get(self, number: int, chunks: int) -> int:
        """Returns the number of leading chunks that are read, every byte compared."""
        tokens, kv = self.cache.get(self.prompts.tokens(number, chunks))
        count = tokens // self.size
        assert same(kv, self.prompts.kv(number, chunks)[:, :, :tokens]), "wrong bytes"
        return count

    def match(self, number: int, chunks: int) -> int:
        return self.cache.match(self.prompts.tokens(number, chunks)) // self.size

    @property
    def size(self) -> int:
        return self.cache.layout.chunk_tokens

    @property
    def unit_bytes(self) -> int:
        """Returns the bytes that one chunk takes of the queue."""
        return self.chain(0, 1).image_bytes(0)

    def in_memory(self, number: int, chunks: int) -> list[bool]:
        """The chunks of a prompt that are in memory."""
        with self.memory.refer(self.chain(number, chunks), 0, chunks) as slots:
            return [entry is not None for entry in slots.entries]

    def on_disk(self, number: int, chunks: int) -> list[bool]:
        """The chunks that are on the local disk."""
        assert self.tiers.disk is not None
        chain = self.chain(number, chunks)
        return [self.tiers.disk.leading(chain.leading(index + 1), index) == 1 for index in range(chunks)]

    def name(self, number: int, index: int) -> places.Name:
        """Returns the name of a chunk's file on the root."""
        address = self.chain(number, index + 1).addresses[index]
        return places.chunk(address, self.cache.namespace.id, self.identity.shard_bits)

    def on_root(self, number: int, chunks: int) -> list[bool]:
        """The chunks that are on the root, looked at behind the node's back."""
        root = self.root.inner if isinstance(self.root, FaultyRoot) else self.root
        return [root.stat(self.name(number, index)) is not None for index in range(chunks)]

    def lose(self, number: int, chunks: int, first: int = 0) -> None:
        """Takes chunks from the root, behind the node's back; it finds out when it next looks."""
        root = self.root.inner if isinstance(self.root, FaultyRoot) else self.root
        for index in range(first, chunks):
            assert root.remove(self.name(number, index))
        self.node.forget()

    def forget(self, number: int, chunks: int, first: int = 0) -> None:
        """Takes chunks from memory, the last first."""
        with self.memory.refer(self.chain(number, chunks), first, chunks - first) as slots:
            self.memory.evict(slots.referred[::-1])

    def damage(self, number: int, index: int, at: int = 9_000) -> None:
        """Turns a bit of an image in memory."""
        with self.memory.refer(self.chain(number, index + 1), index, 1) as slots:
            (entry,) = slots.referred
            self.memory.arena.memory[entry.offset + at] ^= 1

    def stat(self, name: str) -> int:
        return int(self.store.stats().get(name, 0))

    def drain(self) -> None:
        self.node.drain()

    def assert_settled(self) -> None:
        """Asserts that nothing is referred to, leased, dirty or waiting."""
        eventually(lambda: not self.stat("memory_referenced_bytes") and not self.stat("behind_bytes"))
        assert self.stat("memory_leased_bytes") == self.stat("memory_dirty_bytes") == 0
        assert self.stat("holds") == 0

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Acting:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def held(root: FaultyRoot, *operations: str) -> Iterator[Hang]:
    """Blocks these calls to the root (``stage`` alone by default) inside the context."""
    hang = Hang()
    root.set_rules([Rule(operation, hang) for operation in operations or ("stage",)])
    try:
        yield hang
    finally:
        root.set_rules([])
        hang.release.set()


def faulty(root: Root | None = None) -> FaultyRoot:
    """A root that fails where rules say so, over one in memory."""
    return FaultyRoot(root or MemoryRoot(MemoryFiles()))


def on_posix(folder: Path) -> PosixRoot:
    folder.mkdir(parents=True, exist_ok=True)
    return PosixRoot(folder)


def together(*actions: Callable[[], object]) -> None:
    """Runs functions in separate threads; raises the first error."""
    with ThreadPoolExecutor(len(actions)) as threads:
        for running in [threads.submit(action) for action in actions]:
            running.result()
