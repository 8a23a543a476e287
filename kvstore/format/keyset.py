"""Key sets: the chunks that a call asks for, those of a prompt or blocks under an engine's own keys.

Everything below a cache takes either. A key set describes its chunks to Python, to native code and to inventories.

The next turn of a chat hashes only its new tokens (``RecentChains``): most prompts begin with one seen before.
Comparing tokens costs a twentieth of hashing them and is as exact: an address follows from the parent's address and the
chunk's tokens, so if both are equal byte for byte, the addresses are equal.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, NO_PARENT, Address, TokenArray, block_addresses
from kvstore.core.buffers import BufferMap, Sections, address_of
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.errors import InvalidRequest
from kvstore.format.header import Ancestry, Expected, IdentityKind, expected_block, header_bytes, laid_descent
from kvstore.native import library as native

CHAIN_CHUNKS_MAX = 262_144
"""Chunks in one prompt: about 0.04 s of hashing, and 4 MiB of addresses or 22 MiB as objects."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """The identity of a chunk in an inventory."""

    namespace: NamespaceDigest
    address: Address
    parent: Address
    """``NO_PARENT`` for the first chunk of a prompt and for an engine-hashed block."""


class KeySet(ABC):
    """Chunks in the order of a request, found by their addresses. Never changed. Indexes count from 0."""

    __slots__ = ()

    kind: ClassVar[IdentityKind]
    """What their files are identified by."""
    prefix_ordered: ClassVar[bool]
    """True if each chunk builds on the one before it, as in a prompt: then nothing after a missing chunk is of use."""

    namespace: Namespace
    addresses: Sequence[Address]
    packed_addresses: bytes
    """The addresses, one after the other."""

    def __len__(self) -> int:
        return len(self.packed_addresses) // ADDRESS_BYTES

    @abstractmethod
    def leading(self, count: int) -> KeySet:
        """Returns the first ``count`` chunks, keeping nothing of the rest alive."""

    @abstractmethod
    def take(self, indexes: Sequence[int]) -> KeySet:
        """Returns the blocks at ``indexes``, or the leading chunks of a prompt, which they must be."""

    @abstractmethod
    def as_neighbours(self, indexes: Sequence[int]) -> tuple[KeySet, int]:
        """Returns a key set in which the chunks at ``indexes`` are neighbours, and the index of the first there.

        The indexes of a prompt must be neighbours.
        """

    @abstractmethod
    def needed(self, count: int) -> KeySet:
        """Returns the first ``count`` chunks of a prompt, or all blocks: so those that stay keep their indexes."""

    @abstractmethod
    def found(self, there: npt.ArrayLike) -> KeySet:
        """Returns those that are ``there``: of a prompt only the leading ones."""

    def as_prompt(self) -> ChunkKeys | None:
        """Returns the prompt; None for blocks."""
        return None

    @abstractmethod
    def depths(self) -> Sequence[int]:
        """Returns the index of each in its prompt, as far as the request says."""

    # One chunk

    @abstractmethod
    def expected(self, index: int) -> Expected:
        """Returns what the image of a chunk must hold."""

    @abstractmethod
    def place(self, index: int) -> ChunkIdentity:
        """Returns a chunk's place in an inventory."""

    @abstractmethod
    def image_bytes(self, index: int) -> int:
        """Returns the bytes of a chunk's whole image, header included; 0 for a block of any size."""

    @abstractmethod
    def section_bytes(self, index: int) -> int:
        """Returns the bytes of each section of a chunk."""

    @abstractmethod
    def payload_of(self, index: int, image: memoryview) -> memoryview:
        """Returns all sections of a chunk in its image, one after another."""

    # Several chunks

    def image_sizes(self, indexes: Sequence[int]) -> list[int]:
        """Returns the bytes of the whole images at ``indexes``, headers included."""
        return [self.image_bytes(index) for index in indexes]

    @abstractmethod
    def file_bytes(self, first: int) -> int:
        """Returns the bytes of the files of all chunks from ``first`` on, as far as encoding does not change them."""

    @abstractmethod
    def payload_sizes(self) -> Sequence[int]:
        """Returns the bytes of each chunk, without headers."""

    @abstractmethod
    def payload_bytes(self, indexes: Sequence[int]) -> int:
        """Returns the bytes of all those at ``indexes``, without headers."""

    @abstractmethod
    def mean_bytes(self, first: int, count: int) -> int:
        """Returns the mean bytes of ``count`` chunks from ``first`` on, without headers."""

    @abstractmethod
    def contradicting(self) -> Mask:
        """Returns which have the key of an earlier one and another size: no put may store both."""

    @abstractmethod
    def describe(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        """Fills native structures, except for where sections lie; returns the objects that they point into."""


@dataclass(eq=False, slots=True)
class ChunkKeys(KeySet):
    """The full chunks of one prompt, in order: their addresses and the tokens each covers."""

    kind: ClassVar[IdentityKind] = IdentityKind.TOKENS
    prefix_ordered: ClassVar[bool] = True

    namespace: Namespace
    tokens: TokenArray
    packed_addresses: bytes
    addresses: tuple[Address, ...] = field(init=False, repr=False)
    """Made when they are first asked for: to look for packed ones takes less time than that."""

    @classmethod
    def of(cls, namespace: Namespace, tokens: TokenArray) -> ChunkKeys:
        """The keys of ``tokens``; a trailing part chunk has no address.

        Raises InvalidRequest over 262,144 chunks, which a node would hash and keep for too long.
        """
        # A copy of our own: engines reuse their token buffers while a hold on the old prompt is alive.
        packed = tokens[: chunk_count(namespace, tokens) * namespace.layout.chunk_tokens].tobytes()
        return cls(namespace, np.frombuffer(packed, "<u4"), chained_addresses(namespace, packed))

    def __getattr__(self, name: str) -> Any:
        """Makes ``addresses``. Called for what is not set yet."""
        if name != "addresses":
            raise AttributeError(f"a prompt has no {name}")
        self.addresses = tuple(np.frombuffer(self.packed_addresses, "V16").tolist())
        return self.addresses

    def leading(self, count: int) -> ChunkKeys:
        if count == len(self):
            return self
        tokens = self.tokens[: count * self.namespace.layout.chunk_tokens].copy()
        return ChunkKeys(self.namespace, tokens, self.packed_addresses[: count * ADDRESS_BYTES])

    def take(self, indexes: Sequence[int]) -> ChunkKeys:
        assert not indexes or indexes[-1] == len(indexes) - 1
        return self.leading(len(indexes))

    def as_neighbours(self, indexes: Sequence[int]) -> tuple[KeySet, int]:
        return self, indexes[0] if indexes else 0

    def needed(self, count: int) -> KeySet:
        return self.leading(count)

    def found(self, there: npt.ArrayLike) -> KeySet:
        return self.leading(leading(np.asarray(there, np.bool_)))

    def as_prompt(self) -> ChunkKeys | None:
        return self

    def depths(self) -> Sequence[int]:
        return range(len(self))

    def parent(self, index: int) -> Address:
        """The address of the chunk before chunk ``index``."""
        end = index * ADDRESS_BYTES
        return Address(self.packed_addresses[end - ADDRESS_BYTES : end]) if index else NO_PARENT

    def chunk_tokens(self, index: int) -> memoryview:
        """Tokens of chunk ``index`` as packed u32 bytes."""
        size = self.namespace.layout.chunk_tokens
        return self.tokens[index * size : (index + 1) * size].data.cast("B")

    def expected(self, index: int) -> Expected:
        layout = self.namespace.layout
        return Expected(
            IdentityKind.TOKENS,
            self.parent(index + 1),  # its own address
            self.parent(index),
            self.namespace.digest,
            index,
            bytes(self.chunk_tokens(index)),
            layout.section_count,
            layout.section_bytes,
            self.namespace.tenant,
            layout.itemsize,
        )

    def place(self, index: int) -> ChunkIdentity:
        return ChunkIdentity(self.namespace.digest, self.addresses[index], self.parent(index))

    def image_bytes(self, index: int) -> int:
        layout = self.namespace.layout
        return header_bytes(layout.chunk_tokens * 4, layout.section_count) + layout.chunk_bytes

    def image_sizes(self, indexes: Sequence[int]) -> list[int]:
        return [self.image_bytes(0)] * len(indexes)

    def section_bytes(self, index: int) -> int:
        return self.namespace.layout.section_bytes

    def payload_of(self, index: int, image: memoryview) -> memoryview:
        return image[len(image) - self.namespace.layout.chunk_bytes :]

    def file_bytes(self, first: int) -> int:
        return max(0, len(self) - first) * self.image_bytes(first)

    def payload_sizes(self) -> Sequence[int]:
        return [self.namespace.layout.chunk_bytes] * len(self)

    def payload_bytes(self, indexes: Sequence[int]) -> int:
        return len(indexes) * self.namespace.layout.chunk_bytes

    def mean_bytes(self, first: int, count: int) -> int:
        return self.namespace.layout.chunk_bytes

    def contradicting(self) -> Mask:
        return np.zeros(len(self), np.bool_)

    def describe(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        layout, tokens = self.namespace.layout, self.tokens
        identity_bytes = layout.chunk_tokens * 4
        assert tokens.flags.c_contiguous and tokens.itemsize == 4
        places = np.asarray(indexes, np.uint64)
        if isinstance(indexes, range) and indexes.step == 1:
            # The common case, a run: each is the next one's parent.
            start, end = indexes.start * ADDRESS_BYTES, indexes.stop * ADDRESS_BYTES
            packed = self.packed_addresses
            both = np.frombuffer(packed[start - ADDRESS_BYTES : end] if start else NO_PARENT + packed[:end], "V16")
            items["parent"], items["address"] = both[:-1], both[1:]
        else:
            items["address"] = np.frombuffer(self.packed_addresses, "V16")[places]
            items["parent"] = np.frombuffer(b"".join([self.parent(index) for index in indexes]), "V16")
        items["identity"] = tokens.__array_interface__["data"][0] + places * identity_bytes
        items["identity_bytes"] = identity_bytes
        items["depth"] = places
        items["section_count"] = layout.section_count
        items["section_bytes"] = layout.section_bytes
        items["header_bytes"] = header_bytes(identity_bytes, layout.section_count)
        return [tokens]


@dataclass(frozen=True, slots=True)
class BlockKeys(KeySet):
    """Engine-hashed blocks of one request: their keys, addresses and sizes, in the order of the request."""

    kind: ClassVar[IdentityKind] = IdentityKind.BLOCK
    prefix_ordered: ClassVar[bool] = False

    namespace: Namespace
    keys: Sequence[bytes]
    addresses: Sequence[Address]
    sizes_bytes: Sequence[int]
    """Sizes of the blocks, without headers; empty for blocks of any size."""
    given_depths: Sequence[int] = ()
    """The index of each in its prompt, as far as the request says; empty for 0, 1, 2 ..."""
    descents: Sequence[bytes] = ()
    """The packed descent of each, b"" for none; empty if none has one. For puts only."""

    packed_addresses: bytes = field(init=False, repr=False, compare=False)
    """Made when they are first asked for."""

    @classmethod
    def of(
        cls,
        namespace: Namespace,
        keys: Sequence[bytes],
        sizes_bytes: Sequence[int] = (),
        ancestry: Ancestry | None = None,
    ) -> BlockKeys:
        """The blocks of a request; ``ancestry`` says where in their prompt they are. Without sizes, of any size.

        Raises InvalidRequest for a key of another type or size.
        """
        ancestry = ancestry or Ancestry()
        depths = range(ancestry.first, ancestry.first + len(keys))
        return cls(namespace, keys, block_addresses(namespace, keys), sizes_bytes, depths, ancestry.descents)

    def __getattr__(self, name: str) -> bytes:
        """Makes ``packed_addresses``. Called for what is not set yet."""
        if name != "packed_addresses":
            raise AttributeError(f"blocks have no {name}")
        object.__setattr__(self, name, b"".join(self.addresses))
        return self.packed_addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def leading(self, count: int) -> BlockKeys:
        return self.take(range(count)) if count < len(self) else self

    def take(self, indexes: Sequence[int]) -> BlockKeys:
        return BlockKeys(
            self.namespace,
            [self.keys[index] for index in indexes],
            [self.addresses[index] for index in indexes],
            [self.sizes_bytes[index] for index in indexes] if self.sizes_bytes else (),
            [self.given_depths[index] for index in indexes] if self.given_depths else list(indexes),
            [self.descents[index] for index in indexes] if self.descents else (),
        )

    def as_neighbours(self, indexes: Sequence[int]) -> tuple[KeySet, int]:
        if indexes and indexes[-1] - indexes[0] == len(indexes) - 1:
            return self, indexes[0]
        return self.take(indexes), 0

    def needed(self, count: int) -> KeySet:
        return self

    def found(self, there: npt.ArrayLike) -> KeySet:
        return self.take(np.flatnonzero(there).tolist())

    def depths(self) -> Sequence[int]:
        return self.given_depths or range(len(self))

    def expected(self, index: int) -> Expected:
        descent = self.descents[index] if self.descents else b""
        return expected_block(self.namespace, self.keys[index], self.sizes_bytes[index], descent)

    def place(self, index: int) -> ChunkIdentity:
        return ChunkIdentity(self.namespace.digest, self.addresses[index], NO_PARENT)

    def image_bytes(self, index: int) -> int:
        return header_bytes(len(self.keys[index]), 1) + self.sizes_bytes[index] if self.sizes_bytes else 0

    def section_bytes(self, index: int) -> int:
        return self.sizes_bytes[index]

    def payload_of(self, index: int, image: memoryview) -> memoryview:
        return image[len(image) - self.sizes_bytes[index] :]

    def file_bytes(self, first: int) -> int:
        return sum([self.image_bytes(index) for index in range(first, len(self))])

    def payload_sizes(self) -> Sequence[int]:
        return self.sizes_bytes

    def payload_bytes(self, indexes: Sequence[int]) -> int:
        return sum([self.sizes_bytes[index] for index in indexes])

    def mean_bytes(self, first: int, count: int) -> int:
        return sum(self.sizes_bytes[first : first + count]) // max(1, count)

    def contradicting(self) -> Mask:
        first: dict[bytes, int] = {}
        sizes = [first.setdefault(key, size) for key, size in zip(self.keys, self.sizes_bytes, strict=True)]
        return np.not_equal(sizes, self.sizes_bytes)

    def describe(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        keys = [self.keys[index] for index in indexes]
        joined = np.frombuffer(b"".join(keys), np.uint8)
        sizes = np.fromiter(map(len, keys), np.uint64, len(keys))
        items["address"] = np.frombuffer(b"".join([self.addresses[index] for index in indexes]), "V16")
        items["identity"] = joined.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
        items["identity_bytes"] = sizes
        if self.sizes_bytes:  # else they are only looked for
            items["section_count"] = 1
            items["section_bytes"] = [self.sizes_bytes[index] for index in indexes]
            lengths, which = np.unique(sizes, return_inverse=True)
            items["header_bytes"] = np.array([header_bytes(int(length), 1) for length in lengths], np.uint32)[which]
        return [joined, self._describe_descents(indexes, items)] if any(self.descents) else [joined]

    def _describe_descents(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Fills in where descents lie, and returns their memory."""
        laid = [laid_descent(self.descents[index]) for index in indexes]
        joined = np.frombuffer(b"".join(laid), np.uint8)
        sizes = np.fromiter(map(len, laid), np.uint64, len(laid))
        items["descent"] = joined.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
        return joined


def leading(there: bytes | bytearray | Mask) -> int:
    """Returns how many leading chunks are there, of those that have a byte each."""
    first_miss = bytes(there).find(0)
    return len(there) if first_miss < 0 else first_miss


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


class NativeBatch:
    """The chunks at ``indexes`` as native code takes them: who each is, and where its sections lie.

    ``alive`` owns the memory that the addresses in the structures point into.
    """

    def __init__(self, keys: KeySet, indexes: Sequence[int]) -> None:
        self._indexes = indexes
        self.items: npt.NDArray[Any] = np.zeros(len(indexes), native.CHUNK)
        self.alive = keys.describe(indexes, self.items)
        self.common = native.Common(
            digest=(ctypes.c_ubyte * 32).from_buffer_copy(keys.namespace.digest), kind=int(keys.kind)
        )
        self._start: int = self.items.ctypes.data  # making the interface of a structured array is slow

    def at(self, place: int) -> int:
        """Returns the address of one structure, counted from 0."""
        assert 0 <= place < max(1, len(self.items))
        return self._start + place * native.CHUNK.itemsize

    def lay(self, sections: Sections, *, fills: bool = False) -> None:
        """Sets where the sections are; ``fills`` says that they will be written to."""
        items, indexes = self.items, self._indexes
        if isinstance(sections, BufferMap):
            assert not fills or sections.is_writable
            self.alive += sections.lay(indexes, items)
            return
        each = list(map(sections, indexes))
        counts = np.fromiter(map(len, each), np.uint64, len(each))
        pieces = [piece for sections in each for piece in sections]
        assert (counts == items["section_count"]).all()
        sizes = np.fromiter(map(len, pieces), np.uint64, len(pieces))
        assert (sizes == np.repeat(items["section_bytes"], counts.astype(np.intp))).all()
        assert not (fills and any(piece.readonly for piece in pieces))
        bases = np.fromiter(map(address_of, pieces), np.uint64, len(pieces))
        start = bases.__array_interface__["data"][0]
        items["bases"] = start + (np.cumsum(counts) - counts) * np.uint64(bases.itemsize)
        self.alive += (pieces, bases)


SHORT_BYTES = 4096
"""Fewer bytes of tokens are hashed in less time than it takes to get the GIL back."""


def chained_addresses(namespace: Namespace, packed: bytes, first: int = 0, parent: Address = NO_PARENT) -> bytes:
    """Returns the addresses of the full chunks of ``packed`` (tokens as u32) from chunk ``first`` on, whose parent is
    given, one after the other.
    """
    size = namespace.layout.chunk_tokens * 4
    count = max(0, len(packed) // size - first)
    found = ctypes.create_string_buffer(ADDRESS_BYTES * count)
    tokens = packed[first * size :]
    library = native.brief if len(tokens) < SHORT_BYTES else native.library
    library.kv_addresses(namespace.digest, parent, tokens, size, count, found)
    return found.raw


CHUNKS_MIN = 8
"""Below this many chunks, hashing a prompt is as fast as finding a recent one."""
CHAINS_MAX = 32
"""Limit on remembered chains. A prompt that matches none of them is compared with each, at 0.2 microseconds each."""
ADDRESS_COST_BYTES = 96
"""Memory cost of one address: packed, and as an object in a tuple once it is needed."""


class _Recent:
    """A chain and its tokens as u32. What each look at it needs is at hand: a search looks at all, many times."""

    __slots__ = ("chain", "cost_bytes", "count", "digest", "packed_addresses", "packed_tokens")

    def __init__(self, chain: ChunkKeys, packed: bytes) -> None:
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

    def of(self, namespace: Namespace, tokens: TokenArray) -> ChunkKeys:
        """Returns ``ChunkKeys.of``, taking the shared leading chunks from a recent prompt. Raises InvalidRequest."""
        count = chunk_count(namespace, tokens)
        size = 4 * namespace.layout.chunk_tokens
        if count < CHUNKS_MIN:
            return ChunkKeys.of(namespace, tokens)
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
        chain = ChunkKeys(namespace, np.frombuffer(packed, "<u4"), addresses)
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
