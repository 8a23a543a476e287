"""The room that this node takes on the root: what it wrote and deleted, what its puts under way may write, and how much
more it may write before its next report is heard, or, while no collector is there, before it claims more (rule S6).

Separate from the view, which hears the collectors' word, and from the follower, which reports: lanes count here, and
every put asks, under a lock of its own that no I/O holds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvstore.errors import Overloaded, StoreFull
from kvstore.meta.usage import Room, Usage
from kvstore.root.posix_errors import DiskFull

Claiming = Any
AGAIN_S = 1.0
"""A node that waits for the collectors' word reports again after this: a restored etcd may have lost its report."""
KEPT_S = 60.0
"""A limit stays in force for so long after its collector died: another collector starts meanwhile."""
COUNTED_S = 1.0
"""A put waits up to this long, and until its node may report, for collectors to count it: they do so at once."""
STARTED_S = 5.0
"""A put waits up to this long for the first word of a collector that is being started, and that counts this node."""

ASKED_SHARE = 1 / 8
"""Puts that wait are asked for together up to this share of the capacity."""
AMPLE_BYTES = 64 << 20
"""A node that finds this much room beyond its put does not look at the disk again until a write is refused."""


WAITS = (
    "the root has no room for this put, or no collector has counted yet what this node wrote: back off, and put again "
    "in a moment"
)
"""What a put without room is told, if no more is known."""


@dataclass(slots=True)
class Reserved:
    """Room for one put. Its owner releases it once nothing of the put is on its way any more.

    A put that is dropped half-way gives it back as well: nobody else would.
    """

    usage: NodeUsage
    size_bytes: int

    def release(self) -> None:
        """Gives the room back; what was written of it counts as written. Idempotent, and takes no lock.

        So ``__del__`` may do it, in any thread. A put that waits for room hears the collectors' next word of it.
        """
        size_bytes, self.size_bytes = self.size_bytes, 0
        if size_bytes:
            self.usage._released.append(size_bytes)

    __del__ = release

    def __enter__(self) -> Reserved:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class NodeUsage:
    """Counts of one node. Thread-safe."""

    def __init__(self, refused: Callable[[], None] = lambda: None) -> None:
        """``refused`` is called for each put that gets no room."""
        self._refused = refused
        self._lock = threading.Condition()
        self._written = self._removed = 0
        self._granted = 0
        """Bytes of puts that have room."""
        self._released: deque[int] = deque()
        """Room that puts gave back, and that ``_granted`` still has."""
        self._waiting: dict[object, int] = {}
        """Puts that wait for room, in order, and their bytes."""
        self._asks_from_s = 0.0
        """After a put that got no room this node asks for none for about as long: others have their turn."""
        self._written_before = self._removed_before = 0
        """Counts at the beginning of the session: its report counts from here."""
        self._written_told = 0
        self._in_session = False
        self._room: Room | None = None
        """The collectors' word; None if no collector asks."""
        self._bound: Room | None = None
        """The last word with an allowance: it outlives its collector, and bounds this node until the next one."""
        self._unasked_s: float | None = None
        """Since when no collector asks, though one did before."""
        self._room_created = 0
        self._answered = 0
        """The create_revision of the word that the last report answered."""
        self._told = Usage()
        self._told_s = 0.0
        self._reports: deque[tuple[int, int]] = deque()
        """Revision and taken bytes of reports: the last one that the collectors' word counts, and those after it."""
        self._was_counted = False
        """A collector has counted a report of this node since it is bound."""
        self.claiming: Claiming | None = None
        """Where no collector's word is in force, this node writes what it claims; None: whatever it likes."""
        self._claimed = 0
        """No put begins that takes more than this."""
        self._claims_now = False
        self._puts = False
        self.looks = False
        """Each put looks at the disk first, with ``check_disk`` (rule S7)."""
        self._was_full = False
        """The disk had no room for a write of this node: it looks for ever."""

    # Called by lanes

    def wrote(self, size_bytes: int) -> None:
        """Counts a published file."""
        with self._lock:
            self._written += size_bytes

    def removed(self, size_bytes: int) -> None:
        """Counts a deleted file."""
        with self._lock:
            self._removed += size_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes of the files that this node published."""
        with self._lock:
            return self._written

    # Called by puts

    def reserve(self, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None) -> Reserved:
        """Reserves the room that a put may take, of at least one byte where its size is not known.

        Where there is none yet, claims it, or waits a little: until collectors have counted this put beside all others,
        and made room for it. Raises Overloaded if there is none then. ``missing_bytes`` is called before that, and
        returns how much of the put is not stored already. Nothing is reserved for a put of no bytes.
        """
        if size_bytes and self.claiming is not None and not self._puts:
            self._puts = True
            self.claiming.begin()
        with self._lock:
            if not size_bytes or self._fits(size_bytes):
                self._granted += size_bytes
                return Reserved(self, size_bytes)
        size_bytes = size_bytes if missing_bytes is None else missing_bytes()
        if not size_bytes or self._wait_for_room(size_bytes):
            return Reserved(self, size_bytes)
        self._refused()
        raise Overloaded(WAITS if self.claiming is None else self.claiming.refusal())

    def _wait_for_room(self, size_bytes: int) -> bool:
        """Waits until a put may begin, and grants it room; False if it may not.

        It has ``_patience_s`` until it is its turn to be asked for, and as long from then on.
        """
        put, patience_s, is_granted = object(), self._patience_s(), False
        asks_s, ends_s, left_s = math.inf, time.monotonic() + patience_s, patience_s
        try:
            while True:
                # Again and again: a claim fails where the metadata are slow, and another put may take what was claimed.
                is_refused = self._claim(size_bytes)
                with self._lock:
                    if not is_refused and not self._claims_now and not self._fits(size_bytes):
                        continue
                    if left_s > 0 and not self._fits(size_bytes) and (self._may_hear() or not is_refused):
                        self._waiting[put] = size_bytes
                        pause_s = self._asks_from_s - time.monotonic()
                        if asks_s == math.inf and pause_s <= 0 and next(iter(self._waiting)) is put:
                            asks_s = time.monotonic()
                            ends_s, left_s = asks_s + patience_s, patience_s
                        self._lock.wait(min(left_s, pause_s if pause_s > 0 else AGAIN_S))
                        left_s = ends_s - time.monotonic()
                        if left_s > 0 and not self._fits(size_bytes):
                            continue
                    is_granted = self._fits(size_bytes)
                    self._granted += size_bytes if is_granted else 0
                    return is_granted
        finally:
            with self._lock:
                self._waiting.pop(put, None)
                now_s = time.monotonic()
                if not is_granted and asks_s < now_s:
                    self._asks_from_s = now_s + min(now_s - asks_s, COUNTED_S)
                self._lock.notify_all()

    def _asked(self) -> int:
        """Bytes that collectors are asked to make room for: the first put that waits, and some more.

        Not those of all: together they might never fit, and room for them would empty the root.
        """
        asked = 0
        if time.monotonic() >= self._asks_from_s:
            most = ASKED_SHARE * ((self._room and self._room.capacity_bytes) or 0)
            for size_bytes in self._waiting.values():
                if asked and asked + size_bytes > most:
                    break
                asked += size_bytes
        return asked

    def _patience_s(self) -> float:
        with self._lock:
            room = self._room
            counted_s = COUNTED_S + (0.0 if room is None else 2 * room.pace_s)  # where many nodes report, each waits
            return min(counted_s, STARTED_S) if self._was_counted else STARTED_S

    def check_disk(self, size_bytes: int) -> None:
        """Raises StoreFull if the disk has no room for a put of that size beside the reserve (rule S7).

        Looks until there is ample room, and from the first write on that the disk refused. So puts leave the room of
        the reserve to a collector, which frees more. Also raises the root's errors.
        """
        if self.claiming is None:
            return
        if not self.claiming.has_disk_for(size_bytes):
            raise StoreFull(f"No space left on the disk of this root; {self.claiming.full()}")
        if not self._was_full and self.claiming.has_disk_for(size_bytes + AMPLE_BYTES):
            with self._lock:
                self.looks = self._was_full

    def refusal(self, full: DiskFull) -> StoreFull:
        """Notes that a write failed on a full disk; returns the caller's error, which says what makes room."""
        if self.claiming is None:
            return full
        with self._lock:
            self.looks = self._was_full = True
        return StoreFull(f"{full.said}; {self.claiming.full()}")

    def close(self) -> None:
        """Makes claims and writes equal. Call it once nothing is written any more."""
        with self._lock:
            left_bytes = self._claimed - self._written if self._bound is None else 0
            self._claimed = self._written
        if self.claiming is not None:
            self.claiming.settle(left_bytes)

    # Called by the view, under its lock

    def begin(self) -> None:
        """Begins a session; ``hear`` follows.

        Unreported writes of the last session count for this one, if a collector asked for them. Deletions do not: a
        report whose reply was lost would count them twice, and so hide writes.
        """
        with self._lock:
            self._written_before = self._written if self._bound is None else self._written_told
            self._removed_before = self._removed
            self._told, self._answered = Usage(), 0
            self._reports.clear()
            self._in_session = True

    def hear(self, room: Room | None, created: int = 0) -> None:
        """Notes that the collectors' word changed; ``created`` is the create_revision of its key. None: nobody asks.

        A word without an allowance comes from a collector that has not listed the root yet. It counts nothing, so the
        bound before it stays.
        """
        with self._lock:
            self._room, self._room_created, self._unasked_s = room, created, None
            if room is not None and room.allowance_bytes is not None:
                self._bound = room
                while len(self._reports) > 1 and self._reports[1][0] <= room.revision:
                    self._reports.popleft()
                self._was_counted = self._was_counted or self._counted() is not None
            elif room is None and not self._was_counted:
                self._bound = None  # that collector never counted this node
            self._lock.notify_all()

    def end(self) -> None:
        """Ends the session: nobody hears reports. The last word stays in force, and so does the bound."""
        with self._lock:
            self._in_session = False
            self._lock.notify_all()

    # Called by the follower

    def due(self, now_s: float) -> Usage | None:
        """Returns what to report now; None if nothing is due. Call ``told`` once it is reported.

        Where nobody asks, claims what a put wrote beyond its claim, as encodings may: perhaps no other put of this node
        follows.
        """
        if self.claiming is not None and self._bound is None and self._written > self._claimed:
            self._claim(0)
        with self._lock:
            room = self._room
            if room is None:
                self._lapse(now_s)
            if room is None or not self._in_session:
                return None
            self._fits(0)  # counts what was released
            now = Usage(
                self._written - self._written_before,
                self._removed - self._removed_before,
                self._granted,
                self._asked(),
                is_bound=self._bound is not None and self._was_counted,
            )
            if self._answered != self._room_created or now.is_bound > self._told.is_bound:
                return now
            since_s = now_s - self._told_s
            if since_s < room.pace_s or room.step_bytes is None:
                return None
            is_changed = (
                abs(now.taken_bytes - self._told.taken_bytes) >= room.step_bytes
                or now.removed_bytes > self._told.removed_bytes
                or (not now.pending_bytes and self._told.pending_bytes > 0)
                or (not now.asked_bytes and self._told.asked_bytes > 0)
            )
            return now if is_changed or (bool(self._waiting) and since_s >= AGAIN_S) else None

    def told(self, usage: Usage, revision: int, answered: int, now_s: float) -> None:
        """Notes that the report was written at ``revision``, when the word's create_revision was ``answered``."""
        with self._lock:
            self._told, self._told_s, self._answered = usage, now_s, answered
            self._written_told = self._written_before + usage.written_bytes
            self._reports.append((revision, usage.taken_bytes))
            self._was_counted = self._was_counted or self._counted() is not None

    @property
    def owes_s(self) -> float:
        """Seconds until a report may be due; infinity if nothing was written that collectors ask for."""
        with self._lock:
            room = self._room
            taken_bytes = self._written - self._written_before + self._granted + self._asked()
            is_told = taken_bytes == self._told.taken_bytes
            return math.inf if room is None or is_told else room.pace_s

    @property
    def asked_by(self) -> int:
        """The create_revision of the word that is in force."""
        with self._lock:
            return self._room_created

    def _may_hear(self) -> bool:
        """True if a word that allows this node to write may come soon: not without a session, nor a collector."""
        return self._in_session and (self._bound is None or self._room is not None)

    def _counted(self) -> int | None:
        """What collectors count for this node at least, now and until its next report; None before its first one.

        A later report says less than an earlier one when puts have ended that wrote less than they might have.
        """
        if self._bound is None or not self._reports or self._reports[0][0] > self._bound.revision:
            return None
        return min(taken for _, taken in self._reports)

    def _claim(self, size_bytes: int) -> bool:
        """Claims room for a put, unless a collector says who may write. True: nothing may be claimed, now at least."""
        with self._lock:
            bound = self._bound
            if self.claiming is None or (bound is not None and self._in_session):
                return True
            # Without a session the last word stays in force, but where the metadata are lost: no collector will come.
            claimed_bytes = self._claimed if bound is None else self._written
            lacking_bytes = self._written + self._granted + size_bytes - claimed_bytes
            if self._claims_now or lacking_bytes <= 0:
                return False
            self._claims_now = True
            left_bytes = max(0, claimed_bytes - self._written)
        more_bytes, claim = None, self.claiming.claim if bound is None else self.claiming.borrow
        try:
            more_bytes = claim(lacking_bytes, left_bytes)
        finally:
            with self._lock:
                self._claims_now = False
                if more_bytes is not None and self._bound is bound:
                    self._bound, self._claimed = None, claimed_bytes + lacking_bytes + more_bytes
                self._lock.notify_all()
        return more_bytes is None

    def _fits(self, size_bytes: int) -> bool:
        """True if a put may begin."""
        while self._released:
            self._granted -= self._released.popleft()
        bound, taken_bytes = self._bound, self._written + self._granted + size_bytes
        if bound is None or bound.allowance_bytes is None:
            return self.claiming is None or taken_bytes <= self._claimed
        counted = self._counted()
        if not bound.allowance_bytes or counted is None:
            return False
        return taken_bytes - self._written_before - counted <= bound.allowance_bytes

    def _lapse(self, now_s: float) -> None:
        """Ends the bound of collectors that are gone for KEPT_S: without any collector, only claims limit writers."""
        if self._unasked_s is None:
            self._unasked_s = now_s
        elif now_s - self._unasked_s >= KEPT_S and self._bound is not None:
            self._bound, self._was_counted = None, False
            self._claimed = self._written  # collectors counted all before: what is claimed from here on is more
            self._lock.notify_all()
