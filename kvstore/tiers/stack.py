"""All that a node has above the root: its memory, the tiers that memory is filled from, and the queue behind it."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.census.selection import ClearOrder
from kvstore.codec.image import make_images, seal_images
from kvstore.core.address import Address
from kvstore.core.buffers import Sections, address_of
from kvstore.core.executor import Deadline, Decision, Executor, IndexedWork, Loop
from kvstore.core.metrics import NodeCount, TierName
from kvstore.core.recency import Hints
from kvstore.core.write_mode import Durability, WriteMode
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.format.keyset import KeySet
from kvstore.tiers.arena import SealedArena
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.inventory import TierEntry
from kvstore.tiers.memory import MemoryTier, Slot

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine
    from kvstore.engine.settings import TierSettings

# The tiers between a node's memory and the root, in order: the sources of images.


class Tier(Protocol):
    """A place that may have chunks and gives whole images (header and payload, as in the chunk file). Thread-safe."""

    @property
    def name(self) -> TierName:
        """Its name in counters and reports."""
        ...

    def leading(self, wanted: KeySet, first: int) -> int:
        """Returns how many consecutive chunks from index ``first`` on it has, or says it has.

        Answers from what this node knows at this moment: never waits, does no I/O, may be wrong (rule R4).
        """
        ...

    def fetch(
        self, wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """Fills ``images``, each of exactly the size of its chunk's file, with the chunks at ``indexes``.

        True for each that came whole; verifies nothing (rule I1). Never raises KVStoreError, and does not touch the
        memory after it returned. Called on threads: it may block until ``deadline``.
        """
        ...

    def damaged(self, wanted: KeySet, index: int) -> None:
        """Notes that a chunk it gave was not right: it does not give it again."""
        ...

    def forbid(self, standing: ClearOrder) -> None:
        """Sets what it must not give or take from now on (rule P5)."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Returns its gauges, whose names begin with the tier's name."""
        ...

    def close(self, timeout_s: float) -> None:
        """Ends its threads. Idempotent."""
        ...


DEMOTE_PERIOD_S = 0.2
DEMOTE_STEP_BYTES = 64 << 20
FORGET_S = 5.0
FREE_SHARE = 1 / 16
"""With a local disk below it, so much of memory is kept free, so that what goes can be written there before."""

COPY_S = 10.0
PART_BYTES_MIN, PART_BYTES_MAX = 16 << 20, 32 << 20
"""Bytes that one thread copies in one part. For less than the smaller one it is not worth waking another."""
PARTS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class MemoryPut:
    """The ``count`` chunks of a put from index ``first`` on, on their way into memory."""

    keys: KeySet
    first: int
    count: int
    source: Sections
    hints: Hints
    deadline: Deadline

    def rest(self, at: int) -> MemoryPut:
        return replace(self, first=self.first + at, count=self.count - at)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The part of a put that memory took."""

    there: list[bool]
    """For each given chunk, True if it is in memory now."""
    fresh: list[int]
    """Positions, among those given, of chunks that were not in memory before."""
    waits_at: int | None = None
    """Position of the first chunk that the write-behind queue had no room for."""

    def then(self, at: int, rest: MemoryPart) -> MemoryPart:
        """Adds the second attempt at the chunks from position ``at`` on."""
        waits_at = None if rest.waits_at is None else at + rest.waits_at
        return MemoryPart(self.there[:at] + rest.there, self.fresh + [at + each for each in rest.fresh], waits_at)


# The queue of chunks that memory has and the root lacks: written soon, parents first; no caller waits for it (W1, W2).


log = logging.getLogger(__name__)

WRITERS = 4
PAUSE_S = 0.5
"""Pause after the root refused or did not answer."""
JOIN_S = 2.0
"""At the end, the wait for threads that still write."""


@dataclass(slots=True, eq=False)
class FlushJob:
    """Chunks ``first`` to ``first + count - 1`` of what is wanted, most of them dirty in memory when it was queued."""

    wanted: KeySet
    first: int
    count: int
    hints: Hints
    size_bytes: int
    ends_s: float
    """Time (monotonic) at which it is given up."""
    begins_s: float = 0.0
    """Earliest time to begin: its put is still going on, or the root refused it just now."""

    after: list[FlushJob] = field(default_factory=list)
    """Those that have its first chunk too, and so perhaps parents here: they begin when it has ended."""

    @property
    def key(self) -> Address:
        return self.wanted.addresses[self.first]


class WriteBehind:
    """Bounded by ``bytes_max``; loses, and counts, what cannot be written within ``behind_give_up_s``. Thread-safe."""

    def __init__(self, node: Engine, memory: MemoryTier) -> None:
        self._node = node
        self._memory = memory
        self._counters = node.counters
        self._clock = node.clock
        self._changed = threading.Condition()
        self._waiting: deque[FlushJob] = deque()
        self._refused: deque[FlushJob] = deque()
        """Those that the root refused a moment ago; both queues are in the order of ``begins_s``."""
        self._writing: list[FlushJob] = []
        self._begun: dict[Address, FlushJob] = {}
        """Those that are being written or were refused, by their first chunks."""
        self._bytes = 0
        self._jobs = 0
        self._lost_chunks = 0
        self._is_closing = False
        self._close_said = False
        """True once ``close`` has logged its losses; a job that a hanging root loses later logs its own."""
        self._loop = Loop("kvstore-behind", self._changed, self._next, threads_max=WRITERS)

    @property
    def bytes_max(self) -> int:
        """Bytes that may wait; where that becomes less, what waits stays."""
        return int(self._memory.size_bytes * self._node.limits.behind_share)

    @property
    def size_bytes(self) -> int:
        """Bytes that the root does not have yet, or that are reserved for such."""
        return self._bytes

    def reserve(self, sizes_bytes: Sequence[int]) -> int:
        """Reserves room for chunks until ``add`` or ``give_back``; returns for how many leading ones there is room."""
        with self._changed:
            if self._is_closing:
                return 0
            free_bytes = self.bytes_max - self._bytes
            ends = list(accumulate(sizes_bytes))
            count = bisect_right(ends, free_bytes)
            self._bytes += ends[count - 1] if count else 0
            return count

    def wait_for_room(self, size_bytes: int, timeout_s: float) -> bool:
        """Waits until a chunk may be reserved; False if that is not within the time."""
        with self._changed:
            if size_bytes > self.bytes_max:
                return False
            self._changed.wait_for(lambda: self._is_closing or self._has_room(size_bytes), timeout_s)
            return not self._is_closing and self._has_room(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return self._bytes + size_bytes <= self.bytes_max

    def give_back(self, size_bytes: int) -> None:
        if size_bytes:
            with self._changed:
                self._bytes -= size_bytes
                self._changed.notify_all()

    def add(self, wanted: KeySet, first: int, count: int, hints: Hints, size_bytes: int) -> None:
        now_s = self._clock.monotonic_s()
        ends_s = now_s + self._node.limits.behind_give_up_s
        job = FlushJob(wanted, first, count, hints, size_bytes, ends_s, now_s + self._node.limits.behind_after_s)
        with self._changed:
            self._jobs += 1
            if not self._loop.closed:
                self._waiting.append(job)
                if len(self._loop.threads) < WRITERS:
                    self._loop.start()
                self._changed.notify_all()
                return
        self._lost(job, "the node was closed")  # closed after room was reserved for it
        self._done(job)

    def pass_by(self, order: ClearOrder, timeout_s: float) -> bool:
        """Waits for the writes of this moment that an order means; True if each was done, or failed, in time."""
        with self._changed:
            now = [job for job in self._writing if order.means(job.wanted.namespace.digest)]
            return self._changed.wait_for(lambda: not any(job in self._writing for job in now), timeout_s)

    def settle(self, wanted: KeySet, first: int, count: int, timeout_s: float) -> bool:
        """Waits for ``count`` chunks from index ``first`` on; True if none is dirty any more within the time."""

        def is_settled() -> bool:
            with self._memory.refer(wanted, first, count) as slots:
                return not any(entry.is_dirty for entry in slots.referred)

        with self._changed:
            return self._changed.wait_for(is_settled, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits for everything that is queued; True if all was written, or lost, within the time (rule W3)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, waited_s: float = 0.0) -> None:
        """Writes what is queued for at most ``flush_s``; the rest is lost (rule W3). Takes nothing more. Idempotent.

        ``waited_s`` of that time have passed already.
        """
        lost_before = self._lost_chunks
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._jobs, max(0.0, self._node.limits.flush_s - waited_s))
            self._loop.stop()
            left = [*self._refused, *(each for job in self._begun.values() for each in job.after), *self._waiting]
            for job in self._begun.values():
                job.after.clear()
            self._refused.clear()
            self._waiting.clear()
        for job in left:
            self._lost(job, "the node was closed")
            self._done(job)
        self._loop.close(JOIN_S)
        with self._changed:
            lost_count, self._close_said = self._lost_chunks - lost_before, True
        if lost_count:
            log.warning(
                "behind.lost_at_close chunks=%d were in memory alone, and the root did not take them in time: they "
                "will be misses (a put with write='through' waits for the root)",
                lost_count,
            )

    def _next(self) -> Decision:
        """Returns the oldest job that may begin and continues none that has begun; else the seconds until one may
        begin. A job behind another one may when that ends.
        """
        now_s = self._clock.monotonic_s()
        while queues := [each for each in (self._refused, self._waiting) if each]:
            queue = min(queues, key=lambda each: each[0].begins_s)
            if queue[0].begins_s > now_s:
                return queue[0].begins_s - now_s
            job = queue.popleft()
            begun = (self._begun.get(address) for address in job.wanted.addresses[: job.first + job.count])
            before = next((each for each in begun if each is not None and each is not job), None)
            if before is None:
                self._begun[job.key] = job
                self._writing.append(job)
                return partial(self._do, job)
            before.after.append(job)
        return None

    def _do(self, job: FlushJob) -> None:
        again = False
        try:
            again = not self._write(job)
        except Exception:
            self._lost(job, "it failed; see the log")
            log.exception("behind.failed")
        with self._changed:
            self._writing.remove(job)
            waits = again and not self._loop.closed
            if waits:
                job.begins_s = self._clock.monotonic_s() + PAUSE_S
                self._refused.append(job)
            else:
                del self._begun[job.key]
                self._waiting.extendleft(reversed(job.after))
                job.after.clear()
            self._changed.notify_all()
        if waits:
            return
        if again:
            self._lost(job, "the node was closed")
        self._done(job)

    def _write(self, job: FlushJob) -> bool:
        """Writes what it can; False if the job should be tried again."""
        with self._memory.refer(job.wanted, job.first, job.count) as slots:
            if not any(slots.entries):
                return True  # memory has none of it any more: cleared, or damaged
            try:
                present = self._node.writer.publish(job, slots)
                why = "a sweep takes its chunks, memory lost them, or their parents are gone"
            except (Overloaded, Unavailable) as error:
                present, why = job.first, str(error)
            except KVStoreError as error:
                self._lost(job, str(error))
                return True
            written = max(0, min(job.count, present - job.first))
            self._memory.clean([entry for entry in slots.entries[:written] if entry is not None])
            gone = sum(entry is None or entry.is_gone for entry in slots.entries)
        if written == job.count:
            # Some may be gone since the job was queued: cleared, or damaged, which counts as lost where it is found.
            self._counters.add(NodeCount.BEHIND_WRITTEN, job.count - gone)
            return True
        if self._clock.monotonic_s() < job.ends_s:
            return False
        self._lost(job, why)
        return True

    def _lost(self, job: FlushJob, why: str) -> None:
        with self._memory.refer(job.wanted, job.first, job.count) as slots:
            dirty = [entry for entry in slots.entries if entry is not None and entry.is_dirty]
            self._memory.clean(dirty)
        self._counters.add(NodeCount.BEHIND_LOST, job.count)
        with self._changed:
            self._lost_chunks += job.count
            is_said_by_close = self._loop.closed and not self._close_said
        if not is_said_by_close:
            log.warning("behind.lost chunks=%d why=%s", job.count, why)

    def _done(self, job: FlushJob) -> None:
        with self._changed:
            self._bytes -= job.size_bytes
            self._jobs -= 1
            self._changed.notify_all()


ARRIVING_SHARE = 4
"""Share of memory that reservations may have together: clients that stop sending must not keep others out."""


class Reservation:
    """Slots for a run of chunks on their way from a client. A context: gives them back unless they were published."""

    def __init__(self, tiers: TierStack, keys: KeySet, first: int, slots: list[Slot], hints: Hints) -> None:
        self.first = first
        self.count = len(slots)
        self.size_bytes = sum(slot.entry.size_bytes for slot in slots)
        self._tiers = tiers
        self._keys = keys
        self._slots = slots
        self._hints = hints

    def bases(self) -> npt.NDArray[np.uint64]:
        """Returns where the sections belong: the first section of each chunk, then the second of each, and so on."""
        payloads = [self._keys.payload_of(at, slot.memory) for at, slot in enumerate(self._slots, self.first)]
        starts = np.fromiter(map(address_of, payloads), np.uint64, len(payloads))
        offsets = np.arange(0, len(payloads[0]), self._keys.section_bytes(self.first), dtype=np.uint64)
        return (offsets[:, None] + starts).ravel()

    def publish(self, sums: npt.NDArray[np.uint64]) -> None:
        """Makes the chunks ready; ``sums`` are the checksums of their sections, in the order of ``bases``."""
        slots, tiers = self._slots, self._tiers
        tables = sums.reshape(-1, len(slots)).T
        seal_images(self._keys, self.first, [slot.memory for slot in slots], tables, tiers.node.ids)
        self._slots = []
        tiers.memory.ready(slots)
        stop = self.first + len(slots)
        tiers.behind.add(self._keys.needed(stop), self.first, len(slots), self._hints, self.size_bytes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        slots, self._slots = self._slots, []
        if slots:
            self._tiers.memory.drop(slots)
            self._tiers.behind.give_back(self.size_bytes)
        self._tiers.has_arrived(self.size_bytes)


class TierStack:
    """Takes ``arena`` over. Thread-safe."""

    def __init__(self, node: Engine, arena: SealedArena, settings: TierSettings) -> None:
        limits = node.limits
        self.node = node
        self.settings = settings
        self.memory = MemoryTier(arena, node.counters, node.clock)
        self.disk: DiskTier | None = None
        self.below: list[Tier] = []
        """Peers, then the local disk."""
        self._clock = node.clock
        self._counters = node.counters
        self.encodings = node.encodings
        self.copiers = Executor(limits.width, limits.width, limits.queue_max, limits.stall_s, node.clock)
        """Threads that never wait for a device: so memory is read while the root hangs."""
        self.behind = WriteBehind(node, self.memory)
        self._changed = threading.Condition()  # guards that chunks came into memory, and the bytes on their way there
        self._is_filled = False
        self.orders_count = 0
        """How many orders to clear were obeyed."""
        self._arriving_bytes = 0
        self._demoting = Loop("kvstore-demote", self._changed, lambda: self._turn)

    def add_disk(self, folder: str, size_bytes: int) -> None:
        """Puts a local disk below the memory, empty until ``refill``.

        Raises InvalidRequest, PermissionDenied, Unavailable.
        """
        disk = self.disk = DiskTier(
            folder,
            size_bytes,
            self._counters,
            self._clock,
            self.node.ids,
            encodings=self.encodings,
            root_id=self.node.identity.root,
        )
        disk.open()
        self.below.append(disk)
        self._demoting.start()

    def add_peers(self, peers: Tier) -> None:
        """Puts other nodes' memory between ours and the disk."""
        self.below.insert(0, peers)

    def mode(self, asked: WriteMode | None) -> WriteMode:
        """How a put is done here."""
        mode = asked or self.settings.write
        is_durable = self.node.durability is not Durability.NONE
        return WriteMode.THROUGH if is_durable and mode is WriteMode.BEHIND else mode

    def keep(self, put: MemoryPut) -> None:
        """Copies chunks that the root has into memory as well, as far as there is room and time."""
        self.filling(put.keys)
        with suppress(Overloaded, Unavailable):  # too late for memory, but the root has them
            self._take(put, dirty=False)

    def absorb(self, put: MemoryPut, *, waits: bool) -> MemoryPart:
        """Copies chunks into memory that are written to the root later (rule W1); fewer where there is no room.

        With ``waits``, waits for the queue to have room, at most ``behind_wait_s``.
        """
        self.filling(put.keys)
        kept = self._absorb(put)
        patience = Deadline(self._clock, min(put.deadline.left_s(), self.node.limits.behind_wait_s))
        while (
            waits
            and (at := kept.waits_at) is not None
            and self.behind.wait_for_room(put.keys.image_bytes(put.first + at), patience.left_s())
        ):
            kept = kept.then(at, self._absorb(put.rest(at)))
        return kept

    def reserve(self, keys: KeySet, first: int, count: int, hints: Hints) -> Reservation | None:
        """Claims slots for chunks on their way that are written to the root later; None unless all find room now."""
        size_bytes = sum(keys.image_sizes(range(first, first + count)))
        with self._changed:
            if self._arriving_bytes + size_bytes > self.memory.size_bytes // ARRIVING_SHARE:
                return None
            self._arriving_bytes += size_bytes
        self.filling(keys)
        claimed, _ = self._claim(keys, first, [False] * count, hints, dirty=True)
        slots = [slot for _, slot in claimed]
        if len(slots) == count:
            return Reservation(self, keys, first, slots, hints)
        self.memory.drop(slots)
        self.behind.give_back(sum(slot.entry.size_bytes for slot in slots))
        self.has_arrived(size_bytes)
        return None

    def has_arrived(self, size_bytes: int) -> None:
        """Notes that a reservation of so many bytes has ended."""
        with self._changed:
            self._arriving_bytes -= size_bytes

    def _absorb(self, put: MemoryPut) -> MemoryPart:
        kept = self._take(put, dirty=True)
        if kept.fresh:
            # From the first that is fresh on: its parents are on the root, or in the queue before it.
            start, stop = put.first + kept.fresh[0], put.first + kept.fresh[-1] + 1
            size_bytes = sum(put.keys.image_bytes(put.first + at) for at in kept.fresh)
            self.behind.add(put.keys.needed(stop), start, stop - start, put.hints, size_bytes)
        return kept

    def _take(self, put: MemoryPut, *, dirty: bool) -> MemoryPart:
        """Copies chunks as far as there is room (rule E2); waits for no room.

        If ``dirty``, it reserves room for fresh chunks in the queue of those to be written to the root. Of a prompt it
        copies nothing after the first chunk that finds no room. Raises DeadlinePassed.
        """
        with self.memory.refer(put.keys, put.first, put.count) as found:
            there = [entry is not None for entry in found.entries]
            slots, waits_at = self._claim(put.keys, put.first, there, put.hints, dirty=dirty)
            try:
                self._copy(put, slots)
            except BaseException:
                if dirty:
                    self.behind.give_back(sum(slot.entry.size_bytes for _, slot in slots))
                raise
            self.memory.ready([slot for _, slot in slots])
        return MemoryPart(there, [index - put.first for index, _ in slots], waits_at)

    def _claim(
        self, keys: KeySet, first: int, there: list[bool], hints: Hints, *, dirty: bool
    ) -> tuple[list[tuple[int, Slot]], int | None]:
        """Claims room for chunks that are not ``there``, which it updates; returns slots with their indexes.

        Also returns the position of the first that the write-behind queue has no room for; None if a chunk of a prompt
        before it found no memory, so that nothing is taken behind a hole.
        """
        slots: list[tuple[int, Slot]] = []
        own: dict[Address, int] = {}  # a block that is given twice is claimed once
        missing = [at for at, is_there in enumerate(there) if not is_there]
        sizes = keys.image_sizes([first + at for at in missing])
        room_count = self.behind.reserve(sizes) if dirty else len(missing)
        unused_bytes = sum(sizes[:room_count]) if dirty else 0
        try:
            for number, (at, size_bytes) in enumerate(zip(missing, sizes, strict=True)):
                has_room = number < room_count
                slot = self.memory.claim(keys, first + at, hints=hints, dirty=dirty) if has_room else None
                if slot is not None:
                    there[at] = True
                    slots.append((first + at, slot))
                    own[slot.entry.address] = size_bytes
                    unused_bytes -= size_bytes if dirty else 0
                elif keys.prefix_ordered:
                    there[at:] = [False] * (len(there) - at)
                    break
                else:
                    there[at] = own.get(keys.addresses[first + at]) == size_bytes
        except BaseException:  # Ctrl-C: the process may go on
            self.memory.drop([slot for _, slot in slots])
            self.behind.give_back(sum(sizes[:room_count]) if dirty else 0)
            raise
        self.behind.give_back(unused_bytes)  # soon: no put waits for the room of a chunk that another put is bringing
        is_behind_hole = keys.prefix_ordered and len(slots) < room_count
        return slots, missing[room_count] if room_count < len(missing) and not is_behind_hole else None

    def _copy(self, put: MemoryPut, slots: list[tuple[int, Slot]]) -> None:
        """Copies the chunks, or drops the slots and raises."""
        if not slots:
            return
        size_bytes = sum(slot.entry.size_bytes for _, slot in slots)
        most = PARTS_PER_THREAD * self.copiers.width
        parts = max(min(size_bytes // PART_BYTES_MIN, most), size_bytes // PART_BYTES_MAX, 1)
        size = -(-len(slots) // parts)

        def copy(number: int) -> bool:
            part = slots[number * size : (number + 1) * size]
            images = [slot.memory for _, slot in part]
            make_images(put.keys, [index for index, _ in part], put.source, images, self.node.ids)
            return True

        batch: IndexedWork | None = None
        try:
            if len(slots) <= size:
                copy(0)  # too little work for another thread
            else:
                batch = self.copiers.start(-(-len(slots) // size), copy, helped=True)
                batch.help(put.deadline)
                batch.wait(put.deadline)
        except BaseException:
            # Copying never waits for a device, so this is short. If it takes too long, the room is lost: given back, a
            # thread would write into it while it belongs to another chunk.
            if batch is None or batch.join(COPY_S):
                self.memory.drop([slot for _, slot in slots])
            raise

    def filling(self, wanted: KeySet) -> None:
        """Prepares memory for chunks that are about to come: if it has little room, a thread demotes others."""
        if not self.encodings.is_plain:
            self.encodings.learn(wanted.namespace)
        if self.disk is not None and self.memory.free_bytes < self.memory.size_bytes * FREE_SHARE:
            with self._changed:
                self._is_filled = True
                self._changed.notify_all()

    def refill(self, cleared: Sequence[ClearOrder]) -> None:
        """Begins to use the local disk, except what orders named while it was away (rule P6). Call it once.

        Memory drops that too if the root has it: this process may have read it while the order was carried out.
        """
        self.memory.drop_ordered(ClearOrder.of_all(cleared), even_dirty=False)
        if self.disk is not None:
            self.disk.refill(cleared)

    def drop_ordered(self, orders: Sequence[ClearOrder], standing: ClearOrder) -> bool:
        """Drops what ``orders`` name, and keeps what ``standing`` names from coming back (rule P5).

        False where something is still being written to the root that may be named by them.
        """
        order = ClearOrder.of_all(orders)
        self.memory.forbid(standing)
        self.orders_count += len(orders)
        for tier in self.below:
            tier.forbid(standing)
        self.memory.drop_ordered(order)
        if self.disk is not None:
            self.disk.drop_ordered(orders)
        # What waited to be written finds its images gone; what is being written has read them already.
        return self.behind.pass_by(order, min(FORGET_S, self.node.limits.clear_answer_s))

    def stats(self) -> dict[str, int | float]:
        found: dict[str, int | float] = {
            **self.memory.stats(),
            "behind_bytes": self.behind.size_bytes,
            "behind_bytes_max": self.behind.bytes_max,
        }
        for tier in self.below:
            found.update(tier.stats())
        return found

    def close(self, timeout_s: float) -> None:
        """Writes what the root does not have yet, for at most ``flush_s`` (rule W3), and ends everything."""
        self.behind.close()
        self._demoting.close(timeout_s)
        for tier in self.below:
            tier.close(timeout_s)
        self.copiers.close(timeout_s)
        self.memory.close()

    def _turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_filled or self._demoting.closed, DEMOTE_PERIOD_S)
            self._is_filled = False
        self.demote_once()

    def demote_once(self) -> None:
        """Keeps some of memory free, writing what goes to the local disk before, if it was used more than once."""
        assert self.disk is not None
        wanted = int(self.memory.size_bytes * FREE_SHARE) - self.memory.free_bytes
        while wanted > 0 and not self._demoting.closed:
            with self.memory.victims(min(wanted, DEMOTE_STEP_BYTES)) as victims:
                if not victims.referred:
                    return
                for entry, image in zip(victims.referred, victims.present_images(), strict=True):
                    self.demote(entry, image)
                    wanted -= entry.size_bytes
                self.memory.evict(victims.referred)

    def demote(self, entry: TierEntry, image: memoryview) -> None:
        """Writes a chunk that memory is about to give up to the local disk, if it was used more than once."""
        assert self.disk is not None
        if entry.uses >= 1 and self.disk.add(entry.place, image, entry.hints):
            self._counters.add(NodeCount.MEMORY_DEMOTED)
            if entry.is_gone:
                # Cleared during the write: the clear reached memory first, and the disk perhaps before this chunk did.
                self.disk.drop(entry.address)
