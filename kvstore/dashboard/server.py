"""The application of the dashboard: access, documents and the page."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from kvstore.core.http_server import bearer_token
from kvstore.dashboard.views import Board, Document
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unauthenticated
from kvstore.security.access import EVERY, Presented, Role
from kvstore.security.authentication import Authenticator
from kvstore.security.tls import names_loopback

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Access to the dashboard: open to everybody on this host, or with a token that may read every tenant.


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

    def admit(self, token: str | None, host: str) -> None:
        """Returns for a caller who may see everything. Raises Unauthenticated or PermissionDenied for others."""
        if self._authenticator is None:
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if self._is_local and not names_loopback(name.lower()):
                raise PermissionDenied(f"the dashboard is for this host: open it as localhost, not as {host[:100]!r}")
            return
        identity = self._authenticator.identify(Presented(token=token))
        if not identity.may(Role.READ, EVERY):
            raise PermissionDenied(
                f"{identity.name} may not read every tenant, and the dashboard shows all of them: ask the operator"
            )


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
    "server": "kvstore",  # without the version of Python
}
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
QUERY_CHARACTERS_MAX = 1_000
API = "/api/"


Reply = tuple[str, str, bytes]
"""Status, type and content."""


def application(board: Board, door: DashboardAuth) -> WSGIApplication:
    """Returns everything as a WSGI application."""
    views: dict[str, Callable[[Mapping[str, str]], Document]] = {
        "overview": lambda query: board.overview(),
        "history": lambda query: board.history(query.get("step") == "coarse", _number(query, "after")),
        "capacity": lambda query: board.capacity(),
        "namespaces": lambda query: board.namespaces(),
        "pins": lambda query: board.pins(),
        "workers": lambda query: board.workers(),
        "prefixes": lambda query: board.prefixes(
            query.get("namespace", ""), query.get("at", ""), query.get("order", "bytes")
        ),
        "damage": lambda query: board.damage(),
    }

    def document(name: str, environ: WSGIEnvironment) -> Reply:
        try:
            door.admit(bearer_token(environ), environ.get("HTTP_HOST", ""))
        except KVStoreError as refused:
            log.info("dashboard.refused client=%s why=%s", environ.get("REMOTE_ADDR"), refused)
            unknown = isinstance(refused, Unauthenticated)
            return _error("401 Unauthorized" if unknown else "403 Forbidden", str(refused))
        view, query = views.get(name), environ.get("QUERY_STRING", "")
        if view is None:
            return _error("404 Not Found", "there is no such view")
        if len(query) > QUERY_CHARACTERS_MAX:
            return _error("400 Bad Request", "the query is too long")
        try:
            return _json("200 OK", view(dict(parse_qsl(query))))
        except InvalidRequest as wrong:
            return _error("400 Bad Request", str(wrong))

    files = {f"/{name}": content for name, content in _files().items()}
    files["/"] = files["/index.html"]

    def reply(environ: WSGIEnvironment) -> Reply:
        path: str = environ.get("PATH_INFO", "")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _error("405 Method Not Allowed", "the dashboard only reads")
        if path == "/health":
            return "200 OK", "text/plain", b"ok\n"
        if path.startswith(API):
            return document(path.removeprefix(API), environ)
        if path in files:
            return "200 OK", *files[path]
        return _error("404 Not Found", "there is no such page")

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, kind, content = reply(environ)
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(content))), *SAFETY.items()])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

    return serve


def _files() -> dict[str, tuple[str, bytes]]:
    """Returns the page's own files, all read at the start: anything else has no address."""
    found = {}
    for file in (resources.files("kvstore.dashboard") / "static").iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            found[file.name] = (kind, file.read_bytes())
    return found


def _json(status: str, document: Document) -> Reply:
    """Encodes in ASCII: names may hold invalid text, such as half a surrogate pair."""
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    return status, "application/json", content


def _error(status: str, message: str) -> Reply:
    return _json(status, {"error": message})


def _number(query: Mapping[str, str], name: str) -> float:
    try:
        found = float(query.get(name, "0"))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InvalidRequest(f"{name}: expected a number")
    return found
