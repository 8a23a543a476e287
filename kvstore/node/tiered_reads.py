"""Reads chunks from wherever they are: memory, the tiers below it, the root.

Separate from reading, which reads one root: this module finds chunks, and decides where they come from and go to
(kvstore/memory/MEMORY.md, R1 to R4). A chunk from a tier comes into memory as an image and is verified when it is
copied out. A chunk that only the root has, and that is not worth keeping, goes straight into the caller's memory, as
all do on a node without memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, Address, Chain
from kvstore.buffers import Borrowed
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format.header import Damaged, expected_chunk, header_bytes
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.images import verify_images
from kvstore.node.lanes import Deadline, DeadlinePassed, Lanes
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.reading import Groups, Reading, gaps, group_size, root_groups
from kvstore.node.refresh import Refresher
from kvstore.node.slots import Slot
from kvstore.node.tier_stack import TierStack
from kvstore.node.tiers import Tier
from kvstore.node.wanted import Keyed, Wanted, expected_of, mean_bytes
from kvstore.sections import Sections

Mask = npt.NDArray[np.bool_]

RECENT_MAX = 64
"""Reads that are looked at to know whether lanes are busy with some."""


class TieredReads:
    """The chunks of one node, from the nearest place that has them. Thread-safe."""

    def __init__(
        self, chunks: Chunks, lanes: Lanes, refresher: Refresher, counters: Counters, tiers: TierStack | None
    ) -> None:
        self._chunks = chunks
        self._lanes = lanes
        self._refresher = refresher
        self._counters = counters
        self._tiers = tiers
        # The last ones begun, not owned: a read that its caller drops, or that Ctrl-C ends half-way, is none any more.
        self._recent = deque[ReferenceType[Reading]](maxlen=RECENT_MAX)

    @property
    def is_busy(self) -> bool:
        """True while lanes work on what ``begin`` reads. Advice: of very many reads it sees the last ones."""
        return any(reading.is_running for each in tuple(self._recent) if (reading := each()) is not None)

    def has(self, wanted: Wanted) -> list[bool]:
        """Returns for each chunk whether it is there, looked for by itself."""
        there = [False] * len(wanted)
        at = 0
        while self._tiers is not None and at < len(wanted):
            found = self._leading(wanted, at)
            there[at : at + found] = [True] * found
            at += max(1, found)
        return there

    def sizes(self, wanted: Keyed) -> list[int]:
        """Returns the size of each block that memory has, without its header; 0 for the others."""
        if self._tiers is None:
            return [0] * len(wanted)
        with self._tiers.memory.refer(wanted, 0, len(wanted)) as slots:
            return [
                entry.size_bytes - header_bytes(len(key), 1) if entry is not None else 0
                for key, entry in zip(wanted.keys, slots.entries, strict=True)
            ]

    def remembered(self, addresses: Sequence[Address]) -> npt.NDArray[np.bool_]:
        """Returns which chunks are known to be on the root, without a look at it."""
        return self._chunks.known.present(addresses, self._chunks.known.quantum())

    def matched_count(self, chain: Chain, deadline: Deadline) -> int:
        """Returns how many leading chunks are anywhere (rule R1): on the root, or in a tier above it.

        On an error or a passed deadline the match ends where the remembered chunks end.
        """
        count = self.near(chain)
        try:
            while count < len(chain):
                found = self._lanes.run(partial(self._bisect, chain, count), deadline)
                if found == count or self._tiers is None:
                    return found
                count = self.near(chain, found)
                if count == found:
                    break
        except DeadlinePassed:
            self._counters.add(NodeCount.MISS_DEADLINE)
        except KVStoreError:
            self._counters.add(NodeCount.MISS_UNREADABLE)
        return count

    def near(self, wanted: Wanted, count: int = 0) -> int:
        """Returns how many leading chunks are there without a look at the root, given that the first ``count`` are."""
        known = self._chunks.known
        while count < len(wanted):
            rest = wanted.packed_addresses[count * ADDRESS_BYTES :]
            there = count + known.leading_count(rest, known.quantum())
            count = there + (self._leading(wanted, there) if self._tiers is not None and there < len(wanted) else 0)
            if count == there:
                break
        return count

    def used(self, wanted: Wanted) -> None:
        """Notes that all of these were read: a use in memory, and their recency is renewed."""
        if self._tiers is not None:
            self._tiers.memory.used(wanted, len(wanted))
        self._refresher.used(wanted)

    def looked_up(self, wanted: Wanted) -> None:
        """Notes that all of these were found.

        An engine looks up whole prompts, and reads what it does not have itself. What it has is renewed with the rest:
        or a prompt's first blocks would go before its last.
        """
        self._refresher.used(wanted)

    def superseded(self, wanted: Wanted, first: int, unused_s: float) -> None:
        """Notes that the chunks from ``first`` on are of an abandoned branch that its user left ``unused_s`` ago.

        They go first on the root until somebody uses them again; memory and local disk go by their own uses. Returns at
        once.
        """
        self._refresher.superseded(wanted, first, self._chunks.known.quantum(unused_s))

    def begin(self, wanted: Wanted, first: int, count: int, into: Sections, deadline: Deadline) -> Reading:
        """Begins to read ``count`` chunks from index ``first`` on into ``into(index)``. A miss ends a prompt."""
        stop_at_miss = isinstance(wanted, Chain)
        tiers, from_root = self._tiers, root_groups(self._chunks, self._lanes, wanted, first, count, into)

        def read(at: int, borrowed: Borrowed) -> bool:
            return self._chunks.read(expected_of(wanted, first + at), into(first + at), borrowed)

        if tiers is None or not count:
            return Reading(self._lanes, self._counters, count, read, stop_at_miss, from_root)
        memory = tiers.memory
        slots = memory.refer(wanted, first, count)
        # If memory has all of it, use lanes that work even if every other lane waits for a root that hangs.
        lanes = tiers.copiers if None not in slots.entries else self._lanes

        def read_group(start: int, stop: int, borrowed: Borrowed) -> Mask:
            done = memory.read(slots, first + start, first + stop, into, borrowed)
            if not done.all():
                self._read_fetched(tiers, wanted, first + start, done, into, borrowed, deadline)
            if from_root is not None:
                # Native code reads what it can; the rest is then done one by one.
                for at, end in gaps(done):
                    done[at:end] = from_root.read(start + at, start + end, borrowed)
            return done

        groups = Groups(group_size(count, mean_bytes(wanted, first, count), lanes.width), count, read_group)
        # The caller does no share: a chunk that proves wrong in memory is fetched from devices, which may hang.
        reading = Reading(lanes, self._counters, count, read, stop_at_miss, groups, ended=slots.release)
        self._recent.append(ref(reading))
        return reading

    def _bisect(self, chain: Chain, known: int) -> int:
        """Returns the number of leading chunks present, given that the first ``known`` are.

        An ancestor outlives its descendants, so presence along a chain is a step: O(log n) looks. The first look is at
        the chunk after the known ones: it decides alone for a prompt nobody has stored, and it is where damage would
        show.
        """
        chunks = self._chunks
        present, absent, epoch = known, len(chain), chunks.known.epoch

        def is_present(index: int) -> bool:
            return chunks.is_present(expected_chunk(chain, index))

        with self._counters.timed("root", "look"):
            if not is_present(known):
                return known
            present = known + 1
            if present < absent and is_present(absent - 1):
                present = absent
            while present < absent:
                middle = (present + absent) // 2
                if is_present(middle):
                    present = middle + 1
                else:
                    absent = middle
            chunks.known.add_all(chain.addresses[known:present], chunks.known.quantum(), renewed=False, epoch=epoch)
        return present

    def _leading(self, wanted: Wanted, first: int) -> int:
        assert self._tiers is not None
        at = first
        while at < len(wanted):
            found = self._tiers.memory.leading(wanted, at)
            if not found:
                found = max((tier.leading(wanted, at) for tier in self._tiers.below), default=0)
            if not found:
                break
            at += found
        return at - first

    def bring(
        self, wanted: Wanted, first: int, stop: int, deadline: Deadline, *, even_once: bool, even_root: bool
    ) -> None:
        """Brings chunks ``first`` to ``stop - 1`` into memory from below. Called on a lane.

        ``even_root`` includes chunks that only the root has; ``even_once`` includes those of them that were never asked
        for.
        """
        tiers = self._tiers
        assert tiers is not None
        with tiers.memory.refer(wanted, first, stop - first) as slots:
            missing = [first + at for at, entry in enumerate(slots.entries) if entry is None]
        tiers.filling(wanted)
        for tier, indexes in self._sources(tiers, wanted, missing, even_once=even_once):
            if tier is not None or even_root:
                for index in self._fetch(tiers.memory, wanted, tier, indexes, deadline):
                    with tiers.memory.refer(wanted, index, 1) as slots:
                        is_wrong = slots.entries[0] is not None and not tiers.memory.verified(slots, fetched=True)
                    if is_wrong and tier is not None:
                        tier.damaged(wanted, index)

    def read_image(self, wanted: Wanted, index: int, image: memoryview, deadline: Deadline) -> bool:
        """Reads the whole image of one chunk from wherever it is, past memory; True if it came and is right. Called on
        a lane.

        If False, ``image`` is undefined.
        """
        tiers = self._tiers
        assert tiers is not None
        with tiers.memory.refer(wanted, index, 1) as slots:
            if slots.referred:
                image[:] = slots.image(index)
                if verify_images(wanted, [index], [image]).all():
                    return True
        for tier in tiers.below:
            if tier.leading(wanted, index) and self._fetch_from(tier, wanted, [index], [image], deadline)[0]:
                if verify_images(wanted, [index], [image]).all():
                    return True
                tier.damaged(wanted, index)
        return self._from_root(wanted, index, image) and bool(verify_images(wanted, [index], [image]).all())

    def _read_fetched(
        self,
        tiers: TierStack,
        wanted: Wanted,
        first: int,
        done: Mask,
        into: Sections,
        borrowed: Borrowed,
        deadline: Deadline,
    ) -> None:
        """Fetches what is not ``done`` into memory if that is worth it, and reads it there; updates ``done``."""
        memory = tiers.memory
        missing = [first + at for at in np.flatnonzero(~done).tolist()]
        tiers.filling(wanted)
        for tier, indexes in self._sources(tiers, wanted, missing, even_once=False):
            fetched = self._fetch(memory, wanted, tier, indexes, deadline)
            for index in fetched:
                with memory.refer(wanted, index, 1) as slots:
                    right = bool(memory.read(slots, index, index + 1, into, borrowed, fetched=True)[0])
                done[index - first] = right
                # If it is gone again, others needed the room at once, and nothing was wrong with it.
                if not right and tier is not None and slots.entries[0] is not None:
                    tier.damaged(wanted, index)

    def _sources(
        self, tiers: TierStack, wanted: Wanted, indexes: Sequence[int], *, even_once: bool
    ) -> list[tuple[Tier | None, list[int]]]:
        """Returns where each chunk comes from into memory, grouped by tier; None is the root."""
        left, found = list(indexes), list[tuple[Tier | None, list[int]]]()
        for tier in tiers.below:
            has: list[int] = []
            sure = -1  # asks a tier once per run: one answer covers consecutive chunks
            for index in left:
                if index >= sure:
                    sure = index + tier.leading(wanted, index)
                if index < sure:
                    has.append(index)
            if has:
                found.append((tier, has))
                left = sorted({*left} - {*has})
        left = [index for index in left if even_once or tiers.memory.admits(wanted, index)]
        return [*found, (None, left)] if left else found

    def _fetch(
        self, memory: MemoryTier, wanted: Wanted, tier: Tier | None, indexes: Sequence[int], deadline: Deadline
    ) -> list[int]:
        """Brings chunks into memory; returns those that came, unverified. The others are left to the root."""
        slots: list[Slot] = []
        claimed: list[int] = []
        for index in indexes:
            slot = memory.claim(wanted, index, replica=tier is not None and tier.name == "peers")
            if slot is not None:
                slots.append(slot)
                claimed.append(index)
            elif isinstance(wanted, Chain) and not memory.is_taken(wanted, index):
                break  # no room: the next chunks would only take the room of those before them
        came = [False] * len(slots)
        try:
            images = [slot.memory for slot in slots]
            if tier is None:
                came = [self._from_root(wanted, index, image) for index, image in zip(claimed, images, strict=True)]
            elif claimed:
                came = self._fetch_from(tier, wanted, claimed, images, deadline)
        finally:
            memory.ready([slot for slot, whole in zip(slots, came, strict=True) if whole], fetched=True)
            memory.drop([slot for slot, whole in zip(slots, came, strict=True) if not whole])
        return [index for index, whole in zip(claimed, came, strict=True) if whole]

    def _fetch_from(
        self, tier: Tier, wanted: Wanted, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        with self._counters.timed(tier.name, "read") as timed:
            came = tier.fetch(wanted, indexes, images, deadline)
            timed.size_bytes = sum(len(image) for image, whole in zip(images, came, strict=True) if whole)
        return came

    def _from_root(self, wanted: Wanted, index: int, image: memoryview) -> bool:
        try:
            with self._counters.timed("root", "read") as timed:
                opened = self._chunks.open(expected_of(wanted, index))
                if opened is None:
                    return False
                with opened[0] as reader:
                    timed.size_bytes = reader.read([image], 0, Borrowed())
                return timed.size_bytes == len(image)
        except (KVStoreError, Damaged):
            return False  # a reader of the chunk itself finds out, and counts it
