"""What one run took in one sweep; separate because both ways of taking, trash and deletion, fill it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore_gc.victims import Condemnation


class Taken:
    """What became of the victims of one sweep in one run. Thread-safe."""

    def __init__(self, deleted: Callable[[int], object] = lambda size_bytes: None) -> None:
        """``deleted`` hears the bytes of each chunk at once: the root's level must not be late by a whole sweep."""
        self._deleted = deleted
        self._lock = threading.Lock()
        self.reaped: list[Condemnation] = []
        self.restored_count = 0
        self.failed_count = 0
        self.failure = ""

    def reap(self, victim: Condemnation) -> None:
        """It was deleted."""
        with self._lock:
            self.reaped.append(victim)
        self._deleted(victim.size_bytes)

    def put_back(self) -> None:
        """It was another publication than the condemned one, and went back."""
        with self._lock:
            self.restored_count += 1

    def fail(self, error: Exception) -> None:
        """It could not be taken, or not be deleted; the others can."""
        with self._lock:
            self.failed_count += 1
            self.failure = str(error)
