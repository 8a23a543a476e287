"""Metadata in memory: one client of a MemoryStore, for an embedded store on one host and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.errors import Unavailable
from kvstore.meta.interface import (
    NO_LEASE,
    Compare,
    Delete,
    Event,
    KeyValue,
    LeaseId,
    ModifiedAt,
    Put,
    Snapshot,
    TxnResult,
    WatchLost,
)
from kvstore.meta.limits import check_from_revision, check_key, check_request, check_ttl
from kvstore.meta.memory_store import MemoryStore
from kvstore.sources import Clock


class MemoryWatch:
    """A position in a MemoryStore's history, under one prefix."""

    def __init__(self, store: MemoryStore, prefix: str, from_revision: int) -> None:
        self._store = store
        self._prefix = prefix
        self._from_revision = from_revision
        self.closed = False

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        """See ``interface.Watch``."""
        if self.closed:
            raise WatchLost("the watch is closed")
        events, self._from_revision = self._store.events(
            self._prefix, self._from_revision, timeout_s, lambda: self.closed
        )
        if self.closed:
            raise WatchLost("the watch is closed")
        return events or None

    def close(self) -> None:
        """See ``interface.Watch``."""
        self.closed = True
        self._store.wake()


class MemoryMeta:
    """One client of a MemoryStore (its own one unless given). Never waits, so it meets every deadline."""

    def __init__(self, store: MemoryStore | None = None, clock: Clock | None = None) -> None:
        self.store = store or MemoryStore(clock)
        self._lock = threading.Lock()
        self._operations_count = 0
        self._closed = False
        self._watches: list[MemoryWatch] = []

    @property
    def operations_count(self) -> int:
        """See ``interface.Meta``."""
        return self._operations_count

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        """See ``interface.Meta``."""
        check_key(key)
        return self._open().get(key)

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        """See ``interface.Meta``."""
        return self._open().list(prefix)

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        return self._open().count(prefix)

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        """See ``interface.Meta``."""
        check_request(compares, operations)
        return self._open().txn(compares, operations)

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        return self.txn((), (Put(key, value, lease),)).revision

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        check_key(key)
        store = self._open()
        found = store.get(key)
        while found is not None:
            if store.txn((ModifiedAt(key, found.mod_revision),), (Delete(key),)).succeeded:
                return True
            found = store.get(key)
        return False

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        """See ``interface.Meta``."""
        check_ttl(ttl_s)
        return self._open().grant(ttl_s)

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        return self._open().keep_alive(lease)

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        """See ``interface.Meta``."""
        self._open().revoke(lease)

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        """See ``interface.Meta``."""
        check_from_revision(from_revision)
        watch = MemoryWatch(self._open(), prefix, from_revision)
        with self._lock:
            self._watches = [open_ for open_ in self._watches if not open_.closed] + [watch]
        return watch

    def close(self) -> None:
        """See ``interface.Meta``. The store stays for its other clients."""
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
