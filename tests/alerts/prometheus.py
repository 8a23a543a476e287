"""A real Prometheus with the shipped rules, sped up so that a test can wait for them, and its alerts."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.patience import eventually
from tests.kit.ports import free_port
from tests.kit.watch_queries import RULES

PATIENCE_S = 60.0
SOONER = {
    "> 3600": "> 20",  # without a round
    "kvstore_gc_waiting_seconds > 120": "kvstore_gc_waiting_seconds > 4",
}
"""Waits that are part of a rule's condition, not of its ``for``."""
CONFIG = """\
global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvstore-worker
    file_sd_configs: [{{files: [{workers}], refresh_interval: 1s}}]
  - job_name: kvstore-gc
    file_sd_configs: [{{files: [{collectors}], refresh_interval: 1s}}]
"""


def impatient(rules: str) -> str:
    """The rules with a short ``for``, in which every server is scraped once, and with the other waits as in SOONER."""
    changed, count = re.subn(r"for: \w+", "for: 3s", rules)
    assert count > 10
    for long, short in SOONER.items():
        assert changed.count(long) == 1, f"alerts.yml has no {long!r} any more"
        changed = changed.replace(long, short)
    return changed


class Prometheus:
    """One server. ``watch`` says whom it scrapes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.awaited: set[str] = set()
        """Alerts that were waited for, and came."""
        self._address = f"127.0.0.1:{free_port()}"

    @contextmanager
    def running(self) -> Iterator[Prometheus]:
        """Starts it, after it was told whom to watch, and stops it in the end."""
        (self._folder / "alerts.yml").write_text(impatient(RULES.read_text()))
        config = self._folder / "prometheus.yml"
        config.write_text(CONFIG.format(rules="alerts.yml", workers="workers.json", collectors="collectors.json"))
        with open(self._folder / "prometheus.log", "w") as messages:
            child = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--web.listen-address={self._address}",
                    f"--storage.tsdb.path={self._folder / 'tsdb'}",
                    "--log.level=warn",
                ],
                stdout=messages,
                stderr=messages,
            )
        try:
            self._wait_ready()
            yield self
        finally:
            child.terminate()
            child.wait(PATIENCE_S)

    def watch(self, group: str, addresses: Sequence[str]) -> None:
        """Scrapes these from now on, as ``workers`` or ``collectors``."""
        path = self._folder / f"{group}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps([{"targets": list(addresses)}]))
        fresh.rename(path)

    def query(self, query: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        found: list[dict[str, Any]] = self._ask("query", query=query)["result"]
        return found

    def firing(self) -> set[str]:
        """Alerts that fire now."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def wait_fired(self, *alerts: str, within_s: float = PATIENCE_S) -> None:
        """Returns once all of these have fired, each at some moment since the call."""
        missing, deadline_s = set(alerts), time.monotonic() + within_s
        while missing := missing - self.firing():
            if time.monotonic() > deadline_s:
                pytest.fail(f"did not fire within {within_s:g} s: {sorted(missing)}")
            time.sleep(0.3)
        self.awaited |= set(alerts)

    def names(self) -> set[str]:
        """Every metric that was scraped."""
        return set(self._ask("label/__name__/values"))

    def _ask(self, what: str, **parameters: str) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]

    def _wait_ready(self) -> None:
        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=1.0):
                    return True
            except OSError:
                return False

        eventually(is_ready, f"the start of Prometheus (see {self._folder}/prometheus.log)")
