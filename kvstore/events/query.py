"""Answers for routers that ask: how long a prefix of a prompt is stored. Looks at inventories alone, so it is fast.

The shape follows Mooncake's indexer (RFC 1403: ``longest_matched`` and counts per medium by instance) and Dynamo's
``/query`` (``scores`` by instance and rank), in tokens.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvstore.address import Chain
from kvstore.errors import InvalidRequest
from kvstore.events.messages import DATA_PARALLEL_RANK
from kvstore.events.truth import Model, Truth
from kvstore.tokens import TOKENS_MAX, TokenArray, token_array

BODY_BYTES_MAX = 64 << 20


class _Asked(msgspec.Struct):
    """A question. One of ``token_ids``, ``tokens_base64`` (little-endian u32) and ``hashes`` is given."""

    model: str = ""
    model_name: str = ""
    tenant: str = ""
    tenant_id: str = ""
    token_ids: list[int] | None = None
    tokens_base64: str | None = None
    hashes: list[int] | None = None


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
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise InvalidRequest(f"the question cannot be read: {cause}") from cause
        given = [each for each in (asked.token_ids, asked.tokens_base64, asked.hashes) if each is not None]
        if len(given) != 1:
            raise InvalidRequest("give one of token_ids, tokens_base64 and hashes")
        model = asked.model or asked.model_name
        if not model:
            raise InvalidRequest("which model? give model: the name of its namespace (kvstore ls)")
        tenant = asked.tenant or asked.tenant_id
        if asked.hashes is not None:
            if len(asked.hashes) > TOKENS_MAX or not all(0 <= each < 1 << 64 for each in asked.hashes):
                raise InvalidRequest(f"hashes: expected at most {TOKENS_MAX} numbers from 0 to 2**64 - 1")
            return cls(model, tenant, None, asked.hashes)
        return cls(model, tenant, _tokens(asked), None)


def _tokens(asked: _Asked) -> TokenArray:
    if asked.tokens_base64 is not None:
        try:
            raw = base64.b64decode(asked.tokens_base64, validate=True)
            found: TokenArray = np.frombuffer(raw, "<u4")
        except (binascii.Error, ValueError) as cause:
            raise InvalidRequest(f"tokens_base64: {cause}: expected base64 of little-endian u32") from cause
    else:
        found = token_array(asked.token_ids or [])
    if len(found) > TOKENS_MAX:
        raise InvalidRequest(f"{len(found)} tokens, over the limit of {TOKENS_MAX}")
    return found


class Answers:
    """Answers from the inventories of a truth. Thread-safe."""

    def __init__(self, truth: Truth, instance: str, medium: str) -> None:
        self._truth = truth
        self._instance = instance
        self._medium = medium

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
            "scores": {self._instance: {str(DATA_PARALLEL_RANK): tokens}},
        }

    def _leading(self, model: Model, question: Question) -> int:
        inventory = model.inventory
        if question.tokens is not None:
            addresses = b"".join(Chain.of(model.namespace, question.tokens).addresses)
            keys = np.frombuffer(addresses, ">u8")[::2].astype(np.uint64)
            with self._truth.lock:
                told = inventory.told(inventory.find(keys))
        else:
            with self._truth.lock:
                told = inventory.told(inventory.find_hashes(np.array(question.hashes, np.uint64)))
        return len(told) if told.all() else int(told.argmin())
