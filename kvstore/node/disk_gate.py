"""Leaves a failing local disk alone: for a while after repeated failures, and while reads hang.

Separate from the tier, because it knows nothing of chunks. A dead disk must cost the node neither its lanes nor a wait
in each request.
"""

from __future__ import annotations

import threading

from kvstore.node.lanes import Deadline
from kvstore.sources import Clock

FAILURES_MAX = 3
"""Failures in a row before the disk is left alone for ``PAUSE_S``; each further one in a row starts another pause."""
PAUSE_S = 30.0
READERS_MAX = 8
"""Lanes that a hanging disk can block: half of them."""
WAIT_S = 0.25
"""The longest that a read waits for another one to end."""
STALL_S = 2.0
"""A read of one file that takes longer shows that the disk hangs; no further read begins until it returns."""


class Pause:
    """Is on for ``PAUSE_S`` after ``FAILURES_MAX`` failures in a row."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures_count = 0
        self._until_s = -1.0

    @property
    def is_on(self) -> bool:
        """True while the disk is left alone."""
        return self._clock.monotonic_s() < self._until_s

    def failed(self) -> None:
        """Notes that the disk refused an operation."""
        self._failures_count += 1
        if self._failures_count >= FAILURES_MAX:
            self._until_s = self._clock.monotonic_s() + PAUSE_S

    def succeeded(self) -> None:
        """Notes that the disk did an operation."""
        self._failures_count = 0


class Readers:
    """The threads that read from the disk at this moment, at most ``READERS_MAX``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._since_s: dict[int, float] = {}

    @property
    def is_stuck(self) -> bool:
        """True if a read has not returned for ``STALL_S``."""
        limit = self._clock.monotonic_s() - STALL_S
        with self._changed:
            return any(since < limit for since in self._since_s.values())

    def enter(self, deadline: Deadline) -> bool:
        """Begins a read in this thread; False if it must not begin, because the disk hangs or is too busy."""
        if self.is_stuck:
            return False
        with self._changed:
            if not self._changed.wait_for(self._has_room, min(WAIT_S, deadline.left_s())):
                return False
            self._since_s[threading.get_ident()] = self._clock.monotonic_s()
        return True

    def moved_on(self) -> None:
        """Notes that this thread has read one file and goes on with the next."""
        with self._changed:
            self._since_s[threading.get_ident()] = self._clock.monotonic_s()

    def leave(self) -> None:
        """Ends the read of this thread."""
        with self._changed:
            del self._since_s[threading.get_ident()]
            self._changed.notify()

    def _has_room(self) -> bool:
        return len(self._since_s) < READERS_MAX
