"""The HTTP server of a publisher of events: ``POST /query`` and ``GET /healthz``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.core import metrics_http
from kvstore.core.validate import check_depth
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.events.index import Model, RootIndex
from kvstore.format.keyset import RecentChains
from kvstore.security.access import Identity, Presented, Role
from kvstore.security.authentication import Authenticator
from kvstore.transport.query import QueryCaller, Question, answer_document, answered, asks, respond

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


# ``POST /query`` of a publisher, and ``GET /healthz``: for its host, or with a token that may read the tenant.


Answer = Callable[[Question], dict[str, Any]]


def application(answer: Answer, authenticator: Authenticator | None) -> WSGIApplication:
    """Returns the application; without an authenticator it answers everybody who reaches it."""

    def identify(caller: QueryCaller) -> Identity | None:
        return None if authenticator is None else authenticator.identify(Presented(token=caller.token))

    def admitted(question: Question, caller: QueryCaller) -> dict[str, Any]:
        identity = identify(caller)
        if identity is not None and not identity.may(Role.READ, question.tenant):
            raise PermissionDenied(f"{identity.name} may not read tenant {question.tenant!r}")
        return answer(question)

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if asks(environ):
            return answered(environ, start_response, identify, admitted, decode)
        if environ.get("PATH_INFO") == "/healthz":
            return respond(start_response, "200 OK", {"status": "serving"})
        return respond(start_response, "404 Not Found", {"error": "there is POST /query and GET /healthz"})

    return serve


def serve(app: WSGIApplication, host: str, port: int) -> QueryServer:
    """Serves an application; port 0 is chosen by the system. Raises InvalidRequest if it cannot listen there."""
    try:
        server, _ = metrics_http.serve(app, host, port)
    except OSError as cause:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {cause.strerror or cause}") from cause
    return QueryServer(server, f"{host}:{server.server_port}")


class QueryServer:
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


# Answers for routers that ask: how long a prefix of a prompt is stored. Looks at inventories alone, so it is fast.


RECENT_BYTES = 64 << 20
"""Memory for addresses of recent prompts: the next turn of a chat hashes its new tokens alone."""


class Answers:
    """Answers from the inventories of a truth. Thread-safe."""

    def __init__(self, truth: RootIndex, instance: str, medium: str) -> None:
        self._truth = truth
        self._instance = instance
        self._medium = medium
        self._chains = RecentChains(RECENT_BYTES)

    def answer(self, question: Question) -> dict[str, Any]:
        """Returns the longest stored prefix, in tokens, over all namespaces with that name and tenant; 0 if none."""
        models = [
            model
            for model in list(self._truth.models.values())
            if (model.namespace.name, model.namespace.tenant) == (question.model, question.tenant)
        ]
        found = [(self._leading(model, question), model.namespace.layout.chunk_tokens) for model in models]
        blocks, size = max(found, key=lambda each: each[0] * each[1], default=(0, 0))
        return answer_document(question, size, blocks, self._instance, {self._medium: blocks})

    def _leading(self, model: Model, question: Question) -> int:
        inventory, hashes = model.inventory, question.hashes or ()
        if question.tokens is None:
            with self._truth.lock:
                return next((at for at, each in enumerate(hashes) if not inventory.has_hash(each)), len(hashes))
        paths = self._chains.of(model.namespace, question.tokens).addresses
        with self._truth.lock:
            # Whatever is published has its parents published too, so few are looked up.
            return bisect_left(paths, True, key=lambda path: not inventory.has_path(path))
