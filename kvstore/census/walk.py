"""A walk over the chunks of a root, folder by folder: names, sizes and times, and the headers if asked for.

Streaming: memory does not grow with the root. Unlike a check (``fsck``) it verifies nothing, and unlike a collector's
listing it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvstore import recency
from kvstore.address import Address
from kvstore.census.fixed import Fixed, read_fixed
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.format.places import Name
from kvstore.namespace import NamespaceId
from kvstore.recency import Recency
from kvstore.root.interface import Entry, Root


@dataclass(frozen=True, slots=True)
class Found:
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
) -> Iterator[Found]:
    """Yields the chunks of a root, shard by shard, in no order within one; what comes and goes meanwhile may be missed.

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
) -> Iterator[Found]:
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


def found_in(folder: Name, entry: Entry, quantum_s: int = recency.QUANTUM_S) -> Found | None:
    """The chunk that an entry of a shard's folder is; None for anything else."""
    parsed = places.parse_chunk(entry.name)
    if parsed is None or entry.stat is None:
        return None
    when = recency.decode(entry.stat.mtime_ns, quantum_s)
    return Found(Name(f"{folder}/{entry.name}"), *parsed, entry.stat.size_bytes, when)


def with_header(root: Root, found: Found) -> Found:
    """Adds the header to ``found``, if there is a valid one. Raises the root's errors."""
    seen = root.look(found.name, FIXED_BYTES)
    header = None if seen is None else read_fixed(seen.prefix)
    return replace(found, header=header)


def sampled(shard_bits: int, share: float = 1.0) -> list[int]:
    """So many of the shards, at least one, spread evenly."""
    count = 1 << shard_bits
    wanted = max(1, round(count * share))
    return [number * count // wanted for number in range(wanted)]
