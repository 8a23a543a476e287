"""Counts of the connector since vLLM last asked; ``metrics.py`` passes them on."""

from __future__ import annotations

import enum
import threading

from kvstore.core.metrics import Counter


@enum.unique
class EngineCount(Counter):
    """A counter of the connector in one engine: the metric ``vllm:kvstore_`` and its flat name."""

    LOOKUPS = "Look-ups of prompts in the store"
    LOOKUP_TIMEOUTS = "Look-ups that did not end in time, which are misses"
    LOOKUP_HIT_TOKENS = "Tokens that look-ups found beyond the engine's own cache"
    LOADED_BLOCKS = "Blocks loaded from the store"
    LOADED_BYTES = "Bytes loaded from the store"
    LOAD_FAILED_BLOCKS = "Blocks that were found but could not be loaded, and are computed"
    LOAD_SECONDS = "Time that loads took"
    STORED_BLOCKS = "Blocks that were given to the store"
    STORED_BYTES = "Bytes that were given to the store"
    STORE_FAILED_BLOCKS = "Blocks that the store did not take"
    STORE_SHED_BLOCKS = "Blocks not stored because too many were being stored"
    SKIPPED_LORA_REQUESTS = (
        "Requests with an adapter that share nothing: its files may be others than those that vLLM loaded"
    )


class EngineCounts:
    """Collects counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self._counts: dict[str, int | float] = {}

    def add(self, counter: EngineCount, count: float = 1) -> None:
        """Adds to one counter."""
        if count:
            with self._lock:
                self._counts[counter.flat_name] = self._counts.get(counter.flat_name, 0) + count

    def take(self) -> dict[str, int | float]:
        """Returns the counts since the last call, by flat name; only those that are not 0."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
