"""The collectors of one root.

Each has a lease, with which the record of the one that works (``gc/capacity``) ends. Safety never depends on it: two
collectors that take the same part meet in the transaction that condemns (rule G2), and one that was paused past its
lease is stopped by the fence (rule F1). So a collector is not a session: sweeps do not wait for collectors.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading

from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.meta.keys import SessionId
from kvstore.meta.store import LeaseGone, LeaseId
from kvstore_gc.site import Site

log = logging.getLogger(__name__)

TTL_S = 15
CLOSE_S = 1.0


class Collectors:
    """This collector's place among the others. One thread calls ``beat`` every second or so, any thread the rest."""

    def __init__(self, site: Site) -> None:
        self._meta = site.meta
        self._keys = site.keys
        self._clock = site.clock
        self._ids = site.ids
        self._timeout_s = site.timeout_s
        self._lock = threading.Lock()
        self._id: SessionId | None = None
        self._lease = LeaseId(0)
        self._renewed_s = 0.0

    @property
    def me(self) -> tuple[SessionId, LeaseId] | None:
        """Id and lease of this collector; None while it has none, or can no longer rely on it."""
        with self._lock:
            if self._id is None or self._clock.monotonic_s() - self._renewed_s >= TTL_S:
                return None
            return self._id, self._lease

    def beat(self) -> None:
        """Joins, or stays for another ``TTL_S``; writes once in a third of it.

        Raises Unavailable or PermissionDenied; then call it again.
        """
        now_s = self._clock.monotonic_s()
        if self.me is None:
            self._join(now_s)
        elif now_s - self._renewed_s >= TTL_S / 3:
            if self._meta.keep_alive(self._lease, self._timeout_s):
                with self._lock:
                    self._renewed_s = now_s
            else:
                self._forget()
                self._join(now_s)

    def close(self) -> None:
        """Leaves, so that others take over immediately. If etcd cannot be reached, the lease ends by itself."""
        mine = self.me
        self._forget()
        if mine is not None:
            self._revoke(mine[1])

    def _join(self, sent_s: float) -> None:
        collector = SessionId(self._ids.fresh())
        lease = self._meta.grant(TTL_S, self._timeout_s)
        about = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
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

    def _revoke(self, lease: LeaseId) -> None:
        try:
            self._meta.revoke(lease, CLOSE_S)
        except (Unavailable, PermissionDenied):
            pass  # it ends by itself within its ttl

    def _forget(self) -> None:
        with self._lock:
            self._id = None
