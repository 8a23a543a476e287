"""One sync a second for all that was published meanwhile: the durability "everysec"."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""A crash of the host loses what was put in this time and in the time that two syncs take."""
CLOSE_S = 5.0
"""The end waits so long for a root that does not answer."""


class Syncing:
    """Syncs the file system of a root while something is published.

    It has a thread of its own, so that a root that hangs delays nothing else.
    """

    def __init__(
        self,
        sync: Callable[[], None],
        written_bytes: Callable[[], int],
        every_s: float = EVERY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """``sync`` is the root's, ``written_bytes`` says how much this node has published."""
        self._sync = sync
        self._written_bytes = written_bytes
        self._every_s = every_s
        self._close_s = close_s
        self._synced_bytes = written_bytes()
        self._is_failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-syncing", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # else a program that ends leaves its last second to the kernel

    def close(self) -> None:
        """Syncs what is left, if the root answers in time. Idempotent."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join(self._close_s)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._step()
        self._step()

    def _step(self) -> None:
        written_bytes = self._written_bytes()  # before the sync: what comes later is for the next one
        if written_bytes == self._synced_bytes:
            return
        try:
            self._sync()
        except KVStoreError as error:
            if not self._is_failing:
                log.warning("sync.failed a crash of this host may lose more than the last second: %s", error)
            self._is_failing = True
            return
        self._synced_bytes, self._is_failing = written_bytes, False
