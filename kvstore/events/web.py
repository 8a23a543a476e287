"""``POST /query`` of a publisher, and ``GET /healthz``: for its host, or with a token that may read the tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore import scraping
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.parsing import check_depth
from kvstore.security.authenticator import Authenticator
from kvstore.security.identity import Identity, Presented
from kvstore.security.permissions import Role
from kvstore.wire.questions import Question
from kvstore.wire.web import Caller, answered, asks, respond

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Answer = Callable[[Question], dict[str, Any]]


def application(answer: Answer, authenticator: Authenticator | None) -> WSGIApplication:
    """Returns the application; without an authenticator it answers everybody who reaches it."""

    def identify(caller: Caller) -> None:
        _identity(caller, authenticator)

    def admitted(question: Question, caller: Caller) -> dict[str, Any]:
        _admit(caller, question.tenant, authenticator)
        return answer(question)

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if asks(environ):
            return answered(environ, start_response, identify, admitted, decode)
        if environ.get("PATH_INFO") == "/healthz":
            return respond(start_response, "200 OK", {"status": "serving"})
        return respond(start_response, "404 Not Found", {"error": "there is POST /query and GET /healthz"})

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


def decode(body: bytes) -> Any:
    """Decodes JSON several times as fast as Python's own. Raises ValueError."""
    try:
        text = body.decode()
        check_depth(text)
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise ValueError(str(cause)) from cause


def _admit(caller: Caller, tenant: str, authenticator: Authenticator | None) -> None:
    identity = _identity(caller, authenticator)
    if identity is not None and not identity.may(Role.READ, tenant):
        raise PermissionDenied(f"{identity.name} may not read tenant {tenant!r}")


def _identity(caller: Caller, authenticator: Authenticator | None) -> Identity | None:
    return None if authenticator is None else authenticator.identify(Presented(token=caller.token))
