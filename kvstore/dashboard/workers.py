"""The counters of each worker, read over gRPC from all workers at once, as growth and history."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.dashboard.history import Counts, Growth, History
from kvstore.dashboard.roster import Roster
from kvstore.errors import KVStoreError
from kvstore.operations import OperationStatus
from kvstore.sources import Clock

if TYPE_CHECKING:
    from kvstore.client.store import Store


GONE = "it was killed, or its host is gone: etcd has no registration of it any more"


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """One worker: its counts, or the error why there are none; ``grown`` is the recent growth per second."""

    counts: Counts | None
    error: str | None
    grown: Mapping[str, float]
    restarts: int = 0
    """How often it was started anew since the dashboard began."""
    missing_since_s: float | None = None
    """Seconds since the epoch from which on it was silent; None unless etcd has forgotten it since then."""
    former_until_s: float | None = None
    """Monotonic time at which the run before this one last answered; None if no restart was seen."""


class WorkersSource:
    """Reads the workers' counters. ``connect`` is called by the first read, and again if it failed."""

    def __init__(self, connect: Callable[[], Store], clock: Clock) -> None:
        self._connect = connect
        self._clock = clock
        self._store: Store | None = None
        self._connecting = threading.Lock()
        self._growth = Growth()
        self._roster = Roster()
        self._asked_at_s: float | None = None
        self._lock = threading.Lock()
        self._history = History()

    def seen(self) -> dict[str, WorkerSeen]:
        """The counters of all workers by address, asked now, and workers that are missing. Raises the errors of
        connecting.
        """
        store, began_s = self._connected(), self._clock.monotonic_s()
        answers = store.stats_each()
        at_s = self._clock.monotonic_s()
        counts = {address: each for address, each in answers.items() if not isinstance(each, KVStoreError)}
        grown = self._growth.since_last(counts)
        span_s, self._asked_at_s = (0.0 if self._asked_at_s is None else at_s - self._asked_at_s), at_s
        if span_s > 0:
            with self._lock:
                self._history.add(self._clock.now_s(), span_s, list(grown.values()), list(counts.values()))
        missing = self._roster.call({each: counts.get(each) for each in answers}, self._clock.now_s(), began_s)
        seen = {address: self._said(address, answer, grown, span_s) for address, answer in answers.items()}
        seen |= {each: WorkerSeen(None, GONE, {}, 0, since_s) for each, since_s in missing.items()}
        return dict(sorted(seen.items()))

    def _said(
        self, address: str, answer: Counts | KVStoreError, grown: Mapping[str, Mapping[str, float]], span_s: float
    ) -> WorkerSeen:
        restarts, former_until_s = self._roster.restarts(address), self._roster.former_until_s(address)
        if isinstance(answer, KVStoreError):
            return WorkerSeen(None, str(answer), {}, restarts, former_until_s=former_until_s)
        rates = _per_second(grown.get(address, {}), span_s)
        return WorkerSeen(answer, None, rates, restarts, former_until_s=former_until_s)

    def operations(self) -> list[OperationStatus]:
        """Returns the operations of all workers that answer, newest first. Raises Unavailable if none does."""
        return [each.last for each in self._connected().operations()]

    def rates(self, over_s: float) -> dict[str, float]:
        """See ``History.rates``."""
        with self._lock:
            return self._history.rates(over_s)

    def columns(self, coarse: bool, after_s: float) -> dict[str, Any]:
        """See ``History.columns``."""
        with self._lock:
            return self._history.columns(coarse, after_s)

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
