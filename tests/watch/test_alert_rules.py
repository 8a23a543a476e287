"""Alert rules and dashboards: every query is valid in Prometheus, and uses metrics and labels in docs/metrics.md."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.cases import for_each
from tests.kit.programs import ended
from tests.kit.watch_page import documented, series_names
from tests.kit.watch_queries import ADDED, DASHBOARDS, DEPLOY, RULES, RULES_TEST, grouped, panels, shown, used

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


# Alert rules: promtool accepts them and their tests, each has one, and they only use existing metrics.


NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's prometheus)")
ALERT = re.compile(r"- alert: (\w+)\n(.*?)(?=\n\n|\Z)", re.DOTALL)


def alerts() -> dict[str, str]:
    """The text of each rule by its alert's name."""
    found = ALERT.findall(RULES.read_text())
    assert len(found) == RULES.read_text().count("- alert: ") == len(dict(found))
    return dict(found)


def test_every_metric_of_a_rule_is_documented() -> None:
    known = series_names() | {"up"}
    for alert, text in alerts().items():
        names = set(used(text.split("labels:")[0]))
        assert names, f"{alert} asks for nothing"
        assert {name for name in names if not name.startswith("process_")} <= known, f"{alert}: {names - known}"


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for alert, rest in re.findall(r'alertname="(\w+)".*?\n.*?\n\s*exp_samples: (.*)', RULES_TEST.read_text()):
        (silent if rest == "[]" else fires)[alert] += 1
    assert set(fires) == set(silent) == set(alerts())


@NEEDS_PROMTOOL
@for_each(
    "arguments",
    [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml"), ("check", "config", "prometheus.yml")],
)
def test_promtool_accepts_what_ships(arguments: tuple[str, ...]) -> None:
    done = ended("promtool", *arguments, cwd=DEPLOY / "prometheus")
    assert done.returncode == 0, done.stdout + done.stderr
