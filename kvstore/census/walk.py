"""A walk over the chunks of a root, folder by folder: names, sizes and times, and the headers if asked for.

Streaming: memory does not grow with the root. Unlike a check (``fsck``) it verifies nothing, and unlike a collector's
listing it decides nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstore.core import recency
from kvstore.core.address import Address
from kvstore.core.buffers import ReadBuffer
from kvstore.core.namespace import NamespaceDigest, NamespaceId
from kvstore.core.recency import Recency
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format import places
from kvstore.format.header import (
    FIXED_BYTES,
    MAGIC,
    IdentityKind,
    Incarnation,
    LineageId,
    WriterRecord,
    Writers,
    written,
)
from kvstore.format.places import Name
from kvstore.root.interface import FolderEntry, Root

# The first bytes of a chunk file, read leniently: for counting and telling apart, never for serving.
#
# A header is verified as a whole. Here 128 bytes are enough, whatever the version and encoding, and without keys.


_FIELDS = struct.Struct("<8sH2xBB6xI16x16s16s32s16s8s")
assert _FIELDS.size == FIXED_BYTES


class Fixed(NamedTuple):
    """The fixed part of a header; unverified. One is made for each file that a walk looks at."""

    version: int
    kind: IdentityKind
    depth: int
    address: Address
    parent: Address
    """Zero for the first chunk of a prompt and for a block."""
    namespace: NamespaceDigest
    incarnation: Incarnation
    encoding: int
    """Bits of the encoding byte: 0 as version 1 writes it, 1 compressed, 2 encrypted."""
    key_id: bytes
    """8 bytes; zero where nothing is encrypted."""


def read_fixed(prefix: ReadBuffer) -> Fixed | None:
    """Reads the fields of a file that begins with ``prefix``; None if it is not a chunk file."""
    if len(prefix) < FIXED_BYTES:
        return None
    magic, version, kind, encoding, depth, address, parent, namespace, incarnation, key_id = _FIELDS.unpack_from(prefix)
    if magic != MAGIC or kind not in (IdentityKind.TOKENS, IdentityKind.BLOCK):
        return None
    return Fixed(
        version,
        IdentityKind(kind),
        depth,
        Address(address),
        Address(parent),
        NamespaceDigest(namespace),
        Incarnation(incarnation),
        encoding,
        key_id,
    )


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One chunk file. ``header`` is None if it was not asked for, or is none."""

    name: Name
    address: Address
    namespace: NamespaceId
    size_bytes: int
    recency: Recency
    header: Fixed | None = None


def walk(
    root: Root,
    shard_bits: int,
    *,
    headers: bool = False,
    share: float = 1.0,
    shards: Iterable[int] | None = None,
    quantum_s: int = recency.QUANTUM_S,
    trouble: Callable[[KVStoreError], object] = lambda error: None,
    shard_done: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[ChunkFile]:
    """Yields the chunks of a root, shard by shard, in no order within one. Concurrent changes may be missed.

    ``headers`` opens each file for its first 128 bytes. ``share`` (over 0, up to 1) looks at so many of the shards
    only, spread evenly: addresses are hashes, so these are a fair sample of single chunks, though not of whole prompts.
    ``shards`` names them instead, so that a walk that was cut off can go on. ``trouble`` is called with each error of
    the root, which ends a folder or leaves out a file; ``shard_done(done, total)`` after each shard.

    Raises InvalidRequest for another share.
    """
    if not 0 < share <= 1:
        raise InvalidRequest(f"share={share!r}: expected a number over 0, at most 1")
    chosen = sampled(shard_bits, share) if shards is None else list(shards)
    for done, shard in enumerate(chosen, 1):
        yield from walk_shard(root, shard, headers=headers, quantum_s=quantum_s, trouble=trouble)
        shard_done(done, len(chosen))


def walk_shard(
    root: Root,
    shard: int,
    *,
    headers: bool,
    quantum_s: int = recency.QUANTUM_S,
    trouble: Callable[[KVStoreError], object] = lambda error: None,
) -> Iterator[ChunkFile]:
    """Yields the chunks of one shard."""
    folder = places.shard_folder(shard)
    try:
        for entry in root.list(folder):
            found = found_in(folder, entry, quantum_s)
            if found is None:
                continue
            try:
                yield with_header(root, found) if headers else found
            except KVStoreError as error:
                trouble(error)
    except KVStoreError as error:
        trouble(error)


def found_in(folder: Name, entry: FolderEntry, quantum_s: int = recency.QUANTUM_S) -> ChunkFile | None:
    """The chunk that an entry of a shard's folder is; None for anything else."""
    parsed = places.parse_chunk(entry.name)
    if parsed is None or entry.stat is None:
        return None
    when = recency.decode(entry.stat.mtime_ns, quantum_s)
    return ChunkFile(Name(f"{folder}/{entry.name}"), *parsed, entry.stat.size_bytes, when)


def with_header(root: Root, found: ChunkFile) -> ChunkFile:
    """Adds the header to ``found``, if there is a valid one. Raises the root's errors."""
    seen = root.look(found.name, FIXED_BYTES)
    header = None if seen is None else read_fixed(seen.prefix)
    return replace(found, header=header)


def sampled(shard_bits: int, share: float = 1.0) -> list[int]:
    """So many of the shards, at least one, spread evenly."""
    count = 1 << shard_bits
    wanted = max(1, round(count * share))
    return [number * count // wanted for number in range(wanted)]


# The chunks that each writer has on a root, distinguished by their lineage.
#
# Pure: what was found comes in, sums go out.


@dataclass(slots=True)
class WriterShare:
    """The chunks of one writer; ``writer`` is None for all those together that have no record."""

    writer: WriterRecord | None
    chunks_count: int = 0
    size_bytes: int = 0
    """Size of the files, headers included."""
    first_s: int = 0
    """The times of the oldest and the newest of these; 0 if unknown."""
    last_s: int = 0
    namespaces: set[NamespaceId] = field(default_factory=set)


def by_writer(found: Iterable[ChunkFile], writers: Writers) -> list[WriterShare]:
    """The shares of all writers that have any, the latest first. ``found`` with headers; one without has no writer."""
    shares: dict[LineageId | None, WriterShare] = {}
    for each in found:
        said = None if each.header is None else written(each.header.incarnation)
        lineage = said.lineage if said is not None and said.lineage in writers else None
        share = shares.get(lineage)
        if share is None:
            share = shares[lineage] = WriterShare(writers[lineage] if lineage is not None else None)
        share.chunks_count += 1
        share.size_bytes += each.size_bytes
        share.namespaces.add(each.namespace)
        if lineage is not None and said is not None:
            share.first_s = min(share.first_s or said.written_s, said.written_s)
            share.last_s = max(share.last_s, said.written_s)
    return sorted(shares.values(), key=lambda share: (-share.last_s, share.writer.session if share.writer else ""))
