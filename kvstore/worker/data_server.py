"""The bulk protocol's server: who may connect, which thread serves a connection, and its requests.

One thread watches all silent connections, greets new ones, and passes those that begin a request to the serving
threads. So a silent connection costs one file descriptor and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import selectors
import shutil
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvstore.core.metrics import WorkerCount
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.security.access import NOTHING, Presented
from kvstore.security.tls import Certificate
from kvstore.transport.channel import (
    ARENA,
    HEAD_BYTES,
    HELLO,
    REQUESTS,
    SHORT_CALLS,
    Channel,
    FrameKind,
    Grant,
    LinkBroken,
    LinkLate,
    RequestHeader,
    boot_id,
    decode_head,
    decode_request,
    listen_tcp,
    listen_unix,
    unpacked,
)
from kvstore.transport.messages import parse, trace_of
from kvstore.transport.status import Refusal, refusal
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.context import BulkContext, CallRefused, Calls, DaemonThreads, UnaryCall, WorkerContext
from kvstore.worker.data_get import Leases, serve_get
from kvstore.worker.data_put import Connection, serve_put
from kvstore.worker.limits import WorkerLimits

log = logging.getLogger(__name__)

# The requests on a connection, each from its first frame to its answer.


LINGER_S = 2.0
"""How long the rest of a refused put is read on, so that the client can read why."""
_STREAMS = {FrameKind.GET: "Get", FrameKind.PUT: "Put"}
BULK_METHODS = (*_STREAMS.values(), *SHORT_CALLS)
"""The calls that requests are counted as."""


class BulkRequests:
    """Serves the requests of all bulk connections."""

    def __init__(self, worker: WorkerContext, short: Mapping[str, UnaryCall[Any]]) -> None:
        """``short`` has the calls of SHORT_CALLS."""
        self._worker = worker
        self._calls = worker.calls
        self._short = short
        self.memory = worker.node.memory
        """The memory that clients on this host may map."""
        self.memory_id = worker.node.ids.fresh() if self.memory is not None else b""
        self.leases = Leases(self.memory) if self.memory is not None else None

    def serve(self, connection: Connection) -> bool:
        """Serves the request whose first bytes came; returns whether the connection can be used again. Never raises."""
        channel, limits = connection.channel, self._worker.limits
        number = 0
        try:
            channel.limit(limits.idle_s, limits.stream_s_max)
            head = channel.receive_head()
            channel.expect(head, FrameKind.ARENA, FrameKind.MAP, *REQUESTS)
            number = head.request
            payload = channel.receive(head.length)
            if head.kind is FrameKind.ARENA:
                connection.adopt_arena(unpacked(ARENA, payload)[0], limits.arena_bytes_max)
                return True
            channel.take_files(0)
            if head.kind is FrameKind.MAP:
                mapping = BulkContext(channel, limits.idle_s, (), connection.presented)
                with self._calls.serving("MapMemory", mapping, light=True):
                    self._hand_memory(channel, number)
                return True
            request = decode_request(payload)
            channel.limit(limits.idle_s, min(request.timeout_s, limits.stream_s_max))
            context = BulkContext(channel, request.timeout_s, trace_of(request.message), connection.presented)
            if head.kind is FrameKind.CALL:
                self._answer(channel, number, request, context)
                return channel.alive
            with self._calls.serving(_STREAMS[head.kind], context) as call:
                if head.kind is FrameKind.GET:
                    serve_get(self._worker, self.leases, channel, number, request.flag, request.message, call)
                else:
                    serve_put(self._worker, connection, number, request.message, call)
            channel.take_files(0)
            return channel.alive
        except CallRefused as refused:
            self._refuse(connection, number, refused.refusal)
        except LinkLate:
            self._calls.add(WorkerCount.CALLS_IDLE)
        except KVStoreError as error:
            self._refuse(connection, number, refusal(error))
        return False

    def close(self, timeout_s: float) -> None:
        """Stops waiting for clients. Idempotent."""
        if self.leases is not None:
            self.leases.close(timeout_s)

    def _answer(self, channel: Channel, number: int, request: RequestHeader, context: BulkContext) -> None:
        if request.flag >= len(SHORT_CALLS):
            raise InvalidRequest(f"call {request.flag} is not known: expected 0 to {len(SHORT_CALLS) - 1}")
        name = SHORT_CALLS[request.flag]
        served = self._short[name]
        try:
            with self._calls.serving(name, context, light=served.light) as call:
                answer = served.answer(parse(served.kind, request.message), call).SerializeToString()
        except CallRefused as refused:
            # Nothing else is on its way: the connection goes on.
            channel.send(FrameKind.REFUSED, number, [_message_of(refused.refusal)])
        else:
            channel.send(FrameKind.ANSWER, number, [answer])

    def _hand_memory(self, channel: Channel, number: int) -> None:
        if self.memory is None or not channel.is_unix:
            raise InvalidRequest(
                "no memory to map: it is offered on a unix socket only, by a worker with a memory tier"
            )
        arena = self.memory.arena
        channel.send(FrameKind.MEMORY, number, [ARENA.pack(arena.size_bytes)], [arena.fd])

    def _refuse(self, connection: Connection, number: int, refused: Refusal) -> None:
        """Sends the reason and ends the connection: bytes in flight would look like a new request."""
        channel = connection.channel
        if not channel.alive:
            return
        try:
            channel.limit(LINGER_S, LINGER_S)
            channel.send(FrameKind.REFUSED, number, [_message_of(refused)])
            scratch = memoryview(bytearray(1 << 16))
            while True:
                channel.receive_some([scratch])
        except (LinkBroken, LinkLate):
            pass


def _message_of(refused: Refusal) -> bytes:
    message = pb.BulkRefusal(code=refused.code.value[0], message=refused.message, trailers=dict(refused.trailers))
    return message.SerializeToString()


# A connection before its grant is proved and, over TCP, before its TLS handshake is done.


GREETING_BYTES = HEAD_BYTES + HELLO.size


class Stranger:
    """One such connection. Used by the listening thread alone. ``socket`` never blocks; the listener closes it."""

    def __init__(self, sock: socket.socket, ends_s: float) -> None:
        self.socket = sock
        self.ends_s = ends_s
        """Time at which it is closed."""
        self._said = bytearray()
        self._shakes_hands = isinstance(sock, ssl.SSLSocket)

    @property
    def thumbprint(self) -> bytes:
        """Thumbprint of the client's certificate; empty without TLS or if none was asked for."""
        shown = self.socket.getpeercert(binary_form=True) if isinstance(self.socket, ssl.SSLSocket) else None
        return hashlib.sha256(shown).digest() if shown else b""

    def hear(self) -> bytes | None:
        """Returns the greeting once it is complete, empty if none will come, None if more bytes are needed."""
        try:
            if self._shakes_hands and isinstance(self.socket, ssl.SSLSocket):
                self.socket.do_handshake()
                self._shakes_hands = False
            said = self.socket.recv(GREETING_BYTES - len(self._said))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:
            return b""
        self._said += said
        if said and len(self._said) < GREETING_BYTES:
            return None
        return bytes(self._said) if said else b""


PERIOD_S = 0.25
FILES_MAX = 1
"""Files that a client hands over with one frame: its arena."""
FOLDER_PREFIX = "kvstore-bulk-"
GRANTS_MAX = 4096
STRANGERS_MAX = 64
"""Connections that have not yet proved a grant; one more closes the oldest."""
_CREDENTIALS = struct.Struct("3i")


class BulkListener:
    """Listens for bulk connections on a unix socket in a folder of its own, and on ``port`` of ``host`` if given.

    Port 0 is chosen by the system. The folder is in the system's folder for temporary files: both ends must see it
    under the same path. With ``tls`` the port uses TLS; the unix socket does not leave this host.
    """

    def __init__(
        self,
        requests: BulkRequests,
        calls: Calls,
        limits: WorkerLimits,
        host: str | None,
        port: int = 0,
        tls: Certificate | None = None,
    ) -> None:
        self._requests = requests
        self._calls = calls
        self._limits = limits
        self._host = host
        self._port = port
        self._tls = tls
        self._folder = ""
        self._lock = threading.Lock()
        self._grants: dict[bytes, tuple[Grant, float, Presented]] = {}
        self._connections: set[Connection] = set()
        self._strangers: deque[Stranger] = deque()
        self._returned: deque[Connection] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listeners: list[socket.socket] = []
        self._threads = DaemonThreads(limits.threads_max, "kvstore-bulk")
        self._thread = threading.Thread(target=self._run, name="kvstore-bulk-listener", daemon=True)
        self._closed = False
        self.unix_path = ""
        self.tcp_port = 0
        self.boot_id = boot_id()

    def start(self) -> None:
        """Starts to listen. A socket that cannot be opened is logged and left out: clients then use another path."""
        try:
            self._folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
            path = os.path.join(self._folder, "socket")
            self._listeners.append(listen_unix(path))
            self.unix_path = path
        except OSError as error:
            log.warning("bulk.no_unix_socket %s", error)
        if self._host is not None:
            try:
                listener = listen_tcp(self._host, self._port)
                self._listeners.append(listener)
                self.tcp_port = int(listener.getsockname()[1])
            except OSError as error:
                log.warning("bulk.no_port %s", error)
        for each in self._listeners:
            self._selector.register(each, selectors.EVENT_READ, None)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._thread.start()

    def grant(self, presented: Presented = NOTHING) -> Grant:
        """Grants one connection within ``hello_s`` to these credentials; each request on it is theirs (rule X8)."""
        grant, now_s = Grant.fresh(), time.monotonic()
        with self._lock:
            for old in [each for each, (_, ends_s, _) in self._grants.items() if ends_s < now_s]:
                del self._grants[old]
            while len(self._grants) >= GRANTS_MAX:
                del self._grants[next(iter(self._grants))]  # the oldest: its client falls back to gRPC
            self._grants[grant.id] = (grant, now_s + self._limits.hello_s, presented)
        return grant

    @property
    def connections_count(self) -> int:
        """Number of open connections that proved a grant."""
        return len(self._connections)

    def close(self, timeout_s: float) -> None:
        """Closes everything; requests in progress are cut off. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.channel.cut()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._threads.shutdown(timeout_s=timeout_s)
        self._requests.close(timeout_s)
        for sock in [*self._listeners, *(each.socket for each in self._strangers)]:
            sock.close()
        for connection in [*connections, *self._connections]:
            connection.close()
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # The listening thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:
                # Without this thread the worker would serve no bulk connection again.
                self._calls.add(WorkerCount.CALLS_FAILED)
                log.exception("bulk.listener_failed")
                time.sleep(PERIOD_S)

    def _turn(self) -> None:
        """Looks at all connections once. A function, so that no local name keeps a closed connection alive."""
        for key, _ in self._selector.select(PERIOD_S):
            if key.fd == self._wake_in:
                with suppress(BlockingIOError):
                    os.read(self._wake_in, 4096)
            elif isinstance(key.data, Stranger):
                self._greet(key.data)
            elif isinstance(key.data, Connection):
                self._hand_on(key.data)
            else:
                self._accept(key.fileobj)  # type: ignore[arg-type]  # a socket: it was registered as one
        while self._returned:
            connection = self._returned.popleft()
            self._listen_to(connection)
        now_s = time.monotonic()
        for late in [each for each in self._strangers if each.ends_s < now_s]:
            self._turn_away(late)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            time.sleep(0.01)  # perhaps out of file descriptors: do not spin
            return
        try:
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX and _user_of(sock) not in (os.geteuid(), 0):
                raise OSError("another user")
            if len(self._connections) + len(self._strangers) >= self._limits.bulk_connections_max:
                raise OSError("too many connections")
            if self._tls is not None and sock.family != socket.AF_UNIX:
                # The handshake continues as the client's bytes arrive: this thread does not wait for it.
                context = self._tls.context(server=True)
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except (OSError, KVStoreError):
            self._calls.add(WorkerCount.BULK_REFUSED)
            sock.close()
            return
        if len(self._strangers) >= STRANGERS_MAX:
            self._turn_away(self._strangers[0])
        stranger = Stranger(sock, time.monotonic() + self._limits.hello_s)
        try:
            self._selector.register(sock, selectors.EVENT_READ, stranger)
        except OSError:
            sock.close()
            return
        self._strangers.append(stranger)

    def _greet(self, stranger: Stranger) -> None:
        """Reads what there is of a greeting; answers it when it is whole and right."""
        if stranger not in self._strangers:
            return  # turned away since the selector saw it
        said = stranger.hear()
        if said is None:
            return
        welcomed = self._welcomed(said, stranger.thumbprint) if said else None
        if welcomed is None:
            self._turn_away(stranger)
            return
        answer, presented = welcomed
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.socket)
        try:
            connection = Connection(Channel(stranger.socket, self._limits.idle_s, FILES_MAX), presented)
        except OSError as error:
            log.warning("bulk.no_connection %s", error)  # perhaps out of file descriptors
            stranger.socket.close()
            return
        try:
            files = [connection.ledger.fd] if connection.ledger is not None else []
            connection.channel.limit(0.1, 0.1)  # a new connection has room for a few bytes
            connection.channel.send(FrameKind.WELCOME, 0, [answer], files)
        except (LinkBroken, LinkLate):
            connection.close()
            return
        self._calls.add(WorkerCount.BULK_CONNECTIONS)
        with self._lock:
            self._connections.add(connection)
        self._listen_to(connection)

    def _welcomed(self, said: bytes, thumbprint: bytes) -> tuple[bytes, Presented] | None:
        """Returns the proof for a greeting and the credentials of its grant; None if the greeting is wrong.

        Uses up the grant either way.
        """
        try:
            head = decode_head(said[:HEAD_BYTES])
        except InvalidRequest:
            return None
        if head.kind is not FrameKind.HELLO or head.length != HELLO.size:
            return None
        grant_id, nonce, proof = HELLO.unpack(said[HEAD_BYTES:])
        with self._lock:
            found = self._grants.pop(grant_id, None)
        if found is None:
            return None
        grant, ends_s, presented = found
        if ends_s < time.monotonic() or not grant.is_hello(nonce, proof):
            return None
        # Over TLS the certificate must be the one that the grant was given to.
        if thumbprint and thumbprint != presented.thumbprint:
            return None
        return grant.welcome(nonce), presented

    def _turn_away(self, stranger: Stranger) -> None:
        self._calls.add(WorkerCount.BULK_REFUSED)
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.socket)
        stranger.socket.close()

    def _listen_to(self, connection: Connection) -> None:
        try:
            self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        except (ValueError, KeyError, OSError):
            self._forget(connection)
            return
        if connection.channel.has_pending:  # a selector does not see bytes already read
            self._hand_on(connection)

    def _hand_on(self, connection: Connection) -> None:
        """Passes a connection with a request to a serving thread."""
        self._selector.unregister(connection.channel)
        try:
            self._threads.submit(self._serve, connection)
        except RuntimeError:  # closing, or no more threads
            self._forget(connection)

    # The serving threads

    def _serve(self, connection: Connection) -> None:
        goes_on = False
        try:
            goes_on = self._requests.serve(connection) and not self._closed
        finally:
            if goes_on:
                self._returned.append(connection)
                self._wake()
            else:
                self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_out, b"!")


def _user_of(sock: socket.socket) -> int:
    """Returns the user id at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
