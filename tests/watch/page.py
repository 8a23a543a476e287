"""Writes docs/metrics.md from the metrics of a running worker and collector:  .venv/bin/python -m tests.watch.page

A test fails when the page is stale.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import kvstore
from kvstore.core.clock import SystemClock
from kvstore.core.metrics import NODE_GAUGES, WORKER_GAUGES, Family, NodeCount, WorkerCount
from kvstore.engine.open import open_member
from kvstore.engine.settings import TierSettings
from kvstore.meta.memory import MemoryMetadata
from kvstore.worker.metrics import Exposition
from kvstore.worker.server import Worker
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import Cycle
from kvstore_gc.metrics import Metrics
from tests.kit.clusters import site_of
from tests.kit.stores import SMALL, kv_of
from tests.kit.watch_page import PAGE

HEAD = """# List of metrics

`python -m tests.watch.page` makes this page from a running worker and collector; do not edit it.
[METRICS.md](../kvstore/worker/METRICS.md) explains how they are counted.
"""
TOKENS = list(range(4 * SMALL.chunk_tokens))


def row(name: str, kind: str, labels: Iterable[str], about: str) -> str:
    return f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {about} |"


def rows(families: Iterable[Any]) -> dict[str, str]:
    """Families as rows of the page, by their names."""
    found = {}
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        kind = "gauge" if family.type == "info" else family.type
        found[name] = row(name, kind, labels, family.documentation)
    return found


def of_worker(folder: str) -> dict[str, str]:
    """The metrics of a worker with every tier after a few calls, and gauges that it has only elsewhere."""
    settings = TierSettings(memory_bytes=32 << 20, disk_folder=f"{folder}/disk", disk_bytes=1 << 26)
    member = open_member(f"{folder}/root", settings=settings)
    worker = Worker(member, "127.0.0.1:0")
    try:
        worker.start()
        with kvstore.connect(worker.address) as store:
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, kv_of(SMALL, TOKENS), write="through")
            member.node.forget()
            assert cache.match(TOKENS) == len(TOKENS)
            cache.get(TOKENS)
        served = rows(Exposition(worker, "1.2.3").collect())
    finally:
        worker.stop()
        member.close()
    gauges = {**NODE_GAUGES, **WORKER_GAUGES}
    return {f"kvstore_{name}": row(f"kvstore_{name}", "gauge", (), about) for name, about in gauges.items()} | served


def of_collector() -> dict[str, str]:
    """The metrics of a collector."""
    site = site_of(MemoryMetadata())
    pressure = Pressure(site, None)
    metrics = Metrics(pressure, SystemClock())
    metrics.follow(60.0, Cycle(site, Config(), pressure))
    return {name: each for name, each in rows(metrics.registry.collect()).items() if name.startswith("kvstore_")}


def table(each: dict[str, str]) -> list[str]:
    return ["| metric | type | labels | meaning |", "|---|---|---|---|", *(each[name] for name in sorted(each)), ""]


def values(family: Family) -> list[str]:
    """The values of a family's label."""
    counts = [each for each in (*NodeCount, *WorkerCount) if each.family is family]
    heading = [f"`kvstore_{family.metric}_total`:", "", f"| `{family.label}` | meaning |", "|---|---|"]
    return [*heading, *(f"| `{each.label}` | {each.about} |" for each in counts), ""]


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        worker = of_worker(folder)
    families = dict.fromkeys(each.family for each in (*NodeCount, *WorkerCount) if each.family)
    labels = [line for family in families for line in values(family)]
    lines = [
        HEAD,
        "## Workers",
        "",
        *table(worker),
        "## Labels",
        "",
        *labels,
        "## Collectors",
        "",
        *table(of_collector()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
