"""The last failure of the store, for an engine that goes on without it; logged, but not once per request."""

from __future__ import annotations

import logging
import threading

from kvstore.sources import SystemClock

LOG_S = 10.0
"""At least so long between two lines about the same kind of call."""


class Trouble:
    """Thread-safe. ``log`` gets a line ``event why=...`` for what fails, the first at once."""

    def __init__(self, log: logging.Logger, event: str) -> None:
        self._log = log
        self._event = event
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._unsaid = 0
        self._again_s = 0.0
        self.why = ""
        """The failure of the last call; empty where it went well."""

    def failed(self, why: object) -> None:
        """A call failed."""
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
        """A call went well."""
        self.why = ""
