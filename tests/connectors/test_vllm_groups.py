"""Models with several kinds of KV in the vLLM connector: what a hit needs of each kind, and what is stored for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.blocks import Boundaries, GroupKind, LayerGroups
from tests.kit.cases import for_each
from tests.kit.vllm_connector import BLOCK_TOKENS, Request, cache, halves, matched, step

FULL = LayerGroups((0,), BLOCK_TOKENS)
WINDOW = LayerGroups((1, 2), BLOCK_TOKENS, GroupKind.WINDOW, 9)
"""Two groups with a window of nine tokens: a hit needs two blocks of theirs."""
STATE = LayerGroups((1,), BLOCK_TOKENS, GroupKind.STATE)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    with halves() as found:
        yield found


class Tables:
    """Blocks of every request: ``100 * group + n`` is the n-th of a group, 0 one that vLLM has given back."""

    def __init__(self, groups: int, gone: int = 0) -> None:
        self._groups = groups
        self._gone = gone

    def get_block_ids(self, request_id: str = "") -> tuple[list[int], ...]:
        return tuple(
            [100 * (group + 1) + n if group == 0 or n >= self._gone else 0 for n in range(32)]
            for group in range(self._groups)
        )


@for_each(
    "cluster, boundary, first",
    [
        (FULL, 40, 0),
        (WINDOW, 8, 0),
        (WINDOW, 40, 8),
        (LayerGroups((0,), 4, GroupKind.WINDOW, 10), 40, 7),
        (LayerGroups((0,), 4, GroupKind.CHUNK, 16), 40, 8),
        (LayerGroups((0,), 4, GroupKind.CHUNK, 16), 48, 12),
        (STATE, 40, 9),
    ],
)
def test_a_hit_needs_the_blocks_that_the_next_token_sees(cluster: LayerGroups, boundary: int, first: int) -> None:
    assert cluster.first_block(boundary) == first


def test_windows_beside_one_full_layer_take_two_fifths_of_the_bytes() -> None:
    # Gemma-3: five layers with a window of 512 beside one, blocks of 16 tokens, a prompt of 8,190.
    window = LayerGroups((1, 2, 3, 4, 5), 16, GroupKind.WINDOW, 512)
    boundaries = Boundaries.of(16, [LayerGroups((0,), 16), window])
    stored = [boundaries.needs(window, index, 8190, 0) for index in range(8190 // 16)]
    assert (len(stored) + 5 * sum(stored)) / (6 * len(stored)) <= 0.4
    # The end of the prompt can be hit, and all of what is generated.
    assert all(stored[-32:]) and not any(stored[1:96])
    assert all(boundaries.needs(window, index, 8190, 0) for index in range(512, 600))


@for_each("length", [1, 2, 60, 64, 130, 1000])
def test_every_boundary_that_is_stored_for_is_whole_and_no_other_block_is_stored(length: int) -> None:
    boundaries = Boundaries.of(BLOCK_TOKENS, [FULL, WINDOW])
    blocks = range(length // BLOCK_TOKENS)
    stored = {index for index in blocks if boundaries.needs(WINDOW, index, length, 24)}
    wanted = {24, (length - 1) // 4 * 4, length // 4 * 4, *range(boundaries.apart, length, boundaries.apart)}
    needed = {index for end in wanted if end <= length for index in range(WINDOW.first_block(end), end // 4)}
    assert stored == needed


def put(half: Any, *runs: Any) -> None:
    for run in runs:
        assert all(cache(half).put(run.keys, [bytes(64)] * len(run.keys), first=run.first))


def state(group: int, block: int, tokens: int) -> tuple[int, int, int]:
    return group, block, tokens


def ran(half: Any, request: Request, computed: int, count: int, *offered: tuple[int, int, int]) -> Any:
    """The orders of a step at whose end vLLM offers these states."""
    return half.orders(
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={request.request_id: count},
            total_num_scheduled_tokens=count,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={request.request_id: list(offered)}),
        )
    )


def test_where_a_prompt_parts_from_a_stored_one_the_next_one_finds_a_window(make: Callable[..., Any]) -> None:
    half, first = make([FULL, WINDOW]), Request("a", 42)
    half.manager = Tables(3)
    half.arrived(first)
    matched(half, first)
    put(half, *step(half, first, 0, 42).stores)
    second, third = Request("b", 42), Request("c", 42)
    for other, mark in ((second, 200), (third, 201)):
        other.block_hashes = [*first.block_hashes[:5], *(bytes([mark]) * 32 for _ in range(5))]
        half.arrived(other)
    assert matched(half, second) == (0, False), "nothing is whole at 20 tokens"
    stores = step(half, second, 0, 42).stores
    assert (1, 3, 2) in [(run.cluster, run.first, len(run.keys)) for run in stores]
    put(half, *stores)
    half._tracked["c"].abandon()
    assert matched(half, third) == (20, True)


def test_what_the_engine_has_itself_where_a_prompt_parts_is_stored_once(make: Callable[..., Any]) -> None:
    half, first = make([FULL, WINDOW]), Request("a", 42)
    half.manager = Tables(3)
    half.arrived(first)
    matched(half, first)
    put(half, *step(half, first, 0, 42).stores)
    second = Request("b", 42)
    second.block_hashes = [*first.block_hashes[:5], *(bytes([200]) * 32 for _ in range(5))]
    half.arrived(second)
    assert matched(half, second, computed=16) == (0, False)
    half.allocated(second, Tables(3, gone=2), 0)
    stores = step(half, second, 16, 10).stores
    assert [(run.cluster, run.first, len(run.keys)) for run in stores] == [(0, 4, 2), (1, 3, 2)]
    later = step(half, second, 26, 16).stores
    assert [(run.cluster, run.first) for run in later if run.cluster == 1] == [(1, 7)]


def test_a_state_that_could_not_be_loaded_is_passed_over(make: Callable[..., Any]) -> None:
    half, request = make([FULL, STATE]), Request("a", 42)
    half.manager = Tables(2, gone=32)
    half.arrived(request)
    matched(half, request)
    put(half, *ran(half, request, 0, 20, state(1, 71, 20)).stores)
    unknown = request.block_hashes.pop()  # its tokens are still being sampled
    assert ran(half, request, 20, 20).stores
    request.block_hashes.append(unknown)
    last = ran(half, request, 40, 1, state(1, 72, 40)).stores
    put(half, *last)
    half.learn(SimpleNamespace(timed_out=False, failed=set(last[1].keys), namespaces={}))
    again = Request("b", 42)
    half.arrived(again)
    assert matched(half, again) == (20, True)


def test_a_hit_of_vllm_within_a_block_gets_no_state_of_another(make: Callable[..., Any]) -> None:
    half, request = make([FULL, STATE]), Request("a", 42)
    half.manager = Tables(2, gone=32)
    half.arrived(request)
    matched(half, request)
    put(half, *ran(half, request, 0, 40, state(1, 71, 40)).stores)
    again = Request("b", 42)
    half.arrived(again)
    assert matched(half, again, computed=18) == (0, False)
    assert matched(half, again, computed=16) == (24, True)
