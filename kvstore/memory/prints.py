"""Prints: 32 bits of each address that a tier holds, by shard, in order; peers are told them (MEMORY.md, "Peers").

Kept up to date at four bytes each, because a shard of a million prints is sent again about once a second.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from kvstore.address import Address

SHARDS_COUNT = 64


def shard_of(address: Address) -> int:
    """Returns the first six bits of an address."""
    return address[0] >> 2


def print_of(address: Address) -> int:
    """Returns bytes 4 to 8 of an address, little-endian."""
    return int.from_bytes(address[4:8], "little")


class Prints:
    """The prints of a set of addresses. Not thread-safe."""

    def __init__(self) -> None:
        self._shards = [array("I") for _ in range(SHARDS_COUNT)]
        self._changed: set[int] = set()

    def add(self, address: Address) -> None:
        """Adds an address that is not in the set."""
        shard = shard_of(address)
        insort(self._shards[shard], print_of(address))
        self._changed.add(shard)

    def remove(self, address: Address) -> None:
        """Removes an address that is in the set."""
        shard = shard_of(address)
        prints = self._shards[shard]
        del prints[bisect_left(prints, print_of(address))]
        self._changed.add(shard)

    def changes(self) -> set[int]:
        """Returns the shards in which addresses came or went since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def of(self, shard: int) -> npt.NDArray[np.uint32]:
        """Returns the prints of a shard, shape ``(n,)``, each once, ascending; a copy."""
        prints = np.array(self._shards[shard], np.uint32)
        # np.unique would sort: 20 times slower.
        return np.concatenate((prints[:1], prints[1:][prints[1:] != prints[:-1]]))
