"""The scheduler's half of the vLLM connector: what it loads, stores, waits for and shares."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Layout
from kvstore.connectors.vllm.blocks import GroupKind, LayerGroups
from kvstore.core.namespace import Namespace
from kvstore.core.recency import PRIORITY_DEFAULT, Hints
from kvstore.format.header import Descent
from tests.kit.cases import for_each
from tests.kit.patience import eventually
from tests.kit.vllm_connector import BLOCK_TOKENS, Blocks, Request, halves, idle, matched, step, store


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    with halves() as found:
        yield found


def test_what_was_loaded_is_not_stored_again(make: Callable[..., Any]) -> None:
    half, request = make(), Request("a", 22)
    store(half, request, 3)
    half.arrived(request)
    assert matched(half, request) == (12, True)
    half.allocated(request, Blocks(), 12)
    first = step(half, request, 12, 10)
    assert [load.runs[0].blocks for load in first.loads] == [[(100,), (101,), (102,)]]
    assert [run.blocks for run in first.stores] == [[(103,), (104,)]]


def test_what_could_not_be_loaded_is_stored_again(make: Callable[..., Any]) -> None:
    half, request = make(), Request("a", 22)
    store(half, request, 3)
    half.arrived(request)
    matched(half, request)
    half.allocated(request, Blocks(), 12)
    step(half, Request("another", 4), 0, 4)
    # The second of the three blocks was damaged: vLLM computes from there on.
    failed = {request.block_hashes[1] + b"\0"}
    half.learn(SimpleNamespace(timed_out=False, failed=failed, namespaces={}))
    orders = step(half, request, 4, 18)
    assert [run.blocks for run in orders.stores] == [[(101,), (102,), (103,), (104,)]]


def test_what_the_workers_name_their_kv_counts(make: Callable[..., Any]) -> None:
    from kvstore.connectors.vllm.messages import WorkerReport

    half, request = make(), Request("a", 22)
    store(half, request, 5)
    report = WorkerReport(namespaces={0: Namespace.of("as built", Layout(1, 1, 16, "int8", 1))})
    former = half._store.caches()
    half.learn(WorkerReport().aggregate(report))
    eventually(lambda: half._store.caches() is not former, "its namespace is opened")
    store(half, request, 3)
    half.arrived(request)
    assert matched(half, request) == (12, True)


def test_a_hole_in_the_store_is_filled_from_what_the_engine_has(make: Callable[..., Any]) -> None:
    half, request = make(), Request("a", 22)
    store(half, request, 1)
    half.arrived(request)
    assert matched(half, request, computed=8) == (0, False)
    half.allocated(request, Blocks(), 0)
    assert [run.blocks for run in step(half, request, 8, 14).stores] == [[(101,), (102,), (103,), (104,)]]


def test_an_engine_that_only_stores_fills_a_hole_too(make: Callable[..., Any]) -> None:
    half, request = make(loads=False), Request("a", 22)
    store(half, request, 1)
    half.arrived(request)
    assert half.matched_tokens(request, 0) == (0, False), "it has nothing that the store could have lost"
    assert matched(half, request, computed=8) == (0, False)
    half.allocated(request, Blocks(), 0)
    assert [run.blocks for run in step(half, request, 8, 14).stores] == [[(101,), (102,), (103,), (104,)]]


def test_after_an_update_of_weights_a_running_request_stores_nothing_until_it_is_computed_anew(
    make: Callable[..., Any],
) -> None:
    half, request = make(), Request("a", 40)
    half.arrived(request)
    matched(half, request)
    assert step(half, request, 0, 12).stores
    request.num_computed_tokens = 12
    half.reset()
    assert step(half, request, 12, 12).stores == []
    assert matched(half, request) == (0, False), "preempted"
    assert [len(run.keys) for run in step(half, request, 0, 24).stores] == [6]


def test_an_answer_that_was_not_used_in_time_is_looked_for_anew(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    half, request = make(), Request("a", 22)
    monkeypatch.setattr(sys.modules["kvstore.connectors.vllm.scheduler"], "STALE_S", 0.05)
    half.arrived(request)
    assert matched(half, request) == (0, False)
    store(half, request, 3)
    time.sleep(0.06)
    assert matched(half, request) == (12, True)


def test_a_look_up_that_nobody_waits_for_any_more_is_given_up(make: Callable[..., Any]) -> None:
    half, request = make(wait_s=60.0), Request("a", 22)
    half.arrived(request)
    half.matched_tokens(request, 0)
    first = half._tracked["a"].lookup
    half.matched_tokens(request, 4)
    second = half._tracked["a"].lookup
    assert first.abandoned
    half.reset()
    assert second.abandoned
    half.matched_tokens(request, 4)
    third = half._tracked["a"].lookup
    half.finished(request)
    assert third.abandoned


def test_a_request_that_goes_on_storing_renews_its_first_blocks(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.connectors.vllm import scheduler

    half, request = make(), Request("r", 40)
    half.arrived(request)
    matched(half, request)
    looked: list[list[list[bytes]]] = []
    monkeypatch.setattr(half._lookups, "renew", looked.append)
    step(half, request, 0, 12)
    step(half, request, 12, 4)
    assert looked == [], "it has just looked them up"
    monkeypatch.setattr(scheduler, "RENEW_S", -1.0)
    step(half, request, 16, 8)
    assert [len(units) for units in looked] == [9], "all but that with the last token"


def loading(half: Any, name: str) -> Request:
    """A request that loads three blocks."""
    request = Request(name, 22)
    half.arrived(request)
    assert matched(half, request) == (12, True)
    half.allocated(request, Blocks(), 12)
    return request


@pytest.mark.parametrize("end", ["it runs", "it is gone", "it takes too long"])
def test_what_one_request_loads_another_waits_for(make: Callable[..., Any], end: str) -> None:
    half = make(load_timeout_s=0.2 if end == "it takes too long" else 30.0)
    store(half, Request("", 22), 3)
    first = loading(half, "a")
    assert len(idle(half).loads) == 1
    second = Request("b", 22)
    half.arrived(second)
    while half._tracked["b"].answered_s is None:
        assert half.matched_tokens(second, 0) == (None, False)
        time.sleep(0.001)
    if end == "it takes too long":
        assert matched(half, second) == (12, True)
        return
    assert half.matched_tokens(second, 0) == (None, False)
    if end == "it runs":
        step(half, first, 12, 10)
        assert half._loading == {}
        assert matched(half, second, 12) == (0, False), "the engine has them itself"
    else:
        half.finished(first)
        assert half._loading == {}
        assert matched(half, second) == (12, True)


def test_hits_of_windows_alone_do_not_wait_for_each_other(make: Callable[..., Any]) -> None:
    half = make([LayerGroups((0,), BLOCK_TOKENS, GroupKind.WINDOW, 8)])
    requests = [Request(name, 22, block_hashes=[bytes([at, *name.encode()]) * 16 for at in range(5)]) for name in "ab"]
    for request in requests:
        store(half, request, 5)
        half.arrived(request)
        assert matched(half, request) == (20, True)
        half.allocated(request, Blocks(), 20)


def test_a_step_without_work_waits_for_a_look_up_and_one_with_work_does_not(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    half, request = make(wait_s=60.0), Request("a", 22)
    waits: list[float] = []
    half.arrived(request)
    assert half.matched_tokens(request, 0) == (None, False)
    monkeypatch.setattr(half._tracked["a"].lookup.done, "wait", waits.append)
    orders = idle(half)
    assert orders.is_idle and waits == [sys.modules["kvstore.connectors.vllm.messages"].IDLE_S]
    idle(half)
    assert len(waits) == 1, "vLLM has not asked again"
    half.matched_tokens(request, 0)
    assert not step(half, Request("another", 4), 0, 4).is_idle
    assert len(waits) == 1


def test_a_step_that_other_ranks_are_in_waits_for_nothing(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    half, request = make(wait_s=60.0, waits=False), Request("a", 22)
    waits: list[float] = []
    half.arrived(request)
    assert half.matched_tokens(request, 0) == (None, False)
    monkeypatch.setattr(half._tracked["a"].lookup.done, "wait", waits.append)
    assert not idle(half).is_idle and waits == []


def action(payload: Any, kind: str = "kvstore") -> Any:
    return SimpleNamespace(actions=[SimpleNamespace(action_type=kind, payload=payload)])


@for_each(
    "said, expected",
    [
        ({}, Hints()),
        ({"kv_transfer_params": {"kvstore": {"priority": 80, "ttl": 600}}}, Hints(80, 1_800)),
        ({"kv_transfer_params": {"kvstore": {"preset": "chat"}, "other": 1}}, Hints.of(preset="chat")),
        ({"kv_hints": action({"priority": 5})}, Hints(5)),
        ({"kv_hints": action({"priority": 5}, "another")}, Hints()),
        ({"priority": 5}, Hints(PRIORITY_DEFAULT - 5)),
        ({"priority": -5}, Hints(PRIORITY_DEFAULT + 5)),
        ({"priority": 1_795_000_000}, Hints(PRIORITY_DEFAULT - 25)),
        ({"priority": 5, "kv_transfer_params": {"kvstore": {"ttl": 600}}}, Hints(PRIORITY_DEFAULT - 5, 1_800)),
        ({"priority": 5, "kv_transfer_params": {"kvstore": {"priority": 80}}}, Hints(80)),
        ({"priority": 5, "kv_transfer_params": {"kvstore": {"preset": "chat"}}}, Hints.of(preset="chat")),
        ({"kv_transfer_params": {"kvstore": {"priority": 101}}}, Hints()),
        ({"kv_transfer_params": {"kvstore": {"prio": 1}}}, Hints()),
        ({"kv_transfer_params": {"kvstore": "high"}}, Hints()),
        ({"kv_transfer_params": {"do_remote_decode": True}}, Hints()),
    ],
)
def test_a_request_says_how_long_to_keep_its_blocks(
    make: Callable[..., Any], said: dict[str, Any], expected: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    half, request = make(), Request("r", 40, **said)
    half.arrived(request)
    matched(half, request)
    assert [run.hints for run in step(half, request, 0, 12).stores] == [expected]
    is_odd = expected == Hints() and "kvstore" in (request.kv_transfer_params or {})
    assert ("are ignored" in caplog.text) == is_odd


def test_the_files_of_blocks_say_what_vllm_hashed(make: Callable[..., Any]) -> None:
    half, request = make(), Request("r", 22)
    half.arrived(request)
    matched(half, request)
    (run,) = step(half, request, 0, 22).stores
    found = [Descent.unpack(each) for each in run.descents]
    for at, (said, key) in enumerate(zip(found, run.keys, strict=True)):
        assert said is not None
        assert list(said.tokens) == request.all_token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
        assert said.parent == (run.keys[at - 1] if at else b"") and said.depth == at
        assert key[: said.hash_bytes] == request.block_hashes[at]
        assert json.loads(said.extra) == {"extra_keys": ["a salt", at * BLOCK_TOKENS]}
