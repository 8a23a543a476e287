"""Sentences on what an operator should look at now: the list at the top of the overview. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.dashboard.cluster import Cluster
from kvstore.dashboard.feed import Reading
from kvstore.dashboard.rooted import Quarantine, RootSeen
from kvstore.dashboard.workers import WorkerSeen

FREE_MIN = 0.05
ITEMS_MAX = 50

Item = dict[str, str]

_SOURCES = {
    "etcd": "etcd: {error}. What is shown of sessions, pins and namespaces may be out of date; reads and writes go on.",
    "root": "the root: {error}. Nodes count what they cannot read as misses.",
    "workers": "workers: {error}.",
    "quarantine": "the quarantine could not be listed: {error}.",
}


def attention(looks: Mapping[str, Reading[Any]]) -> list[Item]:
    """Lists problems ("bad") and warnings ("warn"), each with the view that tells more; problems first."""
    items = [*_of_sources(looks), *_of_workers(looks["workers"].value or {})]
    items += [*_of_cluster(looks["etcd"].value), *_of_root(looks["root"].value, looks["quarantine"].value)]
    return sorted(items, key=lambda item: item["level"] != "bad")[:ITEMS_MAX]


def _item(level: str, view: str, text: str) -> Item:
    return {"level": level, "view": view, "text": text}


def _of_sources(looks: Mapping[str, Reading[Any]]) -> Iterator[Item]:
    views = {"etcd": "workers", "root": "capacity", "workers": "workers", "quarantine": "damage"}
    for name, said in _SOURCES.items():
        error = looks[name].error
        if error is not None:
            yield _item("bad", views[name], said.format(error=error.rstrip(".")))


def _of_workers(workers: Mapping[str, WorkerSeen]) -> Iterator[Item]:
    for address, worker in workers.items():
        counts = worker.counts
        if counts is None:
            said = "does not answer" if worker.missing_since_s is None else "is missing"
            yield _item("bad", "workers", f"worker {address} {said}: {worker.error}")
            continue
        if counts.get("root_hangs"):
            yield _item("bad", "workers", f"worker {address}: the root does not answer it")
        if not counts.get("session_alive", 1):
            yield _item("bad", "workers", f"worker {address} has no session in etcd: holds and pins wait")
        elif not counts.get("protected", 1):
            yield _item(
                "bad",
                "workers",
                f"worker {address} has holds and pins that collectors ignore: see kvstore fsck --adopt",
            )
        if counts.get("draining"):
            yield _item("warn", "workers", f"worker {address} is draining")
        if counts.get("behind_lost"):
            yield _item("warn", "workers", f"worker {address} lost {counts['behind_lost']:,} chunks written behind")
    if not workers:
        yield _item("warn", "workers", "no worker is known")


def _of_cluster(etcd: Cluster | None) -> Iterator[Item]:
    if etcd is None:
        return
    if etcd.is_full:
        yield _item("bad", "capacity", "a collector says that the root is full: puts are refused until there is room")
    if not etcd.collectors:
        yield _item("warn", "capacity", "no garbage collector runs as a service: nothing is deleted unless cron does")
    if etcd.odd_namespaces_count:
        count = etcd.odd_namespaces_count
        yield _item("warn", "namespaces", f"{count} records of namespaces in etcd cannot be read")


def _of_root(root: RootSeen | None, quarantine: Quarantine | None) -> Iterator[Item]:
    if quarantine is not None and quarantine.count:
        more = "" if quarantine.is_whole else "more than "
        files = "1 damaged file is" if quarantine.count == 1 else f"{more}{quarantine.count:,} damaged files are"
        yield _item("warn", "damage", f"{files} in quarantine: run kvstore fsck ROOT --repair")
    if root is None or not root.space.total_bytes or root.space.free_bytes is None:
        return
    if root.space.free_bytes < FREE_MIN * root.space.total_bytes:
        yield _item("bad", "capacity", f"less than {FREE_MIN:.0%} of the root's file system is free")
