"""Threads for calls to the root, which may never return, and the request to stop, which must still take effect.

A call into a dead mount cannot be interrupted. So it runs on a daemon thread, and its caller waits no longer than until
a stop is requested or a deadline has passed.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.core.clock import Clock
from kvstore.errors import Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

Each = Callable[[int, Callable[[int], object]], None]
"""Calls ``work(0) ... work(count - 1)``, perhaps in parallel. On an error it begins no more, and raises it."""

THREADS_COUNT = 8
"""More than cores, because listing and deleting mostly wait for the root."""
LISTEN_S = 0.1
BRIEF_S = 0.005
"""Work that takes no longer is done by one thread."""


class Stopped(Exception):
    """The collector was asked to stop. Whatever is open stays open: the next collector adopts it."""


class Stop:
    """The request to stop: made once, it ends every wait of the collector."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        """True once a stop was requested."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Requests a stop; idempotent."""
        self._asked.set()

    def check(self) -> None:
        """Raises Stopped once a stop was requested."""
        if self.asked:
            raise Stopped

    def pause(self, pause_s: float) -> None:
        """Waits. Raises Stopped as soon as a stop is requested."""
        if self._asked.wait(pause_s):
            raise Stopped


class OutageLog:
    """Logs repeated failures, such as of etcd: once when an outage begins, and once when it has ended.

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

    def ended(self) -> None:
        """Logs the end of an outage, if there was one."""
        if self._since_s is not None:
            log.info("gc.%s_recovered after_s=%.0f", self._what, self._clock.monotonic_s() - self._since_s)
        self._since_s, self._kind = None, ""


class Task(Generic[T]):
    """One call, started immediately on its own daemon thread."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvstore-gc {name}", daemon=True)
        self._thread.start()

    def has_ended(self, wait_s: float) -> bool:
        """Waits up to ``wait_s`` for the end of the call; True if it has ended."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Returns the result of a call that has ended. Raises what the call raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, who raises it
            self._error = raised


def within(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Makes one call on its own thread; returns its result, raises what it raises.

    Raises Unavailable if it has not ended within ``timeout_s``: it may still run, but the caller no longer waits.
    """
    task = Task(work, what)
    if not task.has_ended(timeout_s):
        raise Unavailable(f"{what} did not answer within {timeout_s:g} s; check the mount (kvstore check-root)")
    return task.result()


def inline(count: int, work: Callable[[int], object]) -> None:
    """An ``Each`` on the caller's own thread, in order."""
    for number in range(count):
        work(number)


class Threads:
    """An ``Each`` on up to ``count`` daemon threads, which live for one call of ``each`` and so need no closing.

    A caller that sees the request to stop returns immediately. Work that has begun ends by itself, or with the program.
    """

    def __init__(self, count: int, stop: Stop) -> None:
        self._count = count
        self._stop = stop

    def each(self, count: int, work: Callable[[int], object]) -> None:
        """See ``Each``. Raises Stopped when a stop is requested, without waiting for work that has begun."""
        self._stop.check()
        numbers = itertools.count()  # ``next`` on it is one step, so no two threads get the same number
        failed: list[BaseException] = []

        def share() -> None:
            while not failed and not self._stop.asked and (number := next(numbers)) < count:
                try:
                    work(number)
                except BaseException as error:
                    failed.append(error)
                    raise

        if not count:
            return
        tasks = [Task(share, "0")]
        if not tasks[0].has_ended(BRIEF_S):  # else more threads would cost more than they gain
            tasks += [Task(share, str(number)) for number in range(1, min(count, self._count))]
        for task in tasks:
            while not task.has_ended(LISTEN_S):
                self._stop.check()
        if failed:
            raise failed[0]
        if next(numbers) < count:
            raise Stopped  # every thread saw the request before all of the work was begun
