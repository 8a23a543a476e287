"""Failures that last: said once when they begin and once when they are over, not every second in between."""

from __future__ import annotations

import logging

from kvstore.errors import Unavailable
from kvstore.sources import Clock

log = logging.getLogger(__name__)


class Trouble:
    """One thing that can fail again and again, such as the metadata store being away. One thread at a time."""

    def __init__(self, what: str, clock: Clock) -> None:
        self._what = what
        self._clock = clock
        self._since_s: float | None = None
        self._kind = ""

    @property
    def lasts(self) -> bool:
        """Whether it failed the last time."""
        return self._since_s is not None

    def failed(self, error: Exception | str) -> None:
        """Says so, unless it failed in the same way the last time."""
        # One outage is worded in many ways; what has to be mended, such as a file, is named.
        kind = type(error).__name__ if isinstance(error, Unavailable) else str(error)
        if self._since_s is None:
            self._since_s = self._clock.monotonic_s()
        if kind != self._kind:
            self._kind = kind
            log.error("gc.%s_failed %s", self._what, error)

    def went_well(self) -> None:
        """Says that it is over, if it failed the last time."""
        if self._since_s is not None:
            log.info("gc.%s_recovered after_s=%.0f", self._what, self._clock.monotonic_s() - self._since_s)
        self._since_s, self._kind = None, ""
