"""The operations of ``Meta`` on etcd: one request each, through ``EndpointPool.call``."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvstore.core.clock import Ids, RandomIds
from kvstore.core.executor import CLOSE_S, within
from kvstore.core.grpc_channels import open_channel
from kvstore.core.validate import brief, is_unicode, kind_of
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.etcd.messages import (
    Effect,
    Fault,
    Message,
    event,
    fault_of,
    key_value,
    prefix_range,
    put_request,
    rpc,
    txn_request,
)
from kvstore.meta.store import (
    NO_LEASE,
    TIMEOUT_S,
    Compare,
    Delete,
    EtcdDeadline,
    Event,
    KeyValue,
    LeaseGone,
    LeaseId,
    Put,
    Snapshot,
    TxnResult,
    WatchLost,
    check_from_revision,
    check_key,
    check_request,
    check_ttl,
)
from kvstore.security.tls import ClientTls, client_certificate

# Access to etcd: its endpoints, TLS files and user.


ENDPOINTS_MAX = 64


class EtcdTls(ClientTls):
    """PEM files for TLS to etcd, with the fields of ``ClientTls``."""


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """A user of etcd's own authentication."""

    name: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_unicode(self.name):
            raise InvalidRequest(f"etcd user name={brief(self.name)}: expected text")
        if not isinstance(self.password, str) or not is_unicode(self.password):
            # Say nothing of the value: it may be the password, as bytes.
            raise InvalidRequest(f"etcd user password is {kind_of(self.password)}: expected text, in Unicode")
        if not self.name:
            raise InvalidRequest("etcd user name is empty: give a name, or no user at all")


@dataclass(frozen=True, slots=True)
class EtcdEndpoints:
    """``host:port`` of each member, in the order given; ``tls`` as their scheme says, None if they have none."""

    targets: tuple[str, ...]
    tls: bool | None

    @classmethod
    def parse(cls, text: str | Sequence[str]) -> EtcdEndpoints:
        """Parses ``host:port[,host:port]`` or a sequence of them, with or without http:// or https://.

        Raises InvalidRequest for an empty list, a missing or wrong port, a path, or http and https mixed.
        """
        given = [text] if isinstance(text, str) else text
        if not all(isinstance(one, str) and is_unicode(one) for one in given):
            raise InvalidRequest(f"etcd={brief(text)}: expected host:port, several with commas or as a list")
        parts = [part.strip() for one in given for part in one.split(",") if part.strip()]
        if not 1 <= len(parts) <= ENDPOINTS_MAX:
            raise InvalidRequest(
                f"{len(parts)} etcd endpoints: expected 1 to {ENDPOINTS_MAX}, as host:port[,host:port]"
            )
        schemes = {part.split("://", 1)[0].lower() if "://" in part else "" for part in parts}
        if len(schemes) > 1 or not schemes <= {"", "http", "https"}:
            raise InvalidRequest(
                f"etcd endpoints {text!r}: expected host:port, http://host:port or https://host:port, all alike"
            )
        tls = {"": None, "http": False, "https": True}[schemes.pop()]
        return cls(tuple(dict.fromkeys(_target(part) for part in parts)), tls)

    def __str__(self) -> str:
        return ",".join(self.targets)


def check_access(etcd: object, tls: object, user: object) -> None:
    """Raises InvalidRequest for ``etcd``, ``etcd_tls`` or ``etcd_user`` of a wrong type, or the two without etcd."""
    listed = [etcd] if etcd is None or isinstance(etcd, str) else etcd
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str | None) for one in listed):
        raise InvalidRequest(f"etcd={brief(etcd)}: expected host:port, several with commas or as a list")
    if etcd is not None and not any(listed):
        raise InvalidRequest(f"etcd={brief(etcd)} names none: give host:port, or None for a store without etcd")
    for name, given, kind in (("etcd_tls", tls, EtcdTls), ("etcd_user", user, EtcdUser)):
        if given is not None and not isinstance(given, kind):
            # Only its type: it may be a password.
            raise InvalidRequest(f"{name} is {kind_of(given)}: expected kvstore.{kind.__name__}")
        if given is not None and not etcd:
            raise InvalidRequest(f"{name} says how to reach etcd, and none is given: give etcd=host:port as well")


def _target(part: str) -> str:
    address = part.split("://", 1)[-1].rstrip("/")
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    odd = any(character in host for character in "/@?# ") or (":" in host and not bracketed)
    if not colon or not host or odd or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise InvalidRequest(f"etcd endpoint {part!r}: expected host:port, such as 10.0.0.5:2379 or [::1]:2379")
    return f"{host}:{int(port)}"


# The members of an etcd cluster: failover, retries, deadlines and authentication.
#
# Every request goes through ``EndpointPool.call``, so that no operation can wait for ever.


log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]
Method = Callable[..., Message]
"""A method of a stub: called with a request, ``timeout`` and ``metadata``."""

RECEIVE_BYTES_MAX = 64 << 20
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    # Lost connections are tried again quickly: our own backoff keeps the rate low, the caller's deadline bounds it.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in gRPC's core also the timeout of one connection attempt
    # A frozen member keeps its connections open: pings notice within 15 s. etcd refuses pings more often than 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC must not send anything twice: whether that is allowed is decided here.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


class EtcdRefused(Unavailable):
    """etcd answered with an error that some operations interpret; for the others it is Unavailable."""

    def __init__(self, what: str, fault: Fault) -> None:
        super().__init__(f"etcd: {what}: {fault.text}: {fault.advice}")
        self.effect = fault.effect


class EndpointChannel:
    """One endpoint with its channel, which connects on first use and reconnects by itself."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, server_name: str | None) -> None:
        options = list(_OPTIONS)
        if server_name is not None:
            options.append(("grpc.ssl_target_name_override", server_name))
        self.target = target
        self.channel = open_channel(
            target,
            lambda: (
                grpc.secure_channel(target, credentials, options)
                if credentials
                else grpc.insecure_channel(target, options)
            ),
        )
        self.kv = rpc().KVStub(self.channel)
        self.lease = rpc().LeaseStub(self.channel)
        self.watch = rpc().WatchStub(self.channel)
        self.auth = rpc().AuthStub(self.channel)


class EndpointPool:
    """All members, one of them current. Thread-safe."""

    def __init__(self, endpoints: EtcdEndpoints, tls: EtcdTls | None, user: EtcdUser | None) -> None:
        self.endpoints = endpoints
        self._server_name = tls.server_name if tls is not None else None
        self._certificate = client_certificate(tls) if tls is not None else None
        self._members, self._version = self._connected()
        self._retired: tuple[EndpointChannel, ...] = ()
        """The members with the certificate before this one: calls and watches may still be under way there."""
        self._user = user
        self._lock = threading.Lock()
        self._index = 0
        self._token: str | None = None
        self._authenticating = threading.Lock()
        self._closed = threading.Event()

    def current(self) -> EndpointChannel:
        """Returns the member to ask next. If TLS files have changed, it has a new connection."""
        if self._certificate is not None and self._certificate.version != self._version:
            self._renew()
        with self._lock:
            return self._members[self._index]

    def failed(self, member: EndpointChannel) -> None:
        """Moves on from ``member``, unless another call has done so already."""
        with self._lock:
            if self._members[self._index] is member:
                self._index = (self._index + 1) % len(self._members)

    def call(
        self,
        what: str,
        method: Callable[[EndpointChannel], Method],
        request: Message,
        deadline: EtcdDeadline,
        *,
        resend: bool = True,
    ) -> Message:
        """Returns the answer to one request, from the first member that gives one before ``deadline``.

        ``method`` returns a member's method that sends it. If ``resend`` is false, the request is not sent again once
        it may have taken effect. Raises Unavailable, PermissionDenied, InvalidRequest, or Refused for answers that the
        operation interprets.
        """
        last: Fault | None = None
        renewed = False
        tries_count = 0
        backoff_s = BACKOFF_S_MIN
        while True:
            self._check(what, deadline, last)
            member = self.current()
            # One frozen member must leave time for the others; a request that is sent only once may use all of it.
            untried_count = len(self._members) - tries_count % len(self._members)
            attempt_s = deadline.left_s(1 / untried_count if resend else 1)
            sent, token = False, None
            try:
                token = self._token_from(member, attempt_s)
                sent = True
                return method(member)(request, timeout=attempt_s, metadata=_metadata(token))
            except grpc.RpcError as error:
                last = fault_of(error)
                if last.effect is Effect.UNSURE and sent and not resend:
                    self.failed(member)
                    raise self._unknown(what, last) from error
                if last.effect is Effect.TOKEN and self._user is not None and not renewed:
                    renewed = True
                    self.drop_token(token)
                    continue
                if last.effect not in (Effect.NONE, Effect.UNSURE):
                    effects = (Effect.LEASE_GONE, Effect.LEASE_EXISTS, Effect.COMPACTED, Effect.TOO_LARGE)
                    raise (EtcdRefused(what, last) if last.effect in effects else last.error(what)) from error
            except ValueError:
                # gRPC raises it for a call on a channel that another thread closed at this moment.
                if not self._closed.is_set():
                    raise
                continue
            self.failed(member)
            tries_count += 1
            if tries_count % len(self._members) == 0:
                self._closed.wait(min(backoff_s * random.uniform(0.5, 1.0), deadline.left_s()))
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    def metadata(self, member: EndpointChannel, timeout_s: float) -> Metadata:
        """Returns metadata for a stream to ``member``. Raises grpc.RpcError if authentication fails."""
        return _metadata(self._token_from(member, timeout_s))

    def drop_token(self, token: str | None = None) -> None:
        """Forgets ``token`` (None: any token), so that the next call authenticates."""
        with self._lock:
            if token is None or self._token == token:
                self._token = None

    def close(self) -> None:
        """Closes the channels; calls under way end with Unavailable. Idempotent."""
        self._closed.set()
        for member in (*self._members, *self._retired):
            within(CLOSE_S, member.channel.close)

    def _connected(self) -> tuple[tuple[EndpointChannel, ...], int]:
        """Returns all members, with the TLS files as they are now, and their version. Raises InvalidRequest."""
        version, credentials = 0, None
        if self._certificate is not None:
            version, pems = self._certificate.version, self._certificate.pems
            credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        return tuple(
            EndpointChannel(target, credentials, self._server_name) for target in self.endpoints.targets
        ), version

    def _renew(self) -> None:
        members, version = self._connected()
        with self._lock:
            over = members  # another thread was faster
            if version != self._version:
                over, self._retired = self._retired, self._members
                self._members, self._version = members, version
        for member in over:
            within(CLOSE_S, member.channel.close)

    def _token_from(self, member: EndpointChannel, timeout_s: float) -> str | None:
        """Returns the token, from ``member`` if there is none yet; "" if etcd has authentication switched off."""
        if self._user is None:
            return None
        with self._lock:
            if self._token is not None:
                return self._token
        if not self._authenticating.acquire(timeout=timeout_s):
            raise Unavailable("etcd: another thread is still waiting to authenticate: the call may be repeated")
        try:
            with self._lock:
                if self._token is not None:
                    return self._token
            token = self._authenticate(member, self._user, timeout_s)
            with self._lock:
                self._token = token
            return token
        finally:
            self._authenticating.release()

    def _authenticate(self, member: EndpointChannel, user: EtcdUser, timeout_s: float) -> str:
        request = rpc().AuthenticateRequest(name=user.name, password=user.password)
        try:
            return str(member.auth.Authenticate(request, timeout=timeout_s).token)
        except grpc.RpcError as error:
            # etcd's own client does the same: a user may be configured before the operator switches authentication on.
            if "authentication is not enabled" in fault_of(error).text:
                return ""
            raise

    def _check(self, what: str, deadline: EtcdDeadline, last: Fault | None) -> None:
        """Raises Unavailable if this client is closed, or the deadline is over."""
        if self._closed.is_set():
            raise Unavailable(f"etcd: {what}: this client is closed: open a new one")
        if deadline.over:
            why = f"{last.text}: {last.advice}" if last else "no time left to ask"
            within = f"within {round(deadline.timeout_s, 1):g} s"
            raise Unavailable(f"etcd at {self.endpoints} did not answer {what} {within}: {why}")

    def _unknown(self, what: str, fault: Fault) -> Unavailable:
        return Unavailable(
            f"etcd at {self.endpoints}: {what}: the outcome is unknown, it may have taken effect or may yet: "
            f"read back before acting on it ({fault.text})"
        )


def _metadata(token: str | None) -> Metadata:
    return (("token", token),) if token else ()


# A watch on etcd that outlives connections.
#
# A thread follows the stream and fills a bounded queue; when the queue is full it stops reading, and flow control
# makes etcd wait. etcd splits a revision over several responses only for clients that ask for fragments; this one
# does not, so a response is a whole number of revisions and a broken stream can be taken up after the last one.


BATCHES_MAX = 256
AUTHENTICATE_S = 5.0


class EtcdWatch:
    """A ``Watch``. Gives up, with WatchLost, when no stream could be opened for ``reconnect_s``."""

    def __init__(self, members: EndpointPool, prefix: str, from_revision: int, reconnect_s: float) -> None:
        self._members = members
        self._prefix = prefix
        self._from_revision = from_revision
        self._reconnect_s = reconnect_s
        self._changed = threading.Condition()
        self._batches: deque[tuple[Event, ...]] = deque()
        self._end: WatchLost | None = None
        self._closed = False
        self._stream: Message = None
        self._thread = threading.Thread(target=self._run, name=f"etcd-watch {prefix}", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._end or self._closed, timeout=max(0.0, timeout_s))
            if self._closed:
                raise WatchLost("the watch is closed")
            if self._batches:
                batch = self._batches.popleft()
                self._changed.notify_all()
                return batch
            if self._end is not None:
                raise self._end
            return None

    def close(self) -> None:
        """Waits for the thread to end, which it does immediately."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(AUTHENTICATE_S)

    def _run(self) -> None:
        up_s = time.monotonic()
        backoff_s = BACKOFF_S_MIN
        token_dropped = False
        while not self._closed:
            member = self._members.current()
            fault, opened = self._follow(member)
            if opened:
                up_s, backoff_s, token_dropped = time.monotonic(), BACKOFF_S_MIN, False
            if fault.effect in (Effect.TOKEN, Effect.DENIED) and not token_dropped:
                # etcd 3.5 answers "permission denied" to a watch whose token has expired.
                token_dropped = True
                self._members.drop_token()
                continue
            end = self._end_of(fault, time.monotonic() - up_s)
            if end is not None:
                self._finish(end)
                return
            self._members.failed(member)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    def _end_of(self, fault: Fault, down_s: float) -> WatchLost | None:
        """Returns why the watch ends with ``fault``; None if the stream should be opened again."""
        what = f"watch of {self._prefix!r} from revision {self._from_revision}"
        if fault.effect in (Effect.TOKEN, Effect.DENIED):
            return WatchLost(f"etcd: {what}: {fault.text}: {fault.advice}")
        if fault.effect in (Effect.COMPACTED, Effect.TOO_LARGE):
            return WatchLost(f"etcd: {what}: {fault.text}: read the prefix afresh")
        if down_s >= self._reconnect_s:
            return WatchLost(f"etcd: {what}: no connection for {down_s:.1f} s ({fault.text}): {fault.advice}")
        return None

    def _follow(self, member: EndpointChannel) -> tuple[Fault, bool]:
        """Reads one stream to its end; returns why it ended, and whether it was ever opened."""
        opened = False
        key, range_end = prefix_range(self._prefix)
        request = rpc().WatchRequest(
            create_request=rpc().WatchCreateRequest(key=key, range_end=range_end, start_revision=self._from_revision)
        )
        try:
            # Without "hasleader" a member cut off from its cluster would keep a silent, stale watch open.
            metadata = (*self._members.metadata(member, AUTHENTICATE_S), ("hasleader", "true"))
            with self._changed:
                if self._closed:
                    return _CLOSED, False
                self._stream = member.watch.Watch(iter([request]), metadata=metadata)
            for response in self._stream:
                if response.canceled:
                    return _cancelled(response), opened
                opened = True
                if response.events:
                    self._offer(tuple(event(each) for each in response.events))
        except grpc.RpcError as error:
            return fault_of(error), opened
        except (ValueError, Unavailable) as error:
            # A channel that another thread closed at this moment, or no token in time.
            return Fault(Effect.UNSURE, str(error), "the watch opens the stream again"), opened
        return Fault(Effect.UNSURE, "the stream ended", "the watch opens it again"), opened

    def _offer(self, batch: tuple[Event, ...]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._batches) < BATCHES_MAX or self._closed)
            self._batches.append(batch)
            self._from_revision = batch[-1].revision + 1
            self._changed.notify_all()

    def _finish(self, end: WatchLost) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()


_CLOSED = Fault(Effect.FAILED, "closed", "open a new watch")


def _cancelled(response: Message) -> Fault:
    reason = response.cancel_reason or "cancelled by etcd"
    if response.compact_revision:
        return Fault(Effect.COMPACTED, f"compacted up to revision {response.compact_revision}", "read afresh")
    if "auth" in reason or "permission" in reason:
        return Fault(Effect.DENIED, reason, "check that the user's role covers the prefix")
    return Fault(Effect.UNSURE, reason, "the watch opens the stream again")


WATCH_RECONNECT_S = 30.0
PAGE_KEYS_FIRST = 64
PAGE_KEYS_MAX = 4096
PAGE_BYTES_AIM = 4 << 20


class EtcdMetadata:
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
        parsed = EtcdEndpoints.parse(endpoints)
        if tls is not None and parsed.tls is False:
            raise InvalidRequest(f"etcd endpoints {endpoints!r} say http:// but TLS files are given: write https://")
        self._members = EndpointPool(parsed, EtcdTls() if parsed.tls and tls is None else tls, user)
        self._timeout_s = EtcdDeadline(timeout_s).timeout_s
        self._watch_reconnect_s = watch_reconnect_s
        self._ids = ids or RandomIds()
        self._lock = threading.Lock()
        self._operations_count = 0
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._closed = False

    @property
    def operations_count(self) -> int:
        return self._operations_count

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        check_key(key)
        deadline = self._begin(timeout_s)
        request = rpc().RangeRequest(key=key.encode())
        reply = self._members.call(f"get {key}", _range, request, deadline)
        return key_value(reply.kvs[0]) if reply.kvs else None

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        deadline = self._begin(timeout_s)
        while True:
            try:
                return self._read(prefix, deadline)
            except EtcdRefused as refused:
                if refused.effect is not Effect.COMPACTED:
                    raise
                # The revision was compacted during the read: read the whole list again, at a newer revision, while
                # there is time.

    def count(self, prefix: str, timeout_s: float | None = None) -> int:
        deadline = self._begin(timeout_s)
        key, range_end = prefix_range(prefix)
        request = rpc().RangeRequest(key=key, range_end=range_end, count_only=True)
        return int(self._members.call(f"count {prefix}", _range, request, deadline).count)

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        check_request(compares, operations)
        deadline = self._begin(timeout_s)
        request = txn_request(compares, operations)
        with _lease_checked():
            reply = self._members.call("transaction", lambda member: member.kv.Txn, request, deadline, resend=False)
        return TxnResult(reply.succeeded, reply.header.revision)

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE, timeout_s: float | None = None) -> int:
        put = Put(key, value, lease)
        check_request((), (put,))
        deadline = self._begin(timeout_s)
        with _lease_checked():
            reply = self._members.call(f"put {key}", lambda member: member.kv.Put, put_request(put), deadline)
        return int(reply.header.revision)

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        check_key(key)
        deadline = self._begin(timeout_s)
        request = rpc().DeleteRangeRequest(key=key.encode())
        return bool(
            self._members.call(f"delete {key}", lambda member: member.kv.DeleteRange, request, deadline).deleted
        )

    def grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseId:
        check_ttl(ttl_s)
        deadline = self._begin(timeout_s)
        # Choose the id here: asking again after a lost reply then finds the same lease instead of leaking one.
        lease = LeaseId((int.from_bytes(self._ids.fresh()[:8], "big") >> 1) or 1)
        request = rpc().LeaseGrantRequest(ID=lease, TTL=ttl_s)
        try:
            reply = self._members.call("grant a lease", lambda member: member.lease.LeaseGrant, request, deadline)
        except EtcdRefused as refused:
            if refused.effect is Effect.LEASE_EXISTS:
                return lease
            raise
        if reply.error or ttl_s > reply.TTL:
            raise Unavailable(
                f"etcd granted a lease of {reply.TTL} s instead of {ttl_s} s: {reply.error or 'no reason'}"
            )
        return lease

    def keep_alive(self, lease: LeaseId, timeout_s: float | None = None) -> bool:
        deadline = self._begin(timeout_s)
        request = rpc().LeaseKeepAliveRequest(ID=lease)
        reply = self._members.call("keep a lease alive", _keep_alive, request, deadline)
        if reply is None:
            raise Unavailable("etcd ended a keepalive without an answer: the call may be repeated")
        return bool(reply.TTL > 0)

    def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
        deadline = self._begin(timeout_s)
        request = rpc().LeaseRevokeRequest(ID=lease)
        try:
            self._members.call("revoke a lease", lambda member: member.lease.LeaseRevoke, request, deadline)
        except EtcdRefused as refused:
            if refused.effect is not Effect.LEASE_GONE:
                raise

    def watch(self, prefix: str, from_revision: int) -> EtcdWatch:
        check_from_revision(from_revision)
        self._begin(None)
        watch = EtcdWatch(self._members, prefix, from_revision, self._watch_reconnect_s)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """Calls under way in other threads end with Unavailable, watches with WatchLost."""
        with self._lock:
            self._closed = True
        for watch in list(self._watches):
            watch.close()
        self._members.close()

    def _begin(self, timeout_s: float | None) -> EtcdDeadline:
        with self._lock:
            if self._closed:
                raise Unavailable("the etcd client is closed: open a new one")
            self._operations_count += 1
        return EtcdDeadline(self._timeout_s if timeout_s is None else timeout_s)

    def _read(self, prefix: str, deadline: EtcdDeadline) -> Snapshot:
        """Returns all pages of ``prefix``, all at the revision of the first."""
        key, range_end = prefix_range(prefix)
        items: list[KeyValue] = []
        revision, page_keys = 0, PAGE_KEYS_FIRST
        while True:
            request = rpc().RangeRequest(key=key, range_end=range_end, limit=page_keys, revision=revision)
            try:
                reply = self._members.call(f"list {prefix}", _range, request, deadline)
            except EtcdRefused as refused:
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


def _range(member: EndpointChannel) -> Method:
    method: Method = member.kv.Range
    return method


def _keep_alive(member: EndpointChannel) -> Method:
    """Wraps a keepalive, which is a stream in etcd's protocol: one request, and the first answer."""

    def send(request: Message, *, timeout: float, metadata: Metadata) -> Message:
        stream = member.lease.LeaseKeepAlive(iter([request]), timeout=timeout, metadata=metadata)
        try:
            return next(stream, None)
        finally:
            stream.cancel()

    return send


@contextmanager
def _lease_checked() -> Iterator[None]:
    try:
        yield
    except EtcdRefused as refused:
        if refused.effect is not Effect.LEASE_GONE:
            raise
        raise LeaseGone("the lease of a put does not exist (any more): nothing was written") from refused
