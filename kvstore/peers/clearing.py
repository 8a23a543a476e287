"""The thread that drops cleared namespaces here: dropping may wait for a disk, and the follower must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from kvstore.background import Decision, Loop
from kvstore.namespace import NamespaceDigest


class Clearing:
    """Calls ``drop`` for each namespace that it is given, one at a time; repeats are merged while they wait."""

    def __init__(self, drop: Callable[[NamespaceDigest], None]) -> None:
        self._drop = drop
        self._changed = threading.Condition()  # guards the cleared namespaces that wait
        self._waiting: dict[NamespaceDigest, None] = {}
        self._loop = Loop("kvstore-peers-clear", self._changed, self._next)

    def add(self, namespace: NamespaceDigest) -> None:
        """Queues a namespace to be dropped soon."""
        with self._changed:
            self._waiting[namespace] = None
            self._loop.start()
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Namespaces that wait are left; the next start hears of them again. Idempotent."""
        self._loop.close(timeout_s)

    def _next(self) -> Decision:
        if not self._waiting:
            return None
        namespace = next(iter(self._waiting))
        del self._waiting[namespace]
        return partial(self._drop, namespace)
