"""The chains of recent prompts: the next turn of a chat hashes only its new tokens.

Most prompts begin with one seen before. Comparing tokens costs a twentieth of hashing them and is as exact: an address
follows from the parent's address and the chunk's tokens, so if both are equal byte for byte, the addresses are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from kvstore.address import ADDRESS_BYTES, Chain, chained_addresses, chunk_count
from kvstore.namespace import Namespace
from kvstore.tokens import TokenArray

CHUNKS_MIN = 8
"""Below this many chunks, hashing a prompt is as fast as finding a recent one."""
CHAINS_MAX = 32
"""Limit on remembered chains. A prompt that matches none of them is compared with each, at 0.2 microseconds each."""
ADDRESS_COST_BYTES = 96
"""Memory cost of one address: packed, and as an object in a tuple once somebody needs it."""


def chains_of(namespace: Namespace, prompts: Sequence[TokenArray]) -> list[Chain]:
    """Returns ``Chain.of`` each, for prompts that begin with no recent one. Raises InvalidRequest."""
    size = namespace.layout.chunk_tokens
    counts = [chunk_count(namespace, tokens) for tokens in prompts]
    # A copy of our own, as ``Chain.of`` has.
    packed = b"".join([tokens[: count * size].data for tokens, count in zip(prompts, counts, strict=True)])
    own, found = np.frombuffer(packed, "<u4"), chained_addresses(namespace, packed, counts=counts)
    ends = pairwise((0, *accumulate(counts)))
    return [
        Chain(namespace, own[start * size : end * size], found[start * ADDRESS_BYTES : end * ADDRESS_BYTES])
        for start, end in ends
    ]


class _Recent:
    """A chain and its tokens as u32. What each look at it needs is at hand: a search looks at all, many times."""

    __slots__ = ("chain", "cost_bytes", "count", "digest", "packed_addresses", "packed_tokens")

    def __init__(self, chain: Chain, packed: bytes) -> None:
        self.chain = chain
        self.packed_tokens = packed
        self.packed_addresses = chain.packed_addresses
        self.count = len(chain)
        self.digest = chain.namespace.digest
        self.cost_bytes = len(packed) + ADDRESS_COST_BYTES * self.count

    def continues(self, other: _Recent) -> bool:
        """True if its chain begins with all of the other one, or equals it."""
        return self.packed_addresses.startswith(
            other.packed_addresses[-ADDRESS_BYTES:], (other.count - 1) * ADDRESS_BYTES
        )


class RecentChains:
    """The chains of the most recent prompts; thread-safe, at most ``bytes_max`` of memory."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        # Most recent first. Replaced as a whole, so that readers need no lock.
        self._recent: tuple[_Recent, ...] = ()

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def size_bytes(self) -> int:
        """An upper bound of the memory used."""
        return sum(recent.cost_bytes for recent in self._recent)

    def of(self, namespace: Namespace, tokens: TokenArray) -> Chain:
        """Returns ``Chain.of``, taking the shared leading chunks from a recent prompt. Raises InvalidRequest."""
        count = chunk_count(namespace, tokens)
        size = 4 * namespace.layout.chunk_tokens
        if count < CHUNKS_MIN:
            return Chain.of(namespace, tokens)
        given = tokens.data.cast("B")[: count * size]
        like, shared = self._most_alike(namespace, given, size)
        if like is None:
            # The bytes of a prompt in bytes that nobody can change are as good as a copy.
            whole: object = tokens.base
            packed = whole if type(whole) is bytes and len(whole) == tokens.nbytes == len(given) else bytes(given)
            addresses = chained_addresses(namespace, packed)
        elif shared == count:
            self._used(like)
            return like.chain.leading(count)
        else:
            # Take the shared part from our copy: the caller's bytes may have changed since the comparison, and an
            # address must belong to the tokens beside it.
            packed = b"".join((memoryview(like.packed_tokens)[: shared * size], given[shared * size :]))
            known, last = like.chain.packed_addresses[: shared * ADDRESS_BYTES], like.chain.parent(shared)
            addresses = known + chained_addresses(namespace, packed, shared, last)
        chain = Chain(namespace, np.frombuffer(packed, "<u4"), addresses)
        self._used(_Recent(chain, packed))
        return chain

    def _most_alike(self, namespace: Namespace, given: memoryview, size: int) -> tuple[_Recent | None, int]:
        """Returns the recent chain that shares the most chunks with the tokens ``given``, and how many it shares."""
        best: _Recent | None = None
        shared, parent, following = 0, b"", given[:size]
        digest = namespace.digest
        for recent in self._recent:
            # Equal addresses prove equal tokens up to here; compare the chunk after that.
            if (
                recent.count > shared
                and recent.digest == digest
                and (not shared or recent.packed_addresses.startswith(parent, (shared - 1) * ADDRESS_BYTES))
                and recent.packed_tokens.startswith(following, shared * size)
            ):
                best, shared = recent, _shared_count(recent.packed_tokens, given, size, shared + 1)
                if (shared + 1) * size > len(given):
                    break
                parent = recent.packed_addresses[(shared - 1) * ADDRESS_BYTES : shared * ADDRESS_BYTES]
                following = given[shared * size : (shared + 1) * size]
        return best, shared

    def _used(self, used: _Recent) -> None:
        """Moves a chain to the front; drops the chains that it continues and those over the limit."""
        recent = self._recent
        if (recent and recent[0] is used) or used.cost_bytes > self._bytes_max:
            return
        with self._lock:
            kept, left_bytes = [used], self._bytes_max - used.cost_bytes
            for each in self._recent:
                if used.continues(each):
                    continue
                left_bytes -= each.cost_bytes
                if left_bytes < 0 or len(kept) == CHAINS_MAX:
                    break
                kept.append(each)
            self._recent = tuple(kept)


def _shared_count(packed: bytes, given: memoryview, size: int, low: int) -> int:
    """Counts the equal leading chunks of ``size`` bytes, given that the first ``low`` are equal."""
    high = min(len(packed), len(given)) // size
    middle = high
    # Each step compares up to the first difference at most, and skips what an earlier step found equal.
    while low < high:
        if packed.startswith(given[low * size : middle * size], low * size):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
