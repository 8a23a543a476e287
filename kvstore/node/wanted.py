"""The chunks that a call asks for: the chunks of a chain, or engine-hashed blocks under their keys.

Separate because memory and images take either: this module describes a chunk of each kind to Python, to native code and
to the inventory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address, Chain, block_addresses
from kvstore.buffers import Laid, Sections, address_of
from kvstore.format.header import Ancestry, Expected, Kind, expected_block, expected_chunk, header_bytes, laid_descent
from kvstore.memory.inventory import Place, place_of
from kvstore.namespace import Namespace
from kvstore.native import library as native


@dataclass(frozen=True, slots=True)
class Keyed:
    """Engine-hashed blocks of one request: their keys, addresses and sizes, in the order of the request."""

    namespace: Namespace
    keys: Sequence[bytes]
    addresses: Sequence[Address]
    sizes_bytes: Sequence[int]
    """Sizes of the blocks, without headers; empty for blocks of any size."""
    depths: Sequence[int] = ()
    """The index of each in its prompt, as far as the request says; empty for 0, 1, 2 ..."""
    descents: Sequence[bytes] = ()
    """The packed descent of each, b"" for none; empty if none has one. For puts only."""

    packed_addresses: bytes = field(init=False, repr=False, compare=False)
    """The addresses, one after the other: made when they are first asked for."""

    def __getattr__(self, name: str) -> bytes:
        """Makes ``packed_addresses``. Called for what is not set yet."""
        if name != "packed_addresses":
            raise AttributeError(f"blocks have no {name}")
        object.__setattr__(self, name, b"".join(self.addresses))
        return self.packed_addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def leading(self, count: int) -> Keyed:
        """Returns the first ``count`` of them."""
        return self.picked(range(count)) if count < len(self) else self

    def picked(self, indexes: Sequence[int]) -> Keyed:
        """Returns the blocks at ``indexes``."""
        return Keyed(
            self.namespace,
            [self.keys[index] for index in indexes],
            [self.addresses[index] for index in indexes],
            [self.sizes_bytes[index] for index in indexes] if self.sizes_bytes else (),
            [self.depths[index] for index in indexes] if self.depths else list(indexes),
            [self.descents[index] for index in indexes] if self.descents else (),
        )

    def contradicting(self) -> npt.NDArray[np.bool_]:
        """Returns which blocks have the key of an earlier one and another size: no put may store both."""
        first: dict[bytes, int] = {}
        sizes = [first.setdefault(key, size) for key, size in zip(self.keys, self.sizes_bytes, strict=True)]
        return np.not_equal(sizes, self.sizes_bytes)


Wanted = Chain | Keyed


def keyed(
    namespace: Namespace, keys: Sequence[bytes], sizes_bytes: Sequence[int], ancestry: Ancestry | None = None
) -> Keyed:
    """The blocks of a request, with their addresses; ``ancestry`` says where in their prompt they are."""
    ancestry = ancestry or Ancestry()
    depths = range(ancestry.first, ancestry.first + len(keys))
    return Keyed(namespace, keys, block_addresses(namespace, keys), sizes_bytes, depths, ancestry.descents)


def kind_of(wanted: Wanted) -> Kind:
    """Returns the kind of identity of these chunks."""
    return Kind.TOKENS if isinstance(wanted, Chain) else Kind.BLOCK


def expected_of(wanted: Wanted, index: int) -> Expected:
    """Returns what the image of one of them must hold."""
    if isinstance(wanted, Chain):
        return expected_chunk(wanted, index)
    descent = wanted.descents[index] if wanted.descents else b""
    return expected_block(wanted.namespace, wanted.keys[index], wanted.sizes_bytes[index], descent)


def image_bytes(wanted: Wanted, index: int) -> int:
    """Returns the bytes of the whole image of one of them, header included; 0 for a block of any size."""
    if isinstance(wanted, Chain):
        layout = wanted.namespace.layout
        return header_bytes(layout.chunk_tokens * 4, layout.section_count) + layout.chunk_bytes
    return header_bytes(len(wanted.keys[index]), 1) + wanted.sizes_bytes[index] if wanted.sizes_bytes else 0


def image_sizes(wanted: Wanted, indexes: Sequence[int]) -> list[int]:
    """Returns the bytes of the whole images at ``indexes``, headers included."""
    if isinstance(wanted, Chain) and len(indexes):
        return [image_bytes(wanted, indexes[0])] * len(indexes)
    return [image_bytes(wanted, index) for index in indexes]


def file_bytes(wanted: Wanted, first: int) -> int:
    """Returns the bytes of the files of all chunks from ``first`` on, as far as their encoding does not change them."""
    if isinstance(wanted, Chain):
        layout = wanted.namespace.layout
        one_bytes = header_bytes(layout.chunk_tokens * 4, layout.section_count) + layout.chunk_bytes
        return max(0, len(wanted) - first) * one_bytes
    return sum(
        [
            header_bytes(len(key), 1) + size_bytes
            for key, size_bytes in zip(wanted.keys[first:], wanted.sizes_bytes[first:], strict=True)
        ]
    )


def section_bytes(wanted: Wanted, index: int) -> int:
    """Returns the bytes of each section of one of them."""
    return wanted.namespace.layout.section_bytes if isinstance(wanted, Chain) else wanted.sizes_bytes[index]


def sizes_of(wanted: Wanted) -> Sequence[int]:
    """Returns the bytes of each of them, without headers."""
    if isinstance(wanted, Chain):
        return [wanted.namespace.layout.chunk_bytes] * len(wanted)
    return wanted.sizes_bytes


def payload_bytes(wanted: Wanted, indexes: Sequence[int]) -> int:
    """Returns the bytes of all those at ``indexes``, without headers."""
    if isinstance(wanted, Chain):
        return len(indexes) * wanted.namespace.layout.chunk_bytes
    return sum([wanted.sizes_bytes[index] for index in indexes])


def mean_bytes(wanted: Wanted, first: int, count: int) -> int:
    """Returns the mean bytes of ``count`` chunks from ``first`` on, without headers."""
    if isinstance(wanted, Chain):
        return wanted.namespace.layout.chunk_bytes
    return sum(wanted.sizes_bytes[first : first + count]) // max(1, count)


def leading(there: bytes | bytearray | npt.NDArray[np.bool_]) -> int:
    """Returns how many leading chunks are there, of those that have a byte each."""
    first_miss = bytes(there).find(0)
    return len(there) if first_miss < 0 else first_miss


def payload_of(wanted: Wanted, index: int, image: memoryview) -> memoryview:
    """Returns all sections of one of them in its image, one after another."""
    if isinstance(wanted, Chain):
        return image[len(image) - wanted.namespace.layout.chunk_bytes :]
    return image[len(image) - wanted.sizes_bytes[index] :]


def place_at(wanted: Wanted, index: int) -> Place:
    """Returns its place in an inventory."""
    if isinstance(wanted, Chain):
        return place_of(wanted, index)
    return Place(wanted.namespace.digest, wanted.addresses[index], NO_PARENT, b"")


def describe(wanted: Wanted, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
    """Fills native structures, except for where sections lie; returns the objects that their pointers point into."""
    return (
        _describe_chain(wanted, indexes, items)
        if isinstance(wanted, Chain)
        else _describe_keyed(wanted, indexes, items)
    )


def _describe_chain(chain: Chain, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
    layout, tokens = chain.namespace.layout, chain.tokens
    identity_bytes = layout.chunk_tokens * 4
    assert tokens.flags.c_contiguous and tokens.itemsize == 4
    places = np.asarray(indexes, np.uint64)
    if isinstance(indexes, range) and indexes.step == 1:
        # The common case, a run: each is the next one's parent.
        start, end = indexes.start * ADDRESS_BYTES, indexes.stop * ADDRESS_BYTES
        packed = chain.packed_addresses
        both = np.frombuffer(packed[start - ADDRESS_BYTES : end] if start else NO_PARENT + packed[:end], "V16")
        items["parent"], items["address"] = both[:-1], both[1:]
    else:
        items["address"] = np.frombuffer(chain.packed_addresses, "V16")[places]
        items["parent"] = np.frombuffer(b"".join([chain.parent(index) for index in indexes]), "V16")
    items["identity"] = tokens.__array_interface__["data"][0] + places * identity_bytes
    items["identity_bytes"] = identity_bytes
    items["depth"] = places
    items["section_count"] = layout.section_count
    items["section_bytes"] = layout.section_bytes
    items["header_bytes"] = header_bytes(identity_bytes, layout.section_count)
    return [tokens]


def _describe_keyed(keyed: Keyed, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
    keys = [keyed.keys[index] for index in indexes]
    joined = np.frombuffer(b"".join(keys), np.uint8)
    sizes = np.fromiter(map(len, keys), np.uint64, len(keys))
    items["address"] = np.frombuffer(b"".join([keyed.addresses[index] for index in indexes]), "V16")
    items["identity"] = joined.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
    items["identity_bytes"] = sizes
    if keyed.sizes_bytes:  # else they are only looked for
        items["section_count"] = 1
        items["section_bytes"] = [keyed.sizes_bytes[index] for index in indexes]
        lengths, which = np.unique(sizes, return_inverse=True)
        items["header_bytes"] = np.array([header_bytes(int(length), 1) for length in lengths], np.uint32)[which]
    return [joined, _describe_descents(keyed, indexes, items)] if any(keyed.descents) else [joined]


def _describe_descents(keyed: Keyed, indexes: Sequence[int], items: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Fills in where descents lie, and returns their memory."""
    laid = [laid_descent(keyed.descents[index]) for index in indexes]
    joined = np.frombuffer(b"".join(laid), np.uint8)
    sizes = np.fromiter(map(len, laid), np.uint64, len(laid))
    items["descent"] = joined.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
    return joined


class Items:
    """The wanted chunks at ``indexes`` as native code takes them: who each is, and where its sections lie.

    ``alive`` owns the memory that the addresses in the structures point into.
    """

    def __init__(self, wanted: Wanted, indexes: Sequence[int]) -> None:
        self._indexes = indexes
        self.items: npt.NDArray[Any] = np.zeros(len(indexes), native.CHUNK)
        self.alive = describe(wanted, indexes, self.items)
        self.common = native.Common(
            digest=(ctypes.c_ubyte * 32).from_buffer_copy(wanted.namespace.digest), kind=int(kind_of(wanted))
        )
        self._start: int = self.items.ctypes.data  # making the interface of a structured array is slow

    def at(self, place: int) -> int:
        """Returns the address of one structure, counted from 0."""
        assert 0 <= place < max(1, len(self.items))
        return self._start + place * native.CHUNK.itemsize

    def lay(self, sections: Sections, *, fills: bool = False) -> None:
        """Sets where the sections are; ``fills`` says that they will be written to."""
        items, indexes = self.items, self._indexes
        if isinstance(sections, Laid):
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
