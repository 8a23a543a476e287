"""The room that this node takes on the root: what it wrote and deleted, and how much more it may before it is heard.

Separate from the view, which hears the collectors' word, and from the follower, which reports: lanes count here, and
every put asks, under a lock of its own that is held for no I/O.
"""

from __future__ import annotations

import math
from collections import deque

from kvstore.meta.usage import Room, Usage
from kvstore.waiting import Monitor

AGAIN_S = 1.0
"""A node that waits for the collectors' word reports again after this: a restored etcd may have lost its report."""
KEPT_S = 60.0
"""A limit whose collector died stays in force so long: another collector starts meanwhile."""
COUNTED_S = 1.0
"""A put waits so long until collectors have counted what was written before; they do so some times a second."""


class NodeUsage:
    """Counts of one node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Monitor()
        self._written = self._removed = 0
        self._written_before = self._removed_before = 0
        """As the session began: its report counts from here."""
        self._written_told = 0
        self._in_session = False
        self._room: Room | None = None
        """The collectors' word; None where no collector asks."""
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
        """Revision and written bytes of reports: the last that the collectors' word counts, and those after it."""

    # By lanes

    def wrote(self, size_bytes: int) -> None:
        """A file was published."""
        with self._lock:
            self._written += size_bytes

    def removed(self, size_bytes: int) -> None:
        """A file was deleted."""
        with self._lock:
            self._removed += size_bytes

    # By puts

    @property
    def is_spent(self) -> bool:
        """Whether this node wrote all that it may before collectors have heard of it."""
        with self._lock:
            return self._is_spent()

    def wait_for_room(self) -> bool:
        """Whether this node may write; where it may not yet, waits for the collectors' word, COUNTED_S at most."""
        with self._lock:
            self._lock.wait_for(lambda: not self._is_spent() or not self._may_hear(), COUNTED_S)
            return not self._is_spent()

    # By the view, under its lock

    def begin(self) -> None:
        """A session begins; ``hear`` follows.

        Writes that the last session did not report are this one's, if a collector asked for them.  Deletions are not:
        a report whose reply was lost would count them twice, and so hide writes.
        """
        with self._lock:
            self._written_before = self._written if self._bound is None else self._written_told
            self._removed_before = self._removed
            self._told, self._answered = Usage(), 0
            self._reports.clear()
            self._in_session = True

    def hear(self, room: Room | None, created: int = 0) -> None:
        """The collectors' word changed; ``created`` is the create_revision of its key. None: nobody asks.

        A word without an allowance is that of a collector which has not listed the root yet: it counts nothing, so the
        bound before it stays.
        """
        with self._lock:
            self._room, self._room_created, self._unasked_s = room, created, None
            if room is not None and room.allowance_bytes is not None:
                self._bound = room
                while len(self._reports) > 1 and self._reports[1][0] <= room.revision:
                    self._reports.popleft()
            self._lock.notify_all()

    def end(self) -> None:
        """The session is over: nobody hears reports. The last word stays in force, so that the bound does as well."""
        with self._lock:
            self._in_session = False
            self._lock.notify_all()

    # By the follower

    def due(self, now_s: float) -> Usage | None:
        """What to report now; None where nothing is due. ``told`` follows when that was done."""
        with self._lock:
            room = self._room
            if room is None:
                self._lapse(now_s)
            if room is None or not self._in_session:
                return None
            now = Usage(self._written - self._written_before, self._removed - self._removed_before)
            if self._answered != self._room_created:
                return now
            since_s = now_s - self._told_s
            if since_s < room.pace_s or room.step_bytes is None:
                return None
            is_changed = (
                now.written_bytes - self._told.written_bytes >= room.step_bytes
                or now.removed_bytes > self._told.removed_bytes
            )
            return now if is_changed or (self._is_spent() and since_s >= AGAIN_S) else None

    def told(self, usage: Usage, revision: int, answered: int, now_s: float) -> None:
        """The report was written at ``revision``, when the word's create_revision was ``answered``."""
        with self._lock:
            self._told, self._told_s, self._answered = usage, now_s, answered
            self._written_told = self._written_before + usage.written_bytes
            self._reports.append((revision, usage.written_bytes))

    @property
    def owes_s(self) -> float:
        """How soon a report may be due; infinity where nothing was written that collectors ask for."""
        with self._lock:
            room = self._room
            is_told = self._written - self._written_before == self._told.written_bytes
            return math.inf if room is None or is_told else room.pace_s

    @property
    def asked_by(self) -> int:
        """The create_revision of the word that is in force."""
        with self._lock:
            return self._room_created

    def _may_hear(self) -> bool:
        """Whether a word that lets this node write may come soon: not without a session, nor on a full root."""
        bound = self._bound
        return self._in_session and self._room is not None and (bound is None or bound.allowance_bytes != 0)

    def _is_spent(self) -> bool:
        bound = self._bound
        if bound is None or bound.allowance_bytes is None:
            return False
        counted = 0
        for revision, written in self._reports:
            if revision > bound.revision:
                break
            counted = written
        return self._written - self._written_before - counted >= bound.allowance_bytes

    def _lapse(self, now_s: float) -> None:
        """Ends the bound of collectors that are gone for KEPT_S: without any, nothing limits writers."""
        if self._unasked_s is None:
            self._unasked_s = now_s
        elif now_s - self._unasked_s >= KEPT_S and self._bound is not None:
            self._bound = None
            self._lock.notify_all()
