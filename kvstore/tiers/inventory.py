"""The inventory of a bounded tier: its entries, their users, and which go when room is needed (MEMORY.md, E1 to E4).

Pure: no lock, no clock, no I/O. So the memory and the local disk share it, and a replay needs no bytes. Its owner makes
one call at a time, and looks at entries only between calls. Queues have the entries in the order in which they are
evicted.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.address import NO_PARENT, Address
from kvstore.core.recency import DEFAULT, PRIORITY_DEFAULT, Hints
from kvstore.format.keyset import ChunkIdentity

# The entry that a bounded tier keeps for one chunk, its place (which chunk it is), and its queue.


USES_MAX = 3
"""Uses are counted up to this, as on the root: 3 means at least 3."""


class Worth(NamedTuple):
    """The rank of an entry, besides the time of its last use."""

    octaves: float = 0.0
    """Number of times that its age is halved."""
    ttl_s: int | None = None


class Queue:
    """The entries of one worth."""

    __slots__ = ("held_bytes", "turns", "worth")

    def __init__(self, worth: Worth) -> None:
        self.worth = worth
        self.held_bytes = 0
        """Bytes of all of them, including those that may not be evicted."""
        self.turns: list[tuple[float, int, TierEntry]] = []
        """A heap of last use, ticket, entry. A turn counts as long as the entry has that ticket."""

    @property
    def oldest_s(self) -> float:
        """Time of the last use of the entry whose turn is next."""
        return self.turns[0][0]


class TierEntry:
    """A chunk in a tier: claimed (neither ready nor gone), ready, gone (E1). Only its inventory changes it."""

    __slots__ = (
        *("address", "children_count", "hints", "is_dirty", "is_gone", "is_ready", "is_replica", "is_retired"),
        *("namespace", "offset", "parent", "queue", "references", "size_bytes", "ticket", "used_s", "uses"),
    )

    def __init__(self, place: ChunkIdentity, offset: int, size_bytes: int, now_s: float, hints: Hints) -> None:
        self.address = place.address
        self.parent = place.parent
        self.namespace = place.namespace
        self.children_count = 0
        """Number of entries whose parent this is, ready or not."""
        self.is_ready = False
        """True if look-ups find it."""
        self.offset = offset
        """Position of its room, as the ``TierSpace`` returned it."""
        self.size_bytes = size_bytes
        """Bytes of its image."""
        self.hints = hints
        self.used_s = now_s
        """Time when it was claimed or last used."""
        self.uses = 0
        """Number of uses since it was claimed, up to ``USES_MAX``."""
        self.references = 1
        self.is_dirty = False
        self.is_replica = False
        self.is_gone = False
        self.is_retired = False
        """True if a caller said that it is not needed soon: it goes before all others, until it is used again."""
        self.queue: Queue
        """Set when it has room."""
        self.ticket = 0
        """Its turn in that queue; 0 if it has none."""

    @property
    def place(self) -> ChunkIdentity:
        """The chunk's identity; also when the entry is gone."""
        return ChunkIdentity(self.namespace, self.address, self.parent)


# The order of eviction is that of the root (gc/kvstore_gc/policy.py): least recently used, with ages weighted by hints.
#
# Entries are sorted into a few *queues*, by their ``Worth``; within each the one unused for longest is first. When room
# is needed the heads of the queues are compared, so that ranks may change with time and yet nothing is sorted again.


OCTAVES_PER_PRIORITY = 0.1
"""Octaves of age that one unit of priority is worth, as in the collector."""
REPLICA_OCTAVES = 1.0
"""A replica counts as twice as old (P4). It does not go before all others: a full node would then keep no replica until
its second use, however hot.
"""
PRIORITY_STEP = 5
"""Priorities are rounded to this, which bounds the number of queues."""
AGE_LEAST_S = 30.0
"""Added to every age, so that brand-new entries do not outlast everything."""
STALE_MAX = 64
"""Limit on stale turns beyond the number of valid ones, before the heaps are cleaned."""
RETIRED = Worth(octaves=-math.inf)
"""The worth of entries that their users said they will not need soon: they go before all others."""


def _worth(entry: TierEntry) -> Worth:
    if entry.is_retired:
        return RETIRED
    steps = round((entry.hints.priority - PRIORITY_DEFAULT) / PRIORITY_STEP)
    octaves = steps * PRIORITY_STEP * OCTAVES_PER_PRIORITY
    return Worth(octaves - entry.is_replica * REPLICA_OCTAVES, entry.hints.ttl_s)


def _staleness(queue: Queue, now_s: float) -> tuple[bool, float]:
    """Ranks the head of a queue: the highest goes first, those past their ttl before all others."""
    octaves, ttl_s = queue.worth
    age_s = max(now_s - queue.oldest_s, 0.0)
    return ttl_s is not None and age_s >= ttl_s, (age_s + AGE_LEAST_S) * 2.0**-octaves


ASKED_MAX = 65_536
ASKED_LASTS_S = 3_600.0


class Admission:
    """The addresses asked for lately: at most ``addresses_max``, for about ``lasts_s``. Not thread-safe.

    It keeps two generations and forgets the older one as a whole, so it remembers half to all of the limit.
    """

    def __init__(self, addresses_max: int = ASKED_MAX, lasts_s: float = ASKED_LASTS_S) -> None:
        self._generation_max = max(addresses_max // 2, 1)
        self._lasts_s = lasts_s / 2
        self._new: set[Address] = set()
        self._old: set[Address] = set()
        self._began_s = -math.inf

    def asked(self, address: Address, now_s: float) -> bool:
        """Notes that an address is asked for; True if it was asked for before, not long ago."""
        age_s = now_s - self._began_s
        if len(self._new) >= self._generation_max or age_s >= self._lasts_s:
            # After a long silence the newer generation is too old as well.
            self._old = self._new if age_s < 2 * self._lasts_s else set()
            self._new, self._began_s = set(), now_s
        known = self.knows(address)
        self._new.add(address)
        return known

    def knows(self, address: Address) -> bool:
        """True if it was asked for, not long ago."""
        return address in self._new or address in self._old


class Queues:
    """The order of eviction. A stale turn stays in its heap until it surfaces, or until most turns are stale."""

    def __init__(self, is_evictable: Callable[[TierEntry], bool]) -> None:
        self._is_evictable = is_evictable
        self._queues: dict[Worth, Queue] = {}
        self._ticket = 0
        self._turns_count = 0
        self._tickets_count = 0

    def enter(self, entry: TierEntry) -> None:
        """Counts an entry in; it has no turn yet."""
        entry.queue = self._queue(_worth(entry))
        entry.queue.held_bytes += entry.size_bytes

    def leave(self, entry: TierEntry) -> None:
        entry.queue.held_bytes -= entry.size_bytes
        self._withdraw(entry)

    def moved(self, entry: TierEntry) -> None:
        """Notes that an entry was used, or is valued differently: its turn comes later, if it has one."""
        worth = _worth(entry)
        if worth != entry.queue.worth:
            entry.queue.held_bytes -= entry.size_bytes
            entry.queue = self._queue(worth)
            entry.queue.held_bytes += entry.size_bytes
        if entry.ticket:
            self._withdraw(entry)
            self.offer(entry)

    def offer(self, entry: TierEntry) -> None:
        """Gives an entry a turn if it may be evicted and has none. Call it whenever that may have become true."""
        if entry.ticket or not self._is_evictable(entry):
            return
        self._ticket += 1
        entry.ticket = self._ticket
        self._tickets_count += 1
        self.put_back(entry)
        if self._turns_count > 2 * self._tickets_count + STALE_MAX:
            self._clean()

    def pop(self, now_s: float) -> TierEntry | None:
        """Returns the entry that goes first, without its turn, to be dropped or ``put_back``; None if none may go."""
        candidates = [queue for queue in list(self._queues.values()) if self._has_head(queue)]
        if not candidates:
            return None
        self._turns_count -= 1
        retired = next((queue for queue in candidates if queue.worth is RETIRED), None)
        first = retired or max(candidates, key=lambda queue: _staleness(queue, now_s))
        return heappop(first.turns)[2]

    def put_back(self, entry: TierEntry) -> None:
        """Gives an entry its turn again, before all that came later."""
        heappush(entry.queue.turns, (entry.used_s, entry.ticket, entry))
        self._turns_count += 1

    def _queue(self, worth: Worth) -> Queue:
        queue = self._queues.get(worth)
        if queue is None:
            queue = self._queues[worth] = Queue(worth)
        return queue

    def _has_head(self, queue: Queue) -> bool:
        """True if there is a valid turn; removes the stale ones before it."""
        while queue.turns:
            _, ticket, entry = queue.turns[0]
            if entry.ticket == ticket:
                if self._is_evictable(entry):
                    return True
                self._withdraw(entry)
            heappop(queue.turns)
            self._turns_count -= 1
        if not queue.held_bytes:
            del self._queues[queue.worth]
        return False

    def _withdraw(self, entry: TierEntry) -> None:
        if entry.ticket:
            entry.ticket = 0
            self._tickets_count -= 1

    def _clean(self) -> None:
        for queue in self._queues.values():
            queue.turns = [turn for turn in queue.turns if turn[2].ticket == turn[1]]
            heapify(queue.turns)
        self._turns_count = sum(len(queue.turns) for queue in self._queues.values())


__all__ = ["ChunkIdentity", "TierEntry", "TierInventory", "TierSpace"]

EVICTED_TIMES_MAX = 8
"""If free room is fragmented, a claim gives up after evicting this multiple of the bytes asked for. With one block in
six of the size asked for, and the others small, 4 was not always enough.
"""

SHARDS_COUNT = 64
"""Shards of the prints, by the first six bits of an address."""

DROP_COUNT = 64
"""Entries of a cleared namespace that are dropped under one lock: look-ups wait for no more than that."""


class TierSpace(Protocol):
    """The bounded space that holds the bytes of entries."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    def take(self, size_bytes: int) -> int | None: ...

    def give(self, offset: int) -> None: ...


def shard_of(address: Address) -> int:
    """Returns the first six bits of an address."""
    return address[0] >> 2


def print_of(address: Address) -> int:
    """Returns bytes 4 to 8 of an address, little-endian."""
    return int.from_bytes(address[4:8], "little")


class Prints:
    """32 bits of each address that a tier holds, by shard, in order; peers receive them (MEMORY.md, "Peers").

    Kept up to date at four bytes each, because a shard of a million prints is sent again about once a second. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._shards = [array("I") for _ in range(SHARDS_COUNT)]
        self._changed: set[int] = set()

    def add(self, address: Address) -> None:
        """Adds an address that is not in the set."""
        shard = shard_of(address)
        insort(self._shards[shard], print_of(address))
        self._changed.add(shard)

    def remove(self, address: Address) -> None:
        """Removes an address that is in the set."""
        shard = shard_of(address)
        prints = self._shards[shard]
        del prints[bisect_left(prints, print_of(address))]
        self._changed.add(shard)

    def changes(self) -> set[int]:
        """Returns the shards in which addresses came or went since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def of(self, shard: int) -> npt.NDArray[np.uint32]:
        """Returns the prints of a shard, shape ``(n,)``, each once, ascending; a copy."""
        prints = np.array(self._shards[shard], np.uint32)
        # np.unique would sort: 20 times slower.
        return np.concatenate((prints[:1], prints[1:][prints[1:] != prints[:-1]]))


class TierInventory:
    """The entries of one tier. Not thread-safe."""

    def __init__(self, room: TierSpace) -> None:
        self._room = room
        self._entries: dict[Address, TierEntry] = {}
        self._ready: dict[Address, TierEntry] = {}
        """Those that look-ups find."""
        self._orphans: dict[Address, int] = {}
        """Numbers of children, by the address of their missing parent."""
        self._queues = Queues(self._is_evictable)
        self.prints = Prints()
        """Those of the entries that are ready."""
        # The latest time that a caller gave: ages of entries count up to it.
        self._now_s = 0.0
        self.held_bytes = 0
        """Bytes of all entries, and of those that are gone and still referred to."""
        self.dirty_bytes = 0
        self.referenced_bytes = 0
        """Bytes of entries with references, gone or not; a claimant has one."""
        self.evicted_count = 0
        """Number of entries evicted since the beginning."""

    @property
    def entries_count(self) -> int:
        """Number of entries that are claimed or ready."""
        return len(self._entries)

    def find(self, address: Address) -> TierEntry | None:
        return self._ready.get(address)

    def leading(self, addresses: Sequence[Address], first: int = 0) -> int:
        """Returns how many consecutive chunks from index ``first`` on are ready; of one chain, or any blocks."""
        indexes = range(first, len(addresses))  # a slice would pass over all before ``first``, one by one
        return len(list(takewhile(self._ready.__contains__, map(addresses.__getitem__, indexes))))

    def claim(
        self,
        place: ChunkIdentity,
        size_bytes: int,
        now_s: float,
        hints: Hints = DEFAULT,
        *,
        dirty: bool = False,
        replica: bool = False,
    ) -> TierEntry | None:
        """Makes a new entry with room, hidden until ``ready``; evicts others if that makes the room.

        None if the address is claimed or ready (E4), or if no room can be made (E2). The caller has one reference, and
        gives it up with ``unrefer``, after ``ready`` or ``drop``.
        """
        self._now_s = max(self._now_s, now_s)
        if place.address in self._entries:
            return None
        # Add it before room is made: its parent is then no leaf, and cannot be evicted for its child.
        entry = TierEntry(place, -1, size_bytes, now_s, hints)
        self._add(entry)
        offset = self._make_room(size_bytes)
        if offset is None:
            self._forget(entry)
            return None
        entry.offset = offset
        entry.is_dirty, entry.is_replica = dirty, replica
        self.held_bytes += size_bytes
        self.referenced_bytes += size_bytes
        self.dirty_bytes += size_bytes if dirty else 0
        self._queues.enter(entry)
        return entry

    def ready(self, entry: TierEntry) -> bool:
        """Shows a claimed entry to all callers. False if it was dropped since the claim."""
        if entry.is_gone:
            return False
        entry.is_ready = True
        self._ready[entry.address] = entry
        self.prints.add(entry.address)
        self._queues.moved(entry)
        self._queues.offer(entry)
        return True

    def drop(self, entry: TierEntry) -> None:
        """Removes an entry immediately, in any state; its room is given back with the last reference. Idempotent."""
        if entry.is_gone:
            return
        if entry.is_ready:
            self.prints.remove(entry.address)
        self.dirty_bytes -= entry.size_bytes if entry.is_dirty else 0
        self._queues.leave(entry)
        self._forget(entry)
        if not entry.references:
            self._give(entry)

    def refer(self, entry: TierEntry) -> None:
        """Keeps an entry that is not gone until ``unrefer``."""
        assert not entry.is_gone, "an entry that is gone may have lost its room to another"
        entry.references += 1
        if entry.references == 1:
            self.referenced_bytes += entry.size_bytes

    def unrefer(self, entry: TierEntry) -> None:
        """Undoes one ``refer``, or the claimant's own."""
        assert entry.references, "more references given up than taken"
        entry.references -= 1
        if entry.references:
            return
        self.referenced_bytes -= entry.size_bytes
        if entry.is_gone:
            self._give(entry)
        else:
            self._queues.offer(entry)

    def clean(self, entry: TierEntry) -> None:
        """Notes that an entry need not reach the root any more (E3)."""
        if entry.is_dirty:
            entry.is_dirty = False
            if not entry.is_gone:
                self.dirty_bytes -= entry.size_bytes
                self._queues.offer(entry)

    def used(self, entries: Iterable[TierEntry], now_s: float, hints: Hints | None = None) -> None:
        """Notes a use of each, and raises its hints to ``hints``."""
        self._now_s = max(self._now_s, now_s)
        for entry in entries:
            if entry.is_gone:
                continue
            entry.used_s = max(entry.used_s, now_s)
            is_worth_more = entry.uses < USES_MAX or entry.is_retired
            entry.uses = min(entry.uses + 1, USES_MAX)
            entry.is_retired = False
            if hints is not None and not entry.hints.covers(hints):
                entry.hints, is_worth_more = entry.hints.raised_to(hints), True
            if is_worth_more or entry.ticket:
                self._queues.moved(entry)

    def retire(self, addresses: Iterable[Address]) -> None:
        """Makes these the first to go when room is needed, until they are used again. Drops nothing."""
        for entry in map(self.find, addresses):
            if entry is not None and not entry.is_retired:
                entry.is_retired = True
                self._queues.moved(entry)

    def victims(self, bytes_wanted: int) -> list[TierEntry]:
        """Returns the next entries to evict, in that order: at least so many bytes if there are. Changes nothing."""
        found = self._plan(bytes_wanted)
        for entry in found:
            self._queues.put_back(entry)
        return found

    def entries(self) -> list[TierEntry]:
        """Returns all entries, claimed ones too."""
        return list(self._entries.values())

    def _is_evictable(self, entry: TierEntry) -> bool:
        """True if rules E1 and E2 allow its eviction."""
        return not entry.references and not entry.children_count and entry.is_ready and not entry.is_dirty

    def _make_room(self, size_bytes: int) -> int | None:
        """Takes room and evicts no more than it needs; evicts nothing if that would not make the room."""
        offset = self._room.take(size_bytes)
        evicted_bytes = 0
        while offset is None and size_bytes <= self._room.size_bytes and evicted_bytes < EVICTED_TIMES_MAX * size_bytes:
            # If there is enough room, but in pieces, evict one after the other until two free pieces meet.
            short_bytes = max(size_bytes - self._room.free_bytes, 1)
            found = self._plan(short_bytes)
            if sum(entry.size_bytes for entry in found) < short_bytes:
                for entry in found:
                    self._queues.put_back(entry)
                return None
            for entry in found:
                evicted_bytes += entry.size_bytes
                self.drop(entry)
            self.evicted_count += len(found)
            offset = self._room.take(size_bytes)
        return offset

    def _plan(self, bytes_wanted: int) -> list[TierEntry]:
        """Takes entries out of the queues in their order, children before parents."""
        found: list[TierEntry] = []
        planned_bytes = 0
        while planned_bytes < bytes_wanted and (entry := self._queues.pop(self._now_s)) is not None:
            found.append(entry)
            planned_bytes += entry.size_bytes
            parent = self._entries.get(entry.parent)
            if parent is not None:
                # Count as if the child were gone already. Undone below: the parent then has a turn that does not count.
                parent.children_count -= 1
                self._queues.offer(parent)
        for entry in found:
            parent = self._entries.get(entry.parent)
            if parent is not None:
                parent.children_count += 1
        return found

    def _add(self, entry: TierEntry) -> None:
        self._entries[entry.address] = entry
        entry.children_count = self._orphans.pop(entry.address, 0)
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.children_count += 1
            entry.parent = parent.address  # share one object, for a million of them
        elif entry.parent != NO_PARENT:
            self._orphans[entry.parent] = self._orphans.get(entry.parent, 0) + 1

    def _forget(self, entry: TierEntry) -> None:
        """Takes an entry out. Its children are still found, and count as its children if it comes back."""
        del self._entries[entry.address]
        self._ready.pop(entry.address, None)
        if entry.children_count:
            self._orphans[entry.address] = entry.children_count
        entry.is_ready, entry.is_gone = False, True
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.children_count -= 1
            self._queues.offer(parent)
        elif entry.parent != NO_PARENT:
            self._orphans[entry.parent] -= 1
            if not self._orphans[entry.parent]:
                del self._orphans[entry.parent]

    def _give(self, entry: TierEntry) -> None:
        self.held_bytes -= entry.size_bytes
        self._room.give(entry.offset)
