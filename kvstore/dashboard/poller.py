"""A feed: one source, read regularly by its own thread, and its last value.

Each source has its own feed, because each can hang: a root in a dead mount, a frozen etcd. That feed is then late and
says so, and the page shows the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvstore.core.clock import Clock
from kvstore.core.executor import Decision, Loop
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

WANTED_S = 45.0
"""A feed on demand goes on for this long after the last look."""
COST_MAX = 0.1
"""Share of the time that reading on demand may take, because it is costly for the root."""
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class SourceValue(Generic[T]):
    """The last value of a source. ``error`` says why it is not newer; None while all is well."""

    value: T | None
    age_s: float | None
    """Seconds since ``value`` was read; None if there is none yet."""
    error: str | None


class Feed(Generic[T]):
    """Reads a source every ``interval_s``; ``on_demand`` only while pages request it, and less often if it takes long.

    A reading that takes longer than ``late_s`` is reported as an error; it is not interrupted, because a call into a
    dead mount cannot be. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        interval_s: float,
        clock: Clock,
        *,
        late_s: float,
        on_demand: bool = False,
    ) -> None:
        self.name = name
        self._read = read
        self._interval_s = interval_s
        self._clock = clock
        self._late_s = late_s
        self._on_demand = on_demand
        self._changed = threading.Condition()
        self._value: T | None = None
        self._read_at_s: float | None = None
        self._error: str | None = None
        self._began_s: float | None = None
        self._next_s = 0.0
        self._wanted_s: float | None = None
        self._loop = Loop(f"kvstore-dashboard-{name}", self._changed, self._next)

    def start(self) -> None:
        """Starts the thread. Idempotent."""
        self._loop.start()

    def look(self) -> SourceValue[T]:
        """Returns the last reading; never waits. Keeps a feed on demand going."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            if self._on_demand and not self._is_wanted(now_s):
                self._changed.notify_all()
            self._wanted_s = now_s
            error, began_s = self._error, self._began_s
            if began_s is not None and now_s - began_s > self._late_s:
                error = f"no answer for {now_s - began_s:.0f} s"
            age_s = None if self._read_at_s is None else now_s - self._read_at_s
            return SourceValue(self._value, age_s, error)

    def close(self) -> None:
        """Ends the thread; one that is stuck in its source ends with the process. Idempotent."""
        self._loop.close(CLOSE_S)

    def _is_wanted(self, now_s: float) -> bool:
        return not self._on_demand or (self._wanted_s is not None and now_s - self._wanted_s < WANTED_S)

    def _next(self) -> Decision:
        now_s = self._clock.monotonic_s()
        if not self._is_wanted(now_s):
            return None
        if now_s < self._next_s:
            return max(0.05, self._next_s - now_s)
        self._began_s = now_s
        return partial(self._once, now_s)

    def _once(self, began_s: float) -> None:
        value: T | None = None
        error: str | None = None
        try:
            value = self._read()
        except KVStoreError as failed:
            error = str(failed)
            if error != self._error and not self._loop.closed:  # once, not every few seconds
                log.warning("dashboard.source_failed name=%s why=%s", self.name, error)
        except Exception as bug:  # a defect of ours in one source must not end the others, nor pass for "no news"
            error = f"internal error, please report it: {type(bug).__name__}"
            if error != self._error:
                log.exception("dashboard.feed_failed name=%s", self.name)
        ended_s = self._clock.monotonic_s()
        with self._changed:
            self._began_s = None
            self._next_s = began_s + self._interval_s
            if self._on_demand:
                self._next_s = max(self._next_s, ended_s + (ended_s - began_s) / COST_MAX)
            self._error = error
            if error is None:
                self._value, self._read_at_s = value, ended_s
