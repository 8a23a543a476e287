"""The connector's counts through vLLM's own hooks: its log line, and metrics named ``vllm:kvstore_*``."""

from __future__ import annotations

import enum
import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.counts import Count

# Counts of the connector since vLLM last asked; ``metrics.py`` passes them on.


@enum.unique
class EngineCount(Count):
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
    SUPERSEDED_BLOCKS = "Blocks of branches that their sessions have abandoned, which go first in the store"
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


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counts since they were last taken; ``data`` maps the flat name of an ``EngineCount`` to its count."""

    def reset(self) -> None:
        """Clears all counts."""
        self.data: dict[str, int | float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the other's counts."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the counts for vLLM's log."""
        return {f"kvstore {name}": round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One metric for each ``EngineCount``, labelled as vLLM labels its own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for counter in EngineCount:
            name = counter.flat_name
            metric = self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=f"{counter.about}.", labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of one engine."""
        for name, count in transfer_stats_data.items():
            if (engine_idx, name) in self._counters:
                self._counters[engine_idx, name].inc(count)
