"""The end of one call, shared out among the requests that it makes."""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore.sources import Clock, SystemClock

TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 3600.0
TRIES_MAX = 3  # of a transaction whose outcome stays unknown, before the caller hears of it
_LEAST_S = 0.001


class Deadline:
    """``timeout_s`` from now (5 s if None), on ``clock``. Raises InvalidRequest outside 0 to 3600 s."""

    def __init__(self, timeout_s: float | None, clock: Clock | None = None) -> None:
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            raise InvalidRequest(
                f"timeout_s={timeout_s!r}: expected seconds, more than 0 and at most {TIMEOUT_S_MAX:g}"
            )
        self._clock = clock or SystemClock()
        self._ends_s = self._clock.monotonic_s() + self.timeout_s

    @property
    def over(self) -> bool:
        """True once no time is left."""
        return self._clock.monotonic_s() >= self._ends_s

    def left_s(self, share: float = 1.0) -> float:
        """Returns ``share`` of the time left, as the timeout of a request; never zero, so that a late request fails by
        itself.

        A request whose lost reply has to be read back gets less than all, or there would be no time to read.
        """
        return max(_LEAST_S, share * (self._ends_s - self._clock.monotonic_s()))
