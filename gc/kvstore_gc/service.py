"""Rounds one after another: every so often, at once when the root fills up, and again after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.errors import KVStoreError, Unavailable
from kvstore.sources import Clock
from kvstore_gc.threads import Stopped

log = logging.getLogger(__name__)

R = TypeVar("R")

LISTEN_S = 0.2
"""Delay before an urgent round begins, and the least time between two rounds."""
BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 30.0


class Trouble:
    """Logs something that fails again and again, such as etcd: once when it begins, and once when it is over.

    One thread at a time.
    """

    def __init__(self, what: str, clock: Clock) -> None:
        self._what = what
        self._clock = clock
        self._since_s: float | None = None
        self._kind = ""

    @property
    def lasts(self) -> bool:
        """True if it failed the last time."""
        return self._since_s is not None

    def failed(self, error: Exception | str) -> None:
        """Logs a failure, unless it failed in the same way the last time."""
        # One outage is worded in many ways; other errors name what must be fixed, such as a file.
        kind = type(error).__name__ if isinstance(error, Unavailable) else str(error)
        if self._since_s is None:
            self._since_s = self._clock.monotonic_s()
        if kind != self._kind:
            self._kind = kind
            log.error("gc.%s_failed %s", self._what, error)

    def went_well(self) -> None:
        """Logs that it is over, if it failed the last time."""
        if self._since_s is not None:
            log.info("gc.%s_recovered after_s=%.0f", self._what, self._clock.monotonic_s() - self._since_s)
        self._since_s, self._kind = None, ""


class Service(Generic[R]):
    """Calls ``round`` and gives ``done`` its outcome. ``pause`` waits, and raises Stopped when the end is near."""

    def __init__(
        self,
        round: Callable[[], R],
        *,
        interval_s: float,
        is_urgent: Callable[[], bool],
        done: Callable[[R], object],
        failed: Callable[[Exception], object] = lambda error: None,
        pause: Callable[[float], object],
        clock: Clock,
    ) -> None:
        self._round = round
        self._interval_s = interval_s
        self._is_urgent = is_urgent
        self._done = done
        self._failed = failed
        self._pause = pause
        self._clock = clock
        self._trouble = Trouble("round", clock)
        self._backoff_s = BACKOFF_S_MIN

    def run(self) -> None:
        """Runs until a stop is requested. A round that fails is logged once and repeated; bugs of ours are raised."""
        try:
            while True:
                began_s = self._clock.monotonic_s()
                if self._once():
                    self._wait(began_s + self._interval_s, urgent=True)
                else:
                    self._wait(self._clock.monotonic_s() + min(self._backoff_s, self._interval_s), urgent=False)
                    self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)
        except Stopped:
            return

    def _once(self) -> bool:
        try:
            outcome = self._round()
        except KVStoreError as error:
            # It has harmed nothing: whatever is left open is adopted by the next round, ours or another's.
            self._trouble.failed(error)
            self._failed(error)
            return False
        self._trouble.went_well()
        self._backoff_s = BACKOFF_S_MIN
        self._done(outcome)
        return True

    def _wait(self, until_s: float, *, urgent: bool) -> None:
        while True:
            self._pause(LISTEN_S)
            if self._clock.monotonic_s() >= until_s or (urgent and self._is_urgent()):
                return
