"""One client's connection to the file: a thread that owns it, and callers that wait for it until their deadline.

A thread of its own, because a call into a disk that hangs never returns, but the caller's call must. SQLite tells
nobody of changes by other processes, so while somebody waits for one, the thread looks ten times a second.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.meta.deadline import Deadline
from kvstore.meta.interface import LeaseGone, WatchLost
from kvstore.meta.sqlite import process
from kvstore.meta.sqlite.faults import fault_of, is_full, keeps_connection
from kvstore.meta.sqlite.file import MetadataFile
from kvstore.meta.sqlite.liveness import Liveness
from kvstore.meta.sqlite.store import Store

T = TypeVar("T")

CLOSE_S = 1.0
POLL_S = 0.1
"""The time that a change by another process, or the end of a lease, may stay unseen. Our own changes wake at once."""
LOOK_S = 1.0
"""The least time for one look, even if the caller does not want to wait."""
LOCK_SHARE = 0.8
"""The share of a call's time in which other processes must let go of the file, so that the caller hears the reason."""
REST_S = 10.0
"""A fork waits so long for a call under way. The child of one that did not wait long enough cannot open the file."""


class _Task:
    """A call that waits for the thread, and its outcome."""

    def __init__(self, what: str, work: Callable[[Store], Any], deadline: Deadline) -> None:
        self.what = what
        self.work = work
        self.deadline = deadline
        self.ended = False
        self.result: Any = None
        self.error: Exception | None = None


class Connection:
    """A thread that opens the file at the first call, and closes it at the end."""

    def __init__(self, file: MetadataFile, liveness: Liveness) -> None:
        self._file = file
        self._liveness = liveness
        self._pid = os.getpid()
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._tasks: deque[_Task] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._rests = False
        self._changes = 0
        self._waiters_count = 0
        # Of the thread.
        self._looked_s = 0.0
        self._seen: tuple[int, int] | None = None

    @property
    def path(self) -> str:
        """The name of the file."""
        return self._file.path

    @property
    def is_here(self) -> bool:
        """True unless this process was forked from the one that made the connection."""
        return self._pid == os.getpid()

    @property
    def changes(self) -> int:
        """Grows with each change to the file that this process makes, or sees while somebody waits."""
        return self._changes

    @property
    def openings(self) -> int:
        """Grows when another file was opened under the name: then revisions begin anew."""
        return self._file.openings

    def call(self, what: str, work: Callable[[Store], T], deadline: Deadline) -> T:
        """Returns what ``work`` returns in the thread. Raises what it raises, with errors of SQLite as ours.

        Raises Unavailable after the deadline; work that had begun may then still be done. Raises InvalidRequest in a
        forked child.
        """
        if not self.is_here:
            raise InvalidRequest(
                "the store was opened before a fork, and its threads are not here: open it in the child"
            )
        task = _Task(what, work, deadline)
        with self._changed:
            if self._closed:
                raise Unavailable(_CLOSED)
            if self._thread is None:
                process.joined(self)
                self._thread = threading.Thread(target=self._run, name="kvstore-sqlite", daemon=True)
                self._thread.start()
            self._tasks.append(task)
            self._changed.notify_all()
            self._changed.wait_for(lambda: task.ended, timeout=deadline.left_s())
            if not task.ended:
                raise self._late(task)
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Waits until ``is_over``, which is asked again after each change to the file and each ``wake``."""
        with self._changed:
            self._waiters_count += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(is_over, timeout=timeout_s)
            finally:
                self._waiters_count -= 1

    def wake(self, *, changed: bool = False) -> None:
        """Makes the thread, and those that wait for changes, look again. Does nothing in a forked child."""
        if self.is_here:
            with self._changed:
                self._changes += changed
                self._changed.notify_all()

    def close(self) -> None:
        """Closes the file and ends the thread; calls that wait end with Unavailable. Idempotent.

        Does nothing in a forked child: the thread is its parent's.
        """
        if not self.is_here:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)

    def rest(self) -> None:
        """Waits until the file is closed, before this process forks."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rests, timeout=REST_S)

    def close_inherited(self) -> None:
        """Closes what a forked child inherited of the lock that tells of its parent."""
        self._liveness.close()

    @property
    def rests(self) -> bool:
        """True while the file is closed, and stays so until the fork is over."""
        return self._rests

    def _late(self, task: _Task) -> Unavailable:
        """Takes a task back, if nobody has begun it; returns the error. Called with the lock."""
        said = f"{task.what}: {self.path} did not answer within {task.deadline.timeout_s:g} s: is the disk hung?"
        if task not in self._tasks:
            return Unavailable(f"{said} The outcome is unknown")
        self._tasks.remove(task)
        return Unavailable(f"{said} Nothing was done: the call may be repeated")

    # The thread

    def _run(self) -> None:
        while not self._closed:
            task = self._next()
            if task is not None:
                result, error = self._outcome(task)
                with self._changed:
                    task.result, task.error, task.ended = result, error, True
                    self._changed.notify_all()
            elif process.is_forking():
                self._pause()
            elif not self._closed:
                self._look()
        self._file.close()
        self._liveness.close()
        with self._changed:
            self._rests = True
            for task in self._tasks:
                task.error, task.ended = Unavailable(_CLOSED), True
            self._changed.notify_all()
        process.left(self)

    def _next(self) -> _Task | None:
        """Returns the next task; None if the connection is closed, the process wants to fork, or it is time to look."""
        with self._changed:
            while not self._closed and not process.is_forking():
                if self._tasks:
                    return self._tasks.popleft()
                left_s = self._looked_s + POLL_S - time.monotonic() if self._waiters_count else None
                if left_s is not None and left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return None

    def _look(self) -> None:
        """Wakes those that wait for changes if there are some, or if the file cannot be read: they hear the error."""
        try:
            _, store = self._file.opened(LOOK_S)
            seen = (self._file.openings, store.revision())
        except (KVStoreError, sqlite3.Error, OSError):
            self._file.close()
            seen = None
        if seen is None or seen != self._seen:
            self._seen = seen
            self.wake(changed=True)
        self._looked_s = time.monotonic()

    def _pause(self) -> None:
        """Closes the file until the fork is over."""
        self._file.close()
        with self._changed:
            self._rests = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not process.is_forking())
            self._rests = self._closed

    def _outcome(self, task: _Task) -> tuple[Any, Exception | None]:
        try:
            try:
                return self._do(task), None
            except sqlite3.Error as fault:
                if not (is_full(fault) and self._file.shortened(task.deadline.left_s(LOCK_SHARE))):
                    raise
                return self._do(task), None
        except (KVStoreError, LeaseGone, WatchLost) as error:
            return None, error
        except sqlite3.Error as fault:
            if not keeps_connection(fault):
                self._file.close()
            translated = fault_of(fault, self.path)
            translated.__cause__ = fault
            return None, translated
        except OSError as cause:
            self._file.close()
            unavailable = Unavailable(f"metadata in {self.path}: {cause.strerror or cause}: check the disk")
            unavailable.__cause__ = cause
            return None, unavailable
        except Exception as bug:  # noqa: BLE001 - raised to the caller
            return None, bug

    def _do(self, task: _Task) -> Any:
        database, store = self._file.opened(task.deadline.left_s(LOCK_SHARE))
        before = database.total_changes
        try:
            return task.work(store)
        finally:
            if database.total_changes != before:
                process.changed(self.path)


_CLOSED = "the metadata client is closed: open a new one"
