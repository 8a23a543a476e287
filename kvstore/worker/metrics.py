"""What a worker serves over HTTP: its metrics for Prometheus, its health for probes, and answers for routers.

A new counter or gauge is a line in kvstore/core/metrics.py; METRICS.md lists them. ``stats()`` returns them under flat
names.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("metrics need prometheus-client: pip install 'kvstore-llm[server]'") from missing

from kvstore.core import metrics_http, tracing
from kvstore.core.address import TokenArray
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
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.security.access import PERMISSIONS, Presented
from kvstore.security.tls import is_loopback
from kvstore.transport.query import QueryCaller, Question, answer_document, answered, asks
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
            "kvstore_serving", "1 while the health service answers SERVING", float(self._worker.is_serving)
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


# Answers for routers that ask a worker: how long a prefix it can read, and how much of that its memory has.
#
# The access rules are those of the worker's calls. The port is plain HTTP, so a worker with TLS answers its host
# alone.


METHOD = "Match"
"""The call that a question is: it asks for the same."""
STORAGE, MEMORY = "STORAGE", "CPU"
"""Media as routers know them."""
AGAIN_S = 1.0
NAMES_S = 60.0
"""The root's namespaces are read again after so long; for a name that is not known, after ``AGAIN_S``."""


class Questions:
    """Answers questions about the store of a worker that is started. Thread-safe."""

    def __init__(self, worker: Worker) -> None:
        self._member = worker.member
        self._guard = worker.service.calls.guard
        self._instance = worker.advertised
        self._for_host_alone = worker.security.tls is not None
        self._lock = threading.Condition()  # guards names
        self._names: dict[tuple[str, str], list[Namespace]] = {}
        self._named_s = float("-inf")

    def identify(self, caller: QueryCaller) -> None:
        """Raises KVStoreError for a caller who may ask nothing, whatever the question is."""
        self._guard.identify(METHOD, self._presented(caller), caller.address, tracing.request_id())

    def answer(self, question: Question, caller: QueryCaller) -> dict[str, Any]:
        """Answers one question. Raises KVStoreError if it is invalid, or the caller may not ask it."""
        visit = self._guard.admit(METHOD, self._presented(caller), caller.address, tracing.request_id())
        outcome = "failed"
        try:
            visit.allow(question.tenant, question.model)
            found = self._answer(question)
            outcome = "OK"
        finally:
            visit.end(outcome)
        return found

    def _presented(self, caller: QueryCaller) -> Presented:
        """Returns what a caller presents. Raises PermissionDenied for one who may not send that over plain HTTP."""
        if self._for_host_alone and not is_loopback(f"{caller.address}:0"):
            raise PermissionDenied("questions are plain HTTP: ask from this worker's host, or through a proxy with TLS")
        return Presented(token=caller.token, account=caller.account)

    def _answer(self, question: Question) -> dict[str, Any]:
        if question.tokens is None:
            raise InvalidRequest("a worker knows no hashes of events: give token_ids, or ask kvstore events")
        best = (0, 0, 0)
        for namespace in self._named(question):
            blocks, in_memory = self._leading(namespace, question.tokens)
            best = max(best, (blocks, in_memory, namespace.layout.chunk_tokens), key=lambda each: each[0] * each[2])
        blocks, in_memory, size = best
        return answer_document(question, size, blocks, self._instance, {MEMORY: in_memory, STORAGE: blocks})

    def _leading(self, namespace: Namespace, tokens: TokenArray) -> tuple[int, int]:
        """Returns how many leading chunks can be read, and how many of them memory has."""
        node = self._member.node
        chain = node.chains.of(namespace, tokens)
        blocks = node.match(chain, node.limits.match_deadline_s, counts=False)
        if node.memory is None or not blocks:
            return blocks, 0
        return blocks, min(blocks, node.memory.leading(chain))

    def _named(self, question: Question) -> list[Namespace]:
        """Returns the namespaces of that name and tenant. Raises the root's errors."""
        wanted = (question.tenant, question.model)
        with self._lock:
            names, age_s = self._names, time.monotonic() - self._named_s
        if age_s >= (NAMES_S if wanted in names else AGAIN_S):
            names = {}
            for namespace in self._member.node.namespaces():
                names.setdefault((namespace.tenant, namespace.name), []).append(namespace)
            with self._lock:
                self._names, self._named_s = names, time.monotonic()
        return names.get(wanted, [])


class MetricsServer:
    """Serves ``/metrics``, ``/healthz`` and ``/query`` until closed. Made by ``start_metrics``."""

    def __init__(self, server: Any, thread: threading.Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        self.address = address
        """Its address, as ``host:port``."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def start_metrics(worker: Worker, address: str, version: str = "") -> MetricsServer:
    """Serves a worker's metrics at ``host:port``; port 0 is chosen by the system.

    Raises InvalidRequest if it cannot listen there. It has a registry of its own: the process may have metrics of
    other code.
    """
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"metrics address {address!r}: expected host:port")
    registry = prometheus_client.CollectorRegistry()
    registry.register(Exposition(worker, version))
    prometheus_client.ProcessCollector(registry=registry)
    try:
        app = _with_answers(worker, prometheus_client.make_wsgi_app(registry))
        server, thread = metrics_http.serve(app, host.strip("[]"), int(port))
    except OSError as cause:
        raise InvalidRequest(f"could not serve metrics at {address}: {cause.strerror or cause}") from cause
    return MetricsServer(server, thread, f"{host}:{server.server_port}")


def _with_answers(worker: Worker, metrics: WSGIApplication) -> WSGIApplication:
    """Answers ``/healthz`` as the health service does, for probes that cannot speak gRPC with mutual TLS, and questions
    of routers (``POST /query``)."""
    questions = Questions(worker)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if asks(environ):
            return answered(environ, start_response, questions.identify, questions.answer)
        if environ.get("PATH_INFO") != "/healthz":
            return metrics(environ, start_response)
        status, said = "200 OK", b"serving\n"
        if not worker.is_serving:
            status, said = "503 Service Unavailable", b"not serving: it drains, or the root hangs\n"
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(said)))])
        return [said]

    return answer
