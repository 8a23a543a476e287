"""The contents of a local disk tier, decided here under one lock and done to files elsewhere.

Separate from the tier, which does the I/O. The bound holds at each moment: a file's room is taken before its first byte
is written, and given back after the file is removed. Dropped entries stay referenced until then, among the *leaving*.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import recency
from kvstore.address import Address
from kvstore.census.selection import NOTHING, Standing
from kvstore.counts import NodeCount
from kvstore.format import places
from kvstore.format.header import Header, Kind
from kvstore.format.places import Name
from kvstore.hints import Hints
from kvstore.memory.inventory import DROP_COUNT, Entry, Inventory, Place, Policy
from kvstore.namespace import NamespaceDigest, NamespaceId
from kvstore.node.counters import Counters
from kvstore.node.disk_folder import SHARD_BITS
from kvstore.recency import QUANTUM_S
from kvstore.sources import Clock

BLOCK_BYTES = 4096
"""The block size, unless the file system reports another."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file with the name of a chunk, as a listing shows it."""

    mtime_ns: int
    size_bytes: int
    address: Address
    namespace: NamespaceId

    @property
    def name(self) -> Name:
        """The file's place in the folder."""
        return places.chunk(self.address, self.namespace, SHARD_BITS)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Room for a file that is being written."""

    entry: Entry
    clears_count: int
    """Number of namespaces cleared before it was claimed."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """An entry that is gone, and its files, which keep its room until they are gone too."""

    entry: Entry
    other_names: tuple[Name, ...]

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of the files."""
        return self.other_names or (name_of(self.entry),)


class FileRoom:
    """Room for files of at most ``size_bytes`` in all, as a file system counts them. Not thread-safe.

    ``take`` returns the charge of the file as its place, so that nothing needs to remember the charge of each file.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.block_bytes = BLOCK_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken."""
        return self.size_bytes - self.held_bytes

    def charge(self, size_bytes: int) -> int:
        """Returns what a file of that size takes: whole blocks, and one more for the file system's map of a fragmented
        file, which ``st_blocks`` counts too.
        """
        return (-(-size_bytes // self.block_bytes) + 1) * self.block_bytes

    def take(self, size_bytes: int) -> int | None:
        """Charges a file; None if it would pass the bound."""
        charged = self.charge(size_bytes)
        if charged > self.free_bytes:
            return None
        self.held_bytes += charged
        return charged

    def give(self, offset: int) -> None:
        """Takes back a charge: the file is gone."""
        assert 0 < offset <= self.held_bytes
        self.held_bytes -= offset


class DiskShelf:
    """Thread-safe; nothing here waits for the disk. Entries that it returns are referenced for the caller."""

    def __init__(self, size_bytes: int, policy: Policy, counters: Counters, clock: Clock) -> None:
        self._policy = policy
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._room = FileRoom(size_bytes)
        self._inventory = Inventory(self._room, policy)
        self._leaving: deque[Leaving] = deque()
        self._leaving_bytes = 0
        """Bytes charged for the leaving entries, and for those whose files are being removed."""
        self._is_counted = False
        """True once it is known how many bytes the folder holds."""
        self._is_whole = False
        """True once everything that was counted is taken in."""
        self._cleared: set[bytes] = set()
        """Namespaces cleared before that; nothing of them is taken in."""
        self._clears_count = 0
        self._standing = NOTHING

    def set_block_bytes(self, block_bytes: int) -> None:
        """Sets the file system's block size; call it before anything is charged."""
        self._room.block_bytes = block_bytes

    def leading(self, packed_addresses: bytes, first: int) -> int:
        """Returns how many consecutive chunks from index ``first`` on are there, by their addresses."""
        with self._lock:
            return self._inventory.leading(packed_addresses, first)

    def has(self, address: Address) -> bool:
        """True if the chunk is there."""
        with self._lock:
            return self._inventory.find(address) is not None

    def refer(self, address: Address) -> Entry | None:
        """Returns the entry, whose room is not given back until ``unrefer``; None if there is none."""
        with self._lock:
            entry = self._inventory.find(address)
            if entry is not None:
                self._inventory.refer(entry)
            return entry

    def unrefer(self, entry: Entry, *, used: bool) -> None:
        """Ends ``refer``; ``used`` says whether the entry was used."""
        with self._lock:
            if used:
                # Wall time: entries taken in at the start have their last uses from the files' times.
                self._inventory.used([entry], self._clock.now_s())
            self._inventory.unrefer(entry)

    def retire(self, addresses: Sequence[Address]) -> None:
        """Makes these the first to go when room is needed, until they are used again."""
        with self._lock:
            entries = [self._inventory.find(address) for address in addresses]
            self._inventory.retire(entry for entry in entries if entry is not None)

    def make_room(self, place: Place, size_bytes: int, *, even_if_free: bool = False) -> bool:
        """Lets the least useful entries leave, as many as a file of that size needs; False if they may not.

        Their room is free once their files are removed. ``even_if_free``: the disk has less room than this shelf
        counts.
        """
        with self._lock:
            charged = self._room.charge(size_bytes)
            if not self._is_counted or charged > self._room.size_bytes:
                return False
            lacking = charged if even_if_free else charged - self._room.free_bytes
            lacking -= self._leaving_bytes
            if lacking <= 0:
                return True
            victims = self._victims(lacking, place.parent)
            if not victims:
                return False
            for victim in victims:
                self._policy.evicted(victim)
                self._inventory.refer(victim)
                self._leave(victim)
            self._counters.add(NodeCount.DISK_EVICTED, len(victims))
            return True

    def claim(self, place: Place, size_bytes: int, hints: Hints) -> Claimed | None:
        """Claims room for a file; None if there is none, or if the address is taken.

        Never evicts: nobody would remove the evicted file.
        """
        with self._lock:
            if self._room.charge(size_bytes) > self._room.free_bytes:
                return None
            entry = self._inventory.claim(place, size_bytes, self._clock.now_s(), hints)
            return None if entry is None else Claimed(entry, self._clears_count)

    def ready(self, claimed: Claimed) -> bool:
        """Notes that the file is there; False if a namespace was cleared meanwhile, which may be the file's own."""
        with self._lock:
            if claimed.clears_count != self._clears_count or not self._inventory.ready(claimed.entry):
                return False
            self._inventory.unrefer(claimed.entry)
            return True

    def leave(self, entry: Entry, *names: Name) -> None:
        """Takes away an entry that the caller refers to. It keeps its room until its file, or ``names``, are gone."""
        with self._lock:
            self._leave(entry, *names)

    def take_leaving(self) -> Leaving | None:
        """Returns the next entry whose files must be removed. Call ``left`` afterwards, or ``put_back`` on failure."""
        with self._lock:
            return self._leaving.popleft() if self._leaving else None

    def left(self, leaving: Leaving) -> None:
        """Notes that its files are gone: the room is free."""
        with self._lock:
            self._leaving_bytes -= self._room.charge(leaving.entry.size_bytes)
            self._inventory.unrefer(leaving.entry)

    def put_back(self, leaving: Leaving) -> None:
        """Queues it again, because the disk refused to remove its files."""
        with self._lock:
            self._leaving.append(leaving)

    def charge(self, size_bytes: int) -> int:
        """Returns what a file of that size takes."""
        return self._room.charge(size_bytes)

    @property
    def bytes_max(self) -> int:
        """The bound in bytes."""
        return self._room.size_bytes

    def counted(self, charged: int) -> None:
        """Notes that the folder holds that much; from now on more may be added."""
        with self._lock:
            self._room.held_bytes += charged
            self._is_counted = True

    def admit(self, found: Found, header: Header) -> bool:
        """Takes in a file that was counted; False if it has to go."""
        was = recency.decode(found.mtime_ns, QUANTUM_S)
        tokens = header.identity if header.kind is Kind.TOKENS else b""
        place = Place(header.namespace, header.address, header.parent, tokens)
        with self._lock:
            if header.namespace in self._cleared or self._standing.forbids(header.namespace, header.incarnation):
                return False
            self._room.give(self._room.charge(found.size_bytes))
            used_s = min(float(was.last_use_s), self._clock.now_s())
            entry = self._inventory.claim(place, found.size_bytes, used_s, was.hints)
            if entry is None:
                self._room.take(found.size_bytes)
                return False
            self._inventory.used([entry] * was.uses, used_s)
            self._inventory.ready(entry)
            self._inventory.unrefer(entry)
        return True

    def gone(self, found: Found) -> None:
        """Gives back the charge of a counted file that is gone."""
        with self._lock:
            self._room.give(self._room.charge(found.size_bytes))

    def whole(self) -> None:
        """Notes that everything that was counted is taken in."""
        with self._lock:
            self._is_whole = True
            self._cleared.clear()

    def drop_namespace(self, digest: NamespaceDigest) -> None:
        """Makes all chunks of the namespace leave, also those that are being written or taken in."""
        with self._lock:
            self._clears_count += 1
            if not self._is_whole:
                self._cleared.add(digest)
            entries = self._inventory.of_namespace(digest)
        for start in range(0, len(entries), DROP_COUNT):
            with self._lock:
                for entry in entries[start : start + DROP_COUNT]:
                    if entry.is_ready:  # if not, it is gone, or its writer removes it in ``ready``
                        self._inventory.refer(entry)
                        self._leave(entry)

    def forbid(self, standing: Standing) -> None:
        """Sets what must not come here from now on (rule P6)."""
        with self._lock:
            self._standing = standing

    def forbids(self, header: Header) -> bool:
        """True if a chunk must not come here."""
        with self._lock:
            return self._standing.forbids(header.namespace, header.incarnation)

    def entries(self) -> list[Entry]:
        """Returns the ready entries of this moment, without references."""
        with self._lock:
            return [entry for entry in self._inventory.entries() if entry.is_ready]

    def stats(self) -> dict[str, int | float]:
        """Returns the gauges of ``DiskTier.stats``."""
        with self._lock:
            return {
                "disk_entries": self._inventory.entries_count,
                "disk_held_bytes": self._room.held_bytes,
                "disk_bytes_max": self._room.size_bytes,
                "disk_refilling": int(not self._is_whole),
            }

    def _victims(self, lacking: int, parent: Address) -> list[Entry]:
        """Returns the entries that go first, just enough to free ``lacking`` bytes, never the parent of the new file;
        empty if there is not enough.
        """
        kept = self._inventory.find(parent)
        if kept is not None:
            self._inventory.refer(kept)
        victims: list[Entry] = []
        for entry in self._inventory.victims(lacking):
            if lacking > 0:
                victims.append(entry)
                lacking -= self._room.charge(entry.size_bytes)
        if kept is not None:
            self._inventory.unrefer(kept)
        return victims if lacking <= 0 else []

    def _leave(self, entry: Entry, *names: Name) -> None:
        self._inventory.drop(entry)
        self._leaving.append(Leaving(entry, names))
        self._leaving_bytes += self._room.charge(entry.size_bytes)


def name_of(chunk: Place | Entry) -> Name:
    """Returns the name of its file. Does not use an entry's ``place``, which may be read under the lock alone."""
    return places.chunk(chunk.address, NamespaceId(chunk.namespace[: places.NAMESPACE_ID_BYTES]), SHARD_BITS)
