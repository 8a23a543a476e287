"""Rounds one after another: every so often, at once when the root fills up, and again after a failure.

Knows nothing of what a round does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.errors import KVStoreError
from kvstore.sources import Clock
from kvstore_gc.threads import Stopped
from kvstore_gc.troubles import Trouble

R = TypeVar("R")

LISTEN_S = 0.2
"""How soon an urgent round begins, and the least time between two rounds."""
BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 30.0


class Service(Generic[R]):
    """Calls ``round`` and tells ``done`` what came of it. ``pause`` waits, and raises Stopped when the end is near."""

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
        """Until the end is asked for. A round that fails is said once and repeated; bugs of ours come out."""
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
            # Whatever it was has harmed nothing: what is left open is adopted by the next round, ours or another's.
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
