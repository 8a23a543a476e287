"""METRICS.md against the metrics of a real worker and collector: none undocumented, none missing, labels as stated."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kvstore
from kvstore.core.clock import SystemClock
from kvstore.core.metrics import GROWING, NODE_GAUGES, WORKER_GAUGES, NodeCount, WorkerCount
from kvstore.engine.open import open_member
from kvstore.engine.settings import TierSettings
from kvstore.format.header import Damage
from kvstore.meta.memory import MemoryMetadata
from kvstore.worker.metrics import Exposition, start_metrics
from kvstore.worker.server import Worker
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.metrics import Metrics
from kvstore_gc.rank import CountAndBytes
from kvstore_gc.summary import Summary
from tests.kit.clusters import site_of
from tests.kit.stores import SMALL, kv_of
from tests.kit.watch_page import PAGE, Documented, documented
from tests.kit.workers import WAIT_S

MEASURED = {
    *("kvstore_serving", "kvstore_build_info", "kvstore_calls_total", "kvstore_call_seconds"),
    *("kvstore_wire_bytes_total", "kvstore_tier_seconds", "kvstore_tier_bytes_total"),
}
"""Served from elsewhere than the counters and gauges."""
SUMMED = {"kvstore_wire_bytes_in_total", "kvstore_wire_bytes_out_total"}
"""In ``stats()`` alone; the metrics have their parts."""
TOKENS = list(range(4 * SMALL.chunk_tokens))


def rows_of(families: Iterable[Any]) -> dict[str, Documented]:
    """Families as rows of the page."""
    found = {}
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        found[name] = Documented("gauge" if family.type == "info" else family.type, tuple(labels))
    return found


def of_worker(tmp_path: Path) -> dict[str, Documented]:
    """Returns the metrics of a worker with every tier after a few calls, and those that its code has only elsewhere."""
    settings = TierSettings(memory_bytes=32 << 20, disk_folder=str(tmp_path / "disk"), disk_bytes=1 << 26)
    member = open_member(str(tmp_path / "root"), settings=settings)
    worker = Worker(member, "127.0.0.1:0")
    try:
        worker.start()
        with kvstore.connect(worker.address) as store:
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, kv_of(SMALL, TOKENS), write="through")
            member.node.forget()
            assert cache.match(TOKENS) == len(TOKENS)
            cache.get(TOKENS)
        served = rows_of(Exposition(worker, "1.2.3").collect())
    finally:
        worker.stop()
        member.close()
    gauges = {f"kvstore_{name}": Documented("gauge", ()) for name in {**NODE_GAUGES, **WORKER_GAUGES}}
    grown = {f"kvstore_{name}_total" for name in GROWING}
    declared = {f"kvstore_{each.flat_name}_total" for each in (*NodeCount, *WorkerCount) if each.family is None}
    labelled = {f"kvstore_{each.family.metric}_total" for each in (*NodeCount, *WorkerCount) if each.family}
    undeclared = {*served} - {*gauges} - grown - declared - labelled - MEASURED
    assert not undeclared, f"served without a line in kvstore/core/metrics.py: {undeclared}"
    assert declared - {*served} == SUMMED, "counters that are declared and not served"
    return gauges | served


def of_collector() -> dict[str, Documented]:
    """Returns the metrics of a collector after a round in which everything happened."""
    site = site_of(MemoryMetadata())
    pressure = Pressure(site, None)
    metrics = Metrics(pressure, SystemClock())
    metrics.follow(60.0, Cycle(site, Config(), pressure))
    some = CountAndBytes(1, 1)
    summary = Summary(
        dry_run=False,
        started_s=0.0,
        shards_count=1,
        chosen={"ttl": some},
        kept={"pinned": some},
        reaped=some,
        seconds={"plan": 1.0},
    )
    summary.spared["pinned"] = summary.orphans["trash"] = 1
    metrics.done(summary)
    return {name: row for name, row in rows_of(metrics.registry.collect()).items() if name.startswith("kvstore_")}


def test_the_page_has_every_metric_and_no_other(tmp_path: Path) -> None:
    served = of_worker(tmp_path) | of_collector()
    page = documented()
    missing = [
        f"| `{name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | ... |"
        for name, row in sorted(served.items())
        if name not in page
    ]
    assert not missing, "METRICS.md lacks:\n" + "\n".join(missing)
    assert not sorted(set(page) - set(served)), "METRICS.md has what nobody serves"
    wrong = {name: (page[name], row) for name, row in served.items() if page[name] != row}
    assert not wrong, "METRICS.md says another type or other labels"


def test_the_page_has_every_reason() -> None:
    said = PAGE.read_text()
    labels = {each.label for each in (*NodeCount, *WorkerCount) if each.family}
    assert {kind.value for kind in Damage} <= labels
    assert not sorted(label for label in labels if f"`{label}`" not in said)


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
