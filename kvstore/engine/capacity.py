"""Tracks the space that this node uses on the root, and how much more it may write (gc/PROTOCOL.md, section 6).

I/O threads count here and every put reserves here, under a lock of its own that no I/O holds. The view passes on what
collectors publish, and the follower reports.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.errors import Overloaded, StoreFull
from kvstore.host.tables import SpaceReservation
from kvstore.meta.usage import Capacity, UsageReport
from kvstore.root.posix import DiskFull

WAIT_S = 2.0
"""A put without credit waits up to this long."""
LOOK_S = 0.1
"""It looks again after this: a released credit wakes no put."""
KEPT_S = 60.0
"""A credit stays in force for this long after its collector died, so that another collector can start."""
REPORT_SHARE = 1 / 4
"""A node reports when it has written this share of its credit."""
REPEAT_S = 1.0
"""A node with puts that wait reports again after this: a restored etcd may have lost its report."""
PACE_S_MIN = 0.02
WAITS = "no credit for this put: eviction (or etcd) has not caught up; retry shortly"


class NodeUsage:
    """Byte counts of one node, and its credit. Thread-safe. All counts are of this node's life, and only grow."""

    def __init__(self, refused: Callable[[], None] = lambda: None, wait_s: float = WAIT_S) -> None:
        """``refused`` is called for each put that gets no credit, after a wait of at most ``wait_s``."""
        self._refused = refused
        self._wait_s = wait_s
        self._lock = threading.Condition()
        self._written = self._removed = self._largest = 0
        self._pending = 0
        """Reserved bytes. Those of ``_released`` are still among them."""
        self._released: deque[int] = deque()
        self._waiting: deque[object] = deque()
        """Puts that wait, in order."""
        self._in_session = False
        self._written_before = self._removed_before = 0
        """The counts at the beginning of the session: its reports count from here."""
        self._capacity: Capacity | None = None
        """What collectors publish now; None if there is no collector."""
        self._created = 0
        """The create_revision of its key."""
        self._limit: Capacity | None = None
        """The last one with a credit. It outlives its collector."""
        self._absent_since_s: float | None = None
        self._reported = UsageReport()
        self._reported_s = 0.0
        self._answered = 0
        """The create_revision that the last report answered."""
        self._reports: deque[tuple[int, int]] = deque()
        """Revisions and written bytes of the reports that collectors may not have counted yet."""
        self._counted = 0
        """Written bytes that collectors have counted."""

    # Called by I/O threads

    def wrote(self, size_bytes: int) -> None:
        with self._lock:
            self._written += size_bytes

    def removed(self, size_bytes: int) -> None:
        with self._lock:
            self._removed += size_bytes

    @property
    def written_bytes(self) -> int:
        with self._lock:
            return self._written

    # Called by puts

    @property
    def is_full(self) -> bool:
        """True if collectors publish that nothing can be evicted."""
        capacity = self._capacity
        return capacity is not None and capacity.is_full

    def reserve(
        self, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = math.inf
    ) -> SpaceReservation:
        """Reserves credit for a put, of at least one byte where its size is not known.

        Waits while there is none, at most ``wait_s``; then raises Overloaded, or StoreFull if collectors publish that
        nothing can be evicted. ``missing_bytes`` is called before the wait, and returns how many bytes of
        the put are not stored yet. Nothing is reserved for no bytes.
        """
        with self._lock:
            self._largest = max(self._largest, size_bytes)
            if not self._waiting and self._admits(size_bytes):
                return self._reserved(size_bytes)
        last_s = time.monotonic() + wait_s
        size_bytes = size_bytes if missing_bytes is None else missing_bytes()
        put, ends_s = object(), min(last_s, time.monotonic() + self._wait_s)
        with self._lock:
            self._waiting.append(put)
            try:
                while size_bytes and not (self._waiting[0] is put and self._admits(size_bytes)):
                    left_s = ends_s - time.monotonic()
                    if left_s <= 0 or self.is_full:
                        break
                    self._lock.wait(min(left_s, LOOK_S))
                else:
                    return self._reserved(size_bytes)
            finally:
                self._waiting.remove(put)
                self._lock.notify_all()
        self._refused()
        # Without credit the root may still have space: collectors, or etcd, are late. Only they know that it is full.
        raise (StoreFull if self.is_full else Overloaded)(WAITS)

    def refusal(self, full: DiskFull) -> Overloaded:
        return full

    def _reserved(self, size_bytes: int) -> SpaceReservation:
        self._pending += size_bytes
        return SpaceReservation(size_bytes, self._released)

    def _admits(self, size_bytes: int) -> bool:
        """True if a put may begin. One that is larger than the credit begins when all before it is counted."""
        while self._released:
            self._pending -= self._released.popleft()
        if not size_bytes or self._limit is None or self._limit.credit_bytes is None:
            return True
        ahead_bytes = self._written + self._pending - self._counted
        if ahead_bytes + size_bytes <= self._limit.credit_bytes:
            return True
        return ahead_bytes <= 0 < self._limit.credit_bytes

    # Called by the view, under its lock

    def begin(self) -> None:
        """Begins a session; ``received`` follows.

        Unreported writes of the last session count for this one, if a collector counts. Deletions do not: a report
        whose reply was lost would count them twice, and so hide writes.
        """
        with self._lock:
            reported_bytes = self._written_before + self._reported.written_bytes
            self._written_before = self._written if self._limit is None else reported_bytes
            self._removed_before = self._removed
            self._counted = self._written_before
            self._reported, self._answered = UsageReport(), 0
            self._reports.clear()
            self._in_session = True

    def received(self, capacity: Capacity | None, created: int = 0) -> None:
        """Takes what collectors publish; ``created`` is the create_revision of its key. None: there is no collector.

        A record without a credit is from a collector that has not listed the root yet: the last credit stays.
        """
        with self._lock:
            self._capacity, self._created, self._absent_since_s = capacity, created, None
            if capacity is not None and capacity.credit_bytes is not None:
                self._limit = capacity
                self._count_reports()
            self._lock.notify_all()

    def end(self) -> None:
        """Ends the session. The last credit stays in force."""
        with self._lock:
            self._in_session = False

    # Called by the follower

    def due(self, now_s: float, pace_s: float = 0.0) -> UsageReport | None:
        """Returns what to report now, at most once in ``pace_s``; None if nothing is due. Call ``reported`` after."""
        with self._lock:
            capacity = self._capacity
            if capacity is None:
                self._lapse(now_s)
            if capacity is None or not self._in_session:
                return None
            now = UsageReport(self._written - self._written_before, self._removed - self._removed_before, self._largest)
            if self._answered != self._created:
                return now  # a collector began: its listing starts from our report
            since_s = now_s - self._reported_s
            if since_s < max(pace_s, PACE_S_MIN):
                return None
            step_bytes = REPORT_SHARE * (capacity.credit_bytes or 0)
            is_behind = now.written_bytes - self._reported.written_bytes > step_bytes
            is_awaited = bool(self._waiting) and (now != self._reported or since_s >= REPEAT_S)
            is_freed = now.removed_bytes > self._reported.removed_bytes
            is_late = now != self._reported and since_s >= REPEAT_S
            return now if is_behind or is_awaited or is_freed or is_late else None

    def reported(self, usage: UsageReport, revision: int, answered: int, now_s: float) -> None:
        """Notes that the report was written at ``revision``, when the record's create_revision was ``answered``."""
        with self._lock:
            self._reported, self._reported_s, self._answered = usage, now_s, answered
            self._reports.append((revision, self._written_before + usage.written_bytes))
            self._count_reports()
            self._lock.notify_all()

    @property
    def owes_s(self) -> float:
        """Seconds until a report may be due; infinity if there is nothing to report."""
        with self._lock:
            is_reported = self._written - self._written_before == self._reported.written_bytes
            return math.inf if self._capacity is None or (is_reported and not self._waiting) else PACE_S_MIN

    @property
    def answers(self) -> int:
        """The create_revision of what collectors publish now."""
        with self._lock:
            return self._created

    def _count_reports(self) -> None:
        """Moves ``_counted`` to the last report that the credit counts."""
        while self._reports and self._limit is not None and self._reports[0][0] <= self._limit.revision:
            self._counted = self._reports.popleft()[1]

    def _lapse(self, now_s: float) -> None:
        """Ends the credit of collectors that have been absent for KEPT_S: then nothing limits writers."""
        if self._absent_since_s is None:
            self._absent_since_s = now_s
        elif now_s - self._absent_since_s >= KEPT_S and self._limit is not None:
            self._limit = None
            self._lock.notify_all()
