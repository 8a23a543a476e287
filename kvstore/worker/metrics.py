"""What a worker serves over HTTP: its metrics for Prometheus, and its health for probes.

A new counter or gauge is a line in kvstore/core/metrics.py; docs/metrics.md lists them, ``stats()`` returns them under
flat names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("metrics need prometheus-client: pip install 'kvstore-llm[server]'") from missing

from kvstore.core.http_server import HttpServer
from kvstore.core.metrics import (
    GROWING,
    LATENCY_BUCKETS_S,
    NODE_GAUGES,
    WORKER_GAUGES,
    Family,
    Latency,
    NodeCount,
    Operation,
    TierName,
    WorkerCount,
)
from kvstore.security.access import PERMISSIONS
from kvstore.worker.context import GRPC, Ended
from kvstore.worker.data_server import BULK_METHODS
from kvstore.worker.server import Worker

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_ELSEWHERE = frozenset((WorkerCount.WIRE_BYTES_IN, WorkerCount.WIRE_BYTES_OUT, WorkerCount.QUOTA_REFUSED))
"""Counters that are sums of others in the metrics."""
_GAUGES = {**NODE_GAUGES, **WORKER_GAUGES}
# At 0 from the start on, or Prometheus would not see the first one as an increase, and a panel would say "No data".
_NO_CALLS = {
    Ended(method, code, path): 0
    for path, methods in ((GRPC, PERMISSIONS), ("unix", BULK_METHODS), ("tcp", BULK_METHODS))
    for method in methods
    for code in ("OK", "UNAVAILABLE")
}
_NO_WAITS = {("Match", GRPC): Latency(), **{("Hold", path): Latency() for path in (GRPC, "unix", "tcp")}}
"""Calls that prefill waits for, whose latency panels and an alert show; all methods would be a thousand series more."""
_NO_BYTES = {(direction, path): 0 for direction in ("in", "out") for path in (GRPC, "unix", "tcp")}
_NO_TIERS = {name: 0.0 for name in NODE_GAUGES if name.startswith(("memory_", "behind_", "disk_", "peers_"))}
"""Gauges of tiers that a worker does not have: a panel of "No data" looks like a worker that is not scraped."""
_NO_STEPS = {(tier, operation): Latency() for tier in get_args(TierName) for operation in get_args(Operation)}


class Exposition:
    """A collector for a registry; reads the worker's counts on request."""

    def __init__(self, worker: Worker, version: str) -> None:
        self._worker = worker
        self._version = version

    def collect(self) -> Iterator[Any]:
        service = self._worker.service
        yield InfoMetricFamily(
            "kvstore_build", "what runs here", {"version": self._version, "python": sys.version.split(maxsplit=1)[0]}
        )
        yield from counters(service.counters())
        for name, value in {**_NO_TIERS, **service.gauges()}.items():
            if name in GROWING:
                yield CounterMetricFamily(f"kvstore_{name}", GROWING[name], value)
            else:
                yield GaugeMetricFamily(f"kvstore_{name}", _GAUGES.get(name, name), value)
        yield GaugeMetricFamily(
            "kvstore_serving", "1 while the health service answers SERVING", float(self._worker.health.is_serving)
        )
        yield from self._calls()
        yield from self._tiers()

    def _calls(self) -> Iterator[Any]:
        calls = self._worker.service.calls
        ended = CounterMetricFamily("kvstore_calls", "calls that ended", labels=("method", "code", "path"))
        for key, count in {**_NO_CALLS, **calls.ended()}.items():
            ended.add_metric(key, count)
        yield ended
        took = {**_NO_WAITS, **calls.latencies()}
        yield _histogram("kvstore_call_seconds", "how long calls took", ("method", "path"), took.items())
        moved = CounterMetricFamily(
            "kvstore_wire_bytes", "payload bytes from and to clients", labels=("direction", "path")
        )
        for moved_key, size_bytes in {**_NO_BYTES, **calls.moved_bytes()}.items():
            moved.add_metric(moved_key, size_bytes)
        yield moved

    def _tiers(self) -> Iterator[Any]:
        found = {**_NO_STEPS, **self._worker.service.tiers.snapshot()}
        labels = ("tier", "operation")
        yield _histogram("kvstore_tier_seconds", "how long steps of a tier took", labels, found.items())
        moved = CounterMetricFamily("kvstore_tier_bytes", "bytes read from and written to a tier", labels=labels)
        for key, latency in found.items():
            moved.add_metric(key, latency.size_bytes)
        yield moved


def counters(counts: Mapping[str, int]) -> Iterator[Any]:
    """Yields every counter of a node and a worker; the flat names of a family become one metric."""
    labelled: dict[Family, CounterMetricFamily] = {}
    for counter in (*NodeCount, *WorkerCount):
        family, count = counter.family, counts[counter.flat_name]
        if family is not None:
            if family not in labelled:
                labelled[family] = CounterMetricFamily(f"kvstore_{family.metric}", family.about, labels=(family.label,))
            labelled[family].add_metric((counter.label,), count)
        elif counter not in _ELSEWHERE:
            yield CounterMetricFamily(f"kvstore_{counter.flat_name}", counter.about, count)
    yield from labelled.values()


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


def start_metrics(worker: Worker, address: str, version: str = "") -> HttpServer:
    """Serves a worker's metrics and ``/healthz`` at ``host:port``; port 0 is chosen by the system.

    Raises InvalidRequest if it cannot listen there. It has a registry of its own: the process may have metrics of
    other code.
    """
    host, _, port = address.rpartition(":")
    registry = prometheus_client.CollectorRegistry()
    registry.register(Exposition(worker, version))
    prometheus_client.ProcessCollector(registry=registry)
    return HttpServer(_with_health(worker, prometheus_client.make_wsgi_app(registry)), host.strip("[]"), int(port))


def _with_health(worker: Worker, metrics: WSGIApplication) -> WSGIApplication:
    """Answers ``/healthz`` as the health service does, for probes that cannot speak gRPC with mutual TLS."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/healthz":
            return metrics(environ, start_response)
        status, said = "200 OK", b"serving\n"
        if not worker.health.is_serving:
            status, said = "503 Service Unavailable", b"not serving: it drains, or the root hangs\n"
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(said)))])
        return [said]

    return answer
