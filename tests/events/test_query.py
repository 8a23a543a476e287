"""Answers against a plain walk over the same chain."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, Unauthenticated
from kvstore.events.index import Model
from kvstore.events.inventory import EventBlock, NamespaceIndex
from kvstore.events.query import Answers, Question, application
from kvstore.format.keyset import ChunkKeys
from kvstore.security.access import Identity, Presented, Role
from tests.kit.cases import for_each
from tests.kit.clusters import SPACE
from tests.kit.stores import TINY


def known(chain: ChunkKeys) -> NamespaceIndex:
    inventory = NamespaceIndex(SPACE.digest, 0)
    inventory.listed(0, chain.addresses)
    depths = {address: depth for depth, address in enumerate(chain.addresses)}
    for entry in inventory.unknown():
        depth = depths[entry.address]
        number = int.from_bytes(entry.address[8:], "big")
        inventory.learn(entry, EventBlock(entry.address, chain.parent(depth), depth, bytes(16), number, None))
    inventory.settle()
    return inventory


def answers(inventory: NamespaceIndex) -> Answers:
    truth: Any = SimpleNamespace(models={SPACE.id: Model(SPACE, inventory)}, lock=threading.Condition())
    return Answers(truth, "pod", "STORAGE")


@for_each("stored", [0, 1, 2, 3, 8, 15, 16, 17, 99, 100])
def test_the_longest_prefix_is_found_by_tokens_and_by_hashes(stored: int) -> None:
    tokens = np.arange(100 * TINY.chunk_tokens, dtype=np.uint32)
    chain = ChunkKeys.of(SPACE, tokens)
    inventory = known(chain)
    if stored < 100:
        inventory.listed(0, chain.addresses[:stored] + chain.addresses[stored + 1 :])
        inventory.settle()
    asked = answers(inventory)
    hashes = [int.from_bytes(each[8:], "big") for each in chain.addresses]
    for length in (0, 1, 50, 99, 100):
        by_tokens = asked.answer(Question("m", "", tokens[: length * TINY.chunk_tokens], None))
        by_hashes = asked.answer(Question("m", "", None, hashes[:length]))
        assert by_tokens == by_hashes
        assert by_tokens["blocks"] == min(stored, length)
        assert by_tokens["instances"]["pod"]["STORAGE"] == min(stored, length) * TINY.chunk_tokens


def test_a_tenant_sees_nothing_of_another() -> None:
    tokens = np.arange(8, dtype=np.uint32)
    asked = answers(known(ChunkKeys.of(SPACE, tokens)))
    assert asked.answer(Question("m", "", tokens, None))["blocks"] == 2
    assert asked.answer(Question("m", "other", tokens, None))["blocks"] == 0


@for_each(
    "body",
    [
        *(b"", b"[]", b"{", b'{"model": "m"}', b'{"token_ids": [1]}', b"[" * 100_000),
        *(b'{"model": "m", "token_ids": [1], "hashes": [1]}', b'{"model": "m", "token_ids": [-1]}'),
        *(b'{"model": "m", "hashes": [18446744073709551616]}', b'{"model": "m", "hashes": [true]}'),
        *(b'{"model": 1, "token_ids": [1]}', b'{"model": "m", "token_ids": "12"}'),
    ],
)
def test_a_bad_question_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Question.of_json(body)


def asked_over_http(identify: Callable[[Presented], Identity], tenant: str) -> tuple[str, bytes]:
    """Status and answer of a publisher that identifies callers so."""
    said: list[str] = []
    authenticator: Any = SimpleNamespace(identify=identify)
    body = json.dumps({"model": "m", "tenant": tenant, "hashes": []}).encode()
    environ: Any = {
        "PATH_INFO": "/query",
        "REQUEST_METHOD": "POST",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": BytesIO(body),
    }
    answered: Any = lambda status, headers: said.append(status)  # noqa: E731
    answer = b"".join(application(lambda question: {}, authenticator)(environ, answered))
    return said[0], answer


def test_without_a_good_token_nothing_is_answered() -> None:
    def refuse(_: Presented) -> Identity:
        raise Unauthenticated("no token")

    status, answer = asked_over_http(refuse, "a")
    assert status == "401 Unauthorized" and b"no token" in answer


def test_a_token_that_may_not_read_the_tenant_is_refused() -> None:
    router = Identity("router", {"a": Role.READ})
    assert asked_over_http(lambda _: router, "a") == ("200 OK", b"{}")
    status, answer = asked_over_http(lambda _: router, "b")
    assert status == "403 Forbidden" and b"may not read tenant 'b'" in answer
