"""The scheduler's half of the vLLM connector, with requests and block tables as vLLM passes them.

No vLLM is needed here, only the two empty base classes of the messages, and its version.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Layout
from kvstore.client.blocks import BlockCache
from kvstore.connectors.vllm.settings import Settings
from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace
from tests.connectors.vllm_modules import vllm_modules
from tests.patience import PATIENCE_S

BLOCK_TOKENS = 4
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@dataclass
class Request:
    """The part of a vLLM request that the connector reads."""

    request_id: str
    num_tokens: int
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.block_hashes = [bytes([number]) * 32 for number in range(self.num_tokens // BLOCK_TOKENS)]


class Blocks:
    """The block table of every request: block ``100 + n`` holds the tokens of its n-th block."""

    def get_block_ids(self, request_id: str = "") -> tuple[list[int]]:
        return (list(range(100, 132)),)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes a scheduler's half on a store in memory."""
    with vllm_modules({BASE: {"KVConnectorMetadata": object, "KVConnectorWorkerMetadata": object}}):
        yield from halves()


def halves() -> Iterator[Callable[..., Any]]:
    from kvstore.connectors.vllm.scheduler import SchedulerHalf

    made: list[Any] = []

    def half(**settings: Any) -> Any:
        given = Settings.of({"root": "memory://", **settings})
        shape = SimpleNamespace(
            tp=1,
            pp=1,
            groups=(0,),
            block_tokens=[BLOCK_TOKENS],
            hash_tokens=BLOCK_TOKENS,
            is_async=lambda settings: settings.load == "async",
        )
        names = [Namespace.of("model", Layout(1, 1, 16, "int8", 1))]
        made.append(SchedulerHalf(given, shape, names, loads=True, stores=True))  # type: ignore[arg-type]
        made[-1].manager = Blocks()
        return made[-1]

    yield half
    for each in made:
        each.close()


def cache(half: Any) -> BlockCache:
    found: list[BlockCache] = half._link.caches()
    return found[0]


def store(half: Any, request: Request, count: int) -> None:
    keys = [hashed + b"\0" for hashed in request.block_hashes[:count]]
    assert cache(half).put(keys, [bytes(64)] * count) == [True] * count


def matched(half: Any, request: Request, computed: int = 0) -> tuple[int, bool]:
    """Asks as vLLM does, once per step, until there is an answer."""
    ends_s = time.monotonic() + PATIENCE_S
    while (found := half.matched_tokens(request, computed))[0] is None:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    answer: tuple[int, bool] = found
    return answer


def step(half: Any, request: Request, computed: int, count: int) -> Any:
    """The orders of a step in which one new request is scheduled."""
    return half.orders(
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={request.request_id: count},
        )
    )


@pytest.mark.parametrize("load", ["async", "sync"])
def test_what_was_loaded_is_not_stored_again(make: Callable[..., Any], load: str) -> None:
    half, request = make(load=load), Request("a", 22)
    store(half, request, 3)
    half.arrived(request)
    assert matched(half, request) == (12, load == "async")
    half.allocated(request, Blocks(), 12)
    first = step(half, request, 12, 10)
    assert [load.runs[0].blocks for load in first.loads] == [[100, 101, 102]]
    if load == "sync":
        # Until it is known that the load went well nothing is stored.
        assert first.stores == []
        half.learn(SimpleNamespace(timed_out=False, ended={0: 1}, failed={}, digests=set()))
        first = step(half, request, 12, 10)
    assert [run.blocks for run in first.stores] == [[103, 104]]


def test_what_could_not_be_loaded_is_stored_again(make: Callable[..., Any]) -> None:
    half, request = make(), Request("a", 22)
    store(half, request, 3)
    half.arrived(request)
    matched(half, request)
    half.allocated(request, Blocks(), 12)
    step(half, Request("another", 4), 0, 4)
    # The second of the three blocks was damaged: vLLM computes from there on.
    failed = {0: {request.block_hashes[1] + b"\0"}}
    half.learn(SimpleNamespace(timed_out=False, ended={0: 1}, failed=failed, digests=set()))
    orders = step(half, request, 4, 18)
    assert [run.blocks for run in orders.stores] == [[101, 102, 103, 104]]


def test_a_hole_in_the_store_is_filled_from_what_the_engine_has(make: Callable[..., Any]) -> None:
    half, request = make(), Request("a", 22)
    store(half, request, 1)
    half.arrived(request)
    assert matched(half, request, computed=8) == (0, False)
    half.allocated(request, Blocks(), 0)
    assert [run.blocks for run in step(half, request, 8, 14).stores] == [[101, 102, 103, 104]]


def test_a_look_up_that_waits_longer_than_an_answer_is_good_for_still_ends(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    half, request = make(wait_s=0.5), Request("a", 22)
    monkeypatch.setattr(sys.modules["kvstore.connectors.vllm.scheduler"], "STALE_S", 0.05)
    half.arrived(request)
    began_s = time.monotonic()
    assert matched(half, request) == (0, False)
    assert time.monotonic() - began_s >= 0.5
    assert half.counts.take()["lookups"] == 1


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


def test_requests_with_an_adapter_are_left_alone(make: Callable[..., Any]) -> None:
    half, request = make(), Request("a", 22, lora_request="adapter")
    store(half, request, 3)
    half.arrived(request)
    assert half.matched_tokens(request, 0) == (0, False)
    assert step(half, request, 0, 22).stores == []


def test_loads_that_vllm_could_not_make_up_for_are_refused() -> None:
    waits = Settings.of({"root": "memory://", "load": "sync"})
    waits.check_loads(batches=1, drafts=True)
    with pytest.raises(InvalidRequest, match="--no-async-scheduling"):
        waits.check_loads(batches=2, drafts=False)
    layered = Settings.of({"root": "memory://", "load": "sync", "layerwise": True})
    layered.check_loads(batches=1, drafts=False)
    with pytest.raises(InvalidRequest, match="set layerwise to false"):
        layered.check_loads(batches=1, drafts=True)
    Settings.of({"root": "memory://"}).check_loads(batches=2, drafts=True)


def test_blocks_are_stored_with_their_place_in_the_prompt(make: Callable[..., Any]) -> None:
    half, request = make(), Request("r", 40)
    half.arrived(request)
    assert matched(half, request) == (0, False)
    assert [run.first for run in step(half, request, 0, 12).stores] == [0]
    assert [run.first for run in step(half, request, 12, 16).stores] == [3]


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
