"""What panels show is there from the start, at 0: Prometheus sees the first count as an increase, no panel is empty."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
LABELS = re.compile(r"sum by \(([a-z, ]+)\) \((?:rate|increase)?\(?(kvstore_[a-z_]+)\{([^}]*)\}")

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


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    found = [target.get("expr", "") for panel in panels for target in panel.get("targets", ())]
    return found + [each for panel in panels for each in expressions(panel.get("panels", []))]


def test_every_labelled_series_of_a_panel_is_there_from_the_start(exported: list[str]) -> None:
    queries = [each for file in GRAFANA.glob("*.json") for each in expressions(json.loads(file.read_text())["panels"])]
    asked = [found for query in queries for found in LABELS.findall(query)]
    assert len(asked) > 10
    for labels, name, wanted in asked:
        own = [label for label in labels.split(", ") if label not in ("instance", "le", "job")]
        values = dict(re.findall(r'([a-z]+)="([^"$]+)"', wanted))
        there = [line for line in exported if line.startswith((f"{name}{{", f"{name} "))]
        there = [line for line in there if all(f'{label}="{value}"' in line for label, value in values.items())]
        if 'code!="OK"' in wanted:
            there = [line for line in there if 'code="OK"' not in line]
        if own:
            assert there and all(f'{label}="' in line for label in own for line in there), (name, wanted)
            assert "bucket" in name or any(line.endswith(" 0.0") for line in there), name


def test_every_metric_of_a_panel_is_there_on_a_worker_without_memory_and_disk(exported: list[str]) -> None:
    queries = [target["expr"] for file in DASHBOARDS for panel in panels(file) for target in panel["targets"]]
    names = {name for query in queries for name in used(query) if name.startswith("kvstore_")}
    there = {re.split(r"[{ ]", line)[0] for line in exported}
    assert names - there == ELSEWHERE
    tiers = [line for line in exported if re.match(r"kvstore_(memory|behind|disk|peers)_\w+ ", line)]
    assert len(tiers) > 40 and all(line.endswith(" 0.0") for line in tiers)
