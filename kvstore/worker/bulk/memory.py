"""The worker's memory for bytes that come and go: buffers that are used again, because fresh memory has to be zeroed
first, which costs about as much as copying into it.
"""

from __future__ import annotations

import threading

from kvstore.buffers import aligned


class Buffers:
    """Buffers by size, of which at most ``kept_bytes_max`` are kept for the next one who asks. Thread-safe."""

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of exactly this size, which begins at a page; its content is whatever it was."""
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                self._kept_bytes -= size_bytes
                return free.pop()
        return aligned(size_bytes)

    def give(self, buffer: memoryview) -> None:
        """Gives a buffer back, which nobody uses any more."""
        with self._lock:
            if self._kept_bytes + len(buffer) > self._kept_bytes_max:
                # Sizes that nobody asks for any more must not keep out those that are asked for.
                self._free.clear()
                self._kept_bytes = 0
            if len(buffer) <= self._kept_bytes_max:
                self._free.setdefault(len(buffer), []).append(buffer)
                self._kept_bytes += len(buffer)
