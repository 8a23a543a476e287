"""The operations of ``interface.Meta`` on a file: each one transaction, in the thread of the connection."""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.deadline import TIMEOUT_S, Deadline
from kvstore.meta.interface import NO_LEASE, Compare, Delete, KeyValue, LeaseId, Put, Snapshot, TxnResult
from kvstore.meta.limits import check_from_revision, check_key, check_request, check_ttl
from kvstore.meta.sqlite.connection import Connection
from kvstore.meta.sqlite.file import MetadataFile
from kvstore.meta.sqlite.host import boot_id, why_not_shared
from kvstore.meta.sqlite.liveness import Liveness
from kvstore.meta.sqlite.store import Store
from kvstore.meta.sqlite.watch import SqliteWatch
from kvstore.sources import Clock, Ids, RandomIds, SystemClock

T = TypeVar("T")


class SqliteMeta:
    """Metadata in the file ``metadata.sqlite`` in ``folder``, which all processes of this host may share.

    ``clock`` must be the same for all of them since ``boot``; by default it is CLOCK_BOOTTIME. ``timeout_s`` is the
    deadline of calls that give none. The first call opens the file. Raises InvalidRequest if other hosts may write to
    the folder, Unavailable if it cannot be looked at.
    """

    def __init__(
        self,
        folder: str,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        boot: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        reason = why_not_shared(folder)
        if reason is not None:
            raise InvalidRequest(f"no metadata in a file: {reason}")
        chosen_clock, chosen_boot = clock or SystemClock(), boot_id() if boot is None else boot

        liveness = Liveness(folder)

        def tables(database: sqlite3.Connection) -> Store:
            return Store(database, chosen_clock, chosen_boot, liveness)

        self._connection = Connection(MetadataFile(folder, tables), liveness)
        self._ids = ids or RandomIds()
        self._timeout_s = Deadline(timeout_s).timeout_s
        self._lock = threading.Lock()
        self._operations_count = 0
        self._closed = False
        self._watches: weakref.WeakSet[SqliteWatch] = weakref.WeakSet()

    @property
    def operations_count(self) -> int:
        """See ``interface.Meta``."""
        return self._operations_count

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        """See ``interface.Meta``."""
        check_key(key)
        return self._call(f"get {key}", lambda store: store.get(key), timeout_s)

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        """See ``interface.Meta``."""
        return self._call(f"list {prefix}", lambda store: store.list(prefix), timeout_s)

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        return self._call(f"count {prefix}", lambda store: store.count(prefix), timeout_s)

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        """See ``interface.Meta``."""
        check_request(compares, operations)
        return self._call("transaction", lambda store: store.txn(compares, operations), timeout_s)

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        return self.txn((), (Put(key, value, lease),), timeout_s).revision

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        check_key(key)
        return self._call(f"delete {key}", lambda store: store.delete(key), timeout_s)

    def grant(self, ttl_s: int, timeout_s: float | None = None, *, while_open: bool = False) -> LeaseId:
        """See ``interface.Meta``."""
        check_ttl(ttl_s)
        # Random: no lease of a file that was removed has the id of one in the next file.
        lease = LeaseId((int.from_bytes(self._ids.fresh()[:8], "big") >> 1) or 1)
        self._call("grant a lease", lambda store: store.grant(lease, ttl_s, while_open=while_open), timeout_s)
        return lease

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        return self._call("keep a lease alive", lambda store: store.keep_alive(lease), timeout_s)

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        """See ``interface.Meta``."""
        self._call("revoke a lease", lambda store: store.revoke(lease), timeout_s)

    def watch(self, prefix: str, from_revision: int) -> SqliteWatch:
        """See ``interface.Meta``."""
        check_from_revision(from_revision)
        with self._lock:
            if self._closed:
                raise Unavailable("the metadata client is closed: open a new one")
            self._operations_count += 1
            watch = SqliteWatch(self._connection, prefix, from_revision)
            self._watches.add(watch)
        return watch

    def close(self) -> None:
        """See ``interface.Meta``. Calls under way in other threads end with Unavailable, watches with WatchLost."""
        if not self._connection.is_here:
            return
        with self._lock:
            self._closed = True
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        self._connection.close()

    def _call(self, what: str, work: Callable[[Store], T], timeout_s: float | None) -> T:
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        if self._connection.is_here:
            with self._lock:
                self._operations_count += 1
        return self._connection.call(what, work, deadline)
