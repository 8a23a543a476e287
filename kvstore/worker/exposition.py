"""What a worker counts as Prometheus' metrics: which names and labels its counters and gauges get.

METRICS.md lists them.  Apart from the server because here is decided what a counter is called; ``stats()`` has the same
numbers under flat names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from kvstore.format.header import Damage
from kvstore.node.counters import COUNTERS, GAUGES
from kvstore.node.timings import LATENCY_BUCKETS_S, Latency
from kvstore.worker.calls import WORKER_COUNTERS, WORKER_GAUGES
from kvstore.worker.worker import Worker

_HELP = {**COUNTERS, **WORKER_COUNTERS, **GAUGES, **WORKER_GAUGES}

_LABELLED = (
    (re.compile(r"miss_(\w+)"), "misses", "reason", "chunks or requests that were a miss, by why"),
    (re.compile(r"damage_(\w+)"), "damage", "kind", "damaged chunks found, by what is wrong with them"),
    (re.compile(r"denied_(\w+)"), "denied", "reason", "calls denied, by why"),
    (re.compile(r"tickets_(done|failed|cancelled)"), "tickets", "outcome", "tickets of the control service that ended"),
    (re.compile(r"refused_(\w+)_quota"), "quota_refused", "limit", "calls refused by a tenant's quota, by which limit"),
)
"""Counters that are one metric with a label."""
_ELSEWHERE = frozenset(("wire_bytes_in", "wire_bytes_out", "quota_refused"))
"""Counters that metrics have as sums of others."""
_GROWING = frozenset(("etcd_operations",))
"""Gauges of ``stats()`` that only grow."""


class Exposition:
    """Reads the worker's counts when it is asked: a collector for a registry."""

    def __init__(self, worker: Worker, version: str) -> None:
        self._worker = worker
        self._version = version

    def collect(self) -> Iterator[Any]:
        """All metrics, as they stand now."""
        service = self._worker.service
        yield InfoMetricFamily(
            "kvstore_build", "what runs here", {"version": self._version, "python": sys.version.split(maxsplit=1)[0]}
        )
        gauges = service.gauges()
        growing = {name: value for name, value in gauges.items() if name in _GROWING}
        yield from counters({**{f"damage_{kind.value}": 0 for kind in Damage}, **service.counters(), **growing})
        for name, gauge in gauges.items():
            if name not in _GROWING:
                yield GaugeMetricFamily(f"kvstore_{name}", _HELP.get(name, name.replace("_", " ")), gauge)
        yield GaugeMetricFamily("kvstore_serving", "whether health says SERVING", float(self._worker.is_serving))
        yield from self._calls()
        yield from self._tiers()

    def _calls(self) -> Iterator[Any]:
        calls = self._worker.service.calls
        ended = CounterMetricFamily("kvstore_calls", "calls that ended", labels=("method", "code", "path"))
        for key, count in calls.ended().items():
            ended.add_metric(key, count)
        yield ended
        yield _histogram("kvstore_call_seconds", "how long calls took", ("method", "path"), calls.latencies().items())
        moved = CounterMetricFamily(
            "kvstore_wire_bytes", "payload bytes from and to clients", labels=("direction", "path")
        )
        for moved_key, size_bytes in calls.moved_bytes().items():
            moved.add_metric(moved_key, size_bytes)
        yield moved

    def _tiers(self) -> Iterator[Any]:
        found = self._worker.service.tiers.snapshot()
        labels = ("tier", "operation")
        yield _histogram("kvstore_tier_seconds", "how long steps of a tier took", labels, found.items())
        moved = CounterMetricFamily("kvstore_tier_bytes", "bytes read from and written to a tier", labels=labels)
        for key, latency in found.items():
            moved.add_metric(key, latency.size_bytes)
        yield moved


def counters(counts: Mapping[str, float]) -> Iterator[Any]:
    """Counters by their flat names; those of a kind become one metric."""
    families: dict[str, CounterMetricFamily] = {}
    for name, count in counts.items():
        for pattern, metric, label, about in _LABELLED:
            if found := pattern.fullmatch(name):
                family = families.get(metric)
                if family is None:
                    family = families[metric] = CounterMetricFamily(f"kvstore_{metric}", about, labels=(label,))
                family.add_metric((found[1],), count)
                break
        else:
            if name not in _ELSEWHERE:
                families[name] = CounterMetricFamily(f"kvstore_{name}", _HELP.get(name, name.replace("_", " ")), count)
    yield from families.values()


def _histogram(
    name: str, about: str, labels: tuple[str, ...], latencies: Iterable[tuple[tuple[str, ...], Latency]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, about, labels=labels)
    bounds = [*map(str, LATENCY_BUCKETS_S), "+Inf"]
    for key, latency in latencies:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds, latency.buckets, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(key, buckets, latency.sum_s)
    return family
