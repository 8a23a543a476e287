"""Threads: those that make file-system calls, so that no caller waits longer than its deadline, and background loops.

A call into a dead mount cannot be interrupted; no caller waits for a thread that is stuck in one. They are daemon
threads of our own, because the standard executor joins its threads when the interpreter ends, and would hang with the
mount.
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
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
"""All files of a group are open together: fewer if the process may open few, so that 16 threads take half of them."""
GROUPS_PER_THREAD = 2
WIDTH = min(16, (os.cpu_count() or 1) + 1)
"""Threads that one request may use at a time. One more than cores: while one waits for the GIL, the others copy."""
QUEUE_MAX = 1024
"""Requests that may wait for a thread; more are refused with Overloaded."""
STALL_S = 5.0
"""The root counts as hung once every thread has been in one file-system call for this long; calls then fail."""

_local = threading.local()


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
    """The work did not end in time; it may still run, but its caller has stopped waiting."""


class IndexedWork:
    """Work on the numbers 0 to count - 1, done by several threads in parallel and started in rising order."""

    def __init__(self, count: int, work: Callable[[int], bool]) -> None:
        self._count = count
        self._work = work
        self._lock = threading.Lock()
        self._next = 0
        self._runners = 0
        self.ended = threading.Event()
        """Set once all threads are done with it. Unlike the batch, it refers to no caller's memory."""
        self._stopped = False
        self.error: BaseException | None = None
        if not count:
            self.ended.set()

    def run(self, tick: Callable[[], None]) -> None:
        """Does one thread's share; calls ``tick`` before each piece of work. Stops all threads at the first error, or
        when ``work`` returns False.

        A thread that comes after the others have done it all returns immediately; no caller waits for it.
        """
        with self._lock:
            self._runners += 1
        before: Callable[[], None] | None = getattr(_local, "tick", None)  # set if this thread helps with another batch
        _local.tick = tick
        try:
            while (number := self._take()) is not None:
                tick()
                if not self._work(number):
                    self._stopped = True
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            self.error = self.error or error
            self._stopped = True
        finally:
            _local.tick = before
            with self._lock:
                self._runners -= 1
                if not self._runners and (self._stopped or self._next >= self._count):
                    # The work refers to the caller's memory, and often to us: no such reference may outlive the call.
                    self._work = lambda _: False
                    self.ended.set()

    def _take(self) -> int | None:
        with self._lock:
            if self._stopped or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def wait(self, deadline: Deadline) -> None:
        """Returns when all threads are done with it; raises their first error, or DeadlinePassed."""
        try:
            in_time = self.ended.wait(deadline.left_s())
        except BaseException:
            self.stop()  # interrupted (Ctrl-C): the caller does not wait for the rest
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
    """Reports from work of several steps on a slow root that this thread is not stuck in one call."""
    tick: Callable[[], None] | None = getattr(_local, "tick", None)
    if tick is not None:
        tick()


class Executor:
    """A fixed number of threads with one bounded queue."""

    def __init__(self, count: int, width: int, queue_max: int, stall_s: float, clock: Clock) -> None:
        self._clock = clock
        self.width = width
        """Threads that one request may use at a time."""
        self._queue_max = queue_max
        self._stall_s = stall_s
        self._queue: queue.SimpleQueue[IndexedWork | None] = queue.SimpleQueue()
        self._busy_since_s: list[float | None] = [None] * count
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._owner = Owner()
        with suppress(RuntimeError):  # the system has no more: those that started do it all
            for number in range(count):
                name = f"kvstore-io-{number}"
                thread = threading.Thread(target=self._serve, args=(number,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        del self._busy_since_s[len(self._threads) :]
        if not self._threads:
            raise Overloaded("the system gives no thread: raise the limit of this process")

    def start(self, count: int, work: Callable[[int], bool], *, helped: bool = False) -> IndexedWork:
        """Begins ``work(0) ... work(count - 1)`` on up to ``width`` threads.

        With ``helped`` it uses one thread less, because the caller does a share. The caller MUST call
        ``IndexedWork.help``: no thread begins work that needs only one. Raises Overloaded if too much waits already,
        and Unavailable immediately if the root hangs.
        """
        if self._closed:
            raise Unavailable("the store is closed: open it again")
        self._owner.check()
        if self.stalled:
            raise Unavailable("the root does not answer: every thread waits for it; check the mount")
        if self._queue.qsize() >= self._queue_max:
            raise Overloaded(f"{self._queue_max} requests wait for the root: back off")
        is_followed = tracing.tracer is not None or tracing.request_id() is not None
        batch = IndexedWork(count, tracing.carried(work) if is_followed else work)
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
        """Makes one call on a thread and returns its result. Raises what it raises, or DeadlinePassed."""
        results: list[T] = []

        def only(_: int) -> bool:
            results.append(work())
            return True

        self.each(1, only, deadline)
        return results[0]

    @property
    def stalled(self) -> bool:
        """True if every thread has been in one call for longer than ``stall_s``."""
        limit = self._clock.monotonic_s() - self._stall_s
        return all(since is not None and since < limit for since in self._busy_since_s)

    @property
    def waiting_count(self) -> int:
        return self._queue.qsize()

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends the idle threads; a thread stuck in a call ends with the process."""
        if self._closed or not self._owner.is_here:
            return
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        limit = self._clock.monotonic_s() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, limit - self._clock.monotonic_s()))

    def _tick(self, number: int) -> None:
        """Notes that this thread begins something new, so it is not stuck."""
        self._busy_since_s[number] = self._clock.monotonic_s()

    def _serve(self, number: int) -> None:
        while True:
            batch = self._queue.get()
            if batch is None:
                return
            batch.run(partial(self._tick, number))
            self._busy_since_s[number] = None
            del batch  # else a thread that waits for the next batch would keep the caller's arrays alive


def group_size(chunks: int, chunk_bytes: int, width: int) -> int:
    """Returns how many chunks one call does: enough that Python costs little, few enough that all threads have work."""
    files_max = files_at_most(GROUP_FILES_MAX, LIMIT_PER_GROUP)
    each = chunks * chunk_bytes // (GROUPS_PER_THREAD * width)
    return max(1, min(min(max(each, GROUP_BYTES_MIN), GROUP_BYTES_MAX) // max(1, chunk_bytes), files_max))


def files_at_most(count: int, share: int) -> int:
    """Returns ``count``, or that share of the files that the process may open if it is less; at least 1."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if limit < 0 else max(1, min(limit // share, count))


# A deadline for clean-up by other libraries, which may never return.


CLOSE_S = 2.0


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Runs ``work`` in a thread of its own and waits at most ``seconds``; True if it ended.

    For closing a gRPC channel: it waits without limit for a call that a signal's exception left behind half-way.
    """
    thread = threading.Thread(target=work, name="kvstore-close", daemon=True)
    with suppress(RuntimeError):  # the system has none, or the interpreter ends
        thread.start()
        thread.join(seconds)
    return thread.ident is not None and not thread.is_alive()


class Owner:
    """The process that made an object: a forked child has a copy without threads, and with locks held at the fork.

    Check it before any lock.
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the object."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises InvalidRequest in a forked child."""
        if self._pid != os.getpid():
            raise InvalidRequest(
                "the store was opened or connected before a fork, and a forked child has none of its "
                "threads: open it in the child, or connect in the child and start the child by spawn"
            )


log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Pause of a thread that fails again and again."""

Work = Callable[[], object]
Decision = Work | float | None
"""Work to do now; or the seconds to wait, unless the owner notifies earlier; or None, to wait until it notifies."""


class Loop:
    """Up to ``threads_max`` threads that do what ``decide`` says. Thread-safe.

    ``changed`` is the owner's condition; ``decide`` is called while it is held, and what it returns while it is not.
    """

    def __init__(
        self,
        name: str,
        changed: threading.Condition,
        decide: Callable[[], Decision],
        *,
        threads_max: int = 1,
        drains: bool = False,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.threads: list[threading.Thread] = []
        """The threads started so far."""
        self._name = name
        self._changed = changed
        self._decide = decide
        self._threads_max = threads_max
        self._drains = drains
        self._pause_s = pause_s
        self.closed = False
        """True once ``stop`` or ``close`` was called."""
        self.owner = Owner()

    def start(self) -> None:
        """Starts one thread more; none beyond ``threads_max``, after ``close``, or in a forked child."""
        if not self.owner.is_here:
            return
        with self._changed:
            if self.closed or len(self.threads) >= self._threads_max:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self) -> None:
        """Has the threads end; does not wait for that. Idempotent."""
        if not self.owner.is_here:
            return
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Ends the threads; True if they ended in time. A thread of the loop that calls it is not waited for.

        Idempotent.
        """
        if not self.owner.is_here:
            return True
        self.stop()
        ends_s = time.monotonic() + timeout_s
        others = [thread for thread in self.threads if thread is not threading.current_thread()]
        for number, thread in enumerate(others):
            thread.join(max(0.0, ends_s - time.monotonic()) if number else timeout_s)
        return not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        is_failing = False
        while True:
            try:
                work = self._next()
                if work is None:
                    return
                work()
                is_failing = False
            except Exception:
                log.exception("background.failed thread=%s", self._name)
                if is_failing:
                    with self._changed:
                        self._changed.wait_for(lambda: self.closed, self._pause_s)
                is_failing = True
            work = None  # it may hold memory of a caller

    def _next(self) -> Work | None:
        """Waits for something to do; None at the end."""
        with self._changed:
            while self._drains or not self.closed:
                decision = self._decide()
                if callable(decision):
                    return decision
                if self.closed:
                    break
                self._changed.wait(decision)
        return None


class Tasks:
    """A bounded queue of tasks, and the threads of a loop that does them in turn. Thread-safe.

    Not the standard executor: its threads are joined when the interpreter ends, and it takes any number of tasks.
    """

    def __init__(self, name: str, threads: int, queue_max: int) -> None:
        self._queue_max = queue_max
        self._changed = threading.Condition()  # guards the tasks that wait
        self._waiting: deque[Work] = deque()
        self._busy = 0
        self._loop = Loop(name, self._changed, self._next, threads_max=threads, drains=True)
        for _ in range(threads):
            self._loop.start()

    def submit(self, task: Work) -> bool:
        """Has a thread call ``task``; False if too many wait, after ``close``, and in a forked child."""
        if not self._loop.owner.is_here:
            return False
        with self._changed:
            if self._loop.closed or len(self._waiting) >= self._queue_max:
                return False
            self._waiting.append(task)
            self._changed.notify_all()
        return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until no task is left; True if that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Takes no more tasks, and waits for those in the queue; True if they and the threads ended in time."""
        return self._loop.close(timeout_s)

    def _next(self) -> Decision:
        if not self._waiting:
            return None
        self._busy += 1
        return partial(self._do, self._waiting.popleft())

    def _do(self, task: Work) -> None:
        try:
            task()
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
