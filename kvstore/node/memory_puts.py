"""Puts chunks into a node's memory: claims room first, then copies the bytes on lanes that never wait for a device.

Separate from puts on the root, which may come before, after, or never (``WriteMode``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.address import Address, Chain
from kvstore.hints import Hints
from kvstore.node.images import make_images
from kvstore.node.lanes import Batch, Deadline, Lanes
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.slots import Slot
from kvstore.node.wanted import Wanted, image_bytes
from kvstore.node.write_behind import WriteBehind
from kvstore.sections import Sections
from kvstore.sources import Ids

COPY_S = 10.0
PART_BYTES_MIN, PART_BYTES_MAX = 8 << 20, 32 << 20
"""Bytes that one thread copies at once. For less than the smaller one it is not worth waking another."""
PARTS_PER_LANE = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a put that memory took."""

    there: list[bool]
    """For each given chunk, True if it is in memory now."""
    fresh: list[int]
    """Positions, among those given, of chunks that were not in memory before."""
    waits_at: int | None = None
    """Position of the first chunk that the write-behind queue had no room for."""

    def then(self, at: int, rest: Kept) -> Kept:
        """Adds the second attempt at the chunks from position ``at`` on."""
        waits_at = None if rest.waits_at is None else at + rest.waits_at
        return Kept(self.there[:at] + rest.there, self.fresh + [at + each for each in rest.fresh], waits_at)


class MemoryPuts:
    """Copies chunks of callers into memory. Thread-safe."""

    def __init__(self, memory: MemoryTier, lanes: Lanes, ids: Ids) -> None:
        self._memory = memory
        self._lanes = lanes
        self._ids = ids

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
        size_bytes = sum(slot.entry.size_bytes for _, slot in slots)
        part_bytes = min(max(size_bytes // (PARTS_PER_LANE * self._lanes.width), PART_BYTES_MIN), PART_BYTES_MAX)
        size = max(1, len(slots) * part_bytes // size_bytes)

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
