"""The operations of ``interface.Meta`` on etcd: one request each, through ``Members.call``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.deadline import TIMEOUT_S, Deadline
from kvstore.meta.etcd.access import Endpoints, EtcdTls, EtcdUser
from kvstore.meta.etcd.faults import Effect
from kvstore.meta.etcd.members import Member, Members, Metadata, Method, Refused
from kvstore.meta.etcd.watch import EtcdWatch
from kvstore.meta.etcd.wire import Message, key_value, prefix_range, put_request, rpc, txn_request
from kvstore.meta.interface import (
    NO_LEASE,
    Compare,
    Delete,
    KeyValue,
    LeaseGone,
    LeaseId,
    Put,
    Snapshot,
    TxnResult,
)
from kvstore.meta.limits import check_from_revision, check_key, check_request, check_ttl
from kvstore.sources import Ids, RandomIds

WATCH_RECONNECT_S = 30.0
PAGE_KEYS_FIRST = 64
PAGE_KEYS_MAX = 4096
PAGE_BYTES_AIM = 4 << 20


class EtcdMeta:
    """Metadata in etcd.

    ``endpoints``: ``host:port[,host:port]`` or a sequence, with or without http:// or https://; https, or ``tls``,
    means TLS. ``timeout_s`` is the deadline of calls that give none. A watch is lost if it could not reconnect for
    ``watch_reconnect_s``. Nothing is connected before the first call.

    Raises InvalidRequest for endpoints that cannot be parsed, unreadable TLS files, or a missing client package.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        tls: EtcdTls | None = None,
        user: EtcdUser | None = None,
        timeout_s: float = TIMEOUT_S,
        watch_reconnect_s: float = WATCH_RECONNECT_S,
        ids: Ids | None = None,
    ) -> None:
        parsed = Endpoints.parse(endpoints)
        if tls is not None and parsed.tls is False:
            raise InvalidRequest(f"etcd endpoints {endpoints!r} say http:// but TLS files are given: write https://")
        self._members = Members(parsed, EtcdTls() if parsed.tls and tls is None else tls, user)
        self._timeout_s = Deadline(timeout_s).timeout_s
        self._watch_reconnect_s = watch_reconnect_s
        self._ids = ids or RandomIds()
        self._lock = threading.Lock()
        self._operations_count = 0
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._closed = False

    @property
    def operations_count(self) -> int:
        """See ``interface.Meta``."""
        return self._operations_count

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        """See ``interface.Meta``."""
        check_key(key)
        deadline = self._begin(timeout_s)
        request = rpc().RangeRequest(key=key.encode())
        reply = self._members.call(f"get {key}", _range, request, deadline, resend=True)
        return key_value(reply.kvs[0]) if reply.kvs else None

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        """See ``interface.Meta``."""
        deadline = self._begin(timeout_s)
        while True:
            try:
                return self._read(prefix, deadline)
            except Refused as refused:
                if refused.effect is not Effect.COMPACTED:
                    raise
                # The revision was compacted during the read: read the whole list again, at a newer revision, while
                # there is time.

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        deadline = self._begin(timeout_s)
        key, range_end = prefix_range(prefix)
        request = rpc().RangeRequest(key=key, range_end=range_end, count_only=True)
        return int(self._members.call(f"count {prefix}", _range, request, deadline, resend=True).count)

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        """See ``interface.Meta``."""
        check_request(compares, operations)
        deadline = self._begin(timeout_s)
        request = txn_request(compares, operations)

        try:
            reply = self._members.call("transaction", lambda member: member.kv.Txn, request, deadline, resend=False)
        except Refused as refused:
            raise _lease_gone(refused) from refused
        return TxnResult(reply.succeeded, reply.header.revision)

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        """See ``interface.Meta``."""
        put = Put(key, value, lease)
        check_request((), (put,))
        deadline = self._begin(timeout_s)
        request = put_request(put)

        try:
            reply = self._members.call(f"put {key}", lambda member: member.kv.Put, request, deadline, resend=True)
        except Refused as refused:
            raise _lease_gone(refused) from refused
        return int(reply.header.revision)

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        check_key(key)
        deadline = self._begin(timeout_s)
        request = rpc().DeleteRangeRequest(key=key.encode())

        return bool(
            self._members.call(
                f"delete {key}", lambda member: member.kv.DeleteRange, request, deadline, resend=True
            ).deleted
        )

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        """See ``interface.Meta``."""
        check_ttl(ttl_s)
        deadline = self._begin(timeout_s)
        # Choose the id here: asking again after a lost reply then finds the same lease instead of leaking one.
        lease = LeaseId((int.from_bytes(self._ids.fresh()[:8], "big") >> 1) or 1)
        request = rpc().LeaseGrantRequest(ID=lease, TTL=ttl_s)

        try:
            reply = self._members.call(
                "grant a lease", lambda member: member.lease.LeaseGrant, request, deadline, resend=True
            )
        except Refused as refused:
            if refused.effect is Effect.LEASE_EXISTS:
                return lease
            raise
        if reply.error or ttl_s > reply.TTL:
            raise Unavailable(
                f"etcd granted a lease of {reply.TTL} s instead of {ttl_s} s: {reply.error or 'no reason'}"
            )
        return lease

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        """See ``interface.Meta``."""
        deadline = self._begin(timeout_s)

        request = rpc().LeaseKeepAliveRequest(ID=lease)
        reply = self._members.call("keep a lease alive", _keep_alive, request, deadline, resend=True)
        if reply is None:
            raise Unavailable("etcd ended a keepalive without an answer: the call may be repeated")
        return bool(reply.TTL > 0)

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        """See ``interface.Meta``."""
        deadline = self._begin(timeout_s)
        request = rpc().LeaseRevokeRequest(ID=lease)

        try:
            self._members.call(
                "revoke a lease", lambda member: member.lease.LeaseRevoke, request, deadline, resend=True
            )
        except Refused as refused:
            if refused.effect is not Effect.LEASE_GONE:
                raise

    def watch(self, prefix: str, from_revision: int) -> EtcdWatch:
        """See ``interface.Meta``."""
        check_from_revision(from_revision)
        self._begin(None)
        watch = EtcdWatch(self._members, prefix, from_revision, self._watch_reconnect_s)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """See ``interface.Meta``. Calls under way in other threads end with Unavailable, watches with WatchLost."""
        with self._lock:
            self._closed = True
        for watch in list(self._watches):
            watch.close()
        self._members.close()

    def _begin(self, timeout_s: float | None) -> Deadline:
        with self._lock:
            if self._closed:
                raise Unavailable("the etcd client is closed: open a new one")
            self._operations_count += 1
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    def _read(self, prefix: str, deadline: Deadline) -> Snapshot:
        """Returns all pages of ``prefix``, all at the revision of the first."""
        key, range_end = prefix_range(prefix)
        items: list[KeyValue] = []
        revision, page_keys = 0, PAGE_KEYS_FIRST
        while True:
            request = rpc().RangeRequest(key=key, range_end=range_end, limit=page_keys, revision=revision)
            try:
                reply = self._members.call(f"list {prefix}", _range, request, deadline, resend=True)
            except Refused as refused:
                if refused.effect is Effect.TOO_LARGE and page_keys > 1:
                    page_keys = 1  # large keys after small ones: read this page again
                    continue
                raise
            revision = revision or reply.header.revision
            items.extend(key_value(kv) for kv in reply.kvs)
            if not reply.more:
                return Snapshot(tuple(items), revision)
            key = reply.kvs[-1].key + b"\0"
            # Many small keys come in few pages, few large ones in many, so that no answer outgrows the limit.
            page_keys = max(1, min(PAGE_KEYS_MAX, 2 * page_keys, page_keys * PAGE_BYTES_AIM // reply.ByteSize()))


def _range(member: Member) -> Method:
    method: Method = member.kv.Range
    return method


def _keep_alive(member: Member) -> Method:
    """Wraps a keepalive, which is a stream in etcd's protocol: one request, and the first answer."""

    def send(request: Message, *, timeout: float, metadata: Metadata) -> Message:
        stream = member.lease.LeaseKeepAlive(iter([request]), timeout=timeout, metadata=metadata)
        try:
            return next(stream, None)
        finally:
            stream.cancel()

    return send


def _lease_gone(refused: Refused) -> Exception:
    if refused.effect is Effect.LEASE_GONE:
        return LeaseGone("the lease of a put does not exist (any more): nothing was written")
    return refused
