"""Shared by the tests of inventories: room without pieces, places of chunks, and existing entries."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.address import NO_PARENT, chunk_address, hashed_block_address
from kvstore.core.namespace import NamespaceDigest
from kvstore.tiers.inventory import ChunkIdentity, TierEntry, TierInventory, TierSpace

NAMESPACES = [NamespaceDigest(bytes([number]) * 32) for number in (1, 2)]


class Bytes:
    """Room that is never fragmented; each take has a different number."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.taken: dict[int, int] = {}
        self._number = 0

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - sum(self.taken.values())

    def take(self, size_bytes: int) -> int | None:
        if size_bytes > self.free_bytes:
            return None
        self._number += 1
        self.taken[self._number] = size_bytes
        return self._number

    def give(self, offset: int) -> None:
        del self.taken[offset]  # KeyError: given back twice


def block(number: int) -> ChunkIdentity:
    return ChunkIdentity(NAMESPACES[0], hashed_block_address(NAMESPACES[0], number.to_bytes(16, "big")), NO_PARENT)


def chain(count: int, seed: int = 0, namespace: NamespaceDigest = NAMESPACES[0]) -> list[ChunkIdentity]:
    places: list[ChunkIdentity] = []
    parent = NO_PARENT
    for number in range(count):
        tokens = (seed * 1_000 + number).to_bytes(4, "little")
        address = chunk_address(namespace, parent, tokens)
        places.append(ChunkIdentity(namespace, address, parent))
        parent = address
    return places


def fill(
    inventory: TierInventory, places: Iterable[ChunkIdentity], now_s: float = 0.0, size_bytes: int = 10
) -> list[TierEntry]:
    """Claims, shows and releases each."""
    entries = []
    for place in places:
        entry = inventory.claim(place, size_bytes, now_s)
        assert entry is not None
        assert inventory.ready(entry)
        inventory.unrefer(entry)
        entries.append(entry)
    return entries


def lru(room: TierSpace) -> TierInventory:
    return TierInventory(room)
