"""Puts chunks into a node's memory: claims room first, then copies the bytes on lanes that never wait for a device.

Separate from puts on the root, which may come before, after, or never (``WriteMode``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.address import Address, Chain
from kvstore.buffers import Sections, address_of
from kvstore.hints import Hints
from kvstore.node.images import make_images, seal_images
from kvstore.node.lanes import Batch, Deadline, Lanes, group_size
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.slots import Slot
from kvstore.node.wanted import Wanted, image_bytes, payload_of, section_bytes
from kvstore.node.write_behind import WriteBehind
from kvstore.sources import Ids

COPY_S = 10.0


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a put that memory took."""

    there: list[bool]
    """For each given chunk, True if it is in memory now."""
    fresh: list[int]
    """Positions, among those given, of chunks that were not in memory before."""
    waits_at: int | None = None
    """Position of the first chunk that the write-behind queue had no room for."""

    @property
    def written(self) -> int:
        """Number of fresh chunks."""
        return len(self.fresh)

    @property
    def count(self) -> int:
        """Number of leading chunks in memory."""
        return next((at for at, there in enumerate(self.there) if not there), len(self.there))

    def then(self, at: int, rest: Kept) -> Kept:
        """Adds the second attempt at the chunks from position ``at`` on."""
        waits_at = None if rest.waits_at is None else at + rest.waits_at
        return Kept(self.there[:at] + rest.there, self.fresh + [at + each for each in rest.fresh], waits_at)


ROOM_SHARE = 4
"""Share of memory that rooms may take together."""
ROOM_RUNS = 4
"""Runs of one size that this share has room for."""


@dataclass(slots=True)
class Room:
    """Claimed room for a run of chunks from index ``first`` on, whose bytes are on their way: nobody else sees it."""

    wanted: Wanted
    first: int
    slots: list[Slot]
    """Empty once they are filled or given up."""
    hints: Hints
    behind: WriteBehind
    """Has room reserved for the run as well."""
    claimed_bytes: int
    """Bytes it counts for until it is filled or given up."""
    sums: npt.NDArray[np.uint64] | None = None
    """The checksums of the sections, in the order of ``bases``: set once these are in place."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the images."""
        return sum(slot.entry.size_bytes for slot in self.slots)

    def bases(self) -> npt.NDArray[np.uint64]:
        """Returns where the sections belong: the first section of each chunk, then the second of each, and so on."""
        payloads = [payload_of(self.wanted, at, slot.memory) for at, slot in enumerate(self.slots, self.first)]
        starts, size = np.array(list(map(address_of, payloads)), np.uint64), section_bytes(self.wanted, self.first)
        return (np.arange(0, len(payloads[0]), size, dtype=np.uint64)[:, None] + starts).ravel()


class MemoryPuts:
    """Copies chunks of callers into memory. Thread-safe."""

    def __init__(self, memory: MemoryTier, lanes: Lanes, ids: Ids) -> None:
        self._memory = memory
        self._lanes = lanes
        self._ids = ids
        self._lock = threading.Lock()
        self._claimed_bytes = 0  # of rooms; guarded by _lock
        self.run_bytes = memory.size_bytes // ROOM_SHARE // ROOM_RUNS
        """Size of a run for which ``room`` should be asked: some of them fit into the share of rooms."""

    def keep(
        self,
        wanted: Wanted,
        first: int,
        count: int,
        source: Sections,
        hints: Hints,
        deadline: Deadline,
        behind: WriteBehind | None = None,
    ) -> Kept:
        """Copies ``count`` chunks from index ``first`` on, as far as there is room (rule E2); waits for no room.

        With ``behind``, it reserves room there for fresh chunks, which are to be written to the root. Of a chain it
        copies nothing after the first chunk that finds no room. Raises DeadlinePassed.
        """
        with self._memory.refer(wanted, first, count) as found:
            there = [entry is not None for entry in found.entries]
            slots = list[tuple[int, Slot]]()
            try:
                waits_at = self._claim_all(wanted, first, there, hints, behind, slots)
                self._copy(wanted, slots, source, deadline)
            except BaseException:
                if behind is not None:
                    behind.give_back(sum(slot.entry.size_bytes for _, slot in slots))
                raise
            self._memory.ready([slot for _, slot in slots])
        return Kept(there, [index - first for index, _ in slots], waits_at)

    def room(self, wanted: Wanted, first: int, count: int, hints: Hints, behind: WriteBehind) -> Room | None:
        """Claims room for all of these chunks, for ``fill`` or ``give_up``.

        None if one is there, or finds no room, or if all rooms together would take more than their share of memory:
        what is on its way from clients that have stopped sending keeps others out.
        """
        claimed, size_bytes = list[tuple[int, Slot]](), sum(image_bytes(wanted, first + at) for at in range(count))
        if not self._claims(size_bytes):
            return None
        try:
            self._claim_all(wanted, first, [False] * count, hints, behind, claimed)
        except BaseException:
            self._claims(-size_bytes)
            behind.give_back(sum(slot.entry.size_bytes for _, slot in claimed))
            raise
        room = Room(wanted, first, [slot for _, slot in claimed], hints, behind, size_bytes)
        if len(claimed) == count:
            return room
        self.give_up(room)
        return None

    def _claims(self, size_bytes: int) -> bool:
        """Counts bytes of rooms, or takes them back; False, and counts none, beyond the share of memory."""
        with self._lock:
            if size_bytes > 0 and self._claimed_bytes + size_bytes > self._memory.size_bytes // ROOM_SHARE:
                return False
            self._claimed_bytes += size_bytes
            return True

    def fill(self, room: Room) -> None:
        """Makes the chunks of a room, whose sections are in place, ready."""
        assert room.sums is not None
        tables = np.ascontiguousarray(room.sums.reshape(-1, len(room.slots)).T)
        seal_images(room.wanted, room.first, [slot.memory for slot in room.slots], tables, self._ids)
        slots, room.slots = room.slots, []
        self._memory.ready(slots)
        self._claims(-room.claimed_bytes)

    def give_up(self, room: Room) -> None:
        """Gives back room that was not filled. Nobody may be writing into it."""
        size_bytes, slots, room.slots = room.size_bytes, room.slots, []
        self._memory.drop(slots)
        self._claims(-room.claimed_bytes)
        room.behind.give_back(size_bytes)

    def _claim_all(
        self,
        wanted: Wanted,
        first: int,
        there: list[bool],
        hints: Hints,
        behind: WriteBehind | None,
        slots: list[tuple[int, Slot]],
    ) -> int | None:
        """Claims room for those that are not ``there``; adds slots with their indexes, and updates ``there``.

        Returns the position of the first that the write-behind queue has no room for.
        """
        own: dict[Address, int] = {}  # a block that is given twice is claimed once
        waits_at: int | None = None
        try:
            for at in range(len(there)):
                if there[at]:
                    continue
                slot = None
                if behind is not None and not behind.reserve(image_bytes(wanted, first + at)):
                    waits_at = at if waits_at is None else waits_at
                else:
                    slot = self._claim(wanted, first + at, hints, behind)
                if slot is not None:
                    there[at] = True
                    slots.append((first + at, slot))
                    own[slot.entry.address] = slot.entry.size_bytes
                elif isinstance(wanted, Chain):
                    there[at:] = [False] * (len(there) - at)
                    break
                else:
                    there[at] = own.get(wanted.addresses[first + at]) == image_bytes(wanted, first + at)
        except BaseException:
            # Interrupted (Ctrl-C): nobody could claim again a slot that is claimed and never filled.
            self._memory.drop([slot for _, slot in slots])
            raise
        return waits_at

    def _claim(self, wanted: Wanted, index: int, hints: Hints, behind: WriteBehind | None) -> Slot | None:
        """Claims room in memory for a chunk, for which ``behind`` has room reserved; gives that back if there is none.

        One chunk at a time, so that no put reserves room for a chunk that another put is bringing.
        """
        slot = None
        try:
            slot = self._memory.claim(wanted, index, hints=hints, dirty=behind is not None)
        finally:
            if slot is None and behind is not None:
                behind.give_back(image_bytes(wanted, index))
        return slot

    def _copy(self, wanted: Wanted, slots: list[tuple[int, Slot]], source: Sections, deadline: Deadline) -> None:
        """Copies the chunks, or drops the slots and raises."""
        if not slots:
            return
        size = group_size(len(slots), slots[0][1].entry.size_bytes, self._lanes.width)

        def copy(number: int) -> bool:
            part = slots[number * size : (number + 1) * size]
            make_images(wanted, [index for index, _ in part], source, [slot.memory for _, slot in part], self._ids)
            return True

        batch: Batch | None = None
        try:
            if len(slots) <= size:
                copy(0)  # too little work for another thread
            else:
                batch = self._lanes.start(-(-len(slots) // size), copy, helped=True)
                batch.help(deadline)
                batch.wait(deadline)
        except BaseException:
            # Copying never waits for a device, so this is short. If it takes too long, the room is lost: given back, a
            # lane would write into it while it belongs to another chunk.
            if batch is None or batch.join(COPY_S):
                self._memory.drop([slot for _, slot in slots])
            raise
