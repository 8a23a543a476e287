"""Prometheus metrics of a worker, over HTTP. Its own registry: the process may have metrics of somebody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.node.counters import COUNTERS, GAUGES
from kvstore.worker.calls import LATENCY_BUCKETS_S, WORKER_COUNTERS, WORKER_GAUGES
from kvstore.worker.worker import Worker

_HELP = {**COUNTERS, **WORKER_COUNTERS, **GAUGES, **WORKER_GAUGES}


class MetricsServer:
    """Serves ``/metrics`` until closed. Made by ``start_metrics``."""

    def __init__(self, server: Any, thread: threading.Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        self.address = address
        """Where it listens, as ``host:port``."""

    def close(self) -> None:
        """Stops serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def start_metrics(worker: Worker, address: str) -> MetricsServer:
    """Serves a worker's metrics at ``host:port``; port 0 is chosen by the system.

    Raises InvalidRequest where it cannot listen there, ModuleNotFoundError where the ``server`` extra is missing.
    """
    try:
        import prometheus_client
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("metrics need prometheus-client: pip install 'kvstore[server]'") from missing
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"metrics address {address!r}: expected host:port")
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(worker))
    try:
        server, thread = prometheus_client.start_http_server(int(port), host.strip("[]"), registry)
    except OSError as cause:
        raise InvalidRequest(f"could not serve metrics at {address}: {cause.strerror or cause}") from cause
    return MetricsServer(server, thread, f"{host}:{server.server_port}")


class _Collector:
    """Reads the worker's counts when it is asked."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        service = self._worker.service
        for name, value in service.counters().items():
            yield CounterMetricFamily(f"kvstore_{name}", _HELP.get(name, "damaged chunks of this kind"), value)
        for name, gauge in service.gauges().items():
            yield GaugeMetricFamily(f"kvstore_{name}", _HELP.get(name, name.replace("_", " ")), gauge)
        yield GaugeMetricFamily("kvstore_serving", "whether health says SERVING", float(self._worker.is_serving))
        calls = CounterMetricFamily("kvstore_calls", "calls that ended", labels=("method", "code"))
        for (method, code), count in service.calls.ended().items():
            calls.add_metric((method, code), count)
        yield calls
        latencies = HistogramMetricFamily("kvstore_call_seconds", "how long calls took", labels=("method",))
        for method, latency in service.calls.latencies().items():
            total = 0
            buckets = []
            for bound, count in zip((*LATENCY_BUCKETS_S, float("inf")), latency.buckets, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
            latencies.add_metric((method,), buckets, latency.sum_s)
        yield latencies
