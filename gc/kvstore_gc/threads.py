"""Threads for calls to the root, which may never return, and the wish to end, which must be heard all the same.

A call into a dead mount cannot be interrupted; so it is made on a daemon thread, and whoever waits for it waits no
longer than until the end is asked for or a deadline has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import Unavailable

T = TypeVar("T")

Each = Callable[[int, Callable[[int], object]], None]
"""Calls ``work(0) ... work(count - 1)``, perhaps several at once; raises the first error, then begins no more."""

THREADS_COUNT = 8
"""Listing and deleting wait for the root most of the time, so more of them than cores."""
LISTEN_S = 0.1


class Stopped(Exception):
    """The collector was asked to end. What is open is left open: the next one adopts it."""


class Stop:
    """The wish to end: asked for once, heard wherever somebody waits."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        """Whether to end."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Asks for the end; idempotent."""
        self._asked.set()

    def check(self) -> None:
        """Raises Stopped once the end was asked for."""
        if self.asked:
            raise Stopped

    def pause(self, pause_s: float) -> None:
        """Waits. Raises Stopped as soon as the end is asked for."""
        if self._asked.wait(pause_s):
            raise Stopped


def inline(count: int, work: Callable[[int], object]) -> None:
    """An ``Each`` on the caller's own thread, in order: for tests."""
    for number in range(count):
        work(number)


class Threads:
    """An ``Each`` on ``count`` daemon threads, which live for one call of ``each`` and so need no closing.

    A caller that hears the wish to end leaves at once; work that has begun ends by itself, or with the program.
    """

    def __init__(self, count: int, stop: Stop) -> None:
        self._count = count
        self._stop = stop

    def each(self, count: int, work: Callable[[int], object]) -> None:
        """See ``Each``. Raises Stopped when the end is asked for, without waiting for work that has begun."""
        self._stop.check()
        batch = _Batch(count, work, self._stop)
        for number in range(min(count, self._count)):
            threading.Thread(target=batch.run, name=f"kvstore-gc {number}", daemon=True).start()
        while not batch.ended.wait(LISTEN_S):
            self._stop.check()
        if batch.error is not None:
            raise batch.error


class _Batch:
    """Work on the numbers 0 to count - 1, shared by several threads."""

    def __init__(self, count: int, work: Callable[[int], object], stop: Stop) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        self._stop = stop
        self._lock = threading.Lock()
        self._next = 0
        self._left = count
        self._count = count
        if not count:
            self.ended.set()

    def run(self) -> None:
        """One thread's share."""
        while (number := self._take()) is not None:
            error: BaseException | None = None
            try:
                self._work(number)
            except BaseException as raised:  # noqa: BLE001 - carried to the caller, who raises it
                error = raised
            self._done(error)

    def _take(self) -> int | None:
        with self._lock:
            if self.error is not None or self._stop.asked or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def _done(self, error: BaseException | None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            # After an error only what has begun is waited for.
            begun_all_done = self._count - self._left == self._next
            if not self._left or (self.error is not None and begun_all_done):
                self.ended.set()


def within(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """The result of one call, made on a thread of its own. Raises what it raises.

    Raises Unavailable when it has not ended within ``timeout_s``: it may still be running, but nobody waits for it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def only() -> None:
        try:
            results.append(work())
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, who raises it
            errors.append(raised)

    thread = threading.Thread(target=only, name=f"kvstore-gc {what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise Unavailable(f"{what} did not answer within {timeout_s:g} s; check the mount (kvstore check-root)")
    return results[0]
