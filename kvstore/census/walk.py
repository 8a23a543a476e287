"""A walk over the chunks of a root, folder by folder: names, sizes and times.

Streaming: memory does not grow with the root. Unlike a check (``fsck``) it verifies nothing, and unlike a collector's
listing it decides nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core import recency
from kvstore.core.address import Address
from kvstore.core.buffers import ReadBuffer
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import Recency
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, MAGIC, IdentityKind
from kvstore.format.places import Name
from kvstore.root.interface import FolderEntry, Root

# The first bytes of a chunk file, read leniently: for counting and telling apart, never for serving.
#
# A header is verified as a whole. Here 128 bytes are enough, whatever the version and encoding, and without keys.


_FIELDS = struct.Struct("<8s4xB7xI16x16s16s56x")
assert _FIELDS.size == FIXED_BYTES


class Fixed(NamedTuple):
    """The fixed part of a header; unverified. One is made for each file that a walk looks at."""

    kind: IdentityKind
    depth: int
    address: Address
    parent: Address
    """Zero for the first chunk of a prompt and for a block."""


def read_fixed(prefix: ReadBuffer) -> Fixed | None:
    """Reads the fields of a file that begins with ``prefix``; None if it is not a chunk file."""
    if len(prefix) < FIXED_BYTES:
        return None
    magic, kind, depth, address, parent = _FIELDS.unpack_from(prefix)
    if magic != MAGIC or kind not in (IdentityKind.TOKENS, IdentityKind.BLOCK):
        return None
    return Fixed(IdentityKind(kind), depth, Address(address), Address(parent))


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One chunk file, as its folder lists it."""

    name: Name
    address: Address
    namespace: NamespaceId
    size_bytes: int
    recency: Recency


def walk(
    root: Root,
    shard_bits: int,
    *,
    quantum_s: int = recency.QUANTUM_S,
    trouble: Callable[[KVStoreError], object] = lambda error: None,
    shard_done: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[ChunkFile]:
    """Yields the chunks of a root, shard by shard, in no order within one. Concurrent changes may be missed.

    ``trouble`` is called with each error of the root, which ends a folder; ``shard_done(done, total)`` after each
    shard.
    """
    count = 1 << shard_bits
    for shard in range(count):
        yield from walk_shard(root, shard, quantum_s, trouble)
        shard_done(shard + 1, count)


def walk_shard(
    root: Root,
    shard: int,
    quantum_s: int = recency.QUANTUM_S,
    trouble: Callable[[KVStoreError], object] = lambda error: None,
) -> Iterator[ChunkFile]:
    """Yields the chunks of one shard."""
    folder = places.shard_folder(shard)
    try:
        for entry in root.list(folder):
            found = found_in(folder, entry, quantum_s)
            if found is not None:
                yield found
    except KVStoreError as error:
        trouble(error)


def found_in(folder: Name, entry: FolderEntry, quantum_s: int = recency.QUANTUM_S) -> ChunkFile | None:
    """The chunk that an entry of a shard's folder is; None for anything else."""
    parsed = places.parse_chunk(entry.name)
    if parsed is None or entry.stat is None:
        return None
    when = recency.decode(entry.stat.mtime_ns, quantum_s)
    return ChunkFile(Name(f"{folder}/{entry.name}"), *parsed, entry.stat.size_bytes, when)
