"""Plans over every port: what the store holds is free, and a store that is silent holds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client import Cache, Store
from kvstore.client.local import LocalTransport
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.stores import SMALL, kv_of, member_on
from tests.kit.workers import connected, serving

SIZE = SMALL.chunk_tokens
Ids = npt.NDArray[np.int64]


@pytest.fixture(params=["local", "shared", "tcp", "grpc"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    root = MemoryRoot(MemoryFiles())
    if request.param == "local":
        with Store(LocalTransport(member_on(root))) as opened:
            yield opened
    else:
        with serving(root) as served, connected(served, bulk=request.param) as opened:
            yield opened


@pytest.fixture
def cache(store: Store) -> Cache:
    return store.namespace("m", SMALL)


def document(number: int, chunks: int = 4) -> Ids:
    return np.arange(chunks * SIZE) + 10_000 * number


def questions(numbers: list[int]) -> list[Ids]:
    """A prompt for each: a document, and a question of 5 tokens."""
    return [np.append(document(number), np.arange(5) + 1000 * at) for at, number in enumerate(numbers)]


BATCH = [1, 2, 3, 1, 2, 3, 1]
COUNT = len(BATCH) * (4 * SIZE + 5)
ALONE = 3 * 4 * SIZE + len(BATCH) * 5


def test_a_store_that_holds_nothing_shares_what_the_batch_shares(cache: Cache) -> None:
    plan = cache.plan(questions(BATCH), memory_tokens=8 * SIZE)
    assert plan.order == [0, 3, 6, 1, 4, 2, 5]
    assert [group.prefix_tokens for group in plan.groups] == [4 * SIZE] * 3
    assert (plan.tokens_total, plan.tokens_to_compute, plan.tokens_optimum) == (COUNT, ALONE, ALONE)
    assert plan.tokens_stored == 0


def test_what_the_store_holds_is_free(cache: Cache) -> None:
    held = document(2)[: 3 * SIZE]
    cache.put(held, kv_of(SMALL, held))
    cache.put(document(3), kv_of(SMALL, document(3)))
    plan = cache.plan(iter(questions(BATCH)), memory_tokens=8 * SIZE)
    assert plan.tokens_to_compute == ALONE - 7 * SIZE
    assert plan.tokens_stored == 2 * 3 * SIZE + 2 * 4 * SIZE
    assert [group.stored_tokens for group in plan.groups] == [0, 3 * SIZE, 4 * SIZE]


def test_without_a_worker_nothing_is_stored() -> None:
    with serving(MemoryRoot(MemoryFiles())) as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(document(1), kv_of(SMALL, document(1)))
        served.worker.stop()
        plan = cache.plan(questions([1, 1]), memory_tokens=8 * SIZE)
        assert (plan.tokens_stored, plan.tokens_to_compute) == (0, 4 * SIZE + 10)


def test_prompts_are_matched_in_calls_that_answer_in_part(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose time runs out answers for those prompts that it came to."""
    cache.put(document(1), kv_of(SMALL, document(1)))
    cache.put(document(2)[:SIZE], kv_of(SMALL, document(2)[:SIZE]))
    match_each, answers = cache._port.match_each, iter([2, 1, 9, 0])
    monkeypatch.setattr(cache._port, "match_each", lambda *what: match_each(*what)[: next(answers)])
    prompts: list[Ids | list[int]] = [document(1), document(2), [], document(3), document(1)]
    assert cache.match_each(iter(prompts)) == [4 * SIZE, SIZE, 0, 0, 4 * SIZE]
    assert cache.match_each(prompts) == [0] * 5, "it does not answer"
    assert cache.match_each([]) == []
