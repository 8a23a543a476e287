"""A lock that threads wait on, and a flag, which Ctrl-C never leaves locked.

``threading.Condition`` is entered by a function in Python: a KeyboardInterrupt that comes when that has the lock and
has not returned leaves it locked for ever, and the next one who needs it waits without end. So do ``Semaphore``,
``Event`` and ``queue.Queue``, which are made of it. A lock of C is entered in one step: it is held within the block or
not at all.
"""

from __future__ import annotations

import threading
from _thread import RLock
from collections import deque


class Monitor(RLock, threading.Condition):  # type: ignore[misc]  # the stubs call RLock final, and it is not
    """As ``threading.Condition``: entered and left as the lock that it is, in C."""

    def __init__(self) -> None:
        # Not those of Condition, which would make a lock of its own: it finds the methods of ours instead.
        self._waiters: deque[threading.Lock] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """As that of Condition. Whatever ends it, the lock is held again, as the block around it takes for granted."""
        try:
            return threading.Condition.wait(self, timeout)
        except BaseException:
            # Ctrl-C between letting go of the lock and waiting: the end of the block would raise RuntimeError instead.
            if not self._is_owned():  # type: ignore[attr-defined]  # of the lock in C
                self.acquire()
            raise


class Flag:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._changed = Monitor()  # guards the flag
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Sets it, and wakes up who waits for that."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Sets it back."""
        with self._changed:
            self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)
