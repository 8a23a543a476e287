"""Queries of Prometheus that ship with the project: those of the alert rules and of the dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus/alerts.yml"
RULES_TEST = DEPLOY / "prometheus/alerts_test.yml"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))

_NAME = re.compile(r"\b((?:kvstore|process)_\w+|up)\b(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_QUOTED = re.compile(r'"[^"]*"')
ADDED = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard that show something."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def shown(query: str) -> str:
    """A query of a dashboard as Grafana asks it, with all jobs and instances chosen."""
    return re.sub(r"\$(?:job|instance)\b", ".*", query.replace("$__rate_interval", "1m"))


def used(query: str) -> dict[str, set[str]]:
    """The metrics of a query, each with the labels that it is selected by."""
    found: dict[str, set[str]] = {}
    for name, selected in _NAME.findall(query):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", _QUOTED.sub("", selected)))
    return found


def grouped(query: str) -> set[str]:
    """The labels that a query groups by or joins on."""
    return {label.strip() for labels in _GROUPED.findall(query) for label in labels.split(",")} - {""}
