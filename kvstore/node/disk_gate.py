"""When a local disk is left alone: after repeated failures for a while, and while reads do not come back from it.

Apart from the tier, because it knows nothing of chunks: a disk that is dead must cost the node neither its lanes nor a
wait in each request.
"""

from __future__ import annotations

import threading

from kvstore.node.deadline import Deadline
from kvstore.sources import Clock
from kvstore.waiting import Monitor

FAILURES_MAX = 3
"""In a row; with the next one the disk is left alone for ``PAUSE_S``, and after that with each one that follows."""
PAUSE_S = 30.0
READERS_MAX = 8
"""Lanes that a disk which hangs can take from the node: half of them."""
WAIT_S = 0.25
"""A read waits for so long, at most, until one of the others ends."""
STALL_S = 2.0
"""A read of one file that takes longer says that the disk hangs; nobody follows it until it is back."""


class Pause:
    """On for ``PAUSE_S`` after ``FAILURES_MAX`` failures in a row."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures_count = 0
        self._until_s = -1.0

    @property
    def is_on(self) -> bool:
        """Whether the disk is left alone."""
        return self._clock.monotonic_s() < self._until_s

    def failed(self) -> None:
        """The disk refused something."""
        self._failures_count += 1
        if self._failures_count >= FAILURES_MAX:
            self._until_s = self._clock.monotonic_s() + PAUSE_S

    def succeeded(self) -> None:
        """It did something."""
        self._failures_count = 0


class Readers:
    """Who reads from the disk at this moment, at most ``READERS_MAX``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = Monitor()
        self._since_s: dict[int, float] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether a read has not come back for ``STALL_S``."""
        limit = self._clock.monotonic_s() - STALL_S
        with self._changed:
            return any(since < limit for since in self._since_s.values())

    def enter(self, deadline: Deadline) -> bool:
        """This thread begins to read; False where it must not, since the disk hangs or is too busy."""
        if self.is_stuck:
            return False
        with self._changed:
            if not self._changed.wait_for(self._has_room, min(WAIT_S, deadline.left_s())):
                return False
            self._since_s[threading.get_ident()] = self._clock.monotonic_s()
        return True

    def moved_on(self) -> None:
        """This thread has read one file, and goes on with the next."""
        with self._changed:
            self._since_s[threading.get_ident()] = self._clock.monotonic_s()

    def leave(self) -> None:
        """This thread is done."""
        with self._changed:
            del self._since_s[threading.get_ident()]
            self._changed.notify()

    def _has_room(self) -> bool:
        return len(self._since_s) < READERS_MAX
