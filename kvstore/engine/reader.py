"""Reads chunks from wherever they are: memory, the tiers below it, the root.

A read is parallel and verified, and its caller can end it at any moment. Where chunks come from and go to is in
kvstore/tiers/MEMORY.md, R1 to R4: a chunk from a tier comes into memory as an image and is verified when it is copied
out. A chunk that only the root has, and that is not worth keeping, goes straight into the caller's memory, as all do on
a node without memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from kvstore.codec.image import verified, verify_images
from kvstore.core.address import ADDRESS_BYTES
from kvstore.core.buffers import BufferLoan, Sections, Withdrawn, cut_evenly
from kvstore.core.executor import (
    GROUP_BYTES_MAX,
    GROUP_BYTES_MIN,
    Deadline,
    DeadlinePassed,
    Executor,
    IndexedWork,
    group_size,
    moved_on,
)
from kvstore.core.metrics import Counters, NodeCount
from kvstore.engine.chunk_store import ChunkStore, StoredRun
from kvstore.engine.gc_state import ChunkHold, GcState, Holds
from kvstore.errors import KVStoreError
from kvstore.format.header import Damaged
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.root.posix import PosixReader
from kvstore.tiers.memory import MemoryTier, Slot, Slots
from kvstore.tiers.stack import Tier, TierStack

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

Mask = npt.NDArray[np.bool_]

TURN_CHUNKS_MAX = 512
"""Chunks that a thread reads in one call: opening takes a millisecond each on some roots, and a thread in one call for
``stall_s`` counts as hung.
"""


@dataclass(frozen=True, slots=True)
class Groups:
    """Chunks read several at a time, by one call that does not need the GIL."""

    size: int
    """Chunks in a group; the last may have fewer."""
    chunks: int
    read: Callable[[int, int, BufferLoan], Mask]
    """Reads the chunks from one index up to another; True for those that are right. Raises Withdrawn."""
    turns: StoredRun | None = None
    """Reads the same chunks once, without fixed bounds between the threads."""


def gaps(done: Mask) -> list[tuple[int, int]]:
    """Returns the runs of chunks that are not done, each from its first index to the one after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], done, [True])).astype(np.int8)))
    starts: list[int] = edges[::2].tolist()
    ends: list[int] = edges[1::2].tolist()
    return list(zip(starts, ends, strict=True))


class ReadFuture:
    """Chunks on their way into the caller's memory; the caller can work between beginning it and waiting."""

    def __init__(
        self,
        executor: Executor,
        counters: Counters,
        count: int,
        read: Callable[[int, BufferLoan], bool],
        stop_at_miss: bool = True,
        groups: Groups | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """``ended`` is called once no thread reads into the memory any more; it may be called more than once."""
        self._ended = ended
        self._counters = counters
        self._read = read
        self._stop_at_miss = stop_at_miss
        self._groups = groups
        self._turns = groups.turns if groups is not None else None
        self._borrowed = BufferLoan()
        self._done = bytearray(count)
        self._batch: IndexedWork | None = None
        groups_count = -(-groups.chunks // groups.size) if groups is not None else 0
        try:
            if groups is None:
                self._batch = executor.start(count, self._work)
            elif self._turns is None:
                self._batch = executor.start(groups_count, self._work_on_group)
            else:
                work = partial(self._work_on_turns, self._turns)
                self._batch = executor.start(min(groups_count, executor.width), work)
        except KVStoreError:
            counters.add(NodeCount.MISS_SHED)
        self._running = self._batch.ended if self._batch is not None else None

    @property
    def is_running(self) -> bool:
        """True while threads work on it and its caller may wait."""
        running = self._running
        return running is not None and not running.is_set()

    def wait(self, deadline: Deadline) -> bytearray:
        """Waits; returns one byte per index, 1 if it was read.

        Past the deadline the memory is withdrawn: what was read until then counts.
        """
        batch, self._batch = self._batch, None  # it refers to our work, and so to us and the caller's memory
        try:
            if batch is not None:
                batch.wait(deadline)
        except DeadlinePassed:
            self._borrowed.withdraw()
            self._counters.add(NodeCount.MISS_DEADLINE)
        except KVStoreError:
            self._counters.add(NodeCount.MISS_SHED)
        except BaseException:
            # Interrupted (Ctrl-C): from here on the memory is the caller's, as after a deadline.
            self._borrowed.withdraw()
            raise
        finally:
            self._end()
        return self._done

    def withdraw(self) -> None:
        """Gives the read up: returns when no thread writes into the memory any more. Idempotent."""
        self._borrowed.withdraw()
        if self._batch is not None:
            self._batch.stop()
        self._end()

    def _end(self) -> None:
        """Ends the read: no thread writes into the memory any more."""
        self._running = None
        turns, self._turns = self._turns, None
        if turns is not None:
            np.frombuffer(self._done, np.bool_)[:] |= turns.end_read()
        if self._ended is not None:
            self._ended()

    def _work_on_turns(self, turns: StoredRun, _: int) -> bool:
        """Reads what no other thread took, as ``_work_on_group`` does."""
        more = True
        while more:
            try:
                left, more = turns.read_turn(self._borrowed)
            except Withdrawn:
                return False
            for index in left:
                moved_on()
                if not self._work(index):
                    turns.stop()
                    return False
            moved_on()
        return True

    def _work_on_group(self, number: int) -> bool:
        """Reads as much of the group as possible in one call, then the rest one by one from scratch."""
        groups = self._groups
        assert groups is not None
        start, stop = number * groups.size, min((number + 1) * groups.size, groups.chunks)
        try:
            read = groups.read(start, stop, self._borrowed)
        except Withdrawn:
            return False
        self._done[start:stop] = read.tobytes()
        for index in (start + np.flatnonzero(~read)).tolist():
            moved_on()
            if not self._work(index):
                return False
        return True

    def _work(self, index: int) -> bool:
        try:
            intact = self._read(index, self._borrowed)
        except Withdrawn:
            return False
        except KVStoreError:
            self._counters.add(NodeCount.MISS_UNREADABLE)
            return not self._stop_at_miss
        self._done[index] = intact
        return intact or not self._stop_at_miss


def root_groups(
    chunks: ChunkStore, executor: Executor, wanted: KeySet, first: int, count: int, into: Sections
) -> Groups | None:
    """Returns chunks from ``first`` on on the root in groups, counted from 0; None if they are read one by one."""
    run = chunks.run(wanted, first, count, into, fills=True)
    if run is None:
        return None

    def read(start: int, stop: int, borrowed: BufferLoan) -> Mask:
        return run.read(first + start, first + stop, borrowed)

    chunk_bytes = max(1, wanted.mean_bytes(first, count))
    size = group_size(count, chunk_bytes, executor.width)
    step = max(1, min(size, GROUP_BYTES_MIN // chunk_bytes))
    most = max(step, min(GROUP_BYTES_MAX // chunk_bytes, TURN_CHUNKS_MAX))
    run.begin_turns(step, most, size)
    return Groups(size, count, read, run)


RECENT_MAX = 64
"""Reads that are looked at to know whether threads are busy with some."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The wanted chunks or engine-hashed blocks, and the hold to read them under, if any."""

    wanted: KeySet
    hold: ChunkHold | None = None
    memory_only: bool = False
    """The client is a peer: give only what memory has (rule P2)."""

    def allowed(self, holds: Holds, view: GcState, indexes: Sequence[int]) -> Sequence[int]:
        """Return the indexes that may be given: all under a hold or of a prompt, else those not condemned.

        Raises HoldBroken.
        """
        if self.hold is not None:
            holds.check(self.hold)
        elif not self.wanted.prefix_ordered:
            allowed = view.allowed([self.wanted.addresses[index] for index in indexes])
            if len(allowed) < len(indexes):
                return [indexes[at] for at in allowed]
        return indexes


class Reader:
    """The chunks of one node, from the nearest place that has them. Thread-safe."""

    def __init__(self, node: Engine) -> None:
        self._chunks = node.store
        self._executor = node.executor
        self._refresher = node.refresher
        self._counters = node.counters
        self._tiers = node.tiers
        # The last ones begun, not owned: a read that its caller drops, or that Ctrl-C ends half-way, is none any more.
        self._recent = deque[ReferenceType[ReadFuture]](maxlen=RECENT_MAX)

    @property
    def is_busy(self) -> bool:
        """True while threads work on what ``begin`` reads. Advice: of very many reads it sees the last ones."""
        return any(reading.is_running for each in tuple(self._recent) if (reading := each()) is not None)

    def has(self, wanted: KeySet) -> list[bool]:
        """Returns for each chunk whether it is there, looked for by itself."""
        there = [False] * len(wanted)
        at = 0
        while self._tiers is not None and at < len(wanted):
            found = self._leading(wanted, at)
            there[at : at + found] = [True] * found
            at += max(1, found)
        return there

    def matched_count(self, chain: KeySet, deadline: Deadline) -> int:
        """Returns how many leading chunks are anywhere (rule R1): on the root, or in a tier above it.

        On an error or a passed deadline the match ends where the remembered chunks end.
        """
        count = self.near(chain)
        try:
            while count < len(chain):
                found = self._executor.run(partial(self._bisect, chain, count), deadline)
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

    def near(self, wanted: KeySet, count: int = 0) -> int:
        """Returns how many leading chunks are there without a look at the root, given that the first ``count`` are."""
        known = self._chunks.known
        while count < len(wanted):
            rest = wanted.packed_addresses[count * ADDRESS_BYTES :]
            there = count + known.leading_count(rest, known.quantum())
            count = there + (self._leading(wanted, there) if self._tiers is not None and there < len(wanted) else 0)
            if count == there:
                break
        return count

    def used(self, wanted: KeySet) -> None:
        """Notes that all of these were read: a use in memory, and their recency is renewed."""
        if self._tiers is not None:
            self._tiers.memory.used(wanted, len(wanted))
        self._refresher.used(wanted)

    def begin(self, wanted: KeySet, first: int, count: int, into: Sections, deadline: Deadline) -> ReadFuture:
        """Begins to read ``count`` chunks from index ``first`` on into ``into(index)``. A miss ends a prompt."""
        stop_at_miss = wanted.prefix_ordered
        tiers, from_root = self._tiers, root_groups(self._chunks, self._executor, wanted, first, count, into)

        def read(at: int, borrowed: BufferLoan) -> bool:
            return self._chunks.read(wanted.expected(first + at), into(first + at), borrowed)

        if tiers is None or not count:
            return ReadFuture(self._executor, self._counters, count, read, stop_at_miss, from_root)
        memory = tiers.memory
        slots = memory.refer(wanted, first, count)
        # If memory has all of it, use threads that work even if every other thread waits for a root that hangs.
        executor = tiers.copiers if None not in slots.entries else self._executor

        def read_group(start: int, stop: int, borrowed: BufferLoan) -> Mask:
            done = memory.read(slots, first + start, first + stop, into, borrowed)
            if not done.all():
                self._read_fetched(tiers, wanted, first + start, done, into, borrowed, deadline)
            if from_root is not None:
                # Native code reads what it can; the rest is then done one by one.
                for at, end in gaps(done):
                    done[at:end] = from_root.read(start + at, start + end, borrowed)
            return done

        groups = Groups(group_size(count, wanted.mean_bytes(first, count), executor.width), count, read_group)
        # The caller does no share: a chunk that proves wrong in memory is fetched from devices, which may hang.
        reading = ReadFuture(executor, self._counters, count, read, stop_at_miss, groups, ended=slots.release)
        self._recent.append(ref(reading))
        return reading

    def _bisect(self, chain: KeySet, known: int) -> int:
        """Returns the number of leading chunks present, given that the first ``known`` are.

        An ancestor outlives its descendants, so presence along a chain is a step: O(log n) looks. The first look is at
        the chunk after the known ones: it alone decides for a prompt that is not stored, and a corrupt chunk
        would show there.
        """
        chunks = self._chunks
        present, absent, epoch = known, len(chain), chunks.known.epoch

        def is_present(index: int) -> bool:
            return chunks.is_present(chain.expected(index))

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

    def _leading(self, wanted: KeySet, first: int) -> int:
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
        self, wanted: KeySet, first: int, stop: int, deadline: Deadline, *, even_once: bool, even_root: bool
    ) -> None:
        """Brings chunks ``first`` to ``stop - 1`` into memory from below. Called on a thread.

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

    def read_image(self, wanted: KeySet, index: int, image: memoryview, deadline: Deadline) -> bool:
        """Reads the whole image of one chunk from wherever it is, past memory; True if it came and is right. Called on
        a thread.

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
        wanted: KeySet,
        first: int,
        done: Mask,
        into: Sections,
        borrowed: BufferLoan,
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
                # An entry that is gone again was evicted for other chunks, not corrupt.
                if not right and tier is not None and slots.entries[0] is not None:
                    tier.damaged(wanted, index)

    def _sources(
        self, tiers: TierStack, wanted: KeySet, indexes: Sequence[int], *, even_once: bool
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
        self, memory: MemoryTier, wanted: KeySet, tier: Tier | None, indexes: Sequence[int], deadline: Deadline
    ) -> list[int]:
        """Brings chunks into memory; returns those that came, unverified. The others are left to the root."""
        slots: list[Slot] = []
        claimed: list[int] = []
        for index in indexes:
            slot = memory.claim(wanted, index, replica=tier is not None and tier.name == "peers")
            if slot is not None:
                slots.append(slot)
                claimed.append(index)
            elif wanted.prefix_ordered and not memory.is_taken(wanted, index):
                break  # no room: the next chunks would only take the room of those before them
        came = [False] * len(slots)
        try:
            images = [slot.memory for slot in slots]
            if tier is None:
                for at, (index, image) in enumerate(zip(claimed, images, strict=True)):
                    moved_on()
                    came[at] = self._from_root(wanted, index, image)
            elif claimed:
                came = self._fetch_from(tier, wanted, claimed, images, deadline)
        finally:
            memory.ready([slot for slot, whole in zip(slots, came, strict=True) if whole], fetched=True)
            memory.drop([slot for slot, whole in zip(slots, came, strict=True) if not whole])
        return [index for index, whole in zip(claimed, came, strict=True) if whole]

    def _fetch_from(
        self, tier: Tier, wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        with self._counters.timed(tier.name, "read") as timed:
            came = tier.fetch(wanted, indexes, images, deadline)
            timed.size_bytes = sum(len(image) for image, whole in zip(images, came, strict=True) if whole)
        return came

    def _from_root(self, wanted: KeySet, index: int, image: memoryview) -> bool:
        try:
            with self._counters.timed("root", "read") as timed:
                opened = self._chunks.open(wanted.expected(index))
                if opened is None:
                    return False
                with opened[0] as reader:
                    timed.size_bytes = reader.read([image], 0, BufferLoan())
                return timed.size_bytes == len(image)
        except (KVStoreError, Damaged):
            return False  # a reader of the chunk itself finds out, and counts it

    # Views

    def view(self, chain: ChunkKeys, deadline: Deadline) -> list[npt.NDArray[Any]]:
        """Returns read-only arrays of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)``; fewer after a loss.

        Without a copy where possible: verified images in memory, or files that native code maps. An array keeps its
        chunk in memory, or its file mapped, as long as it or any slice of it lives.
        """
        found = self._leased_payloads(self._tiers, chain, deadline) if self._tiers is not None else {}
        mapped = self._mapped(chain, deadline, found) if len(found) < len(chain) else found
        layout = chain.namespace.layout
        arrays: list[npt.NDArray[Any]] = []
        while (array := mapped.get(len(arrays))) is not None:
            arrays.append(array.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens)))
        return arrays

    def _leased_payloads(
        self, tiers: TierStack, chain: ChunkKeys, deadline: Deadline
    ) -> dict[int, npt.NDArray[np.uint8]]:
        """Returns payloads in memory, as many as may be leased (rule L1); each keeps its chunk there."""
        memory = tiers.memory
        leased: list[tuple[int, Slots]] = []
        try:
            for index in range(len(chain)):
                slots = memory.refer(chain, index, 1)
                if slots.entries[0] is not None and memory.lease(slots):
                    leased.append((index, slots))
                else:
                    slots.release()
            indexes = [index for index, _ in leased]
            images = [slots.image(index) for index, slots in leased]
            right = verified(chain, indexes, images, tiers.copiers, deadline)
        except BaseException:  # Ctrl-C: the process may go on
            for _, slots in leased:
                slots.release()
            raise
        self._counters.add(NodeCount.MEMORY_HITS, sum(right))
        self._counters.add(NodeCount.MEMORY_BYTES, sum(right) * chain.namespace.layout.chunk_bytes)
        found: dict[int, npt.NDArray[np.uint8]] = {}
        for (index, slots), image, is_right in zip(leased, images, right, strict=True):
            # The tier verifies a wrong image once more and drops it (rule I1). Not past the deadline: this one thread
            # would then verify everything that was not verified by then.
            if is_right or (not deadline.passed and memory.view(slots, index) is not None):
                found[index] = _leased(chain.payload_of(index, image), slots.release)
            else:
                slots.release()
        return found

    def _mapped(
        self, chain: ChunkKeys, deadline: Deadline, found: dict[int, npt.NDArray[np.uint8]]
    ) -> dict[int, npt.NDArray[np.uint8]]:
        """Returns the other payloads, mapped from the root if possible, copied otherwise."""
        layout, count = chain.namespace.layout, len(chain)
        payloads: list[memoryview | None] = [None] * count
        run = self._chunks.run(chain, 0, count) if self._chunks.root.traits.mapped else None

        def read(index: int, borrowed: BufferLoan) -> bool:
            if index in found:
                return True
            payloads[index] = self._copied(chain, index)
            if payloads[index] is not None:
                return True
            memory = memoryview(bytearray(layout.chunk_bytes))
            payloads[index] = memory.toreadonly()
            return self._chunks.read(chain.expected(index), cut_evenly(memory, layout.section_bytes), borrowed)

        groups = None
        if run is not None:

            def map_group(start: int, stop: int, _: BufferLoan) -> Mask:
                done = np.array([index in found for index in range(start, stop)], np.bool_)
                for at, end in gaps(done):
                    part = slice(start + at, start + end)
                    payloads[part] = run.map(part.start, part.stop)
                    done[at:end] = [payload is not None for payload in payloads[part]]
                return done

            groups = Groups(group_size(count, layout.chunk_bytes, self._executor.width), count, map_group)
        done = ReadFuture(self._executor, self._counters, count, read, groups=groups).wait(deadline)
        arrays = {
            index: np.frombuffer(payload, np.uint8)
            for index, payload in enumerate(payloads)
            if payload is not None and done[index]
        }
        return arrays | found

    def _copied(self, chain: ChunkKeys, index: int) -> memoryview | None:
        """Returns a copy of a chunk that memory has and may not lease (rule L1): the root may not have it yet."""
        if self._tiers is None:
            return None
        memory = self._tiers.memory
        with memory.refer(chain, index, 1) as slots:
            payload = memory.view(slots, index)
            return None if payload is None else memoryview(bytes(payload))

    # Chunks for clients that verify them

    def in_memory(
        self, wanted: KeySet, indexes: Sequence[int], deadline: Deadline, *, brings: bool = True
    ) -> Slots | None:
        """Refer to those chunks that are in memory, one entry for each index. None if this node has no memory.

        With ``brings``, chunks that are worth it are brought to memory first.
        """
        if self._tiers is None:
            return None
        memory = self._tiers.memory
        part, first = wanted.as_neighbours(indexes)
        slots = memory.refer(part, first, len(indexes))
        if not brings or None not in slots.entries or deadline.passed:
            return slots
        slots.release()
        with suppress(KVStoreError):
            self._executor.run(
                lambda: self.bring(part, first, first + len(indexes), deadline, even_once=False, even_root=True),
                deadline,
            )
        return memory.refer(part, first, len(indexes))

    def open_files(self, wanted: KeySet, indexes: Sequence[int], deadline: Deadline) -> dict[int, PosixReader]:
        """Open the files of chunks, and verify their headers. The caller closes them.

        Chunks that the root does not have, or has encoded, are left out. A prompt ends at the first of them.
        """
        stop_at_miss = wanted.prefix_ordered
        lock = threading.Lock()
        opened: dict[int, PosixReader] = {}
        given_up = False

        def work(at: int) -> bool:
            try:
                found = self._chunks.open_file(wanted.expected(indexes[at]))
            except KVStoreError:
                self._counters.add(NodeCount.MISS_UNREADABLE)
                return not stop_at_miss
            if found is None:
                return not stop_at_miss
            with lock:
                # Opened after the caller gave up: only this thread can close it.
                keep = not given_up
                if keep:
                    opened[at] = found
            if not keep:
                found.close()
            return keep

        try:
            self._executor.each(len(indexes), work, deadline)
        except DeadlinePassed:
            self._counters.add(NodeCount.MISS_DEADLINE)
        except KVStoreError:
            self._counters.add(NodeCount.MISS_SHED)
        finally:
            with lock:
                given_up = True
        if stop_at_miss:
            end = next((at for at in range(len(indexes)) if at not in opened), len(indexes))
            for at in [at for at in opened if at > end]:
                opened.pop(at).close()
        return {indexes[at]: opened[at] for at in sorted(opened)}

    def begin_copy(self, wanted: KeySet, indexes: Sequence[int], into: Callable[[int], memoryview]) -> ReadFuture:
        """Begin to read whole files into ``into(index)``, which has the size of the file.

        A prompt ends at its first miss.
        """

        def read(at: int, borrowed: BufferLoan) -> bool:
            expected = wanted.expected(indexes[at])
            opened = self._chunks.open(expected)
            if opened is None:
                return False
            reader, _ = opened
            with self._chunks.noted(expected), reader, self._counters.timed("root", "read") as timed:
                memory = into(indexes[at])
                timed.size_bytes = len(memory)
                try:
                    if reader.read([memory], 0, borrowed) != len(memory):
                        self._counters.add(NodeCount.MISS_UNREADABLE)
                        return False
                except Damaged as damaged:  # of an encoded file, which is verified as it is decoded
                    borrowed.check()
                    self._chunks.set_aside(expected, damaged.damage)
                    return False
            self._counters.add_read(expected.payload_bytes)
            return True

        return ReadFuture(self._executor, self._counters, len(indexes), read, wanted.prefix_ordered)


def _leased(payload: memoryview, release: Callable[[], None]) -> npt.NDArray[np.uint8]:
    """Returns an array over ``payload``; ``release`` is called when neither it nor any slice of it lives any more."""
    array = np.frombuffer(payload, np.uint8)
    # Every slice of it has this very array as its base: numpy follows bases up to the last one that is an array.
    weakref.finalize(array, release).atexit = False
    return array
