"""Evicts chunks from a root that the processes of one host share: hazard pointers over files.

A batch has four steps, in this order (gc/PROTOCOL.md, section 7; ``tests/model/host.py`` searches every interleaving):

1. append the victims to the log,
2. *then* read the hold tables of all live processes,
3. *then* read the pins,
4. delete what none of them has, children before parents; then the batch is settled.

A process that holds does the opposite: it writes its table, *then* reads the log. So one of the two sees the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.census.walk import read_fixed
from kvstore.core.address import NO_PARENT, Address
from kvstore.core.clock import Clock
from kvstore.core.namespace import NamespaceId
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.format.places import Name
from kvstore.host.pins import PinnedPrints
from kvstore.host.tables import BATCH_MAX, SHARED, Number, Shared, evicting_lock, live_tables
from kvstore.root.posix import PosixRoot, translated

Truths = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EvictionVictim:
    """A chunk to be evicted."""

    address: Address
    namespace: NamespaceId
    size_bytes: int
    mtime_ns: int = 0
    """As it was listed, for collectors of a cluster."""


@dataclass(slots=True)
class Evicted:
    """What became of victims: those that were deleted, with their bytes; those that stay because they are pinned, or
    were used since the listing; those that could not be deleted.
    """

    count: int = 0
    size_bytes: int = 0
    pinned_count: int = 0
    used_count: int = 0
    failed_count: int = 0
    lacking_bytes: int = 0
    """Bytes that a caller still needs."""
    held: list[EvictionVictim] = field(default_factory=list)
    """Those that stay because they, or descendants of theirs, are held."""

    def __iadd__(self, other: Evicted) -> Evicted:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def begin_listing(folder: str, shared: Shared) -> int:
    """Returns when a listing for an eviction begins, by the clock that stamps files: ``time.time`` is ahead by a tick.

    The time is read before the listing counts: a put that sees the count already writes later than that, one that sees
    it change marks its parents, and one that has ended by then is listed.
    """
    path = f"{folder}/{SHARED}"
    with translated("touch", path):
        os.utime(path)
        since_ns = os.stat(path).st_ctime_ns
    shared.add(Number.LISTINGS, 1)
    return since_ns


@contextmanager
def settled(folder: str, shared: Shared) -> Iterator[None]:
    """Evicts alone. The batch of a process that died stays as it is: without this its chunks would stay misses."""
    with evicting_lock(folder):
        shared[Number.SETTLED] = shared[Number.TAIL]
        yield


def settle_left(folder: str, shared: Shared) -> None:
    """Settles the batch of a process that died; not that of one that lives, which has the lock."""
    with suppress(Unavailable), evicting_lock(folder, waits=False):
        shared[Number.SETTLED] = shared[Number.TAIL]


class Eviction:
    """Evicts chunks of one listing. ``since_ns`` is when the listing began, by the file system's clock: what was
    written or used later stays, because it may be the parent of a chunk that the listing lacks.

    Keeps the ancestors of what stays, for all of its batches: no chunk outlives its parent.
    """

    def __init__(self, root: PosixRoot, shard_bits: int, shared: Shared, clock: Clock, since_ns: int) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._shared = shared
        self._since_ns = since_ns
        self._pins = PinnedPrints(root, clock)
        self._kept: set[Address] = set()

    def evict(self, victims: Sequence[EvictionVictim], *, even_pinned: bool = False) -> Evicted:
        """Evicts chunks, children before their parents. Raises Unavailable and the root's errors."""
        done = Evicted()
        for start in range(0, len(victims), BATCH_MAX):
            part = victims[start : start + BATCH_MAX]
            # Advice: what is condemned is a miss for others until the batch is settled.
            held, pinned = self._in_use(part, even_pinned)
            for at in np.flatnonzero(held | pinned).tolist():
                self._stays(part[at], done, is_pinned=bool(pinned[at]))
            free = [part[at] for at in np.flatnonzero(~(held | pinned)).tolist()]
            with self._batch(free):
                held, pinned = self._in_use(free, even_pinned)
                for victim, is_held, is_pinned in zip(free, held.tolist(), pinned.tolist(), strict=True):
                    self._delete(victim, is_held, is_pinned, done)
        return done

    def _in_use(self, victims: Sequence[EvictionVictim], even_pinned: bool) -> tuple[Truths, Truths]:
        """Reads which victims are held, *then* which are pinned."""
        prints = np.frombuffer(b"".join(victim.address for victim in victims), "<u8")[::2]
        held = np.zeros(len(victims), np.bool_)
        with translated("read", f"{self._root.path}/host"):
            tables = live_tables(self._root.path, self._shared, whole=True)
        for table in tables:
            held |= np.isin(prints, np.frombuffer(table.held, "<u8")[::2])
        return held, np.isin(prints, self._pins.read()) & (not even_pinned)

    @contextmanager
    def _batch(self, batch: Sequence[EvictionVictim]) -> Iterator[None]:
        """Appends a batch, and settles it. One process at a time."""
        shared = self._shared
        with settled(self._root.path, shared):
            shared.append(b"".join(victim.address for victim in batch))
            shared.fence()
            try:
                yield
            finally:
                shared[Number.SETTLED] = shared[Number.TAIL]

    def _delete(self, victim: EvictionVictim, is_held: bool, is_pinned: bool, done: Evicted) -> None:
        name = places.chunk(victim.address, victim.namespace, self._shard_bits)
        path = f"{self._root.path}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        except OSError:
            done.failed_count += 1
            return
        was_used = status.st_ctime_ns >= self._since_ns
        if is_held or is_pinned or was_used or victim.address in self._kept:
            self._stays(victim, done, is_pinned=is_pinned, was_used=was_used and not is_held)
            return
        # Before and after: a listing that begins or ends in between must not subtract it once more.
        self._shared.add(Number.DELETED, status.st_size)
        try:
            os.unlink(path)
        except OSError:
            done.failed_count += 1
            self._keep(victim)
            return
        self._shared.add(Number.USED, -status.st_size)
        self._shared.add(Number.DELETED, status.st_size)
        done.count += 1
        done.size_bytes += status.st_size

    def _stays(self, victim: EvictionVictim, done: Evicted, *, is_pinned: bool, was_used: bool = False) -> None:
        """Counts a victim that stays."""
        if is_pinned:
            done.pinned_count += 1
        elif was_used:
            done.used_count += 1
        else:
            done.held.append(victim)
        self._keep(victim)

    def _keep(self, victim: EvictionVictim) -> None:
        """Keeps the ancestors of a chunk that stays. Their addresses are in the headers."""
        address, namespace = victim.address, victim.namespace
        while (parent := self._parent(places.chunk(address, namespace, self._shard_bits))) is not None:
            if parent in self._kept:
                return
            self._kept.add(parent)
            address = parent

    def _parent(self, name: Name) -> Address | None:
        try:
            seen = self._root.look(name, FIXED_BYTES)
        except KVStoreError:
            return None
        header = read_fixed(seen.prefix) if seen is not None else None
        return header.parent if header is not None and header.parent != NO_PARENT else None
