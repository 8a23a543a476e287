"""Alert rules: promtool accepts them and their tests, each has one, and they only use existing metrics."""

from __future__ import annotations

import re
import shutil
from collections import Counter

import pytest

from tests.kit.cases import for_each
from tests.kit.programs import ended
from tests.kit.watch_page import series_names
from tests.kit.watch_queries import DEPLOY, RULES, RULES_TEST, used

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
