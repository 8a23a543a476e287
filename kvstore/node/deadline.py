"""A point in time after which nobody waits any more."""

from __future__ import annotations

from kvstore.sources import Clock


class Deadline:
    """A point on the monotonic clock, passed down instead of a duration so that waits add up to one."""

    __slots__ = ("_at_s", "_clock")

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._at_s = clock.monotonic_s() + seconds

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at_s - self._clock.monotonic_s())

    @property
    def passed(self) -> bool:
        """True if it has passed."""
        return self._clock.monotonic_s() >= self._at_s
