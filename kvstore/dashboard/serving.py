"""Serves the application: the socket, TLS with renewed certificates, and limits on clients.

uvicorn limits the size of headers, but neither the number of connections nor the time that a client takes over its
headers: that is done here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.security.tls import Certificate, ServerTls, server_certificate

HEADERS_BYTES_MAX = 16 << 10
AT_REST_S = 30
"""An idle connection is closed after this time."""
START_S = 10.0
STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """Limits on clients and on their time."""

    connections_max: int = 256
    """One more connection closes the oldest that waits for its client."""
    first_request_s: float = 10.0
    """Time from a connection to its first whole request."""
    connection_s: float = 120.0
    """A connection of this age ends after its request; the page opens another one."""
    answer_s: float = 10.0
    """Time that a client then has to take the answer."""


BOUNDS = ClientBounds()


class Serving:
    """Serves until closed. ``start`` binds; port 0 is chosen by the system."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, tls: ServerTls | None = None, bounds: ClientBounds = BOUNDS
    ) -> None:
        self._host = host
        self._port = port
        self._certificate = server_certificate(tls) if tls else None
        self._config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(_Bounded, bounds)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
            timeout_keep_alive=AT_REST_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.cert_file if tls else None,
            ssl_keyfile=tls.key_file if tls else None,
        )
        self._server = uvicorn.Server(self._config)
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serves; returns the URL.

        Raises InvalidRequest if it cannot listen there or the certificate is not valid, Unavailable if it is not ready
        in time.
        """
        if self._certificate is not None:
            context = self._certificate.context(server=True)
            context.sni_callback = _renewing(self._certificate)
            self._config.load()
            self._config.ssl = context
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family, backlog=128)
        except OSError as cause:
            raise InvalidRequest(
                f"could not listen on {self._host}:{self._port}: {cause.strerror or cause}: give another --listen"
            ) from cause
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="kvstore-dashboard-web", daemon=True
        )
        self._thread.start()
        pause = threading.Event()
        for _ in range(int(START_S / 0.02)):
            if self._server.started:
                break
            pause.wait(0.02)
        else:
            raise Unavailable(f"the dashboard did not serve within {START_S:g} s: see its messages")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._certificate else 'http'}://{host}:{listener.getsockname()[1]}/"

    def close(self) -> None:
        """Ends it within some seconds. Idempotent."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_S)


def _renewing(certificate: Certificate) -> Callable[[ssl.SSLObject | ssl.SSLSocket, str | None, ssl.SSLContext], None]:
    """Gives each new connection the certificate that the files hold at that moment."""

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = certificate.context(server=True)

    return choose


class _Bounded(H11Protocol):
    """A connection with limits on its time."""

    def __init__(self, bounds: ClientBounds, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began_s = self.loop.time()
        if len(self.connections) > self._bounds.connections_max:
            waiting = [each for each in self.connections if isinstance(each, _Bounded) and each._waits_for_client]
            given_up = min(waiting, key=lambda each: each._began_s)  # the oldest: this one is among them
            self.connections.discard(given_up)  # at once: the loop tells it later, and the next one must find another
            given_up.transport.abort()
        self._timers = [
            self.loop.call_later(self._bounds.first_request_s, self._check_began),
            self.loop.call_later(self._bounds.connection_s, self._end),
            # A polite close waits until all is sent, which a client that takes nothing delays for ever.
            self.loop.call_later(self._bounds.connection_s + self._bounds.answer_s, transport.abort),
        ]

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:  # otherwise they would keep this connection alive until they are due
            timer.cancel()
        super().connection_lost(exc)

    @property
    def _waits_for_client(self) -> bool:
        """True while it waits for its client: for a request, or for the client to take the answer."""
        return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

    def _check_began(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.shutdown()
