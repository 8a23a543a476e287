"""Chunks as a listing shows them, without their bytes: chains with the stamps that nodes write."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import QUANTUM_S, TTL_CLASSES_S, USES_MAX, Hints, stamp_ns
from kvstore.format import places
from kvstore.root.interface import FolderEntry, Stat
from kvstore.root.memory import MemoryFile, MemoryFiles, MemoryRoot

NOW_S = 1_800_000_000

SHARD_BITS = 3
SHARDS = range(1 << SHARD_BITS)
SPACES = tuple(NamespaceId(bytes([number] * 8)) for number in range(4))
TTLS = (*TTL_CLASSES_S, None)


@dataclass(frozen=True)
class Chunk:
    """One chunk; ``parent`` is the address of the one before it."""

    address: Address
    namespace: NamespaceId
    size_bytes: int
    mtime_ns: int
    parent: Address | None = None

    @property
    def shard(self) -> int:
        return places.shard(self.address, SHARD_BITS)

    @property
    def name(self) -> places.Name:
        return places.chunk(self.address, self.namespace, SHARD_BITS)

    @property
    def entry(self) -> FolderEntry:
        return FolderEntry(self.name.rpartition("/")[2], Stat(self.size_bytes, self.mtime_ns))


def stamp(age_s: int, depth: int = 0, uses: int = 0, hints: Hints | None = None) -> int:
    """The mtime of a chunk whose last use began that long ago."""
    return stamp_ns((NOW_S - age_s) // QUANTUM_S * QUANTUM_S, depth, hints or Hints(), uses)


def loose(count: int, *, seed: int = 0, age_s: int | None = None) -> list[Chunk]:
    """Returns chunks that are separate chains, of the first namespace, ``age_s`` old or up to a day."""
    rnd = random.Random(seed)
    return [
        Chunk(
            Address(rnd.randbytes(16)),
            SPACES[0],
            100,
            stamp(rnd.randrange(86_400) if age_s is None else age_s, 0, rnd.randrange(USES_MAX + 1)),
        )
        for _ in range(count)
    ]


def entries(chunks: Iterable[Chunk], shard: int) -> list[FolderEntry]:
    """Returns the entries that a listing of that shard shows."""
    return [chunk.entry for chunk in chunks if chunk.shard == shard]


def root_of(chunks: Iterable[Chunk]) -> MemoryRoot:
    """A root that holds them."""
    files = MemoryFiles()
    for chunk in chunks:
        files.write(chunk.name, MemoryFile(bytes(chunk.size_bytes), chunk.mtime_ns))
    return MemoryRoot(files)


@st.composite
def forests(draw: st.DrawFn, *, spaces: Sequence[NamespaceId] = SPACES) -> list[Chunk]:
    """Trees of chunks: a parent is used no earlier and no less often than its child, and has hints no weaker."""
    rnd = random.Random(draw(st.integers(0, 1 << 32)))
    spread_s = draw(st.sampled_from([60, 600, 86_400, 30 * 86_400]))
    size_most = draw(st.sampled_from([1, 50]))
    found: list[Chunk] = []
    about: list[tuple[int, int, int, int, int]] = []
    for _ in range(draw(st.integers(1, 120))):
        if found and rnd.random() < 0.85:
            at = rnd.randrange(len(found))
            parent, (age_s, depth, uses, priority, ttl) = found[at], about[at]
            born = (
                age_s + rnd.choice((0, 0, rnd.randrange(spread_s))),
                depth + 1,
                rnd.randint(0, uses),
                rnd.choice((priority, rnd.randint(0, priority))),
                rnd.choice((ttl, rnd.randint(0, ttl))),
            )
            address, namespace = parent.address, parent.namespace
        else:
            born = (
                rnd.randrange(spread_s),
                0,
                rnd.randint(0, USES_MAX),
                rnd.choice((35, rnd.randint(0, 100))),
                rnd.choice((len(TTLS) - 1, rnd.randrange(len(TTLS)))),
            )
            address, namespace = None, rnd.choice(spaces)
        age_s, depth, uses, priority, ttl = born
        mtime_ns = stamp(age_s, depth, uses, Hints(priority, TTLS[ttl]))
        about.append(born)
        found.append(Chunk(Address(rnd.randbytes(16)), namespace, rnd.randint(1, size_most), mtime_ns, address))
    return found
