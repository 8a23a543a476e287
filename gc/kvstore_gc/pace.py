"""A collector beside its host's real work: it uses a small share of one core, unless the root is filling up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.sources import Clock
from kvstore_gc.threads import Each

SHARE = 0.2
"""Of one core, for as long as nothing presses."""
BURST_S = 0.5
"""Of processor time that may be used at once after a rest, so that a small root is not slowed down at all."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.001, 0.25
"""Of one rest; the longest is how late it is noticed that the root has filled up."""


class Pace:
    """Makes an ``Each`` rest between its pieces of work, so that the program's processor time stays within SHARE.

    Processor time, not elapsed time: waiting for a file system costs nobody on this host anything.  ``is_urgent`` lifts
    the bound.  ``pause`` waits, and raises Stopped when the end is near.
    """

    def __init__(
        self,
        each: Each,
        *,
        is_urgent: Callable[[], bool],
        pause: Callable[[float], object],
        clock: Clock,
        used_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._each = each
        self._is_urgent = is_urgent
        self._pause = pause
        self._clock = clock
        self._used_s = used_s
        self._lock = threading.Lock()
        self._seen_s = (clock.monotonic_s(), used_s())
        self._credit_s = BURST_S

    def each(self, count: int, work: Callable[[int], object]) -> None:
        """See ``Each``."""

        def paced(number: int) -> None:
            work(number)
            self._rest()

        self._each(count, paced)

    def _rest(self) -> None:
        while (lacking_s := -self._credit()) > 0 and not self._is_urgent():
            self._pause(min(max(lacking_s / SHARE, PAUSE_S_MIN), PAUSE_S_MAX))

    def _credit(self) -> float:
        """Seconds of processor time that may still be used now."""
        with self._lock:
            now_s, used_s = self._clock.monotonic_s(), self._used_s()
            then_s, used_then_s = self._seen_s
            self._seen_s = now_s, used_s
            self._credit_s = min(BURST_S, self._credit_s + (now_s - then_s) * SHARE - (used_s - used_then_s))
            return self._credit_s
