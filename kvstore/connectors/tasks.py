"""Threads that do what an engine asked for in the background, so that nothing waits in the engine's own threads.

Not the standard executor: its threads are joined when the interpreter ends, and it takes any number of tasks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class TaskThreads:
    """``count`` threads and a bounded queue. Thread-safe."""

    def __init__(self, count: int, queue_max: int, name: str) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(queue_max)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> bool:
        """Has ``task`` called by one of the threads; False where too many wait, or this is closed."""
        if self._closed.is_set():
            return False
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Lets the tasks in the queue come to their ends; whether they did, and the threads ended, in time."""
        if not self._closed.is_set():
            self._closed.set()
            for _ in self._threads:
                try:
                    self._queue.put(None, timeout=timeout_s / len(self._threads))
                except queue.Full:
                    return False
        each_s = timeout_s / len(self._threads)
        for thread in self._threads:
            thread.join(each_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            try:
                task()
            except Exception:
                log.exception("connector.task_failed")
            del task  # it knows the engine's memory
