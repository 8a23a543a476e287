"""The queue of chunks that memory has and the root lacks: written soon, parents first; no caller waits for it.

Memory keeps a dirty image until the root has it; the writer does the writing. Rules W1 to W3 of
kvstore/memory/MEMORY.md.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from kvstore.address import ADDRESS_BYTES
from kvstore.background import Decision, Loop
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.hints import Hints
from kvstore.keyset import KeySet
from kvstore.namespace import NamespaceDigest
from kvstore.node.counters import Counters
from kvstore.node.memory_tier import MemoryTier, Slots
from kvstore.node.settings import CurrentLimits
from kvstore.sources import Clock

log = logging.getLogger(__name__)

WRITERS = 4
AFTER_S = 0.05
"""How long a chunk waits before it is written: the put that brought it is acknowledged meanwhile, and needs cores."""
PAUSE_S = 0.5
"""Pause after the root refused or did not answer."""
JOIN_S = 2.0
"""At the end, the wait for threads that still write."""
STUCK_S = 3.0
"""At the end, the node stops waiting once nothing was written or given up for this long: the root refuses, or lacks
parents.
"""


@dataclass(slots=True, eq=False)
class Job:
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
    was_tried: bool = False
    """It could not be written once, and so may never be."""

    def continues(self, other: Job) -> bool:
        """True if some of its chunks have parents in ``other``, or are the same."""
        # All chunks of the other descend from its first, so a chain without that chunk has none of them.
        at = slice(other.first * ADDRESS_BYTES, (other.first + 1) * ADDRESS_BYTES)
        mine = self.wanted.packed_addresses[at]
        return bool(mine) and mine == other.wanted.packed_addresses[at]


Publish = Callable[[Job, Slots], int]
"""Puts the chunks of a job on the root, from their images; returns the index after the last leading chunk that is
there.

Raises the root's errors, after which some chunks may be there.
"""


class WriteBehind:
    """Bounded by ``bytes_max``; loses, and counts, what cannot be written within ``behind_give_up_s``. Thread-safe."""

    def __init__(
        self, memory: MemoryTier, publish: Publish, counters: Counters, limits: CurrentLimits, clock: Clock
    ) -> None:
        """``publish`` writes each job to the root."""
        self._memory = memory
        self._publish = publish
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._writing: list[Job] = []
        self._bytes = 0
        self._jobs = 0
        self._ended_s = 0.0
        """Time at which a job ended last."""
        self._lost_chunks = 0
        self._is_closing = False
        self._close_said = False
        """True once ``close`` has logged its losses; a job that a hanging root loses later logs its own."""
        self._loop = Loop("kvstore-behind", self._changed, self._next, threads_max=WRITERS)

    @property
    def bytes_max(self) -> int:
        """Bytes that may wait; where that becomes less, what waits stays."""
        return int(self._memory.size_bytes * self._limits.now.behind_share)

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
        ends_s = now_s + self._limits.now.behind_give_up_s
        job = Job(wanted, first, count, hints, size_bytes, ends_s, now_s + AFTER_S)
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

    def forget(self, digest: NamespaceDigest, timeout_s: float) -> None:
        """Gives up the queued chunks of a namespace, and waits for those that are being written."""
        ends_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            given_up = [job for job in self._waiting if job.wanted.namespace.digest == digest]
            self._waiting = deque(job for job in self._waiting if job.wanted.namespace.digest != digest)
        for job in given_up:
            self._done(job)
        with self._changed:
            self._changed.wait_for(
                lambda: all(job.wanted.namespace.digest != digest for job in self._writing),
                ends_s - self._clock.monotonic_s(),
            )

    def pass_by(self, timeout_s: float) -> bool:
        """Waits for the writes of this moment; True if each was done, or failed, within the time."""
        with self._changed:
            now = [*self._writing]
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
        """Writes what is queued for at most ``flush_s``, and for at most STUCK_S where nothing can be written; the rest
        is lost (rule W3). Takes nothing more. Idempotent.

        ``waited_s`` of that time have passed already.
        """
        timeout_s = max(0.0, self._limits.now.flush_s - waited_s)
        lost_before = self._lost_chunks
        began_s = self._clock.monotonic_s()
        with self._changed:
            self._is_closing = True
            while self._jobs and (left_s := self._may_wait_s(began_s, timeout_s)) > 0:
                self._changed.wait(left_s)
            self._loop.stop()
            left = [*self._waiting]
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

    def _may_wait_s(self, began_s: float, timeout_s: float) -> float:
        """Returns how long ``close``, which began at ``began_s``, may still wait before it looks again."""
        now_s, ends_s = self._clock.monotonic_s(), began_s + timeout_s
        if all(job.was_tried for job in self._writing):
            ends_s = min(ends_s, max(began_s, self._ended_s) + STUCK_S)
        return min(ends_s - now_s, STUCK_S)

    def _next(self) -> Decision:
        """Returns the oldest job that may begin and continues no running or waiting job; else the seconds until one may
        begin. A job behind another one may when that ends.
        """
        now_s = self._clock.monotonic_s()
        before = [*self._writing]
        for place, job in enumerate(self._waiting):
            if job.begins_s <= now_s and not any(map(job.continues, before)):
                del self._waiting[place]
                self._writing.append(job)
                return partial(self._do, job)
            before.append(job)
        return min((job.begins_s - now_s for job in self._waiting if job.begins_s > now_s), default=None)

    def _do(self, job: Job) -> None:
        again = False
        try:
            again = not self._write(job)
        except Exception:
            self._lost(job, "it failed; see the log")
            log.exception("behind.failed")
        with self._changed:
            self._writing.remove(job)
            self._changed.notify_all()
            if again and not self._loop.closed:
                job.begins_s = self._clock.monotonic_s() + PAUSE_S
                self._waiting.appendleft(job)
                return
        if again:
            self._lost(job, "the node was closed")
        self._done(job)

    def _write(self, job: Job) -> bool:
        """Writes what it can; False if the job should be tried again."""
        with self._memory.refer(job.wanted, job.first, job.count) as slots:
            if not any(slots.entries):
                return True  # memory has none of it any more: cleared, or damaged
            try:
                present = self._publish(job, slots)
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
        job.was_tried = True
        if self._clock.monotonic_s() < job.ends_s:
            return False
        self._lost(job, why)
        return True

    def _lost(self, job: Job, why: str) -> None:
        with self._memory.refer(job.wanted, job.first, job.count) as slots:
            dirty = [entry for entry in slots.entries if entry is not None and entry.is_dirty]
            self._memory.clean(dirty)
        self._counters.add(NodeCount.BEHIND_LOST, job.count)
        with self._changed:
            self._lost_chunks += job.count
            is_said_by_close = self._loop.closed and not self._close_said
        if not is_said_by_close:
            log.info("behind.lost chunks=%d why=%s", job.count, why)

    def _done(self, job: Job) -> None:
        with self._changed:
            self._bytes -= job.size_bytes
            self._jobs -= 1
            self._ended_s = self._clock.monotonic_s()
            self._changed.notify_all()
