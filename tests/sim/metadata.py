"""etcd of a run: a store that can be restored from a snapshot, and one faulty port of it for each process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.core.clock import Clock
from kvstore.errors import Unavailable
from kvstore.meta.memory import MemoryLease, MemoryMetadata, MemoryStore
from kvstore.meta.store import (
    NO_LEASE,
    Absent,
    Compare,
    Delete,
    Event,
    KeyValue,
    LeaseId,
    MetadataStore,
    Put,
    Snapshot,
    TxnResult,
    Watch,
    WatchLost,
)
from tests.sim.faults import Call, Faults
from tests.sim.kernel import Actor

T = TypeVar("T")

TIMEOUT_S = 5.0
BUMP = 1_000
LAG_S_MAX = 2.0
CALLS = {"condemning": Call.CONDEMN, "closing": Call.CLOSE, "announcing": Call.ANNOUNCE}


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot of the whole store."""

    revision: int
    compacted: int
    keys: dict[str, KeyValue]
    leases: dict[LeaseId, tuple[int, frozenset[str]]]
    history: tuple[tuple[Event, ...], ...]


class SimStore(MemoryStore):
    """The store that all processes share. ``on_put`` hears of every key that was put."""

    def __init__(self, clock: Clock, on_put: Callable[[Put], object], on_closed: Callable[[], object]) -> None:
        super().__init__(clock)
        self.watches: list[WatchPort] = []
        self._on_put = on_put
        self._on_closed = on_closed

    def snapshot(self) -> Saved:
        """Takes a snapshot, like ``etcdctl snapshot save``."""
        leases = {lease: (state.ttl_s, frozenset(state.keys)) for lease, state in self._leases.items()}
        return Saved(self._revision, self._compacted, dict(self._keys), leases, tuple(self._history))

    def restore(self, saved: Saved, *, bump: bool) -> set[str]:
        """Goes back to a snapshot; returns the lost keys. ``bump`` is --bump-revision --mark-compacted.

        Leases restart, as when etcd elects a leader. Lease ids are never used again.
        """
        lost = self._keys.keys() - saved.keys.keys()
        now_s = self._clock.monotonic_s()
        self._revision = saved.revision
        self._compacted = saved.compacted
        self._keys = dict(saved.keys)
        self._leases = {
            lease: MemoryLease(ttl_s, now_s + ttl_s, set(keys)) for lease, (ttl_s, keys) in saved.leases.items()
        }
        self._history.clear()
        self._history.extend(saved.history)
        if bump:
            self._revision += BUMP
            self.compact(self._revision)
        self.stir()
        return lost

    def stir(self) -> None:
        """Watches look again."""
        for watch in self.watches:
            watch.stir()

    def port(self, faults: Faults) -> MetaPort:
        """Returns the client of one process."""
        return MetaPort(MemoryMetadata(self), self, faults)

    def keys_under(self, prefix: str) -> list[str]:
        """Returns the names of keys, for the judge of a run."""
        self.expire()
        return sorted(key for key in self._keys if key.startswith(prefix))

    def _apply(self, operations: Sequence[Put | Delete]) -> None:
        super()._apply(operations)
        for operation in operations:
            if isinstance(operation, Put):
                self._on_put(operation)
            elif "/gc/condemned/" in operation.key:
                self._on_closed()
        self.stir()


class MetaPort:
    """One process's client: other processes may run before and after each call, which may fail or land late."""

    may_land = True
    """A call on its way may take effect although its sender has died."""

    def __init__(self, inner: MetadataStore, store: SimStore, faults: Faults) -> None:
        self._inner = inner
        self._store = store
        self._faults = faults
        self._kernel = faults.kernel
        self._has_looked = False
        """The last call read the sweeps in flight."""

    @property
    def operations_count(self) -> int:
        """See ``interface.Meta``."""
        return self._inner.operations_count

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        """See ``interface.Meta``."""
        actor = self._kernel.current
        if actor is not None and actor.process.is_collector and key.endswith("/gc/seq") and self._has_looked:
            self._faults.maybe_pause(Call.LINK)
        return self._read("get", key, timeout_s, lambda: self._inner.get(key, timeout_s))

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        """See ``interface.Meta``."""
        return self._read("list", prefix, timeout_s, lambda: self._inner.list(prefix, timeout_s))

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        return self._read("count", prefix, timeout_s, lambda: self._inner.count(prefix, timeout_s))

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        """See ``interface.Meta``."""
        keys = " ".join(operation.key for operation in operations)
        purpose = _purpose(compares, operations)
        return self._change("txn", keys, timeout_s, lambda: self._inner.txn(compares, operations, timeout_s), purpose)

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        return self._change("put", key, timeout_s, lambda: self._inner.put(key, value, lease, timeout_s))

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        return self._change("delete", key, timeout_s, lambda: self._inner.delete(key, timeout_s))

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        """See ``interface.Meta``."""
        return self._change("grant", str(ttl_s), timeout_s, lambda: self._inner.grant(ttl_s, timeout_s))

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        return self._change("keep_alive", str(lease), timeout_s, lambda: self._inner.keep_alive(lease, timeout_s))

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        """See ``interface.Meta``."""
        self._change("revoke", str(lease), timeout_s, lambda: self._inner.revoke(lease, timeout_s))

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """See ``interface.Meta``."""
        self._kernel.point()
        return WatchPort(self._inner.watch(prefix, from_revision), self._store, self._faults)

    def close(self) -> None:
        """See ``interface.Meta``."""
        self._inner.close()

    def _read(self, operation: str, key: str, timeout_s: float | None, call: Callable[[], T]) -> T:
        self._has_looked = key.endswith("/gc/condemned/")
        self._kernel.point()
        if self._is_down or self._faults.strikes(self._faults.rates.meta_fails):
            self._time_out(operation, timeout_s)
        result = call()
        self._kernel.note(f"{operation} {_short(key)}")
        self._faults.maybe_pause(Call.READ)
        self._kernel.point()
        return result

    def _change(self, operation: str, key: str, timeout_s: float | None, call: Callable[[], T], purpose: str = "") -> T:
        kernel, actor = self._kernel, self._kernel.current
        assert actor is not None
        if purpose:
            kernel.happened(purpose)
        actor.pending = call if self.may_land else None
        self._faults.maybe_pause(CALLS.get(purpose, Call.TXN) if operation == "txn" else Call.OTHER)
        kernel.point()
        actor.pending = None
        if self._is_down:
            self._time_out(operation, timeout_s)
        if self._faults.strikes(self._faults.rates.meta_fails):
            self._fail(operation, key, timeout_s, call)
        if purpose:
            kernel.happened(f"now {purpose}")
        result = call()
        kernel.note(f"{operation} {_short(key)}{_outcome(result)}")
        if purpose == "joining":
            kernel.happened("joined")
        kernel.point()
        return result

    def _fail(self, operation: str, key: str, timeout_s: float | None, call: Callable[[], object]) -> None:
        how = self._kernel.source.randrange(3)
        if how == 0:
            self._kernel.note(f"{operation} {_short(key)}: will land late")
            self._faults.late.append(call)
        elif how == 1:
            result = call()
            self._faults.count("replies lost")
            self._kernel.note(f"{operation} {_short(key)}{_outcome(result)}: reply lost")
        self._time_out(operation, timeout_s)

    def _time_out(self, operation: str, timeout_s: float | None) -> None:
        actor = self._kernel.current
        assert actor is not None
        actor.process.faults_count += 1
        self._faults.count("metadata calls failed")
        limit_s = TIMEOUT_S if timeout_s is None else timeout_s
        if self._kernel.random() < 0.5:
            self._kernel.sleep(limit_s * self._kernel.random())
        self._kernel.point()
        raise Unavailable(f"injected: {operation} was not answered")

    @property
    def _is_down(self) -> bool:
        return self._kernel.now_s < self._faults.meta_down_until_s


class WatchPort:
    """A watch whose events may be late, and which may be lost."""

    def __init__(self, inner: Watch, store: SimStore, faults: Faults) -> None:
        self._inner = inner
        self._store = store
        self._faults = faults
        self._kernel = faults.kernel
        self._events: list[Event] = []
        self._cut = False
        self._closed = False
        self._waiting: Actor | None = None
        self._held_until_s = 0.0
        store.watches.append(self)

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        """See ``interface.Watch``."""
        kernel = self._kernel
        ends_s = kernel.now_s + timeout_s
        kernel.point()
        while True:
            if self._closed or self._cut:
                raise WatchLost("the watch was cut")
            # Read at once, so that they are in flight even if the store is restored; delivered when they arrive.
            self._events += self._inner.next(0.0) or ()
            if self._events:
                if self._faults.strikes(self._faults.rates.lag):
                    self._held_until_s = kernel.now_s + LAG_S_MAX * kernel.random() ** 3
                arrives_s = max(self._held_until_s, self._faults.meta_down_until_s)
                if kernel.now_s >= arrives_s:
                    return self._told()
                if arrives_s >= ends_s:
                    kernel.sleep(max(0.0, ends_s - kernel.now_s))
                    return None
                kernel.sleep(arrives_s - kernel.now_s)
                return self._told()
            if kernel.now_s >= ends_s:
                return None
            self._waiting = kernel.current
            kernel.block(ends_s)

    def cut(self) -> None:
        """Loses the watch, as a compaction would."""
        self._cut = True
        self.stir()

    def close(self) -> None:
        """See ``interface.Watch``."""
        self._closed = True
        self._inner.close()
        if self in self._store.watches:
            self._store.watches.remove(self)
        self.stir()

    def stir(self) -> None:
        """Something has changed."""
        if self._waiting is not None:
            self._kernel.wake(self._waiting)
            self._waiting = None

    def _told(self) -> tuple[Event, ...]:
        """Some of the events, those of one revision together."""
        revisions = sorted({event.revision for event in self._events})
        last = revisions[int(self._kernel.random() * len(revisions))]
        count = sum(event.revision <= last for event in self._events)
        told, self._events = tuple(self._events[:count]), self._events[count:]
        self._kernel.note(f"watch {' '.join(f'{event.revision}:{_short(event.key)}' for event in told)}")
        if any("/gc/condemned/" in event.key for event in told):
            self._kernel.happened("heard")
        self._kernel.point()
        return told


def _purpose(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> str:
    """Returns the purpose of a transaction, in the words of profiles."""
    puts = " ".join(operation.key for operation in operations if isinstance(operation, Put))
    if "/gc/seq" in puts:
        return "condemning" if "/gc/condemned/" in puts else "closing"
    if "/refs/" in puts:
        return "pinning"
    if "/sessions/" in puts:
        return "joining" if any(isinstance(compare, Absent) for compare in compares) else "announcing"
    return "unpinning"


def _short(key: str) -> str:
    """A key without the part that all have in common."""
    return " ".join("/".join(part[:8] for part in each.split("/")[3:]) or each for each in key.split(" "))


def _outcome(result: object) -> str:
    if isinstance(result, TxnResult):
        return f" -> {'ok' if result.succeeded else 'refused'} @{result.revision}"
    return f" -> {result}" if result is not None else ""
