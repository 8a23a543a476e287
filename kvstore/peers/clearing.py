"""The thread that drops cleared namespaces here: dropping may wait for a disk, and the follower must not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.namespace import NamespaceDigest

log = logging.getLogger(__name__)


class Clearing:
    """Calls ``drop`` for each namespace that it is given, one at a time; repeats are merged while they wait."""

    def __init__(self, drop: Callable[[NamespaceDigest], None]) -> None:
        self._drop = drop
        self._changed = threading.Condition()  # guards the cleared namespaces that wait
        self._waiting: dict[NamespaceDigest, None] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, namespace: NamespaceDigest) -> None:
        """Queues a namespace to be dropped soon."""
        with self._changed:
            if self._closed:
                return
            self._waiting[namespace] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-peers-clear", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Namespaces that wait are left; the next start hears of them again. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                namespace = next(iter(self._waiting))
                del self._waiting[namespace]
            try:
                self._drop(namespace)
            except Exception:
                log.exception("peers.clearing_failed")
