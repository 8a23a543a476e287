"""Dashboards: every query is valid in Prometheus, and uses only metrics and labels in docs/metrics.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.kit.cases import for_each
from tests.kit.programs import ended
from tests.kit.watch_page import documented, series_names
from tests.kit.watch_queries import ADDED, DASHBOARDS, grouped, panels, shown, used

HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def labels_of(name: str) -> set[str]:
    rows = documented()
    for part in ("", *HISTOGRAM_PARTS):
        if name.removesuffix(part) in rows:
            return set(rows[name.removesuffix(part)].labels) | ADDED
    return set(ADDED)


def queries(dashboard: Path) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


@for_each("dashboard", DASHBOARDS)
def test_every_metric_and_label_of_a_dashboard_is_documented(dashboard: Path) -> None:
    known = series_names() | {"up"}
    for query in queries(dashboard):
        metrics = used(query)
        assert metrics, f"asks for nothing: {query}"
        for name, labels in metrics.items():
            assert name in known or name.startswith("process_"), f"docs/metrics.md has no {name}: {query}"
            assert labels <= labels_of(name), f"{name} has no {labels - labels_of(name)}: {query}"
        there = set().union(*map(labels_of, metrics))
        assert grouped(query) <= there, f"groups by {grouped(query) - there}: {query}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's prometheus)")
def test_prometheus_can_parse_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:{dashboard.stem}:{number}", "expr": shown(query)}
        for dashboard in DASHBOARDS
        for number, query in enumerate(queries(dashboard))
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))  # JSON is YAML as well
    checked = ended("promtool", "check", "rules", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout + checked.stderr
