"""What panels show is there from the start, at 0: Prometheus sees the first count as an increase, no panel is empty."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvstore.core.clock import SystemClock
from kvstore.meta.memory import MemoryMetadata
from kvstore.worker.metrics import Exposition
from kvstore_gc import metrics
from kvstore_gc.capacity import Pressure
from tests.kit.clusters import site_of
from tests.kit.watch_queries import DASHBOARDS, panels, used
from tests.kit.workers import serving

ELSEWHERE = {
    "kvstore_certificate_expires_seconds",  # with TLS
    *("kvstore_root_free_bytes", "kvstore_root_total_bytes"),  # a root in memory cannot tell
    "kvstore_gc_waiting_seconds",  # a collector that runs as a service
}


def series(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def exported() -> list[str]:
    """All series of a worker and a collector that have done nothing."""
    registry = CollectorRegistry()
    with serving() as served:
        registry.register(Exposition(served.worker, "0"))
        mine = series(registry)
    return [*mine, *series(metrics.Metrics(Pressure(site_of(MemoryMetadata()), None), SystemClock()).registry)]


def test_every_metric_of_a_panel_is_there_on_a_worker_without_memory_and_disk(exported: list[str]) -> None:
    queries = [target["expr"] for file in DASHBOARDS for panel in panels(file) for target in panel["targets"]]
    names = {name for query in queries for name in used(query) if name.startswith("kvstore_")}
    there = {re.split(r"[{ ]", line)[0] for line in exported}
    assert names - there == ELSEWHERE
    tiers = [line for line in exported if re.match(r"kvstore_(memory|behind|disk|peers)_\w+ ", line)]
    assert len(tiers) > 40 and all(line.endswith(" 0.0") for line in tiers)
