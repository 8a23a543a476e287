"""The connector's counts through vLLM's own hooks: its log line, and metrics named ``vllm:kvstore_*``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.connectors.vllm.counts import EngineCount


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
