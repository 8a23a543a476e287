"""Background threads for work that an engine asked for, so that nothing waits in the engine's own threads.

Not the standard executor: its threads are joined when the interpreter ends, and its queue has no limit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.waiting import Monitor

log = logging.getLogger(__name__)


class TaskThreads:
    """``count`` threads and a bounded queue. Thread-safe."""

    def __init__(self, count: int, queue_max: int, name: str) -> None:
        self._queue_max = queue_max
        self._tasks: deque[Callable[[], None]] = deque()
        self._condition = Monitor()
        self._closed = False
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> bool:
        """Queues ``task``; False if too many wait, or this is closed.

        Also False in a forked process, which has none of the threads.
        """
        if self._process != os.getpid():
            return False
        with self._condition:
            if self._closed or len(self._tasks) >= self._queue_max:
                return False
            self._tasks.append(task)
            self._condition.notify()
        return True

    def close(self, timeout_s: float) -> bool:
        """Waits for the tasks in the queue; True if they and the threads ended in time."""
        if self._process != os.getpid():
            return True
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while True:
            with self._condition:
                while not self._tasks:
                    if self._closed:
                        return
                    self._condition.wait()
                task = self._tasks.popleft()
            try:
                task()
            except Exception:
                log.exception("connector.task_failed")
            del task  # it refers to the engine's memory
