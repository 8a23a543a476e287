"""The views of the dashboard as JSON documents."""

from __future__ import annotations

import heapq
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvstore import __version__
from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.executor import Decision, Loop
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.dashboard.prefix_tree import ORDERS, Forest, PrefixNode, Sum, explore
from kvstore.dashboard.snapshots import (
    ClusterSnapshot,
    EtcdSource,
    PlanSource,
    QuarantineReport,
    RootSeen,
    RootSource,
    SessionSeen,
)
from kvstore.dashboard.workers import DRAINING, WorkerSeen, WorkersSource, problems_of
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.places import NAMESPACE_ID_BYTES
from kvstore.meta.pins import StoredPin
from kvstore.meta.store import MetadataStore
from kvstore.root.interface import Root

if TYPE_CHECKING:
    from kvstore.client.store import Store


# A feed: one source, read regularly by its own thread, and its last value.
#
# Each source has its own feed, because each can hang: a root in a dead mount, a frozen etcd. That feed is then late and
# says so, and the page shows the rest.


log = logging.getLogger(__name__)

T = TypeVar("T")

WANTED_S = 45.0
"""A feed on demand goes on for this long after the last look."""
COST_MAX = 0.1
"""Share of the time that reading on demand may take, because it is costly for the root."""
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class SourceValue(Generic[T]):
    """The last value of a source. ``error`` says why it is not newer; None while all is well."""

    value: T | None
    age_s: float | None
    """Seconds since ``value`` was read; None if there is none yet."""
    error: str | None


class Feed(Generic[T]):
    """Reads a source every ``interval_s``; ``on_demand`` only while pages request it, and less often if it takes long.

    A reading that takes longer than ``late_s`` is reported as an error; it is not interrupted, because a call into a
    dead mount cannot be. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        interval_s: float,
        clock: Clock,
        *,
        late_s: float,
        on_demand: bool = False,
    ) -> None:
        self.name = name
        self._read = read
        self._interval_s = interval_s
        self._clock = clock
        self._late_s = late_s
        self._on_demand = on_demand
        self._changed = threading.Condition()
        self._value: T | None = None
        self._read_at_s: float | None = None
        self._error: str | None = None
        self._began_s: float | None = None
        self._next_s = 0.0
        self._wanted_s: float | None = None
        self._loop = Loop(f"kvstore-dashboard-{name}", self._changed, self._next)

    def start(self) -> None:
        """Starts the thread. Idempotent."""
        self._loop.start()

    def look(self) -> SourceValue[T]:
        """Returns the last reading; never waits. Keeps a feed on demand going."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            if self._on_demand and not self._is_wanted(now_s):
                self._changed.notify_all()
            self._wanted_s = now_s
            error, began_s = self._error, self._began_s
            if began_s is not None and now_s - began_s > self._late_s:
                error = f"no answer for {now_s - began_s:.0f} s"
            age_s = None if self._read_at_s is None else now_s - self._read_at_s
            return SourceValue(self._value, age_s, error)

    def close(self) -> None:
        """Ends the thread; one that is stuck in its source ends with the process. Idempotent."""
        self._loop.close(CLOSE_S)

    def _is_wanted(self, now_s: float) -> bool:
        return not self._on_demand or (self._wanted_s is not None and now_s - self._wanted_s < WANTED_S)

    def _next(self) -> Decision:
        now_s = self._clock.monotonic_s()
        if not self._is_wanted(now_s):
            return None
        if now_s < self._next_s:
            return max(0.05, self._next_s - now_s)
        self._began_s = now_s
        return partial(self._once, now_s)

    def _once(self, began_s: float) -> None:
        value: T | None = None
        error: str | None = None
        try:
            value = self._read()
        except KVStoreError as failed:
            error = str(failed)
            if error != self._error and not self._loop.closed:  # once, not every few seconds
                log.warning("dashboard.source_failed name=%s why=%s", self.name, error)
        except Exception as bug:  # a defect of ours in one source must not end the others, nor pass for "no news"
            error = f"internal error, please report it: {type(bug).__name__}"
            if error != self._error:
                log.exception("dashboard.feed_failed name=%s", self.name)
        ended_s = self._clock.monotonic_s()
        with self._changed:
            self._began_s = None
            self._next_s = began_s + self._interval_s
            if self._on_demand:
                self._next_s = max(self._next_s, ended_s + (ended_s - began_s) / COST_MAX)
            self._error = error
            if error is None:
                self._value, self._read_at_s = value, ended_s


# The rows of the documents: one JSON object for each thing that the page shows. Pure.


Document = dict[str, Any]

TEXT_MAX = 128
"""Length to which user-chosen texts are cut: they may have thousands of characters."""


def cluster(etcd: ClusterSnapshot) -> Document:
    """The cluster in numbers."""
    return {
        "root": etcd.root.hex(),
        "engines": sum(each.worker is None for each in etcd.sessions),
        "sessions": len(etcd.sessions),
        "collectors": len(etcd.collectors),
        "namespaces": len(etcd.namespaces),
        "tenants": len({each.tenant for each in etcd.namespaces}),
        "pins": etcd.pins_count,
        "sweeps": len(etcd.sweeps),
        "is_full": etcd.is_full,
        "used_bytes": etcd.capacity.used_bytes if etcd.capacity else None,
        "capacity_bytes": etcd.capacity.capacity_bytes if etcd.capacity else None,
    }


def space(root: RootSeen | None) -> Document | None:
    """The room of the root; None if it is not known."""
    if root is None:
        return None
    return {
        "url": root.url,
        "root": root.identity.root.hex(),
        "shard_bits": root.identity.shard_bits,
        "total_bytes": root.space.total_bytes,
        "free_bytes": root.space.free_bytes,
    }


def namespace(each: Namespace, stored: Mapping[str, Mapping[str, int]]) -> Document:
    """A namespace with what it has stored, where that was counted."""
    tally = stored.get(each.id.hex(), {})
    return {
        "id": each.id.hex(),
        "digest": each.digest.hex(),
        "name": each.name,
        "tenant": each.tenant,
        "fingerprint": _short(each.fingerprint),
        "attributes": {_short(key): _short(value) for key, value in each.attributes},
        "layout": each.layout.to_dict(),
        "chunks": tally.get("chunks"),
        "bytes": tally.get("bytes"),
    }


def name_of(id: NamespaceId, known: Mapping[NamespaceId, Namespace]) -> Document:
    """The name of a namespace; its id alone if the name is not known."""
    found = known.get(id)
    return {
        "id": id.hex(),
        "name": found.name if found else None,
        "tenant": found.tenant if found else None,
        "chunk_tokens": found.layout.chunk_tokens if found else None,
    }


def below(below: Sum) -> Document:
    """The chunks that continue a prefix, in sums."""
    return {
        "chunks": round(below.chunks),
        "bytes": round(below.size_bytes),
        "depth": below.depth_max,
        "ends": below.ends_count,
        "last_use_s": below.last_use_s,
        "uses": below.uses,
    }


def blocks(forest: Forest, id: NamespaceId) -> Document:
    """The engine-hashed blocks of a namespace."""
    count, size_bytes = forest.blocks.get(id, (0.0, 0.0))
    return {"count": round(count), "bytes": round(size_bytes)}


def run(run: PrefixNode, known: Mapping[NamespaceId, Namespace]) -> Document:
    """A run of the prefix tree."""
    return {
        "id": run.id.hex(),
        "above": run.above.hex() if run.above else None,
        "namespace": name_of(run.namespace, known),
        "first": run.first,
        "chunks": run.chunks,
        "bytes": run.size_bytes,
        "forks": run.forks,
        "last_use_s": run.last_use_s,
        "uses": run.uses,
        "rooted": run.is_rooted,
        "below": below(run.below),
    }


def pin(each: StoredPin, of: Namespace | None) -> Document:
    """A pin; ``of`` is its namespace, if that is known."""
    return {
        "id": each.id.hex(),
        "owner": each.owner,
        "namespace": of.name if of else None,
        "tenant": of.tenant if of else None,
        "namespace_id": each.namespace[:NAMESPACE_ID_BYTES].hex(),
        "tokens": each.tokens_count,
        "chunks": each.addresses_count,
        "ttl_s": each.ttl_s,
        "expires_s": each.expires_s,
    }


def _short(text: str) -> str:
    """A long text without its middle."""
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 33]}…{text[-32:]}"


# Sentences on what an operator should look at now: the list at the top of the overview. Pure.


FREE_MIN = 0.05
ITEMS_MAX = 50

Item = dict[str, str]

_SOURCES = {
    "etcd": "etcd: {error}. What is shown of sessions, pins and namespaces may be out of date; reads and writes go on.",
    "root": "the root: {error}. Nodes count what they cannot read as misses.",
    "workers": "workers: {error}.",
    "quarantine": "the quarantine could not be listed: {error}.",
}


def attention(looks: Mapping[str, SourceValue[Any]]) -> list[Item]:
    """Lists problems ("bad") and warnings ("warn"), each with the view that has the details; problems first."""
    items = [*_of_sources(looks), *_of_workers(looks["workers"].value or {})]
    items += [*_of_cluster(looks["etcd"].value), *_of_root(looks["root"].value, looks["quarantine"].value)]
    return sorted(items, key=lambda item: item["level"] != "bad")[:ITEMS_MAX]


def _item(level: str, view: str, text: str) -> Item:
    return {"level": level, "view": view, "text": text}


def _of_sources(looks: Mapping[str, SourceValue[Any]]) -> Iterator[Item]:
    views = {"etcd": "workers", "root": "capacity", "workers": "workers", "quarantine": "damage"}
    for name, said in _SOURCES.items():
        error = looks[name].error
        if error is not None:
            yield _item("bad", views[name], said.format(error=error.rstrip(".")))


def _of_workers(workers: Mapping[str, WorkerSeen]) -> Iterator[Item]:
    for address, worker in workers.items():
        counts = worker.counts
        if counts is None:
            yield _item("bad", "workers", f"worker {address} does not answer: {worker.error}")
            continue
        for problem in problems_of(counts):
            yield _item("warn" if problem is DRAINING else "bad", "workers", f"worker {address} {problem}")
        if counts.get("behind_lost"):
            yield _item("warn", "workers", f"worker {address} lost {counts['behind_lost']:,} chunks written behind")
    if not workers:
        yield _item("warn", "workers", "no worker is known")


def _of_cluster(etcd: ClusterSnapshot | None) -> Iterator[Item]:
    if etcd is None:
        return
    if etcd.is_full:
        yield _item("bad", "capacity", "a collector says that the root is full: puts are refused until there is room")
    if not etcd.collectors:
        yield _item("warn", "capacity", "no garbage collector runs as a service: nothing is deleted unless cron does")
    if etcd.odd_namespaces_count:
        count = etcd.odd_namespaces_count
        yield _item("warn", "namespaces", f"{count} records of namespaces in etcd cannot be read")


def _of_root(root: RootSeen | None, quarantine: QuarantineReport | None) -> Iterator[Item]:
    if quarantine is not None and quarantine.count:
        more = "" if quarantine.is_whole else "more than "
        files = "1 damaged file is" if quarantine.count == 1 else f"{more}{quarantine.count:,} damaged files are"
        yield _item("warn", "damage", f"{files} in quarantine: run kvstore fsck ROOT --repair")
    if root is None or not root.space.total_bytes or root.space.free_bytes is None:
        return
    if root.space.free_bytes < FREE_MIN * root.space.total_bytes:
        yield _item("bad", "capacity", f"less than {FREE_MIN:.0%} of the root's file system is free")


# The board: all sources, each with its feed, and one JSON document for each view, made from the last readings of the
# feeds. A view never waits.


@dataclass(frozen=True, slots=True)
class RefreshIntervals:
    """Seconds between two readings of each source; the last three are read only while a page requests them."""

    workers_s: float = 2.0
    cluster_s: float = 5.0
    root_s: float = 10.0
    quarantine_s: float = 30.0
    pins_s: float = 10.0
    plan_s: float = 60.0
    forest_s: float = 60.0
    late_s: float = 6.0
    """A source that takes longer than this is shown as not answering."""


LONG_S = 120.0
"""Limit of a plan or a census, which take long over a large root; one that takes longer is reported as late."""
RATES_S = 60.0
PINS_MAX = 1_000
NAMESPACES_MAX = 500
"""Limit on the namespaces of a page: writers may make any number, and a page of all of them would take megabytes."""
RUNS_MAX = 300


class Board:
    """All sources of the dashboard, each with its feed, and the views made of them.

    It connects to nothing before ``start``; ``close`` it. Each view looks at its feeds, which keeps feeds on demand
    going.
    """

    def __init__(
        self,
        root_url: str,
        open_root: Callable[[], Root],
        open_meta: Callable[[], MetadataStore],
        connect: Callable[[str], Store],
        collector: Sequence[str] | None,
        pace: RefreshIntervals | None = None,
    ) -> None:
        """``root_url`` is as in ``Root.url``; each function is called by a thread that may wait.

        ``connect`` opens a store through the workers of the root with this id, in hex. ``collector`` is the command
        line of the collector, with all that it needs to reach the same root; None if there is none.
        """
        pace, clock = pace or RefreshIntervals(), SystemClock()
        self._root_url = root_url
        self._clock = clock
        self._etcd = etcd = EtcdSource(open_meta, root_url)
        # One source per feed: if the root hangs, the thread that asks for its room must not delay the other feeds.
        self._roots = room, quarantined, explored = [RootSource(open_root, etcd.learn) for _ in range(3)]
        self._workers = WorkersSource(lambda: connect(etcd.root_id().hex()), clock)
        self._plans = PlanSource(collector)
        self._feeds: dict[str, Feed[Any]] = {
            name: Feed(name, read, interval_s, clock, late_s=late_s, on_demand=on_demand)
            for name, read, interval_s, late_s, on_demand in (
                ("workers", self._workers.seen, pace.workers_s, pace.late_s, False),
                ("etcd", etcd.cluster, pace.cluster_s, pace.late_s, False),
                ("root", room.seen, pace.root_s, pace.late_s, False),
                ("quarantine", quarantined.quarantine, pace.quarantine_s, pace.late_s, False),
                ("pins", etcd.pins, pace.pins_s, pace.late_s, True),
                ("plan", self._plans.plan, pace.plan_s, LONG_S, True),
                ("forest", lambda: explore(*explored.opened()), pace.forest_s, LONG_S, True),
            )
        }

    def start(self) -> None:
        """Starts all feeds."""
        for feed in self._feeds.values():
            feed.start()

    def close(self) -> None:
        """Ends all feeds and their sources. A source that hangs is left to the end of the process. Idempotent."""
        self._plans.close()
        for feed in self._feeds.values():
            feed.close()
        self._plans.close()  # one that began in between
        self._workers.close()
        self._etcd.close()
        for root in self._roots:
            root.close()

    def overview(self) -> Document:
        """The cluster at a glance."""
        looks = self._look("workers", "etcd", "root", "quarantine")
        workers: dict[str, WorkerSeen] = looks["workers"].value or {}
        etcd: ClusterSnapshot | None = looks["etcd"].value
        quarantine: QuarantineReport | None = looks["quarantine"].value
        totals = _totals(workers)
        return {
            **self._head(looks),
            "workers": {
                "answering": sum(each.counts is not None for each in workers.values()),
                "known": len(workers),
            },
            "cluster": None if etcd is None else cluster(etcd),
            "space": space(looks["root"].value),
            "rates": self._workers.history.rates(RATES_S),
            "totals": totals,
            "quarantine": None if quarantine is None else quarantine.count,
            "attention": attention(looks),
        }

    def history(self, coarse: bool, after_s: float) -> Document:
        """Returns rates and levels over time, for the points after ``after_s`` (seconds since the epoch)."""
        return self._workers.history.columns(coarse, after_s)

    def capacity(self) -> Document:
        """Returns the room, and what garbage collection would take next and why."""
        looks = self._look("root", "etcd", "plan")
        etcd: ClusterSnapshot | None = looks["etcd"].value
        return {
            **self._head(looks),
            "space": space(looks["root"].value),
            "plan": looks["plan"].value,
            "collectors": None if etcd is None else list(etcd.collectors),
            "is_full": None if etcd is None else etcd.is_full,
            "sweeps": None
            if etcd is None
            else [{"part": each.part, "victims": each.victims_count} for each in etcd.sweeps],
        }

    def namespaces(self) -> Document:
        """Returns namespaces with their stored chunks, as the last plan counted them; the largest first."""
        looks = self._look("etcd", "plan")
        etcd: ClusterSnapshot | None = looks["etcd"].value
        plan: Document = looks["plan"].value or {}
        stored = {str(each["id"]): each["scanned"] for each in plan.get("namespaces", ())}
        rows = [namespace(each, stored) for each in (etcd.namespaces if etcd else ())]
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
        found: tuple[StoredPin, ...] = looks["pins"].value or ()
        etcd: ClusterSnapshot | None = looks["etcd"].value
        names = {each.digest: each for each in (etcd.namespaces if etcd else ())}
        rows = [
            pin(each, names.get(each.namespace)) for each in sorted(found, key=lambda each: each.expires_s)[:PINS_MAX]
        ]
        return {**self._head(looks), "pins": rows, "count": len(found)}

    def workers(self) -> Document:
        """Returns workers with their activity, and sessions of engines that are nodes themselves."""
        looks = self._look("workers", "etcd")
        seen: dict[str, WorkerSeen] = looks["workers"].value or {}
        etcd: ClusterSnapshot | None = looks["etcd"].value
        sessions = _newest(etcd.sessions if etcd else ())
        rows = []
        for address in sorted(seen.keys() | sessions.keys()):
            worker, session = seen.get(address), sessions.get(address)
            record = session.worker if session else None
            rows.append(
                {
                    "address": address,
                    "session": session.id if session else None,
                    "host": record.host if record else None,
                    "pid": record.pid if record else None,
                    "version": record.version if record else None,
                    "error": worker.error if worker else "it is registered, but was not asked yet",
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
        etcd: ClusterSnapshot | None = looks["etcd"].value
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
                    **name_of(id, known),
                    **below(sums.get(id, Sum(depth_max=0))),
                    "blocks": blocks(forest, id),
                }
                for id in sorted(largest)
            ],
            "runs": [run(each, known) for each in forest.runs(wanted, start, RUNS_MAX, order)],
            "way": [run(each, known) for each in (forest.way_to(start) if start else ())],
        }

    def damage(self) -> Document:
        """Returns damage: as workers counted it since they started, and the files in quarantine."""
        looks = self._look("workers", "quarantine", "root")
        seen: dict[str, WorkerSeen] = looks["workers"].value or {}
        quarantine: QuarantineReport | None = looks["quarantine"].value
        counts: dict[str, dict[str, int | float]] = defaultdict(dict)
        for address, worker in seen.items():
            for name, value in (worker.counts or {}).items():
                if name.startswith(("damage_", "quarantine")) or name.endswith("_damaged"):
                    counts[name][address] = value
        return {
            **self._head(looks),
            "counts": dict(counts),
            "quarantine": None
            if quarantine is None
            else {"count": quarantine.count, "bytes": quarantine.size_bytes, "is_whole": quarantine.is_whole},
            "files": [asdict(each) for each in (quarantine.newest if quarantine else ())],
        }

    def _look(self, *names: str) -> dict[str, SourceValue[Any]]:
        return {name: self._feeds[name].look() for name in names}

    def _head(self, looks: Mapping[str, SourceValue[Any]]) -> Document:
        """Returns the head of every document: the time, and the age of its sources."""
        sources = {
            name: {"age_s": None if each.age_s is None else round(each.age_s, 1), "error": each.error}
            for name, each in looks.items()
        }
        return {
            "now_s": round(self._clock.now_s(), 1),
            "version": __version__,
            "root": self._root_url,
            "sources": sources,
        }


def _newest(sessions: Iterable[SessionSeen]) -> dict[str, SessionSeen]:
    """Returns the newest session of each worker, by address: that of one that was killed stays until its lease ends."""
    ordered = sorted(sessions, key=lambda each: each.began_revision)
    return {each.worker.address: each for each in ordered if each.worker}


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
