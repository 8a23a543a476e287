"""The last failure of the store, for an engine that goes on without it; logged, but not once per request."""

from __future__ import annotations

import logging
import threading

from kvstore.sources import SystemClock

LOG_S = 10.0
"""Minimum time between two lines about the same kind of call."""


class Trouble:
    """Counts and logs failures. Thread-safe. ``log`` gets a line ``event why=...`` for a failure, the first at once."""

    def __init__(self, log: logging.Logger, event: str) -> None:
        self._log = log
        self._event = event
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._unsaid = 0
        self._again_s = 0.0
        self.why = ""
        """The failure of the last call; empty if it succeeded."""

    def failed(self, why: object) -> None:
        """Records that a call failed."""
        with self._lock:
            self.why = str(why)
            now_s = self._clock.monotonic_s()
            if now_s < self._again_s:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
            self._again_s = now_s + LOG_S
        self._log.warning("%s why=%s%s", self._event, why, f" (and {unsaid} more)" if unsaid else "")

    def went_well(self) -> None:
        """Records that a call succeeded."""
        self.why = ""
