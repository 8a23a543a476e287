"""``POST /query`` on a worker: what it can read of a prompt and what its memory has, for those who may read it."""

from __future__ import annotations

import base64
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import PermissionDenied, Unauthenticated
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.security.authentication import Account, proof
from kvstore.security.guard import ServerSecurity
from kvstore.transport.query import QueryCaller, Question
from kvstore.worker.metrics import Questions, start_metrics
from kvstore.worker.server import Worker
from tests.kit.arenas import serving_memory
from tests.kit.cases import for_each
from tests.kit.secured import secured
from tests.kit.stores import SMALL, kv_of
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

HERE = QueryCaller("127.0.0.1")
SIZE = SMALL.chunk_tokens


def body_of(tokens: Any, **more: Any) -> bytes:
    packed = base64.b64encode(np.asarray(tokens, "<u4").tobytes()).decode()
    return json.dumps({"model": "m", "tokens_base64": packed, **more}).encode()


def question_of(tokens: Any, **more: Any) -> Question:
    return Question.of_json(body_of(tokens, **more))


def asked(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    metrics = start_metrics(served.worker, "127.0.0.1:0")
    yield f"http://{metrics.address}/query"
    metrics.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_memory(MemoryRoot(MemoryFiles())) as found:
        yield found


def test_a_question_is_answered_as_match_for_any_prompt(served: Served, url: str) -> None:
    chance, stem = random.Random(5), [number % 50 for number in range(40 * SIZE)]
    with connected(served) as store:
        cache = store.namespace("m", SMALL)
        prompts = []
        for _ in range(60):
            tokens = stem[: chance.randrange(len(stem))] + [chance.randrange(50) for _ in range(chance.randrange(90))]
            prompts.append(tokens)
            if chance.random() < 0.5:
                cache.put(tokens, kv_of(SMALL, tokens))
        for tokens in prompts:
            status, found = asked(url, body_of(tokens))
            assert (status, found["longest_matched"]) == (200, cache.match(tokens))
            assert found["blocks"] * found["block_size"] == found["longest_matched"] or not found["blocks"]


def test_memory_is_a_medium_beside_the_root(tmp_root: Path) -> None:
    tokens = range(6 * SIZE)
    with serving(tmp_root) as writer, connected(writer) as store:
        store.namespace("m", SMALL).put(tokens, kv_of(SMALL, tokens))
    with serving_memory(tmp_root) as served, connected(served) as store:
        cache, instance = store.namespace("m", SMALL), served.worker.advertised
        questions = Questions(served.worker)
        before = questions.answer(question_of(tokens), HERE)
        assert before["instances"] == {instance: {"longest_matched": 6 * SIZE, "STORAGE": 6 * SIZE, "CPU": 0}}
        assert before["scores"] == {instance: {"0": 6 * SIZE}}
        cache.get(tokens[: 4 * SIZE])
        cache.get(tokens[: 4 * SIZE])
        eventually(
            lambda: questions.answer(question_of(tokens), HERE)["instances"][instance]["CPU"] == 4 * SIZE, "it was read"
        )


def test_a_question_is_no_use_and_no_hit(served: Served) -> None:
    tokens = range(4 * SIZE)
    with connected(served) as store:
        store.namespace("m", SMALL).put(tokens, kv_of(SMALL, tokens))
        before = served.member.node.stats()["requests_match"]
        assert Questions(served.worker).answer(question_of(tokens), HERE)["blocks"] == 4
        assert served.member.node.stats()["requests_match"] == before


@for_each(
    "body, says",
    [
        (b"", "Content-Length"),
        (b"{", "cannot be read"),
        (b'{"model": "m", "hashes": [1]}', "kvstore events"),
        (b'{"token_ids": [1]}', "which model"),
    ],
)
def test_what_makes_no_sense_says_what_to_do(url: str, body: bytes, says: str) -> None:
    status, found = asked(url, body)
    assert status == 400 and says in found["error"]


def test_x12_without_an_access_file_only_the_workers_account_is_answered(served: Served) -> None:
    account = Account(b"s" * 32)
    account.serve("127.0.0.1:7070")
    questions = Questions(Worker(served.member, "127.0.0.1:0", security=ServerSecurity(account=account)))
    with pytest.raises(Unauthenticated):
        questions.answer(question_of(range(8)), HERE)
    shown = QueryCaller("127.0.0.1", account=proof(b"s" * 32, "127.0.0.1:7070"))
    assert questions.answer(question_of(range(8)), shown)["blocks"] == 0


def test_a_worker_with_tls_answers_its_host_alone_and_whoever_may_read_the_tenant(tmp_path: Path) -> None:
    with secured(tmp_path, {"router": {"a": "read"}}) as cell:
        questions, token = Questions(cell.worker), cell.issuer.token("router")
        assert questions.answer(question_of(range(8), tenant="a"), QueryCaller("127.0.0.1", token))["blocks"] == 0
        with pytest.raises(PermissionDenied):
            questions.answer(question_of(range(8), tenant="b"), QueryCaller("127.0.0.1", token))
        with pytest.raises(PermissionDenied, match="proxy with TLS"):
            questions.answer(question_of(range(8), tenant="a"), QueryCaller("10.0.0.9", token))
        with pytest.raises(Unauthenticated):
            questions.answer(question_of(range(8), tenant="a"), HERE)


def test_nobody_who_may_ask_nothing_has_a_question_read(tmp_path: Path) -> None:
    with secured(tmp_path, {"router": {"a": "read"}}) as cell, closing(start_metrics(cell.worker, "127.0.0.1:0")) as at:
        url, token = f"http://{at.address}/query", {"Authorization": f"Bearer {cell.issuer.token('router')}"}
        long = b'{"model": "m", "tenant": "a", "token_ids": [%s]}' % (b"[]," * 1000 + b"[]")
        assert asked(url, b"{", **token)[0] == 400
        for body in (b"{", long, bytes(900_000)):
            assert asked(url, body)[0] == 401, "and not 400, as what is read is answered"
