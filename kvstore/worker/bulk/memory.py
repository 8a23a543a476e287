"""Reusable buffers for payload in transit. Fresh memory must be zeroed first, which costs about as much as a copy."""

from __future__ import annotations

import threading

from kvstore.buffers import aligned


class Buffers:
    """Buffers by size; at most ``kept_bytes_max`` of free ones are kept. Thread-safe."""

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Returns a page-aligned buffer of exactly this size, with arbitrary content."""
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                self._kept_bytes -= size_bytes
                return free.pop()
        return aligned(size_bytes)

    def give(self, buffer: memoryview) -> None:
        """Takes back a buffer that nobody uses any more."""
        with self._lock:
            if self._kept_bytes + len(buffer) > self._kept_bytes_max:
                # Free buffers of unwanted sizes must not crowd out the wanted ones.
                self._free.clear()
                self._kept_bytes = 0
            if len(buffer) <= self._kept_bytes_max:
                self._free.setdefault(len(buffer), []).append(buffer)
                self._kept_bytes += len(buffer)
