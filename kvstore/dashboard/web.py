"""The pages and documents over HTTP, as an application: who may see them, and the safety headers for browsers.

Read-only by construction: there is only GET. With an access file, all documents need a bearer token in a header; there
are no cookies, so no other site can ask in a user's name. Without one the page is for this host alone, and a ``Host``
that is not this host's name is refused: otherwise any web page could reach it by a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.dashboard.documents import Documents
from kvstore.dashboard.said import Document
from kvstore.errors import InvalidRequest, KVStoreError, Unauthenticated

log = logging.getLogger(__name__)

SAFETY = {
    # Nothing from other sites, no inline script or style, no frames: a name that somebody chose stays text.
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


class Door(Protocol):
    """Decides who may see the documents."""

    def admit(self, authorization: str | None, host: str) -> None:
        """Returns for a caller who may see everything. Raises Unauthenticated or PermissionDenied for others."""
        ...


def application(documents: Documents, door: Door) -> Starlette:
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
        "operations": lambda query: documents.operations(),
    }

    def document(request: Request) -> Response:
        try:
            door.admit(request.headers.get("authorization"), request.headers.get("host", ""))
        except KVStoreError as refused:
            log.info("dashboard.refused client=%s why=%s", request.client and request.client.host, refused)
            return _json({"error": str(refused)}, _status_of(refused))
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
        return Response(content, media_type=kind)

    def health(request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/api/{view}", document),
            *(Route(path, file) for path in files),
        ],
        middleware=[Middleware(_Safety)],
    )


class _Safety:
    """Adds the safety headers to every answer, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in SAFETY.items()),
                ]
            await send(message)

        await self._app(scope, receive, safely)


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
    return Response(content, status, media_type="application/json")


def _status_of(refused: KVStoreError) -> int:
    return 401 if isinstance(refused, Unauthenticated) else 403


def _number(query: Mapping[str, Any], name: str) -> float:
    try:
        found = float(query.get(name, "0"))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InvalidRequest(f"{name}: expected a number")
    return found
