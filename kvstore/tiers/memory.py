"""The memory tier: images in the arena, found by address, filled and read by many threads concurrently.

The inventory decides, under one lock. Every byte is moved outside that lock, in space that a claim or a reference
reserves (kvstore/tiers/MEMORY.md, rules I, A, E and L).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.census.selection import NOTHING, ClearOrder
from kvstore.codec.image import Images, ImagesIn, Mask, take_images, verify_images
from kvstore.core.address import Address
from kvstore.core.buffers import BufferLoan, Sections
from kvstore.core.clock import Clock
from kvstore.core.metrics import Counters, NodeCount
from kvstore.core.recency import DEFAULT, Hints
from kvstore.format.keyset import KeySet, leading
from kvstore.tiers.arena import Extents, SealedArena
from kvstore.tiers.inventory import DROP_COUNT, Admission, TierEntry, TierInventory

# The memory tier's slots and references: room being filled, and chunks that stay in place while they are used.


class Slot:
    """Room for one chunk that is being filled; only its claimant sees it before it is ready."""

    __slots__ = ("entry", "memory")

    def __init__(self, entry: TierEntry, memory: memoryview) -> None:
        self.entry = entry
        self.memory = memory
        """Writable, of the image's size; must not be touched once the slot was given to ``ready`` or ``drop``."""


class References:
    """References to entries, which keep their bytes in place and unchanged until ``release``. A context.

    ``memory`` is the arena, for reading; it stays readable as long as this object lives, even after the tier is closed.
    """

    __slots__ = ("_let_go", "is_leased", "memory", "referred")

    def __init__(self, memory: memoryview, referred: list[TierEntry], let_go: Callable[[References], None]) -> None:
        self.memory = memory
        self.referred = referred
        self.is_leased = False
        self._let_go: Callable[[References], None] | None = let_go

    def release(self) -> None:
        """Lets the entries be evicted again, unless other references remain, and ends their lease. Idempotent.

        Never waits for a lock, so that a finalizer may call it, in any thread at any point.
        """
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go(self)

    def present_images(self) -> Sequence[memoryview]:
        """The images of the entries, in order; unverified (rule I1)."""
        return images_of(self.memory, self.referred)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Slots(References):
    """The chunks from ``first`` on that are in memory."""

    __slots__ = ("entries", "first", "wanted")

    def __init__(
        self,
        memory: memoryview,
        wanted: KeySet,
        first: int,
        entries: list[TierEntry | None],
        let_go: Callable[[References], None],
    ) -> None:
        super().__init__(memory, [entry for entry in entries if entry is not None], let_go)
        self.wanted = wanted
        self.first = first
        self.entries = entries
        """One entry for each chunk; None for chunks that are not in memory."""

    @property
    def leading_count(self) -> int:
        """Number of leading chunks that are in memory without a gap."""
        return next((at for at, entry in enumerate(self.entries) if entry is None), len(self.entries))

    def images(self, start: int, stop: int) -> Sequence[memoryview]:
        """Returns the images of chunks ``start`` to ``stop - 1``, which must all be there; unverified (rule I1)."""
        entries = [entry for entry in self.entries[start - self.first : stop - self.first] if entry is not None]
        assert start >= self.first and len(entries) == stop - start
        return images_of(self.memory, entries)

    def image(self, index: int) -> memoryview:
        """Returns the image of chunk ``index``, which must be there; unverified (rule I1)."""
        entry = self.entries[index - self.first]
        assert index >= self.first and entry is not None
        return self.memory[entry.offset : entry.offset + entry.size_bytes]

    def picked(self, indexes: Sequence[int]) -> Slots:
        """Returns the chunks at ``indexes``, as slots that refer to nothing: use them while these do."""
        entries = [self.entries[index - self.first] for index in indexes]
        return Slots(self.memory, self.wanted.take(indexes), 0, entries, lambda _: None)

    def sections(self, start: int, stop: int) -> Images:
        """Returns the sections of chunks ``start`` to ``stop - 1``, as a put takes them; unverified too."""
        return Images(self.wanted, start, self.images(start, stop))


def images_of(memory: memoryview, entries: Sequence[TierEntry]) -> Sequence[memoryview]:
    """Returns the images of entries in the arena."""
    return ImagesIn(memory, [entry.offset for entry in entries], [entry.size_bytes for entry in entries])


class MemoryTier:
    """The chunks of one node in its arena, which must be open. Thread-safe; no call waits for room.

    Chunks are those of a chain, or engine-hashed blocks (``BlockKeys``); an index is that of the chain or request.
    """

    def __init__(self, arena: SealedArena, counters: Counters, clock: Clock) -> None:
        self.arena = arena
        self._room = Extents(arena.size_bytes)
        self._inventory = TierInventory(self._room)
        self._admission = Admission()
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._memory = arena.memory
        self._readable = arena.memory.toreadonly()
        self._filling: dict[Address, int] = {}
        self._leases: dict[TierEntry, int] = {}
        self._leased_bytes = 0
        self._released: deque[References] = deque()
        self._is_closed = False
        self._standing = NOTHING

    @property
    def size_bytes(self) -> int:
        return self._room.size_bytes

    @property
    def free_bytes(self) -> int:
        """Unused bytes, in however many pieces."""
        with self._lock:
            self._collect()
            return self._room.free_bytes

    # Looking and reading

    def leading(self, wanted: KeySet, first: int = 0) -> int:
        """Returns how many consecutive chunks from index ``first`` on are in memory."""
        addresses = wanted.addresses
        with self._lock:
            return 0 if self._is_closed else self._inventory.leading(addresses, first)

    def refer(self, wanted: KeySet, first: int, count: int) -> Slots:
        """Refers to ``count`` chunks from index ``first`` on; those in memory stay until the slots are released."""
        with self._lock:
            self._collect()
            entries = [self._found(wanted, index) for index in range(first, first + count)]
            for entry in entries:
                if entry is not None:
                    self._inventory.refer(entry)
            return Slots(self._readable, wanted, first, entries, self._let_go)

    def read(
        self, slots: Slots, start: int, stop: int, sections: Sections, borrowed: BufferLoan, *, fetched: bool = False
    ) -> Mask:
        """Copies chunks ``start`` to ``stop - 1`` into ``sections(index)``; True for each that is there and right.

        Runs in the calling thread. Drops a wrong chunk (rule I1). If it was ``fetched`` just now, it was wrong where it
        came from, and does not count as damage of memory. Raises Withdrawn.
        """
        done = np.zeros(stop - start, np.bool_)
        found = slots.entries[start - slots.first : stop - slots.first]
        there = [index for index, entry in enumerate(found, start) if entry is not None]
        entries = [entry for entry in found if entry is not None]
        if there:
            with self._counters.timed("memory", "read") as timed:
                taken = take_images(slots.wanted, there, images_of(slots.memory, entries), sections, borrowed)
                timed.size_bytes = slots.wanted.payload_bytes(there)
            if not taken.all():
                borrowed.check()  # the caller may have changed what was verified
                self._damaged([entry for entry, right in zip(entries, taken, strict=True) if not right], fetched)
            done[np.asarray(there) - start] = taken
            right = [index for index, is_right in zip(there, taken, strict=True) if is_right]
            self._counters.add(NodeCount.MEMORY_HITS, len(right))
            self._counters.add(NodeCount.MEMORY_BYTES, slots.wanted.payload_bytes(right))
        if not done.all():
            self._counters.add(NodeCount.MEMORY_MISSES, int(np.count_nonzero(~done)))
        return done

    def view(self, slots: Slots, index: int) -> memoryview | None:
        """Returns the payload of chunk ``index`` in the arena, verified now; None if it is not there, or was wrong."""
        entry = slots.entries[index - slots.first]
        if entry is None or not self._which_right(slots, [index], [entry], False).all():
            self._counters.add(NodeCount.MEMORY_MISSES)
            return None
        payload = slots.wanted.payload_of(index, slots.image(index))
        self._counters.add(NodeCount.MEMORY_HITS)
        self._counters.add(NodeCount.MEMORY_BYTES, len(payload))
        return payload

    def verified(self, slots: Slots, *, fetched: bool = False) -> int:
        """Returns how many leading chunks are there and right, found in the calling thread; drops wrong ones (I1)."""
        indexes = range(slots.first, slots.first + slots.leading_count)
        return leading(self._which_right(slots, indexes, slots.referred[: len(indexes)], fetched))

    def all_still_right(self, slots: Slots, indexes: Sequence[int]) -> Mask:
        """Returns for each of ``indexes`` whether its chunk is there and right now; drops others (rule I1)."""
        entries = [slots.entries[index - slots.first] for index in indexes]
        right = np.array([entry is not None for entry in entries], np.bool_)
        there = [entry for entry in entries if entry is not None]
        right[right] = self._which_right(slots, [indexes[at] for at in np.flatnonzero(right).tolist()], there, False)
        return right

    # Filling

    def claim(
        self, wanted: KeySet, index: int, *, hints: Hints = DEFAULT, dirty: bool = False, replica: bool = False
    ) -> Slot | None:
        """Claims room for one chunk; pass it to ``ready`` or ``drop``.

        None if the chunk is there, if another thread is bringing it, or if no room can be made.
        """
        size_bytes, inventory = wanted.image_bytes(index), self._inventory
        place = wanted.place(index)
        with self._lock:
            self._collect()
            if self._is_closed:
                return None
            evicted_count, now_s = inventory.evicted_count, self._clock.monotonic_s()
            # Count the put as a use: a chunk evicted soon after its put then has two uses when it is asked for
            # (measured on production traces).
            self._admission.asked(place.address, now_s)
            entry = inventory.claim(place, size_bytes, now_s, hints, dirty=dirty, replica=replica)
            evicted_count = inventory.evicted_count - evicted_count
            slot = None
            if entry is not None:
                self._filling[place.address] = size_bytes
                slot = Slot(entry, self._memory[entry.offset : entry.offset + size_bytes])
            is_full = slot is None and place.address not in self._filling and not inventory.find(place.address)
        if evicted_count:
            self._counters.add(NodeCount.MEMORY_EVICTED, evicted_count)
        if is_full:
            self._counters.add(NodeCount.MEMORY_FULL)
        return slot

    def ready(self, slots: Sequence[Slot], *, fetched: bool = False) -> None:
        """Notes that they are complete: from now on they are found, and never change again (rule I2).

        Drops those ``fetched`` from elsewhere that were cleared during the fetch (rule P5).
        """
        with self._lock:
            for slot in slots:
                self._filling.pop(slot.entry.address, None)
                if fetched and self._standing.means(slot.entry.namespace):
                    self._inventory.drop(slot.entry)
                self._inventory.ready(slot.entry)
                self._inventory.unrefer(slot.entry)

    def drop(self, slots: Sequence[Slot]) -> None:
        """Gives back the room of slots that will not be filled."""
        with self._lock:
            for slot in slots:
                self._filling.pop(slot.entry.address, None)
                self._inventory.drop(slot.entry)
                self._inventory.unrefer(slot.entry)

    # Keeping and letting go

    def used(self, wanted: KeySet, count: int, hints: Hints | None = None) -> None:
        """Notes a use of those of the first ``count`` chunks that are here, and raises their hints to ``hints``."""
        with self._lock:
            entries = [self._inventory.find(address) for address in wanted.addresses[:count]]
            self._inventory.used([each for each in entries if each is not None], self._clock.monotonic_s(), hints)

    def retire(self, wanted: KeySet, count: int) -> None:
        """Makes those of the first ``count`` chunks that are here the first to go, until they are used again."""
        with self._lock:
            self._inventory.retire(wanted.addresses[:count])

    def is_taken(self, wanted: KeySet, index: int) -> bool:
        """True if a chunk of this size is here or being brought: a claim of it fails then, even if there is room."""
        with self._lock:
            coming_bytes = self._filling.get(wanted.addresses[index])
            return coming_bytes == wanted.image_bytes(index) or self._found(wanted, index) is not None

    def admits(self, wanted: KeySet, index: int) -> bool:
        """True if a chunk that is asked for, and is elsewhere, is worth bringing here (rule R2); notes the request."""
        with self._lock:
            return self._admission.asked(wanted.addresses[index], self._clock.monotonic_s())

    def clean(self, entries: Sequence[TierEntry]) -> None:
        """Marks them as no longer kept for the root (rule E3): it has them, or will not get them."""
        with self._lock:
            for entry in entries:
                self._inventory.clean(entry)

    def drop_entries(self, entries: Sequence[TierEntry]) -> None:
        """Drops chunks that the root will not get: it has others under their names."""
        with self._lock:
            self._counters.add(NodeCount.BEHIND_LOST, sum(each.is_dirty and not each.is_gone for each in entries))
            for entry in entries:
                self._inventory.drop(entry)

    def victims(self, bytes_wanted: int) -> References:
        """Returns the next chunks to evict, at least so many bytes if there are; keeps them until it is released."""
        with self._lock:
            self._collect()
            entries = self._inventory.victims(bytes_wanted)
            for entry in entries:
                self._inventory.refer(entry)
            return References(self._readable, entries, self._let_go)

    def evict(self, entries: Sequence[TierEntry]) -> None:
        """Evicts victims before their release, except those that are in use again, or dirty (rule E2)."""
        evicted_count = 0
        with self._lock:
            self._collect()
            for entry in entries:
                is_needed = entry.references > 1 or entry.is_dirty or entry.children_count
                if not entry.is_gone and not is_needed:
                    self._inventory.drop(entry)
                    evicted_count += 1
        self._counters.add(NodeCount.MEMORY_EVICTED, evicted_count)

    def forbid(self, standing: ClearOrder) -> None:
        """Sets what must not be fetched any more.

        Call it before ``drop_ordered``: a chunk that is being fetched is then either listed, or checked in ``ready``.
        """
        with self._lock:
            self._standing = standing

    def drop_ordered(self, order: ClearOrder, *, even_dirty: bool = True) -> int:
        """Drops all chunks that an order names; returns how many."""
        with self._lock:
            entries = self._inventory.entries() if order.namespaces else []
        dropped_count = 0
        for start in range(0, len(entries), DROP_COUNT):
            with self._lock:
                for entry in entries[start : start + DROP_COUNT]:
                    # What is clean and not ready is being fetched: ``ready`` finds it gone, however late that is.
                    is_meant = even_dirty and entry.is_ready if entry.is_dirty else True
                    if is_meant and not entry.is_gone and order.means(entry.namespace):
                        self._inventory.drop(entry)
                        dropped_count += 1
        return dropped_count

    def lease(self, slots: Slots) -> bool:
        """True if others may map these chunks until ``slots`` is released (rule L1), which must not be yet. Idempotent.

        Chunks that are leased already do not count towards the limit again.
        """
        with self._lock:
            self._collect()
            entries = set(slots.referred)
            wanted_bytes = sum(entry.size_bytes for entry in entries if entry not in self._leases)
            if slots.is_leased:
                return True
            if self._is_closed or self._leased_bytes + wanted_bytes > self.size_bytes // 2:
                return False
            for entry in entries:
                self._leases[entry] = self._leases.get(entry, 0) + 1
            self._leased_bytes += wanted_bytes
            slots.is_leased = True
            return True

    # For peers

    def changes(self) -> set[int]:
        """Returns the shards (0 to 63) in which chunks came or went since the last call."""
        with self._lock:
            return self._inventory.prints.changes()

    def prints(self, shard: int) -> npt.NDArray[np.uint32]:
        """Returns the prints of the chunks of a shard, shape ``(n,)``, ascending."""
        with self._lock:
            return self._inventory.prints.of(shard)

    # Looking after it

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            self._collect()
            inventory = self._inventory
            return {
                "memory_size_bytes": self.size_bytes,
                "memory_chunks": inventory.entries_count,
                "memory_held_bytes": inventory.held_bytes,
                "memory_dirty_bytes": inventory.dirty_bytes,
                "memory_referenced_bytes": inventory.referenced_bytes,
                "memory_leased_bytes": self._leased_bytes,
            }

    def close(self) -> None:
        """Closes the arena: nothing is found or claimed any more. Idempotent.

        Threads that still read or fill go on, in memory that lives as long as they do.
        """
        with self._lock:
            self._collect()
            self._is_closed = True
            self._memory = self._readable = memoryview(b"")
        self.arena.close()

    def _let_go(self, references: References) -> None:
        # Finalizers come here, also in a thread that holds the lock at this moment, so this never takes it. The next
        # call that refers to chunks, or needs to know what is free, gives back the references noted here.
        self._released.append(references)

    def _collect(self) -> None:
        while self._released:
            references = self._released.popleft()
            if references.is_leased:
                self._end_lease(references)
            for entry in references.referred:
                self._inventory.unrefer(entry)

    def _end_lease(self, references: References) -> None:
        references.is_leased = False
        for entry in set(references.referred):
            self._leases[entry] -= 1
            if not self._leases[entry]:
                del self._leases[entry]
                self._leased_bytes -= entry.size_bytes

    def _found(self, wanted: KeySet, index: int) -> TierEntry | None:
        entry = None if self._is_closed else self._inventory.find(wanted.addresses[index])
        # The request may give another size for a block than it has.
        return entry if entry is not None and wanted.image_bytes(index) in (entry.size_bytes, 0) else None

    def _which_right(self, slots: Slots, indexes: Sequence[int], entries: Sequence[TierEntry], fetched: bool) -> Mask:
        right = verify_images(slots.wanted, indexes, images_of(slots.memory, entries))
        if not right.all():
            self._damaged([entries[at] for at in np.flatnonzero(~right).tolist()], fetched)
        return right

    def _damaged(self, entries: Sequence[TierEntry], fetched: bool) -> None:
        """Drops wrong entries, and counts each once, even if several threads find it."""
        with self._lock:
            wrong = [entry for entry in entries if not entry.is_gone]
            self._counters.add(NodeCount.BEHIND_LOST, sum(entry.is_dirty for entry in wrong))
            for entry in wrong:
                self._inventory.drop(entry)
        if not fetched:
            self._counters.add(NodeCount.MEMORY_DAMAGED, len(wrong))
