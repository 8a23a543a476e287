"""``POST /query`` over HTTP, and ``GET /healthz``: for this host alone, or with a token that may read the tenant."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvstore import scraping
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unauthenticated
from kvstore.events.query import BODY_BYTES_MAX, Question
from kvstore.security.authenticator import Authenticator
from kvstore.security.identity import Presented
from kvstore.security.permissions import Role

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

BEARER = "bearer "
STATUSES = {400: "400 Bad Request", 401: "401 Unauthorized", 403: "403 Forbidden", 404: "404 Not Found"}

Answer = Callable[[Question], dict[str, Any]]


def application(answer: Answer, authenticator: Authenticator | None) -> WSGIApplication:
    """Returns the application; without an authenticator it answers everybody who reaches it."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, document = _answered(environ, answer, authenticator)
        content = json.dumps(document, separators=(",", ":")).encode("ascii")
        said = STATUSES.get(status, "200 OK")
        start_response(said, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
        return [content]

    return serve


def serve(app: WSGIApplication, host: str, port: int) -> Serving:
    """Serves an application; port 0 is chosen by the system. Raises InvalidRequest if it cannot listen there."""
    try:
        server, _ = scraping.serve(app, host, port)
    except OSError as cause:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {cause.strerror or cause}") from cause
    return Serving(server, f"{host}:{server.server_port}")


class Serving:
    """A server at work."""

    def __init__(self, server: Any, address: str) -> None:
        self._server = server
        self.address = address
        """Its address, as ``host:port``."""

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()


def _answered(
    environ: WSGIEnvironment, answer: Answer, authenticator: Authenticator | None
) -> tuple[int, dict[str, Any]]:
    path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "")
    if path == "/healthz":
        return 200, {"status": "serving"}
    if path != "/query" or method != "POST":
        return 404, {"error": "there is POST /query and GET /healthz"}
    try:
        question = Question.of_json(_body(environ))
        _admit(environ, question.tenant, authenticator)
        return 200, answer(question)
    except InvalidRequest as wrong:
        return 400, {"error": str(wrong)}
    except Unauthenticated as refused:
        return 401, {"error": str(refused)}
    except KVStoreError as refused:
        log.info("events.query_refused client=%s why=%s", environ.get("REMOTE_ADDR"), refused)
        return 403, {"error": str(refused)}


def _admit(environ: WSGIEnvironment, tenant: str, authenticator: Authenticator | None) -> None:
    if authenticator is None:
        return
    given = environ.get("HTTP_AUTHORIZATION", "")
    token = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else None
    identity = authenticator.identify(Presented(token=token))
    if not identity.may(Role.READ, tenant):
        raise PermissionDenied(f"{identity.name} may not read tenant {tenant!r}")


def _body(environ: WSGIEnvironment) -> bytes:
    try:
        size = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        size = 0
    if not 0 < size <= BODY_BYTES_MAX:
        raise InvalidRequest(f"expected a body of at most {BODY_BYTES_MAX} bytes, and its Content-Length")
    found: bytes = environ["wsgi.input"].read(size)
    return found
