"""``POST /query`` of a publisher of events: questions of routers, answers from its index, and their HTTP."""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from kvstore.core import tracing
from kvstore.core.address import TOKENS_MAX, TokenArray
from kvstore.core.buffers import token_array
from kvstore.core.http_server import bearer_token
from kvstore.core.validate import check_depth
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from kvstore.events.index import Model, RootIndex
from kvstore.format.keyset import RecentChains
from kvstore.security.access import Identity, Presented, Role
from kvstore.security.authentication import Authenticator
from kvstore.transport.messages import unpack_tokens

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# The questions of routers, and the answers.
#
# The shape follows Mooncake's indexer (RFC 1403: ``longest_matched`` and counts per medium by instance) and Dynamo's
# ``/query`` (``scores`` by instance and rank), in tokens.


BODY_BYTES_MAX = 64 << 20
FIELDS_MAX = 1_024
"""JSON with more commas than this, except those between tokens, is not decoded: decoders stop all threads."""
RANK = "0"
"""Stores have no data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Question:
    """The leading blocks of a prompt in a model of a tenant: by tokens, or by the hashes of events, in order."""

    model: str
    tenant: str
    tokens: TokenArray | None
    hashes: list[int] | None

    @classmethod
    def of_json(cls, body: bytes) -> Question:
        """Parses the body of a request. Raises InvalidRequest."""
        if body.count(b",") > TOKENS_MAX + FIELDS_MAX:
            raise InvalidRequest(f"the question has more parts than the limit of {TOKENS_MAX} tokens: split the prompt")
        try:
            text = body.decode()
            check_depth(text)
            asked = msgspec.json.decode(text)  # several times as fast as Python's own
        except ValueError as cause:  # msgspec's and UTF-8's errors are ValueErrors
            raise InvalidRequest(f"the question cannot be read: {cause}") from cause
        if not isinstance(asked, dict):
            raise InvalidRequest("the question is no JSON object: expected model, and token_ids or hashes")
        given = [name for name in ("token_ids", "hashes") if asked.get(name) is not None]
        if len(given) != 1:
            raise InvalidRequest("give one of token_ids and hashes")
        model, tenant = _text(asked, "model", "model_name"), _text(asked, "tenant", "tenant_id")
        if not model:
            raise InvalidRequest("which model? give model: the name of its namespace (kvstore ls)")
        if given == ["hashes"]:
            return cls(model, tenant, None, _hashes(asked["hashes"]))
        if not isinstance(asked["token_ids"], list):
            raise InvalidRequest("token_ids: expected a list of numbers")
        return cls(model, tenant, token_array(asked["token_ids"]), None)

    @classmethod
    def of_tokens(cls, model: str, tenant: str, packed: bytes) -> Question:
        """Takes a prompt as little-endian u32, without a copy. Raises InvalidRequest."""
        if not model:
            raise InvalidRequest("which model? give ?model=NAME: the name of its namespace (kvstore ls)")
        return cls(model, tenant, unpack_tokens(packed), None)


def _text(asked: Mapping[str, Any], *names: str) -> str:
    """Returns the first of some fields that is given, or nothing. Raises InvalidRequest if it is no text."""
    for name in names:
        found = asked.get(name)
        if found is not None and not isinstance(found, str):
            raise InvalidRequest(f"{name}: expected a text")
        if found:
            return found
    return ""


def _hashes(given: Any) -> list[int]:
    is_right = isinstance(given, list) and len(given) <= TOKENS_MAX
    if not is_right or not all(type(each) is int and 0 <= each < 1 << 64 for each in given):
        raise InvalidRequest(f"hashes: expected at most {TOKENS_MAX} numbers from 0 to 2**64 - 1")
    found: list[int] = given
    return found


# Answers from the index alone, so they are fast.


RECENT_BYTES = 64 << 20
"""Memory for addresses of recent prompts: the next turn of a chat hashes its new tokens alone."""


class Answers:
    """Answers from the inventories of a root. Thread-safe."""

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
        tokens = blocks * size
        return {
            "model": question.model,
            "tenant": question.tenant,
            "block_size": size,
            "blocks": blocks,
            "longest_matched": tokens,
            "instances": {self._instance: {"longest_matched": tokens, self._medium: tokens}},
            "scores": {self._instance: {RANK: tokens}},
        }

    def _leading(self, model: Model, question: Question) -> int:
        inventory, hashes = model.inventory, question.hashes or ()
        if question.tokens is None:
            with self._truth.lock:
                return next((at for at, each in enumerate(hashes) if not inventory.has_hash(each)), len(hashes))
        paths = self._chains.of(model.namespace, question.tokens).addresses
        with self._truth.lock:
            # Whatever is published has its parents published too, so few are looked up.
            return bisect_left(paths, True, key=lambda path: not inventory.has_path(path))


# ``POST /query`` over HTTP, and ``GET /healthz``: for its host, or with a token that may read the tenant.
#
# A question is JSON; or, which takes a third of the time for a long prompt, its tokens alone as ``application/octet-
# stream``, with ``model`` and ``tenant`` in the query string.


log = logging.getLogger(__name__)

RAW = "application/octet-stream"
STATUSES: tuple[tuple[type[KVStoreError], str], ...] = (
    (InvalidRequest, "400 Bad Request"),
    (Unauthenticated, "401 Unauthorized"),
    (PermissionDenied, "403 Forbidden"),
    (Overloaded, "429 Too Many Requests"),
    (Unavailable, "503 Service Unavailable"),
)
SKIPPED_BYTES_MAX = 1 << 20
"""At most this much of a refused request's body is read: closing the connection earlier could lose the answer."""
PART_BYTES = 64 << 10
OTHER = "500 Internal Server Error"


def application(answer: Callable[[Question], dict[str, Any]], authenticator: Authenticator | None) -> WSGIApplication:
    """Returns the application; without an authenticator it answers everybody who reaches it."""

    def answered(environ: WSGIEnvironment) -> dict[str, Any]:
        # A long question takes memory and time, so it is read only for a caller who is known.
        identity = None if authenticator is None else _identified(environ, authenticator)
        question = _question(environ)
        if identity is not None and not identity.may(Role.READ, question.tenant):
            raise PermissionDenied(f"{identity.name} may not read tenant {question.tenant!r}")
        return answer(question)

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/query" and environ.get("REQUEST_METHOD") == "POST":
            with tracing.served("kvstore.query", _metadata(environ)):
                try:
                    status, document = "200 OK", answered(environ)
                except KVStoreError as refused:
                    status = next((said for kind, said in STATUSES if isinstance(refused, kind)), OTHER)
                    document = {"error": str(refused)}
                    client = environ.get("REMOTE_ADDR", "")
                    log.info("query.refused client=%s status=%s why=%s", client, status[:3], refused)
        elif path == "/healthz":
            status, document = "200 OK", {"status": "serving"}
        else:
            status, document = "404 Not Found", {"error": "there is POST /query and GET /healthz"}
        content = json.dumps(document, separators=(",", ":")).encode("ascii")
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
        return [content]

    return serve


def _metadata(environ: WSGIEnvironment) -> Iterator[tuple[str, str]]:
    """The tracing headers of a request, under the names of a call's metadata."""
    for key in (tracing.REQUEST_ID_KEY, tracing.PARENT_KEY):
        if (value := environ.get("HTTP_" + key.upper().replace("-", "_"))) is not None:
            yield key, value


def _identified(environ: WSGIEnvironment, authenticator: Authenticator) -> Identity:
    try:
        return authenticator.identify(Presented(token=bearer_token(environ)))
    except KVStoreError:
        left = min(_size(environ), SKIPPED_BYTES_MAX)
        while left > 0 and (part := environ["wsgi.input"].read(min(left, PART_BYTES))):
            left -= len(part)
        raise


def _question(environ: WSGIEnvironment) -> Question:
    size = _size(environ)
    if not 0 < size <= BODY_BYTES_MAX:
        raise InvalidRequest(f"expected a body of at most {BODY_BYTES_MAX} bytes, and its Content-Length")
    body: bytes = environ["wsgi.input"].read(size)
    if len(body) < size:
        raise InvalidRequest(f"the body ended after {len(body)} bytes: expected {size}, its Content-Length")
    if environ.get("CONTENT_TYPE") != RAW:
        return Question.of_json(body)
    said = {name: values[-1] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
    return Question.of_tokens(said.get("model", ""), said.get("tenant", ""), body)


def _size(environ: WSGIEnvironment) -> int:
    """Returns the size of the body as the request states it; 0 if it does not."""
    try:
        return int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return 0
