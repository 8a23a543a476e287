"""A loop in the background: daemon threads that ask what to do, do it, and wait while there is nothing to do.

Queues, timers and watches all need the same rules. They are here once:

- **Decide under the lock, act outside.** ``decide`` runs under the condition of the owner. It returns what to do next,
  or how long to wait. The owner changes its state under the same condition and then notifies, so no change is missed.
- **Stop.** After ``close`` a thread ends with the work that it does at the moment. What waits is left, or, in a loop
  that ``drains``, done first. Joining has a deadline: a thread that a dead mount holds ends with the process.
- **Exceptions.** What ``decide`` or the work raises is a defect of ours. It is logged, and the thread goes on: it must
  not end unseen. From the second failure in a row on it pauses, so that it does not fill the log. Errors of the world
  are the work's own to catch.
- **Fork.** A forked child has none of the threads, and its copy of the condition may be locked for ever. There
  ``start`` and ``close`` do nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvstore.errors import InvalidRequest

# A deadline for clean-up by other libraries, which may never return.


CLOSE_S = 2.0


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Runs ``work`` in a thread of its own and waits at most ``seconds``; True if it ended.

    For closing a gRPC channel: it waits without limit for a call that a signal's exception left behind half-way.
    """
    thread = threading.Thread(target=work, name="kvstore-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


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
        if not self.is_here:
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
    ) -> None:
        self.threads: list[threading.Thread] = []
        """The threads started so far."""
        self._name = name
        self._changed = changed
        self._decide = decide
        self._threads_max = threads_max
        self._drains = drains
        self.closed = False
        """True once ``stop`` or ``close`` was called."""
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child, which has none of the threads."""
        return self._process == os.getpid()

    def start(self) -> None:
        """Starts one thread more; none beyond ``threads_max``, after ``close``, or in a forked child."""
        if not self.is_here:
            return
        with self._changed:
            if self.closed or len(self.threads) >= self._threads_max:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self) -> None:
        """Has the threads end; does not wait for that. Idempotent."""
        if not self.is_here:
            return
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Ends the threads; True if they ended in time. A thread of the loop that calls it is not waited for.

        Idempotent.
        """
        if not self.is_here:
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
                    self._pause()
                is_failing = True
            work = None  # it may hold memory of a caller

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closed, PAUSE_S)

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
        if not self._loop.is_here:
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
