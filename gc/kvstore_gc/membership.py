"""The collectors of one root.

They agree on one limit, and the record of the one that works (``gc/capacity``) ends with it. Safety never depends on
it: two collectors that take the same shard meet in the transaction that condemns (rule G2), and one that was paused
past its lease is stopped by the fence (rule F1). So a collector is not a session: sweeps do not wait for collectors.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Sequence

from kvstore.core.validate import parse_json
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.meta.keys import SessionId
from kvstore.meta.store import KeyValue, LeaseGone, LeaseId
from kvstore_gc.site import Site

log = logging.getLogger(__name__)

TTL_S = 15
CLOSE_S = 1.0


class Collectors:
    """This collector's place among the others. One thread calls ``beat`` every second or so, any thread the rest."""

    def __init__(self, site: Site, max_bytes: int | None = None, ttl_s: int = TTL_S) -> None:
        """``max_bytes`` is this collector's limit; None: it has none."""
        self._meta = site.meta
        self._keys = site.keys
        self._clock = site.clock
        self._ids = site.ids
        self._timeout_s = site.timeout_s
        self._max_bytes = max_bytes
        self._smallest: tuple[int, SessionId] | None = None
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._id: SessionId | None = None
        self._lease = LeaseId(0)
        self._renewed_s = 0.0

    @property
    def me(self) -> tuple[SessionId, LeaseId] | None:
        """Id and lease of this collector; None while it has none, or can no longer rely on it."""
        with self._lock:
            if self._id is None or self._clock.monotonic_s() - self._renewed_s >= self._ttl_s:
                return None
            return self._id, self._lease

    @property
    def smallest_bytes(self) -> int | None:
        """The smallest limit of the other collectors, as last seen; None if they have none."""
        return None if self._smallest is None else self._smallest[0]

    def beat(self) -> None:
        """Joins, or stays for another ``ttl_s``; writes once in a third of it.

        Raises Unavailable or PermissionDenied; then call it again.
        """
        now_s = self._clock.monotonic_s()
        if self.me is None:
            self._join(now_s)
            self.look()
        elif now_s - self._renewed_s >= self._ttl_s / 3:
            if self._meta.keep_alive(self._lease, self._timeout_s):
                with self._lock:
                    self._renewed_s = now_s
                self.look()
            else:
                self._forget()
                self._join(now_s)

    def look(self) -> None:
        """Reads which others are there, and all limits. Raises Unavailable, PermissionDenied."""
        self._heed(self._meta.list(self._keys.collectors, self._timeout_s).items)

    def close(self) -> None:
        """Leaves, so that others take over immediately. If etcd cannot be reached, the lease ends by itself."""
        mine = self.me
        self._forget()
        if mine is not None:
            self._revoke(mine[1])

    def _join(self, sent_s: float) -> None:
        collector = SessionId(self._ids.fresh())
        lease = self._meta.grant(self._ttl_s, self._timeout_s)
        fields = {"host": socket.gethostname(), "pid": os.getpid(), "max_bytes": self._max_bytes}
        about = json.dumps(fields).encode()
        try:
            self._meta.put(self._keys.collector(collector), about, lease, self._timeout_s)
        except LeaseGone as gone:
            raise Unavailable("the collector's lease ended before its key was written: try again") from gone
        except KVStoreError:
            self._revoke(lease)  # the put may still be in flight: without its lease it cannot land
            raise
        with self._lock:
            self._id, self._lease, self._renewed_s = collector, lease, sent_s
        log.debug("gc.joined collector=%s", collector.hex())

    def _heed(self, items: Sequence[KeyValue]) -> None:
        """Notes the smallest limit of the others, and logs it once if this collector's is larger, or it has none.

        It holds for all: else the collector with the smallest limit would stop puts for ever, because another one sees
        no need to evict.
        """
        mine, before = self.me, self._smallest
        others = [(limit, id) for kv in items if (id := self._keys.parse_session(kv.key)) and (limit := _limit(kv))]
        smallest = self._smallest = min((each for each in others if mine is None or each[1] != mine[0]), default=None)
        if smallest is None or smallest == before or (self._max_bytes is not None and smallest[0] >= self._max_bytes):
            return
        log.warning(
            "gc.smaller_limit collector=%s max_bytes=%d: it holds for this one too; give each the same --max-bytes",
            smallest[1].hex(),
            smallest[0],
        )

    def _revoke(self, lease: LeaseId) -> None:
        try:
            self._meta.revoke(lease, CLOSE_S)
        except (Unavailable, PermissionDenied):
            pass  # it ends by itself within its ttl

    def _forget(self) -> None:
        with self._lock:
            self._id = None


def _limit(kv: KeyValue) -> int | None:
    """The limit of a live collector; None if it has none, or if its record cannot be read."""
    try:
        limit = parse_json(kv.value).get("max_bytes") if kv.lease else None
    except (ValueError, AttributeError):
        return None
    return limit if isinstance(limit, int) and limit > 0 else None
