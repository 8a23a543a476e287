"""The probes of kubelet: /healthz answers as the gRPC health service does, /metrics while the process lives."""

from __future__ import annotations

import urllib.error
import urllib.request

from kvstore.worker.metrics import start_metrics
from tests.kit.workers import serving

PATIENCE_S = 30.0


def asked(address: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_worker_that_drains_is_alive_and_not_ready() -> None:
    with serving() as served:
        metrics = start_metrics(served.worker, "127.0.0.1:0")
        try:
            assert [asked(metrics.address, path) for path in ("/healthz", "/metrics")] == [200, 200]
            assert served.worker.drain(PATIENCE_S)
            assert [asked(metrics.address, path) for path in ("/healthz", "/metrics")] == [503, 200]
        finally:
            metrics.close()
