"""The worker: one node of the cluster as a gRPC server. It starts, reports its health, drains, stops."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, cast

import grpc

try:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "a worker needs gRPC's health and reflection packages: pip install 'kvstore-llm[server]'"
    ) from missing

from kvstore.core.clock import SystemClock
from kvstore.core.executor import Loop
from kvstore.engine.coordination import ClusterMember
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied
from kvstore.meta.session import Session
from kvstore.meta.workers import WorkerRecord, WorkerRegistry
from kvstore.security.guard import AccessGuard, ServerSecurity
from kvstore.security.tls import Certificate
from kvstore.transport.limits import CONTROL, SERVER_OPTIONS, SERVICE
from kvstore.transport.status import Busy, refusal
from kvstore.transport.watchdog import StreamWatchdog
from kvstore.worker.admin import ControlService
from kvstore.worker.context import DaemonThreads, abort, presented_by, request_of
from kvstore.worker.data_server import BulkListener
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.service import WorkerService

# The standard services next to ours: health and reflection.


HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection."
STRANGERS_MAX = 16
"""Limit on health checks of unauthenticated callers in progress."""
_STATUSES = health_pb2.HealthCheckResponse


class Health:
    """The worker's answer of the health service."""

    def __init__(self) -> None:
        self._servicer = health.HealthServicer()
        self.is_serving = False
        self.set(False)

    def set(self, serving: bool) -> None:
        """Sets SERVING or NOT_SERVING, for the worker as a whole and for the store's service."""
        self.is_serving = serving
        for service in ("", SERVICE):
            self._servicer.set(service, _STATUSES.SERVING if serving else _STATUSES.NOT_SERVING)

    def add_to(self, server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((SERVICE, CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


class AuthInterceptor:
    """Authenticates callers of services that are not ours, or before ours begin.

    A health check is open to all (rule X4), to a few strangers at a time. A watch of health is not: it keeps a thread
    for as long as it likes, and the service remembers each name that was ever watched.
    """

    def __init__(self, guard: AccessGuard) -> None:
        self._guard = guard
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)

    def knock(self, method: str, context: grpc.ServicerContext) -> None:
        """Returns if the caller may come in, to be authorised inside; aborts the call otherwise."""
        service, _, name = method.removeprefix("/").rpartition("/")
        if self._guard.lets_all_in:
            return
        if service == HEALTH and (name == "Check" or self._guard.knows(presented_by(context))):
            self._admit_to_health(context)
            return
        try:
            if service in (SERVICE, CONTROL):
                # Authorisation follows where the tenant is known; authentication comes before any thread waits for
                # the caller.
                method = name if service == SERVICE else f"Control.{name}"
                self._guard.identify(method, presented_by(context), str(context.peer()), request_of(context))
            else:
                method = "Reflection" if service.startswith(REFLECTION) else f"{service}/{name}"
                self._guard.admit(method, presented_by(context), str(context.peer()), request_of(context))
        except PermissionDenied as error:
            abort(context, refusal(error))

    def _admit_to_health(self, context: grpc.ServicerContext) -> None:
        if self._guard.knows(presented_by(context)):
            return
        if not self._strangers.acquire(blocking=False):
            abort(
                context,
                refusal(Busy("too many health checks without a token are in progress: back off, or show a token")),
            )
        if not context.add_callback(self._strangers.release):
            self._strangers.release()  # the call has already ended


class Patience(grpc.ServerInterceptor):
    """Bounds how long a peer may keep a thread without sending what it announced.

    gRPC waits in a thread of the pool for the message of a call that has only one, before any handler is asked, and for
    as long as the peer keeps its connection. So such calls are taken as streams, whose one message is waited for under
    watch. Streams of reflection, on which a peer need never send anything, end after a time. ``door`` authenticates a
    peer before any thread waits for it.
    """

    def __init__(self, watch: StreamWatchdog, most_s: float, door: AuthInterceptor) -> None:
        self._watch = watch
        self._most_s = most_s
        self._door = door

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        if handler.request_streaming and not handler.response_streaming:
            return handler  # our own handlers watch their streams themselves
        serializers = (handler.request_deserializer, handler.response_serializer)

        def one_to_one(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            self._door.knock(details.method, context)
            return handler.unary_unary(self._first(messages, context), context)

        def one_to_many(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            self._door.knock(details.method, context)
            yield from handler.unary_stream(self._first(messages, context), context)

        def bounded(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            self._door.knock(details.method, context)
            with self._watch.begin(self._most_s, self._most_s, context.cancel):
                yield from handler.stream_stream(messages, context)

        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(one_to_one, *serializers)
        many = bounded if handler.request_streaming else one_to_many
        return grpc.stream_stream_rpc_method_handler(many, *serializers)

    def _first(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        with self._watch.begin(self._most_s, self._most_s, context.cancel):
            message = next(messages, None)
        if message is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message: expected one")
        return message


# TLS of new connections, with the certificate as it is now (rule X2).


def server_credentials(certificate: Certificate, *, asks_certificates: bool) -> grpc.ServerCredentials:
    """Returns a worker's credentials; ``asks_certificates`` demands one of each client. Raises InvalidRequest."""
    used = certificate.version
    first = _configuration(certificate, asks_certificates)

    def fetch() -> Any:
        """Called by gRPC before each handshake; None keeps the certificate from before."""
        nonlocal used
        try:
            version = certificate.version
            if version == used:
                return None
            used = version
            return _configuration(certificate, asks_certificates)
        except KVStoreError as error:  # gRPC would swallow it
            log.error("certificate.not_reloaded %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=asks_certificates)


def _configuration(certificate: Certificate, asks_certificates: bool) -> grpc.ServerCertificateConfiguration:
    pems = certificate.pems
    assert pems.key is not None and pems.cert is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca if asks_certificates else None)


log = logging.getLogger(__name__)

DEREGISTER_S = 2.0
REGISTER_S = 2.0
"""How long a start waits to be listed in etcd; without an answer it serves, and is listed later."""
LAST_ANSWERS_S = 5.0
SPACE_PERIOD_S = 10.0
SPACE_S = 1.0
"""How long the root may take to report its space."""


class Worker:
    """Serves ``member``, which the caller closes after ``stop``.

    ``listen`` is ``host:port``, ``[v6]:port`` or ``unix:path``; port 0 is chosen by the system. ``advertise`` is the
    address for clients, if it differs: discovery returns it. ``version`` is shown in lists of workers. The worker also
    takes bulk connections (kvstore/transport/BULK.md) unless ``bulk_port`` is None: on that port of the same host (0:
    chosen by the system), and on a unix socket in its own folder among the temporary files, which clients on this host
    must see under the same path.
    """

    def __init__(
        self,
        member: ClusterMember,
        listen: str,
        limits: WorkerLimits | None = None,
        *,
        advertise: str | None = None,
        version: str = "",
        bulk_port: int | None = 0,
        security: ServerSecurity | None = None,
    ) -> None:
        self.limits = limits or WorkerLimits()
        clock = SystemClock()
        self.security = security or ServerSecurity()
        self.address = ""
        """The bound address, once started."""
        self.advertised = advertise or ""
        """The address that discovery returns, once started."""
        self.service = WorkerService(member, self.limits, clock, self.security)
        self.control = ControlService(member, self.service, lambda: self.advertised)
        self.member = member
        self._listen = listen
        self._bulk_port = bulk_port
        self._version = version
        self._workers = WorkerRegistry(member.meta, member.keys)
        self._registering = threading.Lock()
        self._settled = threading.Event()  # listed, or leaving before that
        self._changed = threading.Condition()  # guards that the worker stops
        self._leaving = False
        self._deregistered = False
        self._space_at_s = 0.0
        self._server: grpc.Server | None = None
        self._threads: DaemonThreads | None = None
        self.health = Health()
        self._loop = Loop("kvstore-worker", self._changed, lambda: self._turn)

    def start(self) -> str:
        """Listens, serves, and registers in the cluster; returns the bound address.

        Raises InvalidRequest if it cannot listen there.
        """
        assert self._server is None, "a worker is started once"
        host, colon, port = self._listen.rpartition(":")
        is_path = self._listen.startswith("unix:")
        if not is_path and (not host or not colon or not port.isascii() or not port.isdigit() or int(port) > 65535):
            raise InvalidRequest(f"listen={self._listen!r}: expected host:port, [v6]:port or unix:path")
        if is_path and _is_answering(self._listen.removeprefix("unix:").removeprefix("//")):
            raise self._cannot_listen()
        threads = DaemonThreads(self.limits.threads_max, "kvstore-call")
        server = grpc.server(
            cast(futures.ThreadPoolExecutor, threads),  # the stubs require this type; gRPC only submits to it
            handlers=[self.service.handler(), self.control.handler()],
            interceptors=[Patience(self.service.watch, self.limits.idle_s, AuthInterceptor(self.service.calls.guard))],
            options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", self.limits.connections_max)],
            maximum_concurrent_rpcs=self.limits.threads_max,
        )
        self.health.add_to(server)
        try:
            bound = self._bind(server)
        except RuntimeError as cause:
            raise self._cannot_listen() from cause
        if not bound:
            raise self._cannot_listen()
        self.address = self._listen if is_path else f"{host}:{bound}"
        if self.security.account is not None:
            self.security.account.serve(self.address)
        if self._bulk_port is not None:
            service = self.service
            bulk_host, tls = None if is_path else host, self.security.tls
            service.bulk = BulkListener(
                service.bulk_requests, service.calls, self.limits, bulk_host, self._bulk_port, tls
            )
            service.bulk.start()
        server.start()
        self._server, self._threads = server, threads
        self.advertised = self.advertised or self._reachable(host, bound, is_path)
        self.health.set(True)
        self._loop.start()
        self.member.presence.attach(self._register)
        self._settled.wait(REGISTER_S)  # a client that learns of this worker looks it up
        return self.address

    def drain(self, timeout_s: float) -> bool:
        """Stops in good order: refuses new calls, waits for accepted ones, then ``stop``. True if all ended in time.

        Clients learn of it first (health, discovery), so that few calls are refused.
        """
        self._leaving = True
        self._settled.set()
        self.health.set(False)
        self._deregister()
        self.service.gate.close()
        self.control.close()
        ended = self.service.gate.wait_empty(timeout_s)
        if not ended:
            log.warning("worker.drain_cut calls=%d", self.service.gate.inside_count)
        # Only last answers are left to send; a call that did not end in time is cancelled after that.
        self.stop(LAST_ANSWERS_S if ended else 0.0)
        return ended

    def stop(self, grace_s: float = 0.0) -> None:
        """Stops serving: calls in progress are cancelled after ``grace_s``. Idempotent."""
        self._leaving = True
        self._settled.set()
        self.service.gate.close()
        self.control.close()
        self._loop.stop()
        if self._server is None:
            self.service.watch.close()
            return
        self.health.set(False)
        self._deregister()
        if self.service.bulk is not None:
            self.service.bulk.close(LAST_ANSWERS_S)
        self._server.stop(grace_s).wait(grace_s + LAST_ANSWERS_S)
        if self._threads is not None:
            self._threads.shutdown(timeout_s=LAST_ANSWERS_S)
        self._loop.close(LAST_ANSWERS_S)
        self.service.watch.close()

    def _turn(self) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._loop.closed, self.limits.health_period_s)
        if not is_over:
            self._look_after()

    def _look_after(self) -> None:
        """Reports NOT_SERVING while the root hangs, so that clients use other workers; ends expired holds."""
        self.service.holds.expire()
        self.member.node.holds.expire()
        self._look_at_space()
        serving = not self.member.node.stats()["root_hangs"] and not self._leaving
        if serving != self.health.is_serving and not self._loop.closed:
            log.warning("worker.serving %s", serving)
            self.health.set(serving)

    def _look_at_space(self) -> None:
        """Reads the root's space now and then, for metrics. Without an answer the root counts as gone."""
        now_s = time.monotonic()
        if now_s >= self._space_at_s:
            self._space_at_s = now_s + SPACE_PERIOD_S
            try:
                self.service.space = self.member.node.space(SPACE_S)
                self.service.root_is_gone = False
            except KVStoreError:
                self.service.root_is_gone = True

    def _bind(self, server: grpc.Server) -> int:
        tls = self.security.tls
        if tls is None and self._listen.startswith("unix:") and self.security.account is not None:
            before = os.umask(0o177)  # with the bind, or another account could connect before a chmod (rule X12)
            try:
                return server.add_insecure_port(self._listen)
            finally:
                os.umask(before)
        if tls is None:
            return server.add_insecure_port(self._listen)
        credentials = server_credentials(tls, asks_certificates=self.security.asks_certificates)
        return server.add_secure_port(self._listen, credentials)

    def _register(self, session: Session) -> None:
        with self._registering:
            # A session that begins while the worker drains must not list it again.
            if not self._leaving:
                record = WorkerRecord(self.advertised, self._version, socket.gethostname(), os.getpid())
                self._workers.register(session, record)
                self._settled.set()

    def _deregister(self) -> None:
        """Takes the worker off the list, once; without an answer from etcd it goes with its session."""
        if not self._registering.acquire(timeout=DEREGISTER_S):
            return
        try:
            if self._deregistered:
                return
            self._deregistered = True
            self._workers.deregister(self.member.presence.current(), DEREGISTER_S)
        except KVStoreError as error:
            log.info("worker.not_deregistered %s", error)
        finally:
            self._registering.release()

    def _reachable(self, host: str, port: int, is_path: bool) -> str:
        if is_path:
            return self._listen
        wildcard = host in ("0.0.0.0", "[::]", "*")
        return f"{socket.gethostname() if wildcard else host}:{port}"

    def _cannot_listen(self) -> InvalidRequest:
        return InvalidRequest(
            f"could not listen on {self._listen}: the port is in use by another process, or the address is not of this "
            "host; choose another, or port 0"
        )


def _is_answering(path: str) -> bool:
    """True if a process listens on a unix socket: gRPC would silently take the path away from it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
