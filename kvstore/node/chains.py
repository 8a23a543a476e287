"""The chains of recent prompts, so that the next turn of a chat hashes only what is new in it.

Most prompts begin with one that was seen before.  Comparing tokens costs a twentieth of hashing them and is as exact:
an address follows from the parent's address and the chunk's tokens, so where both are equal, byte for byte, it is too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kvstore.address import NO_PARENT, Address, Chain, chained_addresses, chunk_count
from kvstore.namespace import Namespace
from kvstore.native import addresses as native
from kvstore.tokens import TokenArray

CHUNKS_MIN = 8
"""Shorter prompts are hashed as fast as they are found."""
CHAINS_MAX = 32
"""Chains remembered; a prompt that begins like none of them is compared with each, a fifth of a microsecond each."""
ADDRESS_COST_BYTES = 80
"""An address as an object in a tuple."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recent:
    """A chain, and its tokens as u32."""

    chain: Chain
    packed: bytes

    @property
    def cost_bytes(self) -> int:
        return len(self.packed) + ADDRESS_COST_BYTES * len(self.chain)


class RecentChains:
    """The chains of the prompts used last; thread-safe, at most ``bytes_max`` of memory."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        # The one used last first. Replaced as a whole, so that whoever looks needs no lock.
        self._recent: tuple[_Recent, ...] = ()

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def size_bytes(self) -> int:
        """What they take at most; addresses that some of them share are counted for each."""
        return sum(recent.cost_bytes for recent in self._recent)

    def of(self, namespace: Namespace, tokens: TokenArray) -> Chain:
        """``Chain.of``, with what a recent prompt shares taken from there. Raises InvalidRequest as it does."""
        count = chunk_count(namespace, tokens)
        size = 4 * namespace.layout.chunk_tokens
        if count < CHUNKS_MIN:
            packed = tokens[: count * namespace.layout.chunk_tokens].tobytes()
            return Chain(namespace, np.frombuffer(packed, "<u4"), tuple(_addresses(namespace, packed)))
        given = tokens.data.cast("B")[: count * size]
        like, shared = self._most_alike(namespace, given, size)
        if like is None:
            packed = bytes(given)
            addresses = tuple(_addresses(namespace, packed))
        elif shared == count:
            self._used(like)
            return like.chain.leading(count)
        else:
            # What is shared comes from our bytes, not from the caller's, which may have changed since we compared
            # them: an address must be that of the tokens beside it.
            packed = b"".join((memoryview(like.packed)[: shared * size], given[shared * size :]))
            known = like.chain.addresses[:shared]
            addresses = (*known, *_addresses(namespace, packed, shared, known[-1]))
        chain = Chain(namespace, np.frombuffer(packed, "<u4"), addresses)
        self._used(_Recent(chain, packed))
        return chain

    def _most_alike(self, namespace: Namespace, given: memoryview, size: int) -> tuple[_Recent | None, int]:
        """The recent chain that shares most chunks with the tokens ``given``, and how many."""
        best: _Recent | None = None
        shared, parent, following = 0, NO_PARENT, given[:size]
        for recent in self._recent:
            chain = recent.chain
            # Equal up to here, because the addresses are; and it goes on as the tokens do.
            if (
                len(chain) > shared
                and chain.namespace.digest == namespace.digest
                and chain.parent(shared) == parent
                and recent.packed.startswith(following, shared * size)
            ):
                best, shared = recent, _shared_count(recent.packed, given, size, shared + 1)
                if (shared + 1) * size > len(given):
                    break
                parent, following = chain.addresses[shared - 1], given[shared * size : (shared + 1) * size]
        return best, shared

    def _used(self, used: _Recent) -> None:
        """Puts a chain in front, and forgets those that it continues and what is too much."""
        recent = self._recent
        if (recent and recent[0] is used) or used.cost_bytes > self._bytes_max:
            return
        with self._lock:
            kept: list[_Recent] = []
            cost_bytes = 0
            for each in (used, *(each for each in self._recent if not _continues(used.chain, each.chain))):
                cost_bytes += each.cost_bytes
                if cost_bytes > self._bytes_max or len(kept) == CHAINS_MAX:
                    break
                kept.append(each)
            self._recent = tuple(kept)


def _addresses(namespace: Namespace, packed: bytes, first: int = 0, parent: Address = NO_PARENT) -> Sequence[Address]:
    """``chained_addresses``, without the GIL where that was built."""
    if not native.is_available:
        return chained_addresses(namespace, packed, first, parent)
    found = native.chained(namespace.digest, parent, packed, 4 * namespace.layout.chunk_tokens, first)
    return cast("list[Address]", found)


def _continues(chain: Chain, other: Chain) -> bool:
    """Whether ``chain`` begins with all of ``other``, or is it."""
    return len(other) <= len(chain) and chain.addresses[len(other) - 1] == other.addresses[-1]


def _shared_count(packed: bytes, given: memoryview, size: int, low: int) -> int:
    """How many leading chunks of ``size`` bytes are equal, given that the first ``low`` are."""
    high = min(len(packed), len(given)) // size
    middle = high
    # No step compares more than up to the first difference, and none what was equal in one before.
    while low < high:
        if packed.startswith(given[low * size : middle * size], low * size):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
