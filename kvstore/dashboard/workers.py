"""The counters of each worker, read over gRPC from all workers concurrently, as growth and history."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.core.clock import Clock
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client.store import Store


# Rates and levels over time, in rings of fixed size. Pure: it takes no clock and does no I/O.


AMOUNTS: dict[str, tuple[str, ...]] = {
    "tokens_asked": ("tokens_asked",),
    "tokens_matched": ("tokens_matched",),
    "memory_chunks": ("memory_hits",),
    "memory_bytes": ("memory_bytes",),
    "peers_chunks": ("peers_hits",),
    "disk_chunks": ("disk_hits",),
    "root_chunks": ("chunks_read",),
    "root_bytes": ("bytes_read",),
    "written_bytes": ("bytes_written",),
    "received_bytes": ("wire_bytes_in",),
    "matches": ("requests_match",),
    "gets": ("requests_get",),
    "puts": ("requests_put",),
    "refused": ("calls_refused", "put_refused_full", "put_refused_uncounted", "behind_shed"),
    "damaged": ("miss_damaged", "memory_damaged", "disk_damaged", "peers_damaged"),
}
"""Rates, and the workers' counters whose growth per second each of them sums."""

LEVELS: dict[str, tuple[str, ...]] = {
    "calls": ("calls_in_flight",),
    "queue": ("root_queue",),
    "memory_held_bytes": ("memory_held_bytes",),
    "memory_size_bytes": ("memory_size_bytes",),
    "behind_bytes": ("behind_bytes",),
}
"""Levels, and the workers' gauges that each of them sums."""

FINE_S, FINE_MAX = 2.0, 450
COARSE_S, COARSE_MAX = 60.0, 1_440
"""Two ring sizes: a quarter of an hour in steps of two seconds, a day in minutes."""

Counts = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Point:
    """The ``span_s`` seconds up to ``at_s``: amounts, and levels at the end, in the order above."""

    at_s: float
    span_s: float
    amounts: tuple[float, ...]
    levels: tuple[float, ...]


class Growth:
    """The growth of each worker's counters since the last look."""

    def __init__(self) -> None:
        self._before: dict[str, Counts] = {}

    def since_last(self, now: Mapping[str, Counts]) -> dict[str, dict[str, float]]:
        """Returns the growth by worker and counter.

        A worker that is seen for the first time, or again after it did not answer, has none: the time over
        which its counters grew is unknown. A worker whose counters start from 0 again was restarted.
        """
        grown = {
            worker: {name: _growth(self._before[worker].get(name, 0), count) for name, count in counts.items()}
            for worker, counts in now.items()
            if worker in self._before
        }
        self._before = {worker: dict(counts) for worker, counts in now.items()}
        return grown


class History:
    """Two rings of points, a fine one and a coarse one. Thread-safe."""

    def __init__(self) -> None:
        self._fine: deque[Point] = deque(maxlen=FINE_MAX)
        self._coarse: deque[Point] = deque(maxlen=COARSE_MAX)
        self._pending: list[Point] = []
        self._lock = threading.Lock()  # guards both rings

    def add(self, at_s: float, span_s: float, grown: Sequence[Counts], now: Sequence[Counts]) -> None:
        """Adds the work of all workers in the last ``span_s`` seconds, and their levels."""
        with self._lock:
            if self._fine and at_s <= self._fine[-1].at_s:
                # The clock was set back. A page that has the points so far asks for later ones only.
                at_s = self._fine[-1].at_s + span_s
            amounts = tuple(_sum(grown, names) for names in AMOUNTS.values())
            levels = tuple(_sum(now, names) for names in LEVELS.values())
            point = Point(at_s, span_s, amounts, levels)
            self._fine.append(point)
            self._pending.append(point)
            if sum(each.span_s for each in self._pending) >= COARSE_S:
                self._coarse.append(_merged(self._pending))
                self._pending = []

    def rates(self, over_s: float) -> dict[str, float]:
        """Returns amounts per second by name, over the last ``over_s`` seconds (at most the fine ring); 0 if none."""
        points: list[Point] = []
        with self._lock:
            fine = list(self._fine)
        for point in reversed(fine):
            points.append(point)
            if sum(each.span_s for each in points) >= over_s:
                break
        if not points:
            return dict.fromkeys(AMOUNTS, 0.0)
        merged = _merged(points[::-1])
        return {name: amount / merged.span_s for name, amount in zip(AMOUNTS, merged.amounts, strict=True)}

    def columns(self, coarse: bool, after_s: float) -> dict[str, Any]:
        """The points after ``after_s``, as columns: times, amounts per second, levels."""
        ring = self._coarse if coarse else self._fine
        with self._lock:
            points = [point for point in ring if point.at_s > after_s]
        columns: dict[str, list[float]] = {"at_s": [round(point.at_s, 2) for point in points]}
        for at, name in enumerate(AMOUNTS):
            columns[name] = [_rounded(point.amounts[at] / point.span_s) for point in points]
        for at, name in enumerate(LEVELS):
            columns[name] = [_rounded(point.levels[at]) for point in points]
        return {"step_s": COARSE_S if coarse else FINE_S, "points_max": ring.maxlen, "columns": columns}


def _growth(before: float, now: float) -> float:
    """Returns the growth of one counter; a lower value than before counts from 0 again."""
    return max(0.0, now - before if now >= before else now)


def _sum(counts: Sequence[Counts], names: Sequence[str]) -> float:
    return float(sum(each.get(name, 0) for each in counts for name in names))


def _merged(points: Sequence[Point]) -> Point:
    """Merges several points in a row into one."""
    amounts = tuple(sum(column) for column in zip(*(point.amounts for point in points), strict=True))
    return Point(points[-1].at_s, sum(point.span_s for point in points), amounts, points[-1].levels)


def _rounded(value: float) -> float:
    """Rounds to four digits: more than a chart shows, and half the bytes."""
    return float(f"{value:.4g}")


DRAINING = "is draining"


def problems_of(counts: Counts | KVStoreError) -> list[str]:
    """Returns a worker's problems as text, from its counters or from the error that replaced them."""
    if isinstance(counts, KVStoreError):
        return [f"does not answer: {counts}"]
    problems = []
    if counts.get("root_hangs"):
        problems.append("gets no answer from the root: check the mount (kvstore check-root)")
    elif counts.get("root_gone"):
        problems.append("does not find the root: is its file system mounted, and its FORMAT file intact?")
    if not counts.get("session_alive", 1):
        problems.append("has no session in etcd: holds and pins wait")
    elif not counts.get("protected", 1):
        problems.append("has holds and pins that collectors ignore: see kvstore fsck --adopt")
    if counts.get("draining"):
        problems.append(DRAINING)
    return problems


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """One worker: its counts, or the error why there are none; ``grown`` is the recent growth per second."""

    counts: Counts | None
    error: str | None
    grown: Mapping[str, float]


class WorkersSource:
    """Reads the workers' counters. ``connect`` is called by the first read, and again if it failed."""

    def __init__(self, connect: Callable[[], Store], clock: Clock) -> None:
        self._connect = connect
        self._clock = clock
        self._store: Store | None = None
        self._connecting = threading.Lock()
        self._growth = Growth()
        self._asked_at_s: float | None = None
        self.history = History()

    def seen(self) -> dict[str, WorkerSeen]:
        """The counters of all workers by address, asked now. Raises the errors of connecting."""
        answers = self._connected().stats_each()
        at_s = self._clock.monotonic_s()
        counts = {address: each for address, each in answers.items() if not isinstance(each, KVStoreError)}
        grown = self._growth.since_last(counts)
        span_s, self._asked_at_s = (0.0 if self._asked_at_s is None else at_s - self._asked_at_s), at_s
        if span_s > 0:
            self.history.add(self._clock.now_s(), span_s, list(grown.values()), list(counts.values()))
        return {
            address: WorkerSeen(None, str(answer), {})
            if isinstance(answer, KVStoreError)
            else WorkerSeen(answer, None, _per_second(grown.get(address, {}), span_s))
            for address, answer in sorted(answers.items())
        }

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        with self._connecting:
            if self._store is not None:
                self._store.close()

    def _connected(self) -> Store:
        with self._connecting:  # two feeds share it
            if self._store is None:
                self._store = self._connect()
            return self._store


def _per_second(grown: Mapping[str, float], span_s: float) -> dict[str, float]:
    return {name: amount / span_s for name, amount in grown.items()} if span_s > 0 else {}
