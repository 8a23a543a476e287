"""The server of the dashboard: access, HTTP and the page."""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvstore.dashboard.views import Document, Documents
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unauthenticated, Unavailable
from kvstore.security.access import EVERY, Presented, Role
from kvstore.security.authentication import Authenticator
from kvstore.security.tls import Certificate, ServerTls, server_certificate

# Access to the dashboard: open to everybody on this host, or with a token that may read every tenant.


BEARER = "bearer "


class DashboardAuth:
    """Decides who may see the documents: this host, or the holders of a token that may read every tenant."""

    def __init__(self, access_file: str | None, *, is_local: bool) -> None:
        """Without an access file everybody who reaches the page sees it; if ``is_local``, ``Host`` must name this host.

        The file is reloaded when it changes. Raises InvalidRequest for a bad one.
        """
        self._is_local = is_local
        self._authenticator = None
        if access_file is not None:
            self._authenticator = Authenticator(access_file)
            self._authenticator.load()

    def admit(self, authorization: str | None, host: str) -> None:
        """Returns for a caller who may see everything. Raises Unauthenticated or PermissionDenied for others."""
        if self._authenticator is None:
            if self._is_local and not _is_this_host(host):
                raise PermissionDenied(f"the dashboard is for this host: open it as localhost, not as {host[:100]!r}")
            return
        given = authorization or ""
        token = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else None
        identity = self._authenticator.identify(Presented(token=token))
        if not identity.may(Role.READ, EVERY):
            raise PermissionDenied(
                f"{identity.name} may not read every tenant, and the dashboard shows all of them: ask the operator"
            )


def _is_this_host(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# Serves the application: the socket, and TLS with renewed certificates.


HEADERS_BYTES_MAX = 16 << 10
CONNECTIONS_MAX = 256
"""Requests over more connections are refused (status 503)."""
AT_REST_S = 30
"""An idle connection is closed after this time."""
START_S = 10.0
STOP_S = 3.0


class DashboardServer:
    """Serves until closed. ``start`` binds; port 0 is chosen by the system."""

    def __init__(self, app: Starlette, host: str, port: int, tls: ServerTls | None = None) -> None:
        self._host = host
        self._port = port
        self._certificate = server_certificate(tls) if tls else None
        self._config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
            limit_concurrency=CONNECTIONS_MAX,
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


# The pages and documents over HTTP, as an application: who may see them, and the safety headers for browsers.
#
# Read-only by construction: there is only GET. With an access file, all documents need a bearer token in a header;
# there are no cookies, so no other site can ask in a user's name. Without one the page is for this host alone, and a
# ``Host`` that is not this host's name is refused: otherwise any web page could reach it by a name that resolves to
# 127.0.0.1.


log = logging.getLogger(__name__)

SAFETY = {
    # Nothing from other sites, no inline script or style, no frames: a user-chosen name stays text.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
QUERY_CHARACTERS_MAX = 1_000


def application(documents: Documents, door: DashboardAuth) -> Starlette:
    """Returns everything as an ASGI application."""
    views: dict[str, Callable[[Mapping[str, str]], Document]] = {
        "overview": lambda query: documents.overview(),
        "history": lambda query: documents.history(query.get("step") == "coarse", _number(query, "after")),
        "capacity": lambda query: documents.capacity(),
        "namespaces": lambda query: documents.namespaces(),
        "pins": lambda query: documents.pins(),
        "workers": lambda query: documents.workers(),
        "prefixes": lambda query: documents.prefixes(
            query.get("namespace", ""), query.get("at", ""), query.get("order", "bytes")
        ),
        "damage": lambda query: documents.damage(),
    }

    def document(request: Request) -> Response:
        try:
            door.admit(request.headers.get("authorization"), request.headers.get("host", ""))
        except KVStoreError as refused:
            log.info("dashboard.refused client=%s why=%s", request.client and request.client.host, refused)
            return _json({"error": str(refused)}, 401 if isinstance(refused, Unauthenticated) else 403)
        view = views.get(request.path_params["view"])
        if view is None:
            return _json({"error": "there is no such view"}, 404)
        if len(request.url.query) > QUERY_CHARACTERS_MAX:
            return _json({"error": "the query is too long"}, 400)
        try:
            return _json(view(request.query_params))
        except InvalidRequest as wrong:
            return _json({"error": str(wrong)}, 400)

    files = {f"/{name}": content for name, content in _files().items()}
    files["/"] = files["/index.html"]

    def file(request: Request) -> Response:
        kind, content = files[request.url.path]
        return Response(content, media_type=kind, headers=SAFETY)

    def health(request: Request) -> Response:
        return Response("ok\n", media_type="text/plain", headers=SAFETY)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/api/{view}", document),
            *(Route(path, file) for path in files),
        ]
    )


def _files() -> dict[str, tuple[str, bytes]]:
    """Returns the page's own files, all read at the start: anything else has no address."""
    found = {}
    for file in (resources.files("kvstore.dashboard") / "static").iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            found[file.name] = (kind, file.read_bytes())
    return found


def _json(document: Document, status: int = 200) -> Response:
    """Encodes in ASCII: names may hold invalid text, such as half a surrogate pair."""
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    return Response(content, status, media_type="application/json", headers=SAFETY)


def _number(query: Mapping[str, Any], name: str) -> float:
    try:
        found = float(query.get(name, "0"))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InvalidRequest(f"{name}: expected a number")
    return found
