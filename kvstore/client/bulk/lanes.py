"""The threads of a client that read files and copy memory.

Separate from what a client's calls share (``client/tools.py``), which knows the ways of calls, and so this package.
"""

from __future__ import annotations

import threading

from kvstore.node.lanes import Lanes
from kvstore.node.settings import Limits
from kvstore.sources import Clock


class FileLanes:
    """The threads that read files from workers, and others that copy within memory; made when they are
    needed. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._lanes: Lanes | None = None
        self._copiers: Lanes | None = None
        self._closed = False

    def get(self) -> Lanes:
        """Those for files. After ``close`` they refuse work."""
        with self._lock:
            self._lanes = self._lanes or self._made(2)
            return self._lanes

    def copiers(self) -> Lanes:
        """Those that never wait for a device: so memory is read while the root hangs. As ``get`` after ``close``."""
        with self._lock:
            self._copiers = self._copiers or self._made(1)
            return self._copiers

    def _made(self, requests: int) -> Lanes:
        limits = Limits()
        lanes = Lanes(requests * limits.width, limits.width, limits.queue_max, limits.stall_s, self.clock)
        if self._closed:  # a call goes on while its store is closed: nobody else would end their threads
            lanes.close()
        return lanes

    def close(self) -> None:
        """Ends them. Idempotent."""
        with self._lock:
            self._closed = True
            for lanes in (self._lanes, self._copiers):
                if lanes is not None:
                    lanes.close()
