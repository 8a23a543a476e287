"""Servers as they are started: JSON on standard error, metrics of a collector, spans on their way to a collector."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import kvstore
from kvstore.cli.worker import start_tracing
from kvstore.core import tracing
from tests.cli.conftest import PATIENCE_S, serving
from tests.kit.cases import for_each
from tests.kit.stores import SMALL


@contextmanager
def receiver() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An HTTP server that keeps what is posted to it; yields its address, and path and body of each post."""
    came: list[tuple[str, bytes]] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_spans_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as (address, came):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        stop = start_tracing(None, "kvstore-worker", "node7:7070")
        with kvstore.open("memory://") as store:
            store.namespace("m", SMALL).match(range(SMALL.chunk_tokens))
        stop()
        path, body = came[0]
    assert path == "/v1/traces" and b"kvstore.match" in body and b"kvstore-worker" in body
    assert b"node7:7070" in body
    with tracing.span("after") as span:
        assert span is None, "nothing is made once it has ended"


@for_each("wanted", [None, False])
def test_nothing_is_sent_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, wanted: bool | None) -> None:
    if wanted is None:
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    stop = start_tracing(wanted, "kvstore-worker", "node7:7070")
    with tracing.span("one") as span:
        assert span is None
    stop()


@pytest.mark.slow
def test_up_logs_json_and_its_collector_serves_metrics(tmp_path: Path) -> None:
    arguments = ("up", "--root", str(tmp_path / "root"), "--listen", "127.0.0.1:0", "--log-format", "json")
    with serving(tmp_path, *arguments, "--gc-metrics", "127.0.0.1:0") as up:
        with urllib.request.urlopen(f"http://{up.said['gc-metrics']}/metrics", timeout=PATIENCE_S) as page:
            shown = page.read().decode()
        assert 'kvstore_gc_rounds_total{outcome="failed"} 0.0' in shown and "process_start_time_seconds " in shown
        assert up.end() == 0
    assert all(
        {"time", "level", "logger", "message"} <= set(json.loads(line)) for line in up.log.read_text().splitlines()
    )
