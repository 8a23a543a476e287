"""Who may come in: so many calls and bytes at once, and nobody once the worker drains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.wire.statuses import Busy, Draining


class Gate:
    """Counts the calls inside; thread-safe."""

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        """May change at any time: what is inside stays."""
        self._changed = threading.Condition()
        self._inside = 0
        self._draining = False

    @property
    def inside_count(self) -> int:
        """Calls inside now."""
        return self._inside

    @property
    def draining(self) -> bool:
        """Whether it is closed for good."""
        return self._draining

    @contextmanager
    def passing(self, *, light: bool) -> Iterator[None]:
        """Around one call; a light one is always let in. Raises Draining or Busy."""
        with self._changed:
            if not light:
                if self._draining:
                    raise Draining("the worker is draining and takes no new calls: turn to another one")
                if self._inside >= self.calls_max:
                    raise Busy(f"the worker has {self.calls_max} calls in progress: back off, or turn to another one")
                self._inside += 1
        try:
            yield
        finally:
            if not light:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Lets nobody in any more. Idempotent."""
        with self._changed:
            self._draining = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether all calls inside ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)


class BytesInFlight:
    """A bound on the memory that calls in progress use for payload; thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        """May change at any time: what is reserved stays."""
        self._lock = threading.Lock()
        self.count = 0

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Around the use of so many bytes. Raises Busy where they are not free.

        One call may use more than the limit if it is alone: a limit under a chunk must not make it unreachable.
        """
        with self._lock:
            if self.count and self.count + count > self.bytes_max:
                raise Busy(
                    f"the worker has {self.count} bytes in flight and this call needs {count}, over its limit of "
                    f"{self.bytes_max}: back off, or turn to another worker"
                )
            self.count += count
        try:
            yield
        finally:
            with self._lock:
                self.count -= count
