"""``POST /query`` of publishers of events: questions, answers, and their HTTP."""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import numpy as np

from kvstore.core import tracing
from kvstore.core.address import TOKENS_MAX, TokenArray
from kvstore.core.buffers import token_array
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from kvstore.transport.messages import unpack_tokens

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


# What routers ask over HTTP, ``POST /query``, and the answers.
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
    def of_json(cls, body: bytes, decode: Callable[[bytes], Any] = parse_json) -> Question:
        """Parses the body of a request; ``decode`` raises ValueError. Raises InvalidRequest."""
        if body.count(b",") > TOKENS_MAX + FIELDS_MAX:
            raise InvalidRequest(f"the question has more parts than the limit of {TOKENS_MAX} tokens: split the prompt")
        try:
            asked = decode(body)
        except ValueError as cause:
            raise InvalidRequest(f"the question cannot be read: {cause}") from cause
        if not isinstance(asked, dict):
            raise InvalidRequest("the question is no JSON object: expected model, and token_ids or hashes")
        given = [name for name in ("token_ids", "tokens_base64", "hashes") if asked.get(name) is not None]
        if len(given) != 1:
            raise InvalidRequest("give one of token_ids, tokens_base64 and hashes")
        model, tenant = _text(asked, "model", "model_name"), _text(asked, "tenant", "tenant_id")
        if not model:
            raise InvalidRequest("which model? give model: the name of its namespace (kvstore ls)")
        if given == ["hashes"]:
            return cls(model, tenant, None, _hashes(asked["hashes"]))
        tokens = asked["token_ids"] if given == ["token_ids"] else _unpacked(asked["tokens_base64"])
        if not isinstance(tokens, list | np.ndarray):
            raise InvalidRequest("token_ids: expected a list of numbers")
        return cls(model, tenant, token_array(tokens), None)

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


def _unpacked(packed: Any) -> TokenArray:
    try:
        found: TokenArray = np.frombuffer(base64.b64decode(packed, validate=True), "<u4")
    except (TypeError, binascii.Error, ValueError) as cause:
        raise InvalidRequest(f"tokens_base64: {cause}: expected base64 of little-endian u32") from cause
    return found


def answer_document(
    question: Question, block_size: int, blocks: int, instance: str, media: Mapping[str, int]
) -> dict[str, Any]:
    """Returns an answer: the longest prefix that is there, and how many of its blocks each medium has."""
    tokens = blocks * block_size
    return {
        "model": question.model,
        "tenant": question.tenant,
        "block_size": block_size,
        "blocks": blocks,
        "longest_matched": tokens,
        "instances": {
            instance: {"longest_matched": tokens} | {name: count * block_size for name, count in media.items()}
        },
        "scores": {instance: {RANK: tokens}},
    }


# ``POST /query`` over HTTP: reads a question, returns its answer, or the reason if it is refused.
#
# A question is JSON; or, which takes a third of the time for a long prompt, its tokens alone as ``application/octet-
# stream``, with ``model`` and ``tenant`` in the query string.


log = logging.getLogger(__name__)

PATH = "/query"
RAW = "application/octet-stream"
BEARER = "bearer "
STATUSES: tuple[tuple[type[KVStoreError], str], ...] = (
    (InvalidRequest, "400 Bad Request"),
    (Unauthenticated, "401 Unauthorized"),
    (PermissionDenied, "403 Forbidden"),
    (Overloaded, "429 Too Many Requests"),
    (Unavailable, "503 Service Unavailable"),
)
SKIPPED_BYTES_MAX = 1 << 20
"""Of the body of a refused caller so much is read, a part at a time: a connection that closes before the caller has
sent it would lose the answer."""
PART_BYTES = 64 << 10
OTHER = "500 Internal Server Error"


@dataclass(frozen=True, slots=True)
class QueryCaller:
    """Who asks, as the request says."""

    address: str
    """The address that it comes from, without a port."""
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environ: WSGIEnvironment) -> QueryCaller:
        """Reads the headers of a request."""
        given = environ.get("HTTP_AUTHORIZATION", "")
        token = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else None
        return cls(environ.get("REMOTE_ADDR", ""), token)


Identify = Callable[[QueryCaller], object]
"""Raises KVStoreError for a caller who may ask nothing, before the question is read."""
Answer = Callable[[Question, QueryCaller], dict[str, Any]]
"""Answers a question. Raises KVStoreError."""
Decode = Callable[[bytes], Any]


def asks(environ: WSGIEnvironment) -> bool:
    """True if a request is a question."""
    return environ.get("PATH_INFO") == PATH and environ.get("REQUEST_METHOD") == "POST"


def answered(
    environ: WSGIEnvironment,
    start_response: StartResponse,
    identify: Identify,
    answer: Answer,
    decode: Decode = parse_json,
) -> Iterable[bytes]:
    """Answers a question as a WSGI application does; ``decode`` decodes JSON, and raises ValueError.

    A long question takes memory and time, so it is read only for a caller who is known.
    """
    caller = QueryCaller.of(environ)
    with tracing.served("kvstore.query", _said(environ)):
        try:
            _identified(environ, caller, identify)
            status, document = "200 OK", answer(_question(environ, decode), caller)
        except KVStoreError as refused:
            status = next((said for kind, said in STATUSES if isinstance(refused, kind)), OTHER)
            document = {"error": str(refused)}
            log.info("query.refused client=%s status=%s why=%s", caller.address, status[:3], refused)
    return respond(start_response, status, document)


def respond(start_response: StartResponse, status: str, document: dict[str, Any]) -> Iterable[bytes]:
    """Answers with a JSON document."""
    content = json.dumps(document, separators=(",", ":")).encode("ascii")
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
    return [content]


def _said(environ: WSGIEnvironment) -> Iterator[tuple[str, str]]:
    """What a request says of itself, in headers with the names that a call's metadata has."""
    for key in (tracing.REQUEST_ID_KEY, tracing.PARENT_KEY):
        if (value := environ.get("HTTP_" + key.upper().replace("-", "_"))) is not None:
            yield key, value


def _identified(environ: WSGIEnvironment, caller: QueryCaller, identify: Identify) -> None:
    try:
        identify(caller)
    except KVStoreError:
        left = min(_size(environ), SKIPPED_BYTES_MAX)
        while left > 0 and (part := environ["wsgi.input"].read(min(left, PART_BYTES))):
            left -= len(part)
        raise


def _question(environ: WSGIEnvironment, decode: Decode) -> Question:
    body = _body(environ)
    if environ.get("CONTENT_TYPE") != RAW:
        return Question.of_json(body, decode)
    said = {name: values[-1] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
    return Question.of_tokens(said.get("model", ""), said.get("tenant", ""), body)


def _body(environ: WSGIEnvironment) -> bytes:
    size = _size(environ)
    if not 0 < size <= BODY_BYTES_MAX:
        raise InvalidRequest(f"expected a body of at most {BODY_BYTES_MAX} bytes, and its Content-Length")
    found: bytes = environ["wsgi.input"].read(size)
    if len(found) < size:
        raise InvalidRequest(f"the body ended after {len(found)} bytes: expected {size}, its Content-Length")
    return found


def _size(environ: WSGIEnvironment) -> int:
    """Returns the size of the body as the request states it; 0 if it does not."""
    try:
        return int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return 0
