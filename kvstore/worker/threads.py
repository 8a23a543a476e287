"""The threads that serve calls: daemons, so that the interpreter can end.

The standard executor joins its threads at exit, and so would wait for a call that waits for a dead mount.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """At most ``threads_max`` threads, started on demand."""

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs ``fn`` on a thread. Raises RuntimeError after ``shutdown``, as every executor does."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker has stopped")
            if self._idle > 0:
                self._idle -= 1  # one of them will take this task
            elif len(self._threads) < self._threads_max:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()  # raises RuntimeError if the system has no more
                self._threads.append(thread)
            else:
                self._idle -= 1  # it waits in the queue; the next free thread is then not idle
            self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float = 5.0) -> None:
        """Ends the threads; waits at most ``timeout_s`` for busy ones. Tasks in the queue are still done."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        ends_s = time.monotonic() + timeout_s
        for thread in threads if wait else ():
            thread.join(max(0.0, ends_s - time.monotonic()))

    def _serve(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  # belongs to whoever waits for the future
                    future.set_exception(error)
            del task, future, work  # an idle thread must not keep a message in memory
            with self._lock:
                self._idle += 1
