"""Metadata in memory: one client of a MemoryStore, for an embedded store on one host and for tests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.clock import Clock, SystemClock
from kvstore.errors import Unavailable
from kvstore.meta.store import (
    NO_LEASE,
    Absent,
    Compare,
    Delete,
    Event,
    KeyValue,
    LeaseGone,
    LeaseId,
    ModifiedAt,
    Put,
    Snapshot,
    TxnResult,
    ValueIs,
    WatchLost,
    check_from_revision,
    check_key,
    check_request,
    check_ttl,
)

# A metadata history in memory with etcd's semantics: revisions, compare-and-set, leases, watches from the past.


HISTORY_REVISIONS_MAX = 100_000


@dataclass(slots=True)
class MemoryLease:
    """A lease of a ``MemoryStore``, and the keys that end with it."""

    ttl_s: int
    ends_s: float
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    """One linear history of keys. Thread-safe; leases end by ``clock``, at the next read or call of ``expire``.

    Keeps the events of the last HISTORY_REVISIONS_MAX revisions; an older watch is lost, as after a compaction.
    """

    def __init__(self, clock: Clock | None = None, revision: int = 1) -> None:
        """``revision`` is the first one."""
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._revision = revision
        self._compacted = 0
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[LeaseId, MemoryLease] = {}
        self._lease_last = 0
        self._history: deque[tuple[Event, ...]] = deque()

    def get(self, key: str) -> KeyValue | None:
        with self._changed:
            self._expire()
            return self._keys.get(key)

    def list(self, prefix: str) -> Snapshot:
        with self._changed:
            self._expire()
            items = tuple(self._keys[key] for key in sorted(self._keys) if key.startswith(prefix))
            return Snapshot(items, self._revision)

    def count(self, prefix: str) -> int:
        with self._changed:
            self._expire()
            return sum(key.startswith(prefix) for key in self._keys)

    def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """Applies ``operations`` at one new revision if all ``compares`` hold. Raises LeaseGone."""
        with self._changed:
            self._expire()
            if not all(self._holds(compare) for compare in compares):
                return TxnResult(False, self._revision)
            for operation in operations:
                if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                    raise LeaseGone(f"lease {operation.lease:x} does not exist: nothing was written")
            self._apply(operations)
            return TxnResult(True, self._revision)

    def grant(self, ttl_s: int) -> LeaseId:
        with self._changed:
            self._lease_last += 1
            lease = LeaseId(self._lease_last)
            self._leases[lease] = MemoryLease(ttl_s, self._clock.monotonic_s() + ttl_s)
            self._changed.notify_all()
            return lease

    def keep_alive(self, lease: LeaseId) -> bool:
        with self._changed:
            self._expire()
            found = self._leases.get(lease)
            if found is None:
                return False
            found.ends_s = self._clock.monotonic_s() + found.ttl_s
            return True

    def revoke(self, lease: LeaseId) -> None:
        with self._changed:
            self._expire()
            self._end_lease(lease)

    def expire(self) -> None:
        """Ends the leases that are due, and has waiting watches look again."""
        with self._changed:
            self._expire()
            self._changed.notify_all()

    def compact(self, revision: int) -> None:
        """Forgets the history before ``revision``: watches from before are lost."""
        with self._changed:
            self._compacted = max(self._compacted, min(revision, self._revision))
            while self._history and self._history[0][0].revision < self._compacted:
                self._history.popleft()
            self._changed.notify_all()

    def events(
        self, prefix: str, from_revision: int, timeout_s: float, closed: Callable[[], bool]
    ) -> tuple[tuple[Event, ...], int]:
        """Returns events under ``prefix`` from ``from_revision`` on, waiting up to ``timeout_s`` for the first of them.

        Also returns the revision to go on from. Raises WatchLost if history no longer reaches back that far.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._expire()
                if from_revision < self._compacted:
                    raise WatchLost(f"revision {from_revision} is compacted (up to {self._compacted}): read afresh")
                found = self._since(prefix, from_revision)
                # Skip what was looked through already, however quiet the prefix.
                from_revision = max(from_revision, self._revision + 1)
                remaining_s = deadline_s - time.monotonic()
                if found or closed() or remaining_s <= 0:
                    return found, from_revision
                # Wake in time for the next lease that expires: until then perhaps no other call checks leases.
                self._changed.wait(min(remaining_s, self._next_end_s()))

    def _since(self, prefix: str, from_revision: int) -> tuple[Event, ...]:
        # From the newest back: a watch is mostly near the end of a long history.
        found: list[list[Event]] = []
        for events in reversed(self._history):
            if events[0].revision < from_revision:
                break
            found.append([event for event in events if event.key.startswith(prefix)])
        return tuple(event for events in reversed(found) for event in events)

    def _next_end_s(self) -> float:
        now_s = self._clock.monotonic_s()
        return max(0.0, min((lease.ends_s - now_s for lease in self._leases.values()), default=3600.0))

    def _holds(self, compare: Compare) -> bool:
        found = self._keys.get(compare.key)
        match compare:
            case Absent():
                return found is None
            case ModifiedAt():
                return found is not None and found.mod_revision == compare.mod_revision
            case ValueIs():
                return found is not None and found.value == compare.value

    def _apply(self, operations: Sequence[Put | Delete]) -> None:
        changing = [operation for operation in operations if isinstance(operation, Put) or operation.key in self._keys]
        if not changing:
            return
        self._revision += 1
        self._history.append(tuple(self._change(operation) for operation in changing))
        if len(self._history) > HISTORY_REVISIONS_MAX:
            self._compacted = self._history.popleft()[0].revision + 1
        self._changed.notify_all()

    def _change(self, operation: Put | Delete) -> Event:
        before = self._keys.pop(operation.key, None)
        if before is not None and before.lease in self._leases:
            self._leases[before.lease].keys.discard(operation.key)
        if isinstance(operation, Delete):
            return Event(operation.key, None, self._revision)
        created = before.create_revision if before else self._revision
        after = KeyValue(operation.key, bytes(operation.value), created, self._revision, operation.lease)
        self._keys[operation.key] = after
        if operation.lease:
            self._leases[operation.lease].keys.add(operation.key)
        return Event(operation.key, after, self._revision)

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for lease in [lease for lease, state in self._leases.items() if state.ends_s <= now_s]:
            self._end_lease(lease)

    def _end_lease(self, lease: LeaseId) -> None:
        state = self._leases.get(lease)
        if state is not None:
            self._apply([Delete(key) for key in sorted(state.keys)])
            del self._leases[lease]


class MemoryWatch:
    """A position in a MemoryStore's history, under one prefix."""

    def __init__(self, store: MemoryStore, prefix: str, from_revision: int) -> None:
        self._store = store
        self._prefix = prefix
        self._from_revision = from_revision
        self.closed = False

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        if self.closed:
            raise WatchLost("the watch is closed")
        events, self._from_revision = self._store.events(
            self._prefix, self._from_revision, timeout_s, lambda: self.closed
        )
        if self.closed:
            raise WatchLost("the watch is closed")
        return events or None

    def close(self) -> None:
        self.closed = True
        self._store.expire()


class MemoryMetadata:
    """One client of a MemoryStore (its own one unless given). Never waits, so it meets every deadline."""

    def __init__(self, store: MemoryStore | None = None, clock: Clock | None = None) -> None:
        self.store = store or MemoryStore(clock)
        self._lock = threading.Lock()
        self._operations_count = 0
        self._closed = False
        self._watches: list[MemoryWatch] = []

    @property
    def operations_count(self) -> int:
        return self._operations_count

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        check_key(key)
        return self._open().get(key)

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        return self._open().list(prefix)

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        return self._open().count(prefix)

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        check_request(compares, operations)
        return self._open().txn(compares, operations)

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        return self.txn((), (Put(key, value, lease),)).revision

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        check_key(key)
        store = self._open()
        exists = store.get(key) is not None
        store.txn((), (Delete(key),))
        return exists

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        check_ttl(ttl_s)
        return self._open().grant(ttl_s)

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        return self._open().keep_alive(lease)

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        self._open().revoke(lease)

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        check_from_revision(from_revision)
        watch = MemoryWatch(self._open(), prefix, from_revision)
        with self._lock:
            self._watches = [open_ for open_ in self._watches if not open_.closed] + [watch]
        return watch

    def close(self) -> None:
        """The store stays for its other clients."""
        with self._lock:
            self._closed = True
            watches, self._watches = self._watches, []
        for watch in watches:
            watch.close()

    def _open(self) -> MemoryStore:
        with self._lock:
            if self._closed:
                raise Unavailable("the metadata client is closed: open a new one")
            self._operations_count += 1
        return self.store
