"""Plans over every transport, and runs of plans: every group runs once, whoever dies, with its prefix held and near."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
import kvstore.aio
from kvstore import Group, Plan, Run
from kvstore.batch.run import LeasedGroup
from kvstore.client import Cache, Store
from kvstore.core.write_mode import WriteMode
from kvstore.engine.settings import Limits
from tests.kit.cases import for_each
from tests.kit.patience import eventually, returns
from tests.kit.stores import SMALL, kv_of, member_of
from tests.kit.tiers import Acting, faulty
from tests.kit.workers import connected, reached, serving

SIZE = SMALL.chunk_tokens
Ids = npt.NDArray[np.int64]


@pytest.fixture(params=["local", "shared", "tcp", "grpc"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with reached(request.param) as opened:
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
    with serving() as served, connected(served) as store:
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


GROUPS = 5
EACH = 3
"""Prompts of a group."""


@pytest.fixture(params=["local", "grpc"])
def shared_cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    with reached(request.param) as opened:
        yield opened.namespace("m", SMALL)


def prompts(size: int = SIZE, chunks: int = 3) -> list[Ids]:
    """Prompts about ``GROUPS`` documents in turns."""
    documents = [np.arange(chunks * size) + 10_000 * number for number in range(GROUPS)]
    return [np.append(documents[at % GROUPS], 5_000_000 + at) for at in range(GROUPS * EACH)]


def plan_of(shared_cache: Cache, memory_tokens: int = 1 << 20) -> Plan:
    return shared_cache.plan(prompts(shared_cache.layout.chunk_tokens), memory_tokens=memory_tokens)


def dying(run: Run) -> LeasedGroup:
    """Takes a group in a thread that ends without a word."""
    taken: list[LeasedGroup | None] = []
    thread = threading.Thread(target=lambda: taken.append(run.take()))
    thread.start()
    thread.join()
    assert taken[0] is not None
    return taken[0]


@for_each("step", range(GROUPS))
@for_each("way", ["raises", "closes", "dies"])
def test_the_group_of_a_consumer_that_dies_goes_out_again(shared_cache: Cache, step: int, way: str) -> None:
    plan = plan_of(shared_cache)
    ran: list[Group] = []
    late: LeasedGroup | None = None
    with plan.run() as run:
        for _ in range(step):
            with taken_of(run) as taken:
                ran.append(taken.group)
        if way == "raises":
            with pytest.raises(ZeroDivisionError), taken_of(run):
                raise ZeroDivisionError
        elif way == "closes":
            groups = iter(run)
            assert next(groups) == plan.groups[step]
            groups.close()  # type: ignore[attr-defined]  # a generator
        else:
            late = dying(run)
        ran += returns(lambda: list(run))
        if late is not None:
            late.done()  # too late: somebody else ran it
        assert Counter(ran) == Counter(plan.groups)
        assert run.is_over and not run.failed


def taken_of(run: Run) -> LeasedGroup:
    taken = run.take()
    assert taken is not None
    return taken


def test_a_late_consumer_does_not_end_the_group_of_another(shared_cache: Cache) -> None:
    plan = plan_of(shared_cache)
    with plan.run() as run:
        late, again = dying(run), taken_of(run)
        assert late.group == again.group == plan.groups[0]
        late.done()
        again.give_back()
        assert list(run) == list(plan.groups)


def test_the_last_consumer_waits_for_groups_that_may_come_back(shared_cache: Cache) -> None:
    plan = plan_of(shared_cache)
    with plan.run() as run, ThreadPoolExecutor(1) as threads:
        *others, last = [taken_of(run) for _ in plan.groups]
        waiting = threads.submit(lambda: list(run))
        last.give_back()
        for each in others:
            each.done()
        assert waiting.result() == [last.group]


def test_a_prefix_is_held_while_its_group_runs(tmp_path: Path) -> None:
    with kvstore.open(tmp_path) as store:
        shared_cache = store.namespace("m", SMALL)
        for prompt in prompts()[:GROUPS]:
            shared_cache.put(prompt, kv_of(SMALL, prompt))
        node = member_of(store).node
        plan = plan_of(shared_cache)
        assert plan.tokens_to_compute == GROUPS * EACH
        with plan.run() as run:
            for _ in run:
                assert len(node.holds) == 1
            assert len(node.holds) == 0
        with plan.run() as run:
            taken_of(run)
            assert len(node.holds) == 1
        assert len(node.holds) == 0, "the end of a run releases what is held"


def test_the_next_prefixes_are_brought_into_memory() -> None:
    with Acting(faulty(), write=WriteMode.UNCACHED, limits=Limits()) as acting:
        for number in range(GROUPS):
            acting.put(number, 3)
        batch = [np.append(acting.prompts.tokens(at % GROUPS, 3), at) for at in range(2 * GROUPS)]
        plan = acting.cache.plan(batch, memory_tokens=1 << 20)
        with plan.run(ahead=2) as run:
            with taken_of(run):
                eventually(lambda: all(acting.in_memory(1, 3) + acting.in_memory(2, 3)), "the prefetch of two groups")
                assert not any(acting.in_memory(3, 3))


async def awaited_cache(store: kvstore.aio.Store) -> kvstore.aio.Plan:
    shared_cache = await store.namespace("m", SMALL)
    return await shared_cache.plan(prompts(), memory_tokens=1 << 20)


def test_tasks_share_a_run_and_one_that_dies_gives_its_group_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with kvstore.aio.open(str(tmp_path)) as store:
            plan = await awaited_cache(store)
            ran: list[Group] = []

            async def consume() -> None:
                async for group in run:
                    ran.append(group)

            async def die() -> None:
                await run.take()

            async def fail() -> None:
                taken = await run.take()
                assert taken is not None
                async with taken:
                    raise ZeroDivisionError

            async with plan.run() as run:
                await asyncio.create_task(die())
                assert isinstance((await asyncio.gather(fail(), return_exceptions=True))[0], ZeroDivisionError)
                await asyncio.gather(consume(), consume())
                assert Counter(ran) == Counter(plan.groups)
                assert run.is_over and not run.failed

    asyncio.run(main())


def test_a_task_that_is_cancelled_takes_nothing_and_ends_what_it_took(tmp_path: Path) -> None:
    async def main() -> None:
        async with kvstore.aio.open(str(tmp_path)) as store:
            plan = await awaited_cache(store)
            async with plan.run() as run:
                taken = [await run.take() for _ in plan.groups]
                waiting = asyncio.create_task(run.take())
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                gate = threading.Event()
                waits = [asyncio.create_task(run._threads.run(gate.wait)) for _ in range(kvstore.aio.THREADS)]
                ends = [asyncio.create_task(each.done()) for each in taken if each is not None]
                await asyncio.sleep(0.01)  # all threads wait, so that none has begun
                assert all(each.cancel() for each in ends)
                gate.set()
                await asyncio.gather(*waits, *ends, return_exceptions=True)
                assert run.is_over and not run.failed, "a group that is done is done, whoever was cancelled"

    asyncio.run(main())
