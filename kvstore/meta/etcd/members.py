"""The members of an etcd cluster: failover, retries, deadlines and authentication.

Every request goes through ``Members.call``, so that no operation can wait for ever.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.bounded import CLOSE_S, within
from kvstore.channels import open_channel
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.deadline import Deadline
from kvstore.meta.etcd.access import Endpoints, EtcdTls, EtcdUser, read_key, read_pem
from kvstore.meta.etcd.faults import Effect, Fault, fault_of
from kvstore.meta.etcd.wire import Message, rpc
from kvstore.security.secret_files import Watched

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


class Refused(Unavailable):
    """etcd answered with an error that some operations interpret; for the others it is Unavailable."""

    def __init__(self, what: str, fault: Fault) -> None:
        super().__init__(f"etcd: {what}: {fault.text}: {fault.advice}")
        self.effect = fault.effect


class Member:
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


class Members:
    """All members, one of them current. Thread-safe."""

    def __init__(self, endpoints: Endpoints, tls: EtcdTls | None, user: EtcdUser | None) -> None:
        self.endpoints = endpoints
        self._tls = tls
        self._watched = Watched(
            [file for file in (tls.ca_file, tls.cert_file, tls.key_file) if file is not None] if tls is not None else []
        )
        self._watched.changed()
        self._members = self._connected()
        self._retired: tuple[Member, ...] = ()
        """The members with the certificate before this one: calls and watches may still be under way there."""
        self._user = user
        self._lock = threading.Lock()
        self._index = 0
        self._token: str | None = None
        self._authenticating = threading.Lock()
        self._closed = threading.Event()

    def current(self) -> Member:
        """Returns the member to ask next. If TLS files have changed, it has a new connection."""
        if self._watched.changed():
            self._renew()
        with self._lock:
            return self._members[self._index]

    def failed(self, member: Member) -> None:
        """Moves on from ``member``, unless another call has done so already."""
        with self._lock:
            if self._members[self._index] is member:
                self._index = (self._index + 1) % len(self._members)

    def call(
        self, what: str, method: Callable[[Member], Method], request: Message, deadline: Deadline, *, resend: bool
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
                    raise _final(what, last) from error
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

    def metadata(self, member: Member, timeout_s: float) -> Metadata:
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

    def _connected(self) -> tuple[Member, ...]:
        """Returns all members, with the TLS files as they are now. Raises InvalidRequest."""
        tls, credentials = self._tls, None
        if tls is not None:
            credentials = grpc.ssl_channel_credentials(
                read_pem("CA file", tls.ca_file),
                read_key(tls.key_file),
                read_pem("client certificate", tls.cert_file),
            )
        server_name = tls.server_name if tls is not None else None
        return tuple(Member(target, credentials, server_name) for target in self.endpoints.targets)

    def _renew(self) -> None:
        try:
            members = self._connected()
        except InvalidRequest as error:
            log.error("etcd.certificate_not_reloaded the previous one stays in use: %s", error)
            return
        with self._lock:
            over, self._retired, self._members = self._retired, self._members, members
        for member in over:
            within(CLOSE_S, member.channel.close)
        log.warning("etcd.certificate_reloaded")

    def _token_from(self, member: Member, timeout_s: float) -> str | None:
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

    def _authenticate(self, member: Member, user: EtcdUser, timeout_s: float) -> str:
        request = rpc().AuthenticateRequest(name=user.name, password=user.password)
        try:
            return str(member.auth.Authenticate(request, timeout=timeout_s).token)
        except grpc.RpcError as error:
            # etcd's own client does the same: a user may be configured before the operator switches authentication on.
            if "authentication is not enabled" in fault_of(error).text:
                return ""
            raise

    def _check(self, what: str, deadline: Deadline, last: Fault | None) -> None:
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


def _final(what: str, fault: Fault) -> Exception:
    if fault.effect in (Effect.LEASE_GONE, Effect.LEASE_EXISTS, Effect.COMPACTED, Effect.TOO_LARGE):
        return Refused(what, fault)
    return fault.error(what)
