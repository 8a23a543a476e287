"""A memory tier with room for a few chunks, and chunks to fill it with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.census.selection import ClearOrder
from kvstore.codec.image import make_images
from kvstore.core.buffers import BufferLoan, planes_of
from kvstore.core.clock import RandomIds
from kvstore.core.metrics import Counters
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Hints
from kvstore.format.keyset import ChunkKeys
from kvstore.tiers.arena import SealedArena
from kvstore.tiers.memory import MemoryTier, Slot, Slots
from tests.kit.fake_meta import FakeClock
from tests.kit.stores import SMALL, kv_of, same

SPACE = Namespace.of("m", SMALL)


UNIT = 8_192
"""What one chunk of SMALL takes: a header of 4 KiB and 3 KiB of payload, in whole pages."""


def empty(memory: MemoryTier, *namespaces: Namespace) -> int:
    """Drops all chunks of namespaces; returns how many."""
    return memory.drop_ordered(ClearOrder(frozenset(each.id for each in namespaces)))


class Case:
    """A tier with room for this many chunks of SMALL."""

    def __init__(self, chunks: int) -> None:
        self.arena = SealedArena(chunks * UNIT).open()
        self.counters = Counters()
        self.clock = FakeClock()
        self.tier = MemoryTier(self.arena, self.counters, self.clock)

    def fill(
        self,
        wanted: ChunkKeys,
        first: int,
        count: int,
        *,
        dirty: bool = False,
        priority: int = 35,
        replica: bool = False,
    ) -> int:
        """Puts chunks of a chain into it, as far as there is room; how many."""
        filled = 0
        for index in range(first, first + count):
            slot = self.tier.claim(wanted, index, hints=Hints(priority), dirty=dirty, replica=replica)
            if slot is None:
                break
            make(wanted, [index], [slot])
            self.tier.ready([slot])
            filled += 1
        return filled

    def read(self, wanted: ChunkKeys, slots: Slots, start: int, stop: int) -> list[bool]:
        """Reads chunks, and compares all bytes of those reported right."""
        layout = wanted.namespace.layout
        out = np.zeros(layout.shape(len(wanted.tokens)), layout.numpy_dtype)
        done = self.tier.read(slots, start, stop, planes_of(out, layout), BufferLoan())
        kv, size = kv_for(wanted), layout.chunk_tokens
        for index, right in zip(range(start, stop), done.tolist(), strict=True):
            part = slice(index * size, (index + 1) * size)
            assert not right or same(out[:, :, part], kv[:, :, part])
        found: list[bool] = done.tolist()
        return found

    def get(self, wanted: ChunkKeys, first: int = 0) -> list[bool]:
        """The chunks of a chain that are there and right."""
        with self.tier.refer(wanted, first, len(wanted) - first) as slots:
            return self.read(wanted, slots, first, len(wanted))

    def stat(self, name: str) -> int:
        return int(self.tier.stats()[f"memory_{name}"])

    def count(self, name: str) -> int:
        return self.counters.snapshot().get(f"memory_{name}", 0)


def chain_of(number: int, chunks: int, namespace: Namespace = SPACE) -> ChunkKeys:
    size = namespace.layout.chunk_tokens
    return ChunkKeys.of(namespace, np.arange(number * 1_000_000, number * 1_000_000 + chunks * size, dtype=np.uint32))


def kv_for(chain: ChunkKeys) -> npt.NDArray[Any]:
    return kv_of(chain.namespace.layout, chain.tokens)


def make(chain: ChunkKeys, indexes: Sequence[int], slots: Sequence[Slot]) -> None:
    source = planes_of(kv_for(chain), chain.namespace.layout)
    make_images(chain, indexes, source, [slot.memory for slot in slots], RandomIds())
