"""One JSON document for each view of the page, made from the last readings of the feeds. Never waits."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvstore import __version__
from kvstore.address import ADDRESS_BYTES, Address
from kvstore.dashboard import said
from kvstore.dashboard.attention import attention
from kvstore.dashboard.board import Board
from kvstore.dashboard.cluster import Cluster, SessionSeen
from kvstore.dashboard.feed import Reading
from kvstore.dashboard.forest import ORDERS, Forest, Sum
from kvstore.dashboard.rooted import Quarantine
from kvstore.dashboard.said import Document
from kvstore.dashboard.workers import WorkerSeen
from kvstore.errors import InvalidRequest
from kvstore.format.places import NAMESPACE_ID_BYTES
from kvstore.meta.pins import PinRecord
from kvstore.namespace import NamespaceId
from kvstore.operations import OperationStatus

RATES_S = 60.0
PINS_MAX = 1_000
NAMESPACES_MAX = 500
"""Limit on the namespaces of a page: writers may make any number, and a page of all of them would take megabytes."""
RUNS_MAX = 300


class Documents:
    """The views of one board. Each method looks at its view's feeds, which keeps feeds on demand going."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def overview(self) -> Document:
        """The cluster at a glance."""
        looks = self._look("workers", "etcd", "root", "quarantine")
        workers: dict[str, WorkerSeen] = looks["workers"].value or {}
        etcd: Cluster | None = looks["etcd"].value
        quarantine: Quarantine | None = looks["quarantine"].value
        totals = _totals(workers)
        return {
            **self._head(looks),
            "workers": {
                "answering": sum(each.counts is not None for each in workers.values()),
                "known": len(workers),
                "missing": sum(each.missing_since_s is not None for each in workers.values()),
                "restarts": sum(each.restarts for each in workers.values()),
            },
            "cluster": None if etcd is None else said.cluster(etcd),
            "space": said.space(looks["root"].value),
            "rates": self._board.workers.rates(RATES_S),
            "totals": totals,
            "quarantine": None if quarantine is None else quarantine.count,
            "attention": attention(looks),
        }

    def history(self, coarse: bool, after_s: float) -> Document:
        """Returns rates and levels over time, for the points after ``after_s`` (seconds since the epoch)."""
        return self._board.workers.columns(coarse, after_s)

    def capacity(self) -> Document:
        """Returns the room, and what garbage collection would take next and why."""
        looks = self._look("root", "etcd", "plan")
        etcd: Cluster | None = looks["etcd"].value
        return {
            **self._head(looks),
            "space": said.space(looks["root"].value),
            "plan": looks["plan"].value,
            "collectors": None if etcd is None else list(etcd.collectors),
            "is_full": None if etcd is None else etcd.is_full,
            "sweeps": None
            if etcd is None
            else [{"shard": each.shard, "victims": each.victims_count} for each in etcd.sweeps],
        }

    def namespaces(self) -> Document:
        """Returns namespaces with their stored chunks, as the last plan counted them; the largest first."""
        looks = self._look("etcd", "plan")
        etcd: Cluster | None = looks["etcd"].value
        plan: Document = looks["plan"].value or {}
        stored = {str(each["id"]): each["scanned"] for each in plan.get("namespaces", ())}
        rows = [said.namespace(each, stored) for each in (etcd.namespaces if etcd else ())]
        named = {row["id"] for row in rows}
        # The root may hold chunks of a namespace that etcd does not know.
        rows += [
            {"id": id, "name": None, "tenant": None, "chunks": tally["chunks"], "bytes": tally["bytes"]}
            for id, tally in stored.items()
            if etcd is not None and id not in named
        ]
        rows.sort(key=lambda row: -(row["bytes"] or 0))
        return {
            **self._head(looks),
            "namespaces": rows[:NAMESPACES_MAX],
            "count": len(rows),
            "is_counted": bool(plan),
            "odd": etcd.odd_namespaces_count if etcd else 0,
        }

    def pins(self) -> Document:
        """Returns pins and their owners, those that end first first."""
        looks = self._look("pins", "etcd")
        found: tuple[PinRecord, ...] = looks["pins"].value or ()
        etcd: Cluster | None = looks["etcd"].value
        names = {each.digest: each for each in (etcd.namespaces if etcd else ())}
        rows = [
            said.pin(each, names.get(each.namespace))
            for each in sorted(found, key=lambda each: each.expires_s)[:PINS_MAX]
        ]
        return {**self._head(looks), "pins": rows, "count": len(found)}

    def workers(self) -> Document:
        """Returns workers with their activity, and sessions of engines that are nodes themselves."""
        looks = self._look("workers", "etcd")
        seen: dict[str, WorkerSeen] = looks["workers"].value or {}
        etcd: Cluster | None = looks["etcd"].value
        sessions = _newest(etcd.sessions if etcd else ())
        rows = []
        for address in sorted(seen.keys() | sessions.keys()):
            worker, session = seen.get(address), sessions.get(address)
            record = session.worker if session else None
            is_former = _is_former(session, worker)
            rows.append(
                {
                    "address": address,
                    "session": session.id if session and not is_former else None,
                    "awaited": is_former,
                    "host": record.host if record else None,
                    "pid": record.pid if record and not is_former else None,
                    "version": record.version if record else None,
                    "error": worker.error if worker else "it is registered, but was not asked yet",
                    "missing_since_s": worker.missing_since_s if worker else None,
                    "restarts": worker.restarts if worker else 0,
                    "counts": worker.counts if worker else None,
                    "rates": worker.grown if worker else {},
                }
            )
        engines = [
            {"session": each.id, "announced": each.announced, "began": each.began_revision}
            for each in (etcd.sessions if etcd else ())
            if each.worker is None
        ]
        return {
            **self._head(looks),
            "workers": rows,
            "engines": engines,
            "collectors": list(etcd.collectors) if etcd else [],
            "revision": etcd.revision if etcd else None,
        }

    def prefixes(self, namespace: str, at: str, order: str) -> Document:
        """Returns the heaviest runs of the prefix tree. Raises InvalidRequest for a malformed id or unknown order."""
        wanted = NamespaceId(_id("namespace", namespace, NAMESPACE_ID_BYTES)) if namespace else None
        start = Address(_id("at", at, ADDRESS_BYTES)) if at else None
        if order not in ORDERS:
            raise InvalidRequest(f"order={order!r}: expected one of {', '.join(ORDERS)}")
        looks = self._look("forest", "etcd")
        forest: Forest | None = looks["forest"].value
        etcd: Cluster | None = looks["etcd"].value
        known = {each.id: each for each in (etcd.namespaces if etcd else ())}
        head = self._head(looks)
        if forest is None:
            return {**head, "share": None, "namespaces": [], "runs": [], "way": []}
        sums = forest.namespaces()
        largest = heapq.nlargest(
            NAMESPACES_MAX, sums.keys() | forest.blocks.keys(), key=lambda id: _bytes_of(id, sums, forest)
        )
        return {
            **head,
            "share": forest.share,
            "is_whole": forest.is_whole,
            "chunks_seen": len(forest.leaves),
            "unreadable": forest.unreadable_count,
            "namespaces": [
                {
                    **said.name_of(id, known),
                    **said.below(sums.get(id, Sum(depth_max=0))),
                    "blocks": said.blocks(forest, id),
                }
                for id in sorted(largest)
            ],
            "runs": [said.run(each, known) for each in forest.runs(wanted, start, RUNS_MAX, order)],
            "way": [said.run(each, known) for each in (forest.way_to(start) if start else ())],
        }

    def damage(self) -> Document:
        """Returns damage: as workers counted it since they started, and the files in quarantine."""
        looks = self._look("workers", "quarantine", "root")
        seen: dict[str, WorkerSeen] = looks["workers"].value or {}
        quarantine: Quarantine | None = looks["quarantine"].value
        counts: dict[str, dict[str, int | float]] = defaultdict(dict)
        for address, worker in seen.items():
            for name, value in (worker.counts or {}).items():
                if _tells_of_damage(name):
                    counts[name][address] = value
        return {
            **self._head(looks),
            "counts": dict(counts),
            "quarantine": None
            if quarantine is None
            else {"count": quarantine.count, "bytes": quarantine.size_bytes, "is_whole": quarantine.is_whole},
            "files": [asdict(each) for each in (quarantine.newest if quarantine else ())],
        }

    def operations(self) -> Document:
        """Returns operations of workers, unfinished and finished."""
        looks = self._look("operations")
        found: list[OperationStatus] | None = looks["operations"].value
        rows = None if found is None else [said.operation(each) for each in found]
        return {**self._head(looks), "operations": rows}

    def _look(self, *names: str) -> dict[str, Reading[Any]]:
        return {name: self._board.feeds[name].look() for name in names}

    def _head(self, looks: Mapping[str, Reading[Any]]) -> Document:
        """Returns the head of every document: the time, and the age of its sources."""
        sources = {
            name: {"age_s": None if each.age_s is None else round(each.age_s, 1), "error": each.error}
            for name, each in looks.items()
        }
        return {
            "now_s": round(self._board.clock.now_s(), 1),
            "version": __version__,
            "root": self._board.root_url,
            "sources": sources,
        }


def _newest(sessions: Iterable[SessionSeen]) -> dict[str, SessionSeen]:
    """Returns the newest session of each worker, by address: that of one that was killed stays until its lease ends."""
    ordered = sorted(sessions, key=lambda each: each.began_revision)
    return {each.worker.address: each for each in ordered if each.worker}


def _is_former(session: SessionSeen | None, worker: WorkerSeen | None) -> bool:
    """True if the session is of a run that ended: workers are asked more often than etcd, which has the new one."""
    if session is None or worker is None or worker.former_until_s is None:
        return False
    return session.seen_since_s <= worker.former_until_s


def _id(what: str, text: str, size: int) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != size:
        raise InvalidRequest(f"{what}: expected {2 * size} hexadecimal digits")
    return found


def _bytes_of(id: NamespaceId, sums: Mapping[NamespaceId, Sum], forest: Forest) -> float:
    return (sums[id].size_bytes if id in sums else 0.0) + forest.blocks.get(id, (0.0, 0.0))[1]


def _totals(workers: Mapping[str, WorkerSeen]) -> dict[str, int | float]:
    sums: dict[str, int | float] = defaultdict(int)
    for worker in workers.values():
        for name, value in (worker.counts or {}).items():
            sums[name] += value
    return dict(sums)


def _tells_of_damage(name: str) -> bool:
    return name.startswith(("damage_", "quarantine")) or name.endswith("_damaged")
