"""Threads that make file-system calls, so that no caller ever waits longer than its deadline.

A call into a dead mount cannot be interrupted; nobody waits for a lane that is stuck in one. Lanes are daemon threads
of our own, because the standard executor joins its threads when the interpreter ends, and would hang with the mount.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.core import tracing
from kvstore.core.clock import Clock
from kvstore.errors import InvalidRequest, Overloaded, Unavailable

T = TypeVar("T")

GROUP_BYTES_MIN = 1 << 20
GROUP_BYTES_MAX = 32 << 20
"""Some milliseconds of copying. A caller that takes its memory back waits for one of the chunks read from files."""
GROUP_FILES_MAX = 64
LIMIT_PER_GROUP = 32
"""All files of a group are open at once: fewer if the process may open few, so that 16 lanes take half of them."""
GROUPS_PER_LANE = 2
WIDTH = min(16, (os.cpu_count() or 1) + 1)
"""Lanes that one request may use at a time. One more than cores: while one waits for the GIL, the others copy."""
QUEUE_MAX = 1024
"""Requests that may wait for a lane; more are refused with Overloaded."""
STALL_S = 5.0
"""If every lane has been in one file-system call for this long, the root counts as hung, and calls fail at once."""

_lane = threading.local()


class Deadline:
    """A point on the monotonic clock, passed down instead of a duration so that waits add up to one."""

    __slots__ = ("_at_s", "_clock")

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._at_s = clock.monotonic_s() + seconds

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at_s - self._clock.monotonic_s())

    @property
    def passed(self) -> bool:
        """True if it has passed."""
        return self._clock.monotonic_s() >= self._at_s


class DeadlinePassed(Unavailable):
    """The work did not end in time; it may still be running, but nobody waits for it."""


class IndexedWork:
    """Work on the numbers 0 to count - 1, done by several lanes at once and started in rising order."""

    def __init__(self, count: int, work: Callable[[int], bool]) -> None:
        self._count = count
        self._work = work
        self._lock = threading.Lock()
        self._next = 0
        self._runners = 0
        self.ended = threading.Event()
        """Set once all lanes are done with it. Unlike the batch, it refers to nobody's memory."""
        self._stopped = False
        self.error: BaseException | None = None
        if not count:
            self.ended.set()

    def run(self, tick: Callable[[], None]) -> None:
        """Does one lane's share; calls ``tick`` before each piece of work. Stops all lanes at the first error, or when
        ``work`` returns False.

        A lane that comes after the others have done it all returns at once; nobody waits for it.
        """
        with self._lock:
            self._runners += 1
        before: Callable[[], None] | None = getattr(_lane, "tick", None)  # set if this lane helps with another batch
        _lane.tick = tick
        try:
            while (number := self._take()) is not None:
                tick()
                if not self._work(number):
                    self._stopped = True
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            self.error = self.error or error
            self._stopped = True
        finally:
            _lane.tick = before
            with self._lock:
                self._runners -= 1
                if not self._runners and (self._stopped or self._next >= self._count):
                    # The work refers to the caller's memory, and often to us: no such reference may outlive the call.
                    self._work = _nothing
                    self.ended.set()

    def _take(self) -> int | None:
        with self._lock:
            if self._stopped or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def wait(self, deadline: Deadline) -> None:
        """Returns when all lanes are done with it; raises their first error, or DeadlinePassed."""
        try:
            in_time = self.ended.wait(deadline.left_s())
        except BaseException:
            self.stop()  # interrupted (Ctrl-C): nobody waits for the rest
            raise
        if not in_time:
            self.stop()
            raise DeadlinePassed("the root did not answer in time; check the mount (kvstore check-root)")
        # Clear it: its traceback refers to us and to the caller's memory.
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # else its traceback and this frame would refer to each other

    def help(self, deadline: Deadline) -> None:
        """Does a share of the work in the calling thread, until the deadline: for work that waits for no device."""

        def tick() -> None:
            if deadline.left_s() <= 0:
                raise DeadlinePassed("copying did not end in time: the machine has too much to do")

        self.run(tick)

    def stop(self) -> None:
        self._stopped = True

    def join(self, timeout_s: float) -> bool:
        """True if, after ``stop`` or a passed deadline, all work that was begun has ended within the time."""
        return self.ended.wait(timeout_s)


def moved_on() -> None:
    """Reports from work of several steps on a slow root that this lane is not stuck in one call."""
    tick: Callable[[], None] | None = getattr(_lane, "tick", None)
    if tick is not None:
        tick()


def _nothing(_: int) -> bool:
    return False


class Executor:
    """A fixed number of threads with one bounded queue."""

    def __init__(self, count: int, width: int, queue_max: int, stall_s: float, clock: Clock) -> None:
        self._clock = clock
        self.width = width
        """Lanes that one request may use at once."""
        self._queue_max = queue_max
        self._stall_s = stall_s
        self._queue: queue.SimpleQueue[IndexedWork | None] = queue.SimpleQueue()
        self._busy_since_s: list[float | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"kvstore-lane-{lane}", daemon=True)
            for lane in range(count)
        ]
        self._closed = False
        self._pid = os.getpid()
        for thread in self._threads:
            thread.start()

    def start(self, count: int, work: Callable[[int], bool], *, helped: bool = False) -> IndexedWork:
        """Begins ``work(0) ... work(count - 1)`` on up to ``width`` lanes.

        With ``helped`` it uses one lane less, because the caller does a share. The caller MUST call
        ``IndexedWork.help``: no
        lane begins work that needs only one. Raises Overloaded if too much waits already, and Unavailable at once if
        the root hangs.
        """
        if self._closed:
            raise Unavailable("the store is closed: open it again")
        if self._pid != os.getpid():
            raise InvalidRequest(
                "this store was opened before a fork, and its threads are not here: open it in the child"
            )
        if self.stalled:
            raise Unavailable("the root does not answer: every lane waits for it; check the mount")
        if self._queue.qsize() >= self._queue_max:
            raise Overloaded(f"{self._queue_max} requests wait for the root: back off")
        batch = IndexedWork(count, tracing.carried(work))
        for _ in range(min(count, self.width) - helped):
            self._queue.put(batch)
        return batch

    def each(self, count: int, work: Callable[[int], bool], deadline: Deadline) -> None:
        self.start(count, work).wait(deadline)

    def share(self, count: int, work: Callable[[int], bool], deadline: Deadline) -> None:
        """Starts a batch, does a share of it in the calling thread, and waits: for work that waits for no device."""
        batch = self.start(count, work, helped=True)
        batch.help(deadline)
        batch.wait(deadline)

    def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Makes one call on a lane and returns its result. Raises what it raises, or DeadlinePassed."""
        results: list[T] = []

        def only(_: int) -> bool:
            results.append(work())
            return True

        self.each(1, only, deadline)
        return results[0]

    @property
    def stalled(self) -> bool:
        """True if every lane has been in one call for longer than ``stall_s``."""
        limit = self._clock.monotonic_s() - self._stall_s
        return all(since is not None and since < limit for since in self._busy_since_s)

    @property
    def waiting_count(self) -> int:
        return self._queue.qsize()

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends the idle lanes; a lane stuck in a call ends with the process."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        limit = self._clock.monotonic_s() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, limit - self._clock.monotonic_s()))

    def _tick(self, lane: int) -> None:
        """Notes that this lane begins something new, so it is not stuck."""
        self._busy_since_s[lane] = self._clock.monotonic_s()

    def _serve(self, lane: int) -> None:
        while True:
            batch = self._queue.get()
            if batch is None:
                return
            batch.run(partial(self._tick, lane))
            self._busy_since_s[lane] = None
            del batch  # else a lane that waits for the next batch would keep somebody's arrays alive


def group_size(chunks: int, chunk_bytes: int, width: int) -> int:
    """Returns how many chunks one call does: enough that Python costs little, few enough that all lanes have work."""
    files_max = files_at_most(GROUP_FILES_MAX, LIMIT_PER_GROUP)
    each = chunks * chunk_bytes // (GROUPS_PER_LANE * width)
    return max(1, min(min(max(each, GROUP_BYTES_MIN), GROUP_BYTES_MAX) // max(1, chunk_bytes), files_max))


def files_at_most(count: int, share: int) -> int:
    """Returns ``count``, or that share of the files that the process may open if it is less; at least 1."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if limit < 0 else max(1, min(limit // share, count))
