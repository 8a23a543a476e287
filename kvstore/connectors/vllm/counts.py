"""Counts of the connector since vLLM last asked; ``metrics.py`` passes them on."""

from __future__ import annotations

import threading

COUNTERS = {
    "lookups": "Look-ups of prompts in the store",
    "lookup_timeouts": "Look-ups that did not end in time, which are misses",
    "lookup_hit_tokens": "Tokens that look-ups found beyond the engine's own cache",
    "loaded_blocks": "Blocks loaded from the store",
    "loaded_bytes": "Bytes loaded from the store",
    "load_failed_blocks": "Blocks that were found but could not be loaded, and are computed",
    "load_seconds": "Time that loads took",
    "stored_blocks": "Blocks that were given to the store",
    "stored_bytes": "Bytes that were given to the store",
    "store_failed_blocks": "Blocks that the store did not take",
    "store_shed_blocks": "Blocks not stored because too many were on their way",
    "skipped_lora_requests": "Requests with an adapter, which this connector leaves alone",
}


class Counts:
    """Collects counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int | float] = {}

    def add(self, name: str, count: float = 1) -> None:
        """Adds to one of ``COUNTERS``."""
        if count:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, int | float]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
