"""Addresses: a chained, keyed hash of a chunk's tokens and of all before it.

``address(i) = blake2b(address(i-1) || tokens(i) as u32 little-endian, key=namespace digest, 16 bytes)`` with
``address(-1)`` = 16 zero bytes.  Keyed with the namespace, so that no prompt of one tenant can collide with
another's; input-addressed, so an address says nothing of the bytes (kernels differ in the last bit).

The next turn of a chat hashes only its new tokens (``RecentChains``): most prompts begin with one seen before.
Comparing tokens costs a twentieth of hashing them and is as exact: an address follows from the parent's address and the
chunk's tokens, so if both are equal byte for byte, the addresses are equal.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, NewType, Protocol

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace
from kvstore.native import library as native
from kvstore.text import kind_of
from kvstore.tokens import TokenArray

Address = NewType("Address", bytes)

ADDRESS_BYTES = 16
CHAIN_CHUNKS_MAX = 262_144
"""Chunks in one prompt: about 0.04 s of hashing, and 4 MiB of addresses or 22 MiB as objects."""
NO_PARENT = Address(bytes(ADDRESS_BYTES))
SHORT_BYTES = 4096
"""Fewer bytes of tokens are hashed in less time than it takes to get the GIL back."""
BLOCK_KEY_BYTES_MIN = 16
BLOCK_KEY_BYTES_MAX = 64

_BLOCK_PERSON = b"kvstore.block.1"


class Addressed(Protocol):
    """Something that has addresses, in order."""

    @property
    def addresses(self) -> Sequence[Address]:
        """The addresses, as objects."""

    def __len__(self) -> int: ...


@dataclass(eq=False, slots=True)
class Chain:
    """The full chunks of one prompt, in order: their addresses and the tokens each covers. Never changed."""

    namespace: Namespace
    tokens: TokenArray
    packed_addresses: bytes
    """The addresses, one after the other."""
    addresses: tuple[Address, ...] = field(init=False, repr=False)
    """The same as objects, made when they are first asked for: to look for packed ones takes less time than that."""
    depths: ClassVar[Sequence[int]] = ()
    """Empty: the index of each in its prompt is its index here."""

    @classmethod
    def of(cls, namespace: Namespace, tokens: TokenArray) -> Chain:
        """The chain of ``tokens``; a trailing part chunk has no address.

        Raises InvalidRequest over 262,144 chunks, which a node would hash and keep for too long.
        """
        # A copy of our own: engines reuse their token buffers while a hold on the old prompt is alive.
        packed = tokens[: chunk_count(namespace, tokens) * namespace.layout.chunk_tokens].tobytes()
        return cls(namespace, np.frombuffer(packed, "<u4"), chained_addresses(namespace, packed))

    def __getattr__(self, name: str) -> Any:
        """Makes ``addresses``. Called for what is not set yet."""
        if name != "addresses":
            raise AttributeError(f"a chain has no {name}")
        self.addresses = tuple(np.frombuffer(self.packed_addresses, "V16").tolist())
        return self.addresses

    def __len__(self) -> int:
        return len(self.packed_addresses) // ADDRESS_BYTES

    def leading(self, count: int) -> Chain:
        """The first ``count`` chunks, keeping nothing of the rest alive."""
        if count == len(self):
            return self
        tokens = self.tokens[: count * self.namespace.layout.chunk_tokens].copy()
        return Chain(self.namespace, tokens, self.packed_addresses[: count * ADDRESS_BYTES])

    def parent(self, index: int) -> Address:
        """The address of the chunk before chunk ``index``."""
        end = index * ADDRESS_BYTES
        return Address(self.packed_addresses[end - ADDRESS_BYTES : end]) if index else NO_PARENT

    def chunk_tokens(self, index: int) -> memoryview:
        """Tokens of chunk ``index`` as packed u32 bytes."""
        size = self.namespace.layout.chunk_tokens
        return self.tokens[index * size : (index + 1) * size].data.cast("B")


def chunk_count(namespace: Namespace, tokens: TokenArray) -> int:
    """The number of full chunks in ``tokens``. Raises InvalidRequest over 262,144."""
    size = namespace.layout.chunk_tokens
    count = len(tokens) // size
    if count > CHAIN_CHUNKS_MAX:
        raise InvalidRequest(
            f"{len(tokens)} tokens are {count} chunks of {size} tokens, over the limit of {CHAIN_CHUNKS_MAX}: "
            "use a layout with larger chunk_tokens, or a shorter prompt"
        )
    return count


def chained_addresses(
    namespace: Namespace,
    packed: bytes,
    first: int = 0,
    parent: Address = NO_PARENT,
    counts: Sequence[int] | None = None,
) -> bytes:
    """Returns the addresses of the full chunks of ``packed`` (tokens as u32) from chunk ``first`` on, whose parent is
    given, one after the other.

    With ``counts`` the tokens are those of several prompts, which have so many chunks each.
    """
    size = namespace.layout.chunk_tokens * 4
    if counts is None:
        counts = (max(0, len(packed) // size - first),)
    assert (first + sum(counts)) * size <= len(packed)
    found = ctypes.create_string_buffer(ADDRESS_BYTES * sum(counts))
    each, tokens = (ctypes.c_uint64 * len(counts))(*counts), packed[first * size :]
    library = native.brief if len(tokens) < SHORT_BYTES else native.library
    library.kv_addresses(namespace.digest, parent, tokens, size, each, len(counts), found)
    return found.raw


def chunk_address(digest: bytes, parent: Address, packed_tokens: bytes) -> Address:
    """The address of one chunk, given its parent's; checks a file that names both."""
    state = blake2b(parent, digest_size=ADDRESS_BYTES, key=digest, person=native.CHUNK_PERSON)
    state.update(packed_tokens)
    return Address(state.digest())


def hashed_block_address(digest: bytes, key: bytes) -> Address:
    """The address of a block, given the engine's hash."""
    return Address(blake2b(key, digest_size=ADDRESS_BYTES, key=digest, person=_BLOCK_PERSON).digest())


def block_address(namespace: Namespace, key: bytes) -> Address:
    """The address of a block that an engine hashed itself; ``key`` is the engine's hash, 16 to 64 bytes.

    Raises InvalidRequest for a key of another type or size.
    """
    return block_addresses(namespace, (key,))[0]


def block_addresses(namespace: Namespace, keys: Iterable[bytes]) -> list[Address]:
    """``block_address`` of each key. Raises InvalidRequest for the first key of another type or size."""
    addresses: list[Address] = []
    # A copy of a state that has the namespace in it costs a third less than making one.
    keyed = blake2b(digest_size=ADDRESS_BYTES, key=namespace.digest, person=_BLOCK_PERSON).copy
    for key in keys:
        if not isinstance(key, bytes):
            raise InvalidRequest(f"block key is {kind_of(key)}: expected bytes")
        if not BLOCK_KEY_BYTES_MIN <= len(key) <= BLOCK_KEY_BYTES_MAX:
            raise InvalidRequest(
                f"block key has {len(key)} bytes: expected {BLOCK_KEY_BYTES_MIN} to {BLOCK_KEY_BYTES_MAX}"
            )
        state = keyed()
        state.update(key)
        addresses.append(Address(state.digest()))
    return addresses


CHUNKS_MIN = 8
"""Below this many chunks, hashing a prompt is as fast as finding a recent one."""
CHAINS_MAX = 32
"""Limit on remembered chains. A prompt that matches none of them is compared with each, at 0.2 microseconds each."""
ADDRESS_COST_BYTES = 96
"""Memory cost of one address: packed, and as an object in a tuple once it is needed."""


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
            # A prompt in immutable bytes needs no copy.
            whole: object = tokens.base
            packed = whole if type(whole) is bytes and len(whole) == tokens.nbytes == len(given) else bytes(given)
            addresses = chained_addresses(namespace, packed)
        elif shared == count:
            self._used(like)
            return like.chain.leading(count)
        else:
            # Take the shared part from our copy: the caller's bytes may have changed since the comparison, and an
            # address must belong to the tokens stored with it.
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
