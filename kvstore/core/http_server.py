"""The HTTP server of metrics, queries and the dashboard, bounded in what its clients may take of the process.

The standard library's gives each connection a thread for as long as its peer likes: any host that reaches the port
could use up memory and descriptors with silent connections.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from ssl import SSLContext
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kvstore.errors import InvalidRequest, KVStoreError

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication, WSGIEnvironment

CONNECTIONS_MAX = 16
"""The limit of open connections; the next one closes the oldest."""
SILENT_S = 5.0
"""The time that a client may send nothing, or take nothing."""
BEARER = "bearer "


def bearer_token(environ: WSGIEnvironment) -> str | None:
    """The bearer token of a request; None without one."""
    given: str = environ.get("HTTP_AUTHORIZATION", "")
    return given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else None


class HttpServer:
    """Serves a WSGI application until closed. Port 0 is chosen by the system."""

    def __init__(self, app: WSGIApplication, host: str, port: int, tls: Callable[[], SSLContext] | None = None) -> None:
        """``tls`` returns the context of each new connection. Raises InvalidRequest if it cannot listen there."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            kind = _ServerOfIPv6 if family == socket.AF_INET6 else _Server
            self._server = make_server(host, port, app, kind, _Handler)
        except OSError as cause:
            raise InvalidRequest(
                f"could not listen on {host}:{port}: {cause.strerror or cause}: give another address"
            ) from cause
        self._server.tls = tls
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._server.server_port}"
        """Its address, as ``host:port``."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvstore-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # with 5, as it is otherwise, Prometheus waits seconds behind those

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()  # guards open connections
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self.tls: Callable[[], SSLContext] | None = None
        super().__init__(*arguments)

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        if self.tls is not None:
            try:  # the handshake is the first read's, in the connection's own thread
                request = self.tls().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            except KVStoreError as error:  # files that are being replaced
                request.close()
                raise OSError(str(error)) from error
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it ended by itself just now
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # ends its thread's wait, and that closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that is slow, or gone, is no defect
            super().handle_error(request, client_address)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S
    server_version = "kvstore"
    sys_version = ""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: Prometheus asks every few seconds."""
