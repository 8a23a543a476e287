"""What routers ask over HTTP, ``POST /query``, and the answers: the same of workers and of publishers of events.

The shape follows Mooncake's indexer (RFC 1403: ``longest_matched`` and counts per medium by instance) and Dynamo's
``/query`` (``scores`` by instance and rank), in tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.parsing import parse_json
from kvstore.tokens import TOKENS_MAX, TokenArray, token_array
from kvstore.wire.messages import unpack_tokens

BODY_BYTES_MAX = 64 << 20
FIELDS_MAX = 1_024
"""JSON with more commas than this beside those between tokens is not decoded: decoders stop all threads meanwhile."""
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
