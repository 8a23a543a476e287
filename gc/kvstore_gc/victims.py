"""The chunks that sweeps are to take, the exact list of what one sweep takes, and what one run took of it.

The list is a small file on the root. etcd holds only what nodes need, so any collector that adopts a sweep finds here
which publications of which chunks it may take.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.format import places
from kvstore.format.header import Incarnation
from kvstore.format.places import Name
from kvstore.meta.sweeps import VICTIMS_MAX
from kvstore.namespace import NamespaceId
from kvstore.recency import NS_PER_S
from kvstore.root.identity import read_small
from kvstore.root.interface import Root
from kvstore.sources import Clock

CHECKSUM_BYTES = 16

_MAGIC = b"KVPLAN1\n"
_ENTRY = struct.Struct(f"<{ADDRESS_BYTES}s{places.NAMESPACE_ID_BYTES}sB{ADDRESS_BYTES}sQ")
_BYTES_MAX = len(_MAGIC) + VICTIMS_MAX * _ENTRY.size


@dataclass(frozen=True, slots=True)
class Victim:
    """A chunk to be condemned, as it was listed."""

    address: Address
    namespace: NamespaceId
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The plan for one shard: at most VICTIMS_MAX ``victims``."""

    shard: int
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class Condemnation:
    """One publication of one address. ``incarnation`` is shorter than 16 bytes if the file is (it is damaged then)."""

    address: Address
    namespace: NamespaceId
    incarnation: Incarnation
    size_bytes: int

    def name(self, shard_bits: int) -> Name:
        """The name of its file on the root."""
        return places.chunk(self.address, self.namespace, shard_bits)


class Taken:
    """The fate of the victims of one sweep in one run. Thread-safe.

    ``deleted`` hears the bytes of each chunk at once: the root's level must not be late by a whole sweep.
    """

    def __init__(self, deleted: Callable[[int], object] = lambda size_bytes: None) -> None:
        self._deleted = deleted
        self._lock = threading.Lock()
        self.reaped: list[Condemnation] = []
        self.restored_count = 0
        self.failed_count = 0
        self.failure = ""

    def reap(self, victim: Condemnation) -> None:
        """Counts a victim that was deleted."""
        with self._lock:
            self.reaped.append(victim)
        self._deleted(victim.size_bytes)

    def put_back(self) -> None:
        """Counts a file that was another publication than the condemned one, and went back."""
        with self._lock:
            self.restored_count += 1

    def fail(self, error: Exception) -> None:
        """Counts a victim that could not be taken or deleted; the others can."""
        with self._lock:
            self.failed_count += 1
            self.failure = str(error)


def write_victims(root: Root, sweep: bytes, victims: Sequence[Condemnation], staged: Name, clock: Clock) -> bytes:
    """Writes the list of a sweep by way of ``staged``, synced; returns its checksum, by which it is found.

    Raises the root's errors.
    """
    assert len(victims) <= VICTIMS_MAX
    entries = (
        _ENTRY.pack(one.address, one.namespace, len(one.incarnation), one.incarnation, one.size_bytes)
        for one in victims
    )
    content = _MAGIC + b"".join(entries)
    checksum = _checksum(content)
    try:
        root.stage(staged, [memoryview(content)], stamp_ns=int(clock.now_s()) * NS_PER_S, durable=True)
        root.publish(staged, places.plan(sweep, checksum), durable=True)
    finally:
        root.discard(staged)
    return checksum


def read_victims(root: Root, sweep: bytes, checksum: bytes) -> tuple[Condemnation, ...] | None:
    """The list of a sweep; None if it is gone or damaged: then nothing may be taken. Raises the root's errors."""
    content = read_small(root, places.plan(sweep, checksum), _BYTES_MAX)
    if content is None or not content.startswith(_MAGIC) or _checksum(content) != checksum:
        return None
    return tuple(
        Condemnation(Address(address), NamespaceId(namespace), Incarnation(incarnation[:size]), size_bytes)
        for address, namespace, size, incarnation, size_bytes in _ENTRY.iter_unpack(content[len(_MAGIC) :])
    )


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=CHECKSUM_BYTES, person=b"kvstore.plan.1").digest()
