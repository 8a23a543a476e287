"""Serves a worker's metrics over HTTP, from its own registry: the process may have metrics of other code.

A new counter or gauge is a line in kvstore/counts.py; exposition.py makes metrics of them; METRICS.md lists them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvstore import scraping
from kvstore.errors import InvalidRequest
from kvstore.wire.query import answered, asks
from kvstore.worker.worker import Worker

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class MetricsServer:
    """Serves ``/metrics``, ``/healthz`` and ``/query`` until closed. Made by ``start_metrics``."""

    def __init__(self, server: Any, thread: threading.Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        self.address = address
        """Its address, as ``host:port``."""

    def close(self) -> None:
        """Stops serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def start_metrics(worker: Worker, address: str, version: str = "") -> MetricsServer:
    """Serves a worker's metrics at ``host:port``; port 0 is chosen by the system.

    Raises InvalidRequest if it cannot listen there, ModuleNotFoundError if the ``server`` extra is missing.
    """
    try:
        import prometheus_client

        from kvstore.worker.exposition import Exposition
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("metrics need prometheus-client: pip install 'kvstore-llm[server]'") from missing
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"metrics address {address!r}: expected host:port")
    registry = prometheus_client.CollectorRegistry()
    registry.register(Exposition(worker, version))
    prometheus_client.ProcessCollector(registry=registry)
    try:
        app = _with_answers(worker, prometheus_client.make_wsgi_app(registry))
        server, thread = scraping.serve(app, host.strip("[]"), int(port))
    except OSError as cause:
        raise InvalidRequest(f"could not serve metrics at {address}: {cause.strerror or cause}") from cause
    return MetricsServer(server, thread, f"{host}:{server.server_port}")


def _with_answers(worker: Worker, metrics: WSGIApplication) -> WSGIApplication:
    """Answers ``/healthz`` as the health service does, for probes that cannot speak gRPC with mutual TLS, and questions
    of routers (``POST /query``)."""
    questions = worker.questions()

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
