"""Threads that do what an engine asked for in the background, so that nothing waits in the engine's own threads.

Not the standard executor: its threads are joined when the interpreter ends, and it takes any number of tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstore.background import Decision, Loop
from kvstore.waiting import Monitor


class TaskThreads:
    """``count`` threads and a bounded queue. Thread-safe."""

    def __init__(self, count: int, queue_max: int, name: str) -> None:
        self._queue_max = queue_max
        self._tasks: deque[Callable[[], None]] = deque()
        self._condition = Monitor()
        self._loop = Loop(name, self._condition, self._next, threads_max=count, drains=True)
        for _ in range(count):
            self._loop.start()

    def submit(self, task: Callable[[], None]) -> bool:
        """Has ``task`` called by one of the threads; False where too many wait, or this is closed.

        False in a forked process too, which has none of the threads.
        """
        if not self._loop.is_here:
            return False
        with self._condition:
            if self._loop.closed or len(self._tasks) >= self._queue_max:
                return False
            self._tasks.append(task)
            self._condition.notify()
        return True

    def close(self, timeout_s: float) -> bool:
        """Waits for the tasks in the queue; True if they and the threads ended in time."""
        return self._loop.close(timeout_s)

    def _next(self) -> Decision:
        return self._tasks.popleft() if self._tasks else None
