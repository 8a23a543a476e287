"""The inventory of a bounded tier: what it holds, who uses it, and what goes when room is needed (MEMORY.md, E1 to E4).

Pure: no lock, no clock, no I/O; so the memory and the local disk share it, and a replay needs no bytes. Whoever has it
keeps calls apart, and looks at entries only between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.address import Address
from kvstore.hints import DEFAULT, Hints
from kvstore.memory.entry import USES_MAX, Entry, Place, place_of
from kvstore.memory.policy import Policy
from kvstore.memory.prints import Prints
from kvstore.memory.queues import Queues
from kvstore.memory.tree import Tree
from kvstore.namespace import NamespaceDigest

__all__ = ["Entry", "Inventory", "Place", "Room", "place_of"]

EVICTED_TIMES_MAX = 8
"""Where room is in pieces: how many times the bytes asked for may be evicted before a claim gives up. Where one of six
blocks is as large as what is asked for, and the others are small, 4 was not always enough."""

DROP_COUNT = 64
"""Entries of a cleared namespace that are dropped under a lock at once: look-ups wait for no more than that."""


class Room(Protocol):
    """What the bytes of entries lie in; bounded."""

    @property
    def size_bytes(self) -> int:
        """All there is."""

    @property
    def free_bytes(self) -> int:
        """What is not taken, in however many pieces."""

    def take(self, size_bytes: int) -> int | None:
        """A number that says where; None where there is no room."""

    def give(self, offset: int) -> None:
        """Gives back what was taken there."""


class Inventory:
    """The entries of one tier. Not thread-safe."""

    def __init__(self, room: Room, policy: Policy) -> None:
        self._room = room
        self._policy = policy
        self._tree: Tree[Entry] = Tree()
        self._queues = Queues(policy, self._is_evictable)
        self._prints = Prints()
        self._pins: dict[Address, int] = {}
        # The latest time that a caller gave: what the ages of entries are reckoned to.
        self._now_s = 0.0
        self.held_bytes = 0
        """Of all entries, and of those that are gone and still referred to."""
        self.dirty_bytes = 0
        self.referenced_bytes = 0
        """Of entries that somebody refers to, gone or not; a claimant does."""
        self.pinned_bytes = 0
        self.evicted_count = 0
        """Entries that went because their room was needed, since the beginning."""
        self.evicted_bytes = 0

    @property
    def entries_count(self) -> int:
        """Entries claimed or ready."""
        return len(self._tree)

    def find(self, address: Address) -> Entry | None:
        """The ready entry of this address."""
        entry = self._tree.find(address)
        return entry if entry is not None and entry.is_ready else None

    def leading(self, addresses: Sequence[Address], first: int = 0) -> int:
        """How many consecutive chunks from index ``first`` on are ready; of one chain, or any blocks."""
        return self._tree.leading(addresses, first)

    def match(self, namespace: NamespaceDigest, packed: memoryview) -> list[Entry]:
        """The ready entries of the leading chunks of ``packed`` (tokens as u32, bytes), without hashing them."""
        return self._tree.match(namespace, packed)

    def claim(
        self,
        place: Place,
        size_bytes: int,
        now_s: float,
        hints: Hints = DEFAULT,
        *,
        dirty: bool = False,
        replica: bool = False,
    ) -> Entry | None:
        """A new entry with room, which nobody sees before ``ready``; evicts others where that makes the room.

        None where the address is claimed or ready (E4), or where no room can be made (E2). The caller has one
        reference, and gives it up with ``unrefer``, after ``ready`` or ``drop``.
        """
        self._now_s = max(self._now_s, now_s)
        if self._tree.find(place.address) is not None:
            return None
        # In the tree before room is made: so its parent is no leaf, and cannot go for its child.
        entry = Entry(place, -1, size_bytes, now_s, hints)
        self._tree.add(place.namespace, entry, place.tokens)
        offset = self._make_room(size_bytes)
        if offset is None:
            self._forget(entry)
            return None
        entry.offset = offset
        entry.is_dirty, entry.is_replica = dirty, replica
        self.held_bytes += size_bytes
        self.referenced_bytes += size_bytes
        self.dirty_bytes += size_bytes if dirty else 0
        self.pinned_bytes += size_bytes if entry.address in self._pins else 0
        self._queues.enter(entry)
        return entry

    def ready(self, entry: Entry) -> bool:
        """Shows a claimed entry to everybody. False where it was dropped meanwhile."""
        if entry.is_gone:
            return False
        self._tree.show(entry)
        self._prints.add(entry.address)
        self._queues.moved(entry)
        self._queues.offer(entry)
        return True

    def drop(self, entry: Entry) -> None:
        """Takes an entry away at once, whatever it is; its room is given back with the last reference. Once or more."""
        if entry.is_gone:
            return
        if entry.is_ready:
            self._prints.remove(entry.address)
        self.dirty_bytes -= entry.size_bytes if entry.is_dirty else 0
        self.pinned_bytes -= entry.size_bytes if entry.address in self._pins else 0
        self._queues.leave(entry)
        self._forget(entry)
        if not entry.references:
            self._give(entry)

    def refer(self, entry: Entry) -> None:
        """Keeps an entry that is not gone until ``unrefer``."""
        assert not entry.is_gone, "the room of an entry that is gone may be another's"
        entry.references += 1
        if entry.references == 1:
            self.referenced_bytes += entry.size_bytes

    def unrefer(self, entry: Entry) -> None:
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

    def pin(self, address: Address) -> bool:
        """Keeps what is ready here from being evicted, until as many ``unpin``. False where it is not.

        A pin is of the address: it also keeps what comes in the place of an entry that was dropped as damaged.
        """
        entry = self.find(address)
        if entry is None:
            return False
        count = self._pins.get(address, 0)
        self._pins[address] = count + 1
        self.pinned_bytes += 0 if count else entry.size_bytes
        return True

    def unpin(self, address: Address) -> None:
        """Undoes one ``pin``; without one, nothing."""
        count = self._pins.pop(address, 0)
        if count > 1:
            self._pins[address] = count - 1
        elif count and (entry := self._tree.find(address)) is not None:
            self.pinned_bytes -= entry.size_bytes
            self._queues.offer(entry)

    def is_pinned(self, address: Address) -> bool:
        """Whether a pin keeps what is here of this address."""
        return address in self._pins

    def clean(self, entry: Entry) -> None:
        """Says that an entry need not reach the root any more (E3)."""
        if entry.is_dirty:
            entry.is_dirty = False
            if not entry.is_gone:
                self.dirty_bytes -= entry.size_bytes
                self._queues.offer(entry)

    def used(self, entries: Iterable[Entry], now_s: float, hints: Hints | None = None) -> None:
        """Notes a use of each, and raises what its writers hinted to ``hints``."""
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

    def retire(self, entries: Iterable[Entry]) -> None:
        """Lets these go before all others when room is needed, until they are used again. Nothing is dropped."""
        for entry in entries:
            if not (entry.is_gone or entry.is_retired):
                entry.is_retired = True
                self._queues.moved(entry)

    def victims(self, bytes_wanted: int) -> list[Entry]:
        """What would be evicted next, in that order: at least so many bytes if there are. Nothing is changed."""
        found = self._plan(bytes_wanted)
        for entry in found:
            self._queues.put_back(entry)
        return found

    def of_namespace(self, namespace: NamespaceDigest) -> list[Entry]:
        """The entries of a namespace, claimed ones too, the latest first. Looks at every entry there is."""
        return [entry for entry in self.entries() if entry.namespace == namespace]

    def entries(self) -> list[Entry]:
        """All entries, claimed ones too, the latest first."""
        # So most children come before their parents: a run is shortened then, where else it would be split.
        return [*self._tree][::-1]

    def changes(self) -> set[int]:
        """Shards (0 to 63) in which entries became ready or went since this was last asked."""
        return self._prints.changes()

    def prints(self, shard: int) -> npt.NDArray[np.uint32]:
        """The prints of the ready entries of a shard, shape ``(n,)``, each once, ascending."""
        return self._prints.of(shard)

    def _is_evictable(self, entry: Entry) -> bool:
        """E1, E2."""
        return (
            not entry.references
            and not entry.children_count
            and entry.is_ready
            and not entry.is_dirty
            and entry.address not in self._pins
        )

    def _make_room(self, size_bytes: int) -> int | None:
        """Takes room, evicting no more than is needed for it; where that cannot do, nothing."""
        offset = self._room.take(size_bytes)
        evicted_bytes = 0
        while offset is None and size_bytes <= self._room.size_bytes and evicted_bytes < EVICTED_TIMES_MAX * size_bytes:
            # Where there is enough, but in pieces: one after the other, until two of them meet.
            short_bytes = max(size_bytes - self._room.free_bytes, 1)
            found = self._plan(short_bytes)
            if sum(entry.size_bytes for entry in found) < short_bytes:
                for entry in found:
                    self._queues.put_back(entry)
                return None
            for entry in found:
                evicted_bytes += entry.size_bytes
                self._policy.evicted(entry)
                self.drop(entry)
            self.evicted_count += len(found)
            offset = self._room.take(size_bytes)
        self.evicted_bytes += evicted_bytes
        return offset

    def _plan(self, bytes_wanted: int) -> list[Entry]:
        """Takes entries out of the queues in the order of the policy, children before parents."""
        found: list[Entry] = []
        planned_bytes = 0
        while planned_bytes < bytes_wanted and (entry := self._queues.pop(self._now_s)) is not None:
            found.append(entry)
            planned_bytes += entry.size_bytes
            parent = self._tree.find(entry.parent)
            if parent is not None:
                # As if the child were gone already. Undone below: the parent then has a turn that does not count.
                parent.children_count -= 1
                self._queues.offer(parent)
        for entry in found:
            parent = self._tree.find(entry.parent)
            if parent is not None:
                parent.children_count += 1
        return found

    def _forget(self, entry: Entry) -> None:
        self._tree.remove(entry)
        entry.is_ready, entry.is_gone = False, True
        parent = self._tree.find(entry.parent)
        if parent is not None:
            self._queues.offer(parent)

    def _give(self, entry: Entry) -> None:
        self.held_bytes -= entry.size_bytes
        self._room.give(entry.offset)
