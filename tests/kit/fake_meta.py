"""A clock that stands still until it is moved, and ids that count."""

from __future__ import annotations

import threading

from kvstore.core.clock import SystemClock


class FakeClock:
    """Time as the test says."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._time_s = 1000.0

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._time_s += seconds

    def now_s(self) -> float:
        return self._time_s

    def monotonic_s(self) -> float:
        return self._time_s


class AheadClock(SystemClock):
    """The system's clock, whose monotonic time a test sets forward."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


class CountingIds:
    """1, 2, 3 ..."""

    def __init__(self) -> None:
        self._last = 0

    def fresh(self) -> bytes:
        self._last += 1
        return self._last.to_bytes(16, "big")
