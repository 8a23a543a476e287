"""How full the root is between two surveys.

A survey lists every file and is exact, but takes long.  Until the next one used bytes are those of the last survey plus
what nodes reported to have written, less what they and collectors reported to have deleted.  What others write or
delete on the same file system changes neither: it changes the free space, and so the capacity where that is short.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from kvstore.meta.keys import SessionId
from kvstore.meta.usage import Usage
from kvstore.root.interface import Space
from kvstore.sources import Clock, SystemClock
from kvstore_gc.growth import Growth, Mark

log = logging.getLogger(__name__)

GROWTH_SHARE = 0.01
"""A root that no round could bring below the high watermark (all pinned) is tried again when this was written since."""
LATE_S_MIN = 1.0
"""How long after a deletion its report may come, where nodes are few (``room.py``)."""


@dataclass(frozen=True, slots=True)
class Level:
    """How full the root is, as far as anybody knows; ``capacity_bytes`` is what watermarks are shares of."""

    used_bytes: int
    capacity_bytes: int

    def over(self, share: float) -> bool:
        """Whether more than that share of the capacity is used."""
        return self.used_bytes > share * self.capacity_bytes


class Watermarks:
    """Follows the used bytes of one root. Thread-safe; does no I/O.

    ``max_bytes`` is what the root's files may take at most; None: all there is room for.  Where the file system has
    less room than that, because others fill it, its room counts.  ``high`` is the share above which rounds delete.
    """

    def __init__(self, max_bytes: int | None, high: float, clock: Clock | None = None) -> None:
        self.high = high
        self._max_bytes = max_bytes
        self._limit_bytes = max_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._growth = Growth()
        self._surveyed_bytes: int | None = None
        self._free_then_bytes: int | None = None
        self._free_bytes: int | None = None
        self._is_settled = False
        """Whether a round has done what it could about what the last survey found."""
        self.late_s = LATE_S_MIN
        """How long after a deletion its report may come."""

    @property
    def stop(self) -> float:
        """The share above which nodes should shed puts: in the middle between the high watermark and full."""
        return (self.high + 1) / 2

    @property
    def limit_bytes(self) -> int | None:
        """The smallest limit of this collector and the others that are there."""
        return self._limit_bytes

    def limited(self, others_bytes: int | None) -> None:
        """The smallest limit of the other collectors is this; None: they have none."""
        limits = [limit for limit in (self._max_bytes, others_bytes) if limit is not None]
        limit_bytes = min(limits) if limits else None
        with self._lock:
            if limit_bytes != self._limit_bytes:
                self._limit_bytes, self._is_settled = limit_bytes, False  # what a round has settled was another limit

    # What is known of the root

    def mark(self, unheard: frozenset[SessionId] = frozenset()) -> Mark:
        """Before the root is listed. ``unheard`` are nodes whose reports are older than this moment."""
        with self._lock:
            return self._growth.mark(unheard)

    def surveyed(self, used_bytes: int, mark: Mark) -> None:
        """The sum of all files that were listed since ``mark``.

        What was written meanwhile may count twice: too early a round is better than a full disk.
        """
        with self._lock:
            self._growth.surveyed(mark, self._clock.monotonic_s() + self.late_s)
            self._surveyed_bytes, self._is_settled = used_bytes, False
            self._free_then_bytes = self._free_bytes

    def reported(self, reporter: SessionId, usage: Usage, *, is_answer: bool) -> None:
        """A node or another collector has reported; ``is_answer`` as for ``Growth.reported``."""
        with self._lock:
            self._growth.reported(reporter, usage, self._clock.monotonic_s(), is_answer=is_answer)

    def gone(self, reporter: SessionId) -> None:
        """The report of a node or another collector is gone."""
        with self._lock:
            self._growth.gone(reporter)

    def reaped(self, size_bytes: int) -> None:
        """This collector deleted something."""
        with self._lock:
            self._growth.reaped(size_bytes)

    @property
    def reaped_bytes(self) -> int:
        """All that this collector deleted."""
        with self._lock:
            return self._growth.reaped_bytes

    def followed(self, space: Space) -> None:
        """The space as it is now."""
        with self._lock:
            self._free_bytes = space.free_bytes

    def settled(self) -> None:
        """A round is over, and did what it could about what it listed."""
        with self._lock:
            self._is_settled = True

    # What follows

    @property
    def is_surveyed(self) -> bool:
        """Whether the root was listed once."""
        return self._surveyed_bytes is not None

    @property
    def is_known(self) -> bool:
        """Whether there is, or will be, a level: there is a limit, or free space is known."""
        return self._limit_bytes is not None or self._free_bytes is not None

    @property
    def level(self) -> Level | None:
        """How full it is; None before the first survey, or where neither room nor a limit is known."""
        with self._lock:
            if self._surveyed_bytes is None:
                return None
            used_bytes = max(0, self._surveyed_bytes + self._growth.bytes)
            room_bytes = None if self._free_bytes is None else used_bytes + self._free_bytes
            limits = [limit for limit in (self._limit_bytes, room_bytes) if limit is not None]
            return Level(used_bytes, min(limits)) if limits else None

    @property
    def is_urgent(self) -> bool:
        """Whether a round should begin at once: over the high watermark, and written to since the last one listed.

        What was written while it listed counts as well: the round may not have seen it, and it may have brought the
        root up to where nodes stop, so that nothing more is written.  Free space that shrank by more than was reported
        may be growth as well, of nodes without a session: a survey tells.  Deletions that were not subtracted may have
        brought it below: a survey tells that, too.
        """
        level = self.level
        if level is None:
            return False
        feared_bytes = self._feared_bytes()
        if feared_bytes <= self.high * level.capacity_bytes:
            return False
        with self._lock:
            unseen_bytes = self._growth.written_bytes + self._growth.ignored_bytes + feared_bytes - level.used_bytes
            return not self._is_settled or unseen_bytes >= GROWTH_SHARE * level.capacity_bytes

    def _feared_bytes(self) -> int:
        """Used bytes if all that free space shrank by since the survey were ours."""
        level = self.level
        if level is None:
            return 0
        with self._lock:
            feared_bytes = level.used_bytes
            if self._surveyed_bytes is not None and self._free_then_bytes is not None and self._free_bytes is not None:
                feared_bytes = max(feared_bytes, self._surveyed_bytes + self._free_then_bytes - self._free_bytes)
            return feared_bytes
