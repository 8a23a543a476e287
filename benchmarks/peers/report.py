"""The results of the contests: ratios of kvstore to each contender, and which targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.contender import ENTRIES
from benchmarks.peers.contest import PUT, Contest
from benchmarks.result import Cell, Table

GIB = 1 << 30
GET, VIEW = "get", "view"
OURS = "kvstore"
DURABLE = "kvstore-fsync"
SYNCING = ("vineyard", "vineyard-lists")
"""Peers that sync each file: on a disk they are compared with our durable put."""
COLUMNS = (
    "contender",
    "put GiB/s",
    "get GiB/s",
    "view GiB/s",
    "kvstore put ratio",
    "kvstore get ratio",
    "kvstore view ratio",
    "put ratio range",
    "get ratio range",
    "put CPU s/GiB",
    "get CPU s/GiB",
    "view CPU s/GiB",
    "failure",
)
TARGET_COLUMNS = ("target", "workload", "wanted", "ratio", "met")


@dataclass(frozen=True)
class Target:
    """Our operation against a peer's: the ratio wanted, on workloads of one kind."""

    peer: str
    operation: str
    at_least: float
    long_prompts: bool = False
    ours: str = OURS

    @property
    def title(self) -> str:
        theirs = PUT if self.operation == PUT else GET
        return f"{ENTRIES[self.ours].title} {self.operation} / {ENTRIES[self.peer].title} {theirs}"


TARGETS = (
    Target("vineyard", PUT, 3.0),
    Target("vineyard", GET, 3.0),
    Target("vineyard", PUT, 20.0, long_prompts=True),
    Target("vineyard", GET, 20.0, long_prompts=True),
    Target("vineyard-lists", PUT, 20.0, long_prompts=True),
    Target("vineyard-lists", GET, 20.0, long_prompts=True),
    Target("lmcache-fs-native", PUT, 1.1),
    Target("lmcache-fs-native", GET, 1.0),
    Target("lmcache-fs-native", VIEW, 2.0),
    Target("lmcache-fs-native", PUT, 1.1, ours="kvstore-blocks"),
    Target("lmcache-fs-native", GET, 1.0, ours="kvstore-blocks"),
)


def table_of(contest: Contest, place: str) -> Table:
    """One row for each contender, failed ones with their reason."""
    work = contest.workload
    title = (
        f"Peers: {work.name}, {work.chunk_count} chunks of {work.chunk_bytes / (1 << 20):g} MiB, "
        f"{contest.threads} threads, {place}"
    )
    names = [name for name in ENTRIES if name in contest.seconds or name in contest.failures]
    notes = [f"{ENTRIES[name].title}: {ENTRIES[name].note}" for name in names if ENTRIES[name].note]
    if DURABLE in contest.seconds:
        notes.append("put ratios to peers that sync each file are those of kvstore with fsync")
    return Table(title, COLUMNS, [_row(contest, name) for name in names], "; ".join(notes))


def targets_of(contests: Sequence[tuple[Contest, str]]) -> Table:
    """Each target on each contest it is about; these come with the file system they were on."""
    rows: list[list[Cell]] = []
    for contest, place in contests:
        for target in TARGETS:
            if target.long_prompts != contest.workload.long_prompt:
                continue
            ours, theirs = _opponents(contest, target)
            ratios = _ratios(contest, ours, target.operation, theirs)
            found = statistics.median(ratios) if ratios else None
            met = "not measured" if found is None else "yes" if found >= target.at_least else "no"
            title = target.title if ours == target.ours else target.title.replace("kvstore", "kvstore, fsync,", 1)
            rows.append([title, f"{contest.workload.name}, {place}", target.at_least, found, met])
    return Table("Peers: targets", TARGET_COLUMNS, rows)


def _opponents(contest: Contest, target: Target) -> tuple[str, str]:
    durable = target.peer in SYNCING and target.operation == PUT and DURABLE in contest.seconds
    return (DURABLE if durable else target.ours), target.peer


def _row(contest: Contest, name: str) -> list[Cell]:
    entry = ENTRIES[name]
    if name in contest.failures:
        return [entry.title, *[None] * (len(COLUMNS) - 2), contest.failures[name]]
    putting = DURABLE if name in SYNCING and DURABLE in contest.seconds else OURS
    puts = _ratios(contest, putting, PUT, name)
    gets = _ratios(contest, OURS, GET, name)
    views = _ratios(contest, OURS, VIEW, name)
    return [
        entry.title,
        *(_rate(contest, name, operation) for operation in (PUT, GET, VIEW)),
        *(statistics.median(ratios) if ratios else None for ratios in (puts, gets, views)),
        _range(puts),
        _range(gets),
        *(_cpu_cost(contest, name, operation) for operation in (PUT, GET, VIEW)),
        None,
    ]


def _rate(contest: Contest, name: str, operation: str) -> float | None:
    taken = contest.seconds[name].get(operation)
    return contest.workload.size_bytes / GIB / statistics.median(taken) if taken else None


def _cpu_cost(contest: Contest, name: str, operation: str) -> float | None:
    """Processor seconds for a GiB, which a busy machine disturbs less than rates."""
    used = contest.cpu_seconds.get(name, {}).get(operation)
    return statistics.median(used) / contest.workload.size_bytes * GIB if used else None


def _ratios(contest: Contest, ours: str, operation: str, name: str) -> list[float]:
    """The speed of ours over theirs, round by round; empty if one of the two has no figures."""
    mine = contest.seconds.get(ours, {}).get(operation, [])
    theirs = contest.seconds.get(name, {}).get(PUT if operation == PUT else GET, [])
    return [other_s / mine_s for mine_s, other_s in zip(mine, theirs, strict=False)]


def _range(ratios: Sequence[float]) -> str | None:
    if not ratios:
        return None
    return f"{min(ratios):.2f}-{max(ratios):.2f}"
