"""Ends streams on which nothing moves any more. Both ends need it: a blocking stream has no timeout of its own.

A thread that waits for a peer's next message cannot look at a clock, so one thread looks for all of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from functools import partial

from kvstore.core.clock import Clock
from kvstore.core.executor import Decision, Loop

PERIOD_S = 0.25
CLOSE_S = 5.0


class WatchedStream:
    """One stream under watch, a context around it. ``moved`` at every message."""

    __slots__ = ("_clock", "_watch", "end", "ends_s", "expired", "idle_s", "moved_s")

    def __init__(
        self, watch: StreamWatchdog, clock: Clock, idle_s: float, most_s: float, end: Callable[[], object]
    ) -> None:
        self._watch = watch
        self._clock = clock
        self.idle_s = idle_s
        self.moved_s = clock.monotonic_s()
        self.ends_s = self.moved_s + most_s
        self.end = end
        self.expired = False
        """True if the watch ended the stream."""

    def moved(self) -> None:
        """Notes that a message came or went."""
        self.moved_s = self._clock.monotonic_s()

    def busy(self) -> None:
        """Notes that our own work follows, which has its own deadlines: it does not count as idle until ``moved``."""
        self.moved_s = math.inf

    def __enter__(self) -> WatchedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.remove(self)


class StreamWatchdog:
    """The streams under watch, and the thread that looks at them; it runs only while there are some."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards the streams under watch
        self._streams: set[WatchedStream] = set()
        self._is_resting = False
        """True while the thread waits for a first stream; else it looks within a period, and no call wakes it."""
        self._loop = Loop(name, self._changed, self._next)
        self.expired_count = 0
        """Number of streams ended so far because nothing moved, or because they took too long."""

    def begin(self, idle_s: float, most_s: float, end: Callable[[], object]) -> WatchedStream:
        """Calls ``end``, which must not block, if nothing moves for ``idle_s``, and after ``most_s`` in all."""
        watched = WatchedStream(self, self._clock, idle_s, most_s, end)
        with self._changed:
            self._streams.add(watched)
            if not self._loop.threads:
                self._loop.start()
            if self._is_resting:
                self._is_resting = False
                self._changed.notify_all()
        return watched

    def remove(self, watched: WatchedStream) -> None:
        """Takes a stream out. Idempotent. ``end`` may be on its way: it must not harm a stream that has ended."""
        with self._changed:
            self._streams.discard(watched)

    def close(self) -> None:
        """Ends the thread; no more streams are ended. Idempotent."""
        self._loop.close(CLOSE_S)

    def _next(self) -> Decision:
        self._is_resting = not self._streams
        if self._is_resting:
            return None
        now_s = self._clock.monotonic_s()
        late = [each for each in self._streams if now_s > min(each.moved_s + each.idle_s, each.ends_s)]
        for watched in late:
            watched.expired = True
            self._streams.discard(watched)
            self.expired_count += 1
        return partial(_end, late) if late else PERIOD_S


def _end(late: Iterable[WatchedStream]) -> None:
    for watched in late:
        watched.end()
