"""The level of the root between two surveys.

A survey lists every file and is exact, but takes long. Until the next one, used bytes are those of the last survey plus
the bytes that nodes reported to have written or to be about to write, less those that nodes and collectors reported to
have deleted. If a survey and a report overlap, writes count twice and deletions not at all until the next survey: too
early a round is better than a full disk. Other programs on the same file system change neither sum. They change the
free space, and so the capacity if free space is short.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass

from kvstore.meta.keys import SessionId
from kvstore.meta.usage import Usage
from kvstore.root.interface import Space
from kvstore.sources import Clock, SystemClock

GROWTH_SHARE = 0.01
"""If no round could bring the root below the high watermark (all pinned), the next waits for this many new bytes."""
LATE_S_MIN = 1.0
"""The time within which a deletion is reported, if nodes are few (``signs.room_of``)."""
NONE = Usage()


@dataclass(frozen=True, slots=True)
class Level:
    """The used bytes of the root, as far as anybody knows. Watermarks are shares of ``capacity_bytes``."""

    used_bytes: int
    capacity_bytes: int

    def over(self, share: float) -> bool:
        """True if more than that share of the capacity is used."""
        return self.used_bytes > share * self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Mark:
    """The reports that were known when a listing began, and the reporters that were gone."""

    reported: Mapping[SessionId, Usage]
    gone: Set[SessionId]
    losses: int
    """How often the level had been forgotten."""


class Watermarks:
    """Follows the used bytes of one root. Thread-safe; does no I/O.

    ``max_bytes`` limits what the root's files may take; None: all the room there is. If other programs leave the file
    system less room than that, its room counts. Rounds delete above the share ``high``.
    """

    def __init__(self, max_bytes: int | None, high: float, clock: Clock | None = None) -> None:
        self.high = high
        self.late_s = LATE_S_MIN
        """The time within which a deletion is reported."""
        self._max_bytes = max_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        # Guarded by _lock, all below.
        self._limit_bytes = max_bytes
        self._free_bytes: int | None = None
        self._is_settled = False
        """True once a round has done everything possible about the last survey."""
        # Reports. A reporter whose key is gone keeps its last report: its bytes are still there.
        self._reported: dict[SessionId, Usage] = {}
        self._gone: set[SessionId] = set()
        self._unheard: set[SessionId] = set()
        self._answered: dict[SessionId, Usage] = {}
        """The first answers since the mark of nodes that were unheard then."""
        self._reaped_bytes = 0
        # The last survey, and the reports up to it.
        self._surveyed_bytes: int | None = None
        self._losses = 0
        self._free_then_bytes: int | None = None
        self._base: dict[SessionId, Usage] = {}
        self._reaped_base = 0
        self._settles_s = 0.0
        self._ignored_bytes = 0
        """Bytes that others deleted since the survey, and that are not subtracted: the survey may lack them."""

    @property
    def stop(self) -> float:
        """The share above which nodes should shed puts: in the middle between the high watermark and full."""
        return (self.high + 1) / 2

    @property
    def limit_bytes(self) -> int | None:
        """The smallest limit of this collector and the others that are there."""
        return self._limit_bytes

    def limited(self, others_bytes: int | None) -> None:
        """Notes the smallest limit of the other collectors; None: they have none."""
        limits = [limit for limit in (self._max_bytes, others_bytes) if limit is not None]
        limit_bytes = min(limits) if limits else None
        with self._lock:
            if limit_bytes != self._limit_bytes:
                self._limit_bytes, self._is_settled = limit_bytes, False  # the last round settled another limit

    # Facts about the root come in

    def mark(self, unheard: frozenset[SessionId] = frozenset()) -> Mark:
        """Call it before the root is listed. ``unheard`` are nodes whose reports are older than this moment."""
        with self._lock:
            self._unheard, self._answered = set(unheard), {}
            return Mark(dict(self._reported), set(self._gone), self._losses)

    def surveyed(self, used_bytes: int, mark: Mark) -> None:
        """Notes the sum of all files that were listed since ``mark``. Writes meanwhile may count twice.

        Does nothing if the level was forgotten meanwhile: the listing may lack what nobody reports.
        """
        with self._lock:
            if mark.losses != self._losses:
                return
            self._settles_s = self._clock.monotonic_s() + self.late_s
            self._surveyed_bytes, self._is_settled = used_bytes, False
            self._free_then_bytes = self._free_bytes
            self._reported = {
                reporter: usage
                for reporter, usage in self._reported.items()
                if reporter not in mark.gone or usage != mark.reported.get(reporter)
            }
            self._base = {
                reporter: Usage(
                    self._answered.get(reporter, mark.reported.get(reporter, NONE)).written_bytes, usage.removed_bytes
                )
                for reporter, usage in self._reported.items()
            }
            self._gone &= self._reported.keys()
            self._reaped_base = self._reaped_bytes
            self._ignored_bytes = 0

    def forget(self) -> None:
        """Forgets the level until the next survey: files may have been written that nobody reports (rule S8)."""
        with self._lock:
            self._surveyed_bytes, self._losses = None, self._losses + 1

    def reported(self, reporter: SessionId, usage: Usage, *, is_answer: bool) -> None:
        """Notes a report of a node or another collector. ``is_answer``: it came after a collector had asked for it."""
        with self._lock:
            before = self._reported.get(reporter, NONE)
            now = self._reported[reporter] = before.latest(usage)
            self._gone.discard(reporter)
            if is_answer and reporter in self._unheard:
                # Its report before was older than the survey: nobody knows how much of the difference was listed.
                # Counting all of it might fill the root with the work of hours. The next survey sees the rest.
                self._unheard.discard(reporter)
                self._base[reporter] = self._answered[reporter] = now
            removed_bytes = now.removed_bytes - before.removed_bytes
            if removed_bytes and self._clock.monotonic_s() < self._settles_s:
                # Perhaps deleted before the listing ended, and so not in it.
                base = self._base.get(reporter, NONE)
                self._base[reporter] = Usage(base.written_bytes, base.removed_bytes + removed_bytes)
                self._ignored_bytes += removed_bytes

    def gone(self, reporter: SessionId) -> None:
        """Notes that the key of a reporter is gone."""
        with self._lock:
            self._gone.add(reporter)

    def reaped(self, size_bytes: int) -> None:
        """Notes that this collector deleted something."""
        with self._lock:
            self._reaped_bytes += size_bytes

    def followed(self, space: Space) -> None:
        """Notes the space as it is now."""
        with self._lock:
            self._free_bytes = space.free_bytes

    def settled(self) -> None:
        """Notes that a round is over, and did everything possible about the chunks that it listed."""
        with self._lock:
            self._is_settled = True

    # Conclusions come out

    @property
    def reaped_bytes(self) -> int:
        """All bytes that this collector deleted."""
        with self._lock:
            return self._reaped_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of puts that are under way, or wait for room. Those of a reporter that is gone count until a listing
        after its end: it may have heard that there is room.
        """
        with self._lock:
            return self.asked_bytes + sum(usage.pending_bytes for usage in self._reported.values())

    @property
    def asked_bytes(self) -> int:
        """Bytes of puts that wait for room: no reason to refuse others at once."""
        with self._lock:
            return sum(usage.asked_bytes for usage in self._reported.values())

    @property
    def gone_count(self) -> int:
        """The reporters that are gone since the last survey. They may have written more than their last report says."""
        with self._lock:
            return len(self._gone)

    @property
    def is_surveyed(self) -> bool:
        """True once the root was listed."""
        return self._surveyed_bytes is not None

    @property
    def is_known(self) -> bool:
        """True if there is, or will be, a level: there is a limit, or free space is known."""
        return self._limit_bytes is not None or self._free_bytes is not None

    @property
    def level(self) -> Level | None:
        """The level now; None before the first survey, or if neither room nor a limit is known."""
        with self._lock:
            if self._surveyed_bytes is None:
                return None
            growth_bytes = self._taken_bytes - self._removed_bytes - (self._reaped_bytes - self._reaped_base)
            used_bytes = max(0, self._surveyed_bytes + growth_bytes)
            room_bytes = None  # for puts under way as well, which take from the free space later
            if self._free_bytes is not None:
                room_bytes = used_bytes - self.pending_bytes + self._free_bytes
            limits = [limit for limit in (self._limit_bytes, room_bytes) if limit is not None]
            return Level(used_bytes, min(limits)) if limits else None

    @property
    def is_urgent(self) -> bool:
        """True if a round should begin at once: over the high watermark, and written to since the last one listed.

        Writes while it listed count as well: the round may not have seen them, and they may have filled the root up to
        where nodes stop, so that nothing more is written. Free space that shrank by more than was reported may be
        growth as well, of nodes without a session: a survey tells. So it does about deletions that were not subtracted,
        which may have brought the root below the mark. A level that was forgotten is needed at once.
        """
        with self._lock:
            level = self.level
            if level is None:
                return self._losses > 0 and self._surveyed_bytes is None
            feared_bytes = self._feared_bytes(level)
            if feared_bytes <= self.high * level.capacity_bytes:
                return False
            unseen_bytes = self._taken_bytes + self._ignored_bytes + feared_bytes - level.used_bytes
            return not self._is_settled or unseen_bytes >= GROWTH_SHARE * level.capacity_bytes

    def _feared_bytes(self, level: Level) -> int:
        """The used bytes if all the free space that was lost since the survey went to our files."""
        if self._surveyed_bytes is None or self._free_then_bytes is None or self._free_bytes is None:
            return level.used_bytes
        return max(level.used_bytes, self._surveyed_bytes + self._free_then_bytes - self._free_bytes)

    @property
    def _taken_bytes(self) -> int:
        """Bytes that others wrote since the listing of the survey began, and those of their puts under way."""
        return self.pending_bytes + sum(
            now.written_bytes - self._base.get(reporter, NONE).written_bytes for reporter, now in self._reported.items()
        )

    @property
    def _removed_bytes(self) -> int:
        """Bytes that others deleted since the survey ended."""
        return sum(
            now.removed_bytes - self._base.get(reporter, NONE).removed_bytes for reporter, now in self._reported.items()
        )
