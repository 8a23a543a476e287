"""The names of metrics: the page lists what a worker and a collector serve, and all is there from the start."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from kvstore.core.metrics import GROWING, NodeCount, WorkerCount
from kvstore.engine.open import open_member
from kvstore.format.header import Damage
from kvstore.worker.metrics import start_metrics
from kvstore.worker.server import Worker
from tests.kit.watch_page import PAGE, documented
from tests.kit.workers import WAIT_S
from tests.watch.page import page

SUMMED = {"kvstore_wire_bytes_in_total", "kvstore_wire_bytes_out_total"}
"""In ``stats()`` alone; the metrics have their parts."""


def test_the_page_is_what_is_served() -> None:
    assert PAGE.read_text() == page(), "run: .venv/bin/python -m tests.watch.page"


def test_every_counter_is_served() -> None:
    counts = [*NodeCount, *WorkerCount]
    declared = {f"kvstore_{each.family.metric if each.family else each.flat_name}_total" for each in counts}
    assert declared - {*documented()} == SUMMED
    assert {f"kvstore_{name}_total" for name in GROWING} <= {*documented()}
    assert {kind.value for kind in Damage} <= {each.label for each in counts}


def test_a_scrape_has_what_a_prometheus_expects(tmp_path: Path) -> None:
    member = open_member(str(tmp_path / "root"))
    worker = Worker(member, "127.0.0.1:0")
    try:
        worker.start()
        metrics = start_metrics(worker, "127.0.0.1:0", "1.2.3")
        try:
            with urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=WAIT_S) as answer:
                lines = answer.read().decode().splitlines()
        finally:
            metrics.close()
    finally:
        worker.stop()
        member.close()
    shown = [line for line in lines if not line.startswith("#")]
    assert any(
        re.fullmatch(r'kvstore_build_info\{python="3\.\d+\.\d+\S*",version="1.2.3"\} 1.0', line) for line in shown
    )
    assert any(line.startswith("process_start_time_seconds ") for line in shown)
    # An increase from nothing to 1 is none to Prometheus: what alerts look at is there from the start.
    for name in (
        'kvstore_damage_total{kind="section_checksum"}',
        'kvstore_misses_total{reason="shed"}',
        "kvstore_behind_lost_total",
        "kvstore_calls_failed_total",
        "kvstore_disk_failed_total",
    ):
        assert f"{name} 0.0" in shown
