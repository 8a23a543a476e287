"""The HTTP server that gives Prometheus metrics, bounded in what its clients may take of the process.

At the bottom, because workers and collectors both serve metrics.  The client library's own server gives each connection
a thread for as long as its peer likes, and the port is plain HTTP: any host that reaches it could use up a worker's
memory and descriptors with silent connections.
"""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

CONNECTIONS_MAX = 16
"""The limit of open connections; the next one closes the oldest."""
SILENT_S = 5.0
"""The time that a client may send nothing, or take nothing."""


def serve(app: WSGIApplication, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """Serves ``app`` in a thread of its own, until ``shutdown``; port 0 is chosen by the system. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    kind = _ServerOfIPv6 if family == socket.AF_INET6 else _Server
    server = make_server(host, port, app, kind, _Asked)
    thread = threading.Thread(target=server.serve_forever, name="kvstore-metrics", daemon=True)
    thread.start()
    return server, thread


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # with 5, as it is otherwise, Prometheus waits seconds behind those

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()  # guards open connections
        self._open: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it ended by itself just now
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread's wait, and that closes it
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


class _Asked(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: Prometheus asks every few seconds."""
