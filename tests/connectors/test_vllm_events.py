"""The vLLM connector's KV events: told when every rank has its part, in order, once. No vLLM is needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.blocks import GroupKind, LayerGroups
from tests.kit.vllm_connector import BLOCK_TOKENS, Blocks, Request, cache, events_of, halves, matched, step, store

KINDS = (LayerGroups((2, 3), BLOCK_TOKENS), LayerGroups((0, 1), BLOCK_TOKENS, GroupKind.WINDOW, 9))
"""Two groups of full attention behind two with a window of nine tokens, of which a hit needs two blocks."""


class Tables:
    """Blocks of every request, in four groups."""

    def get_block_ids(self, request_id: str = "") -> tuple[list[int], ...]:
        return tuple([100 * (group + 1) + n for n in range(32)] for group in range(4))


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    with halves() as found:
        yield found


def keys(request: Request, *indices: int) -> list[bytes]:
    return [request.block_hashes[index] + b"\0" for index in indices]


def report(
    stored: dict[bytes, int] | None = None,
    unstored: set[bytes] | None = None,
    failed: set[bytes] | None = None,
) -> SimpleNamespace:
    given = {"stored": stored or {}, "unstored": unstored or set(), "failed": failed or set()}
    return SimpleNamespace(timed_out=False, digests=set(), **given)


def told(half: Any) -> list[tuple[Any, ...]]:
    """Kind, block numbers and parent's number of each event; a block's hash has its number in every byte."""

    def number(hashed: bytes | None) -> int | None:
        return None if hashed is None else hashed[0]

    return [
        (each.kind, [number(hashed) for hashed in each.block_hashes], number(getattr(each, "parent_block_hash", None)))
        for each in half.take_events()
    ]


def test_a_block_is_told_when_every_rank_has_stored_its_part(make: Callable[..., Any]) -> None:
    half = make(events=events_of(parts=2))
    request = Request("a", 22)
    half.arrived(request)
    matched(half, request)
    step(half, request, 0, 22)
    first, second, third = keys(request, 0, 1, 2)
    half.learn(report({first: 1, second: 1, third: 1}))
    assert told(half) == []
    half.learn(report({first: 2, second: 2}))
    assert told(half) == [("stored", [0, 1], None)]
    half.learn(report({first: 2, third: 3}))
    assert told(half) == [("stored", [2], 1)]
    assert told(half) == []


def test_what_a_rank_could_not_store_is_not_told_until_it_is_stored_again(make: Callable[..., Any]) -> None:
    half = make(events=events_of(parts=2))
    request = Request("a", 6)
    half.arrived(request)
    matched(half, request)
    step(half, request, 0, 6)
    (key,) = keys(request, 0)
    half.learn(report({key: 1}, {key}))
    half.learn(report({key: 3}))
    assert told(half) == []
    half.reset()
    again = [run.keys for run in step(half, request, 0, 6).stores]
    half.learn(report({again[0][0]: 3}))
    assert told(half) == [("stored", [0], None)]


def test_what_is_loaded_is_told_and_what_could_not_be_is_told_as_removed(make: Callable[..., Any]) -> None:
    half = make(events=events_of())
    request = Request("a", 22)
    store(half, request, 3)
    half.arrived(request)
    assert matched(half, request)[0] == 12
    half.allocated(request, Blocks(), 12)
    half.learn(report(failed={keys(request, 1)[0]}))
    assert told(half) == [("stored", [0, 1, 2], None), ("removed", [1], None)]


def test_a_look_up_that_misses_what_was_told_tells_it_as_removed_once(make: Callable[..., Any]) -> None:
    half = make(events=events_of())
    first = Request("a", 22)
    half.arrived(first)
    matched(half, first)
    step(half, first, 0, 22)
    half.learn(report(dict.fromkeys(keys(first, 0, 1, 2), 1)))
    assert told(half) == [("stored", [0, 1, 2], None)]
    half.finished(first)
    store(half, first, 1)  # a collector took the others
    for name, expected in (("b", [("removed", [1], None)]), ("c", [])):
        later = Request(name, 22)
        half.arrived(later)
        assert matched(half, later)[0] == 4
        assert told(half) == expected
        half.finished(later)


def test_blocks_of_two_requests_are_two_events(make: Callable[..., Any]) -> None:
    half = make(events=events_of())
    one, two = Request("a", 6), Request("b", 10)
    for request, session in ((one, "x"), (two, "y")):
        request.session_id = session
        half.arrived(request)
        matched(half, request)
    step(half, one, 0, 6)
    half.learn(report({keys(one, 0)[0]: 1}))
    step(half, two, 0, 10)
    half.learn(report({keys(two, 1)[0]: 1}))
    events = half.take_events()
    assert [(each.session_id, each.block_hashes[0][0], each.parent_block_hash) for each in events] == [
        ("x", 0, None),
        ("y", 1, two.block_hashes[0]),
    ]


def test_an_idle_engine_goes_on_for_a_moment_to_tell_and_no_longer(make: Callable[..., Any]) -> None:
    now = [100.0]
    half = make(events=events_of(clock=lambda: now[0]))
    request = Request("a", 6)
    assert not half.has_events()
    half.arrived(request)
    matched(half, request)
    step(half, request, 0, 6)
    assert half.has_events()
    now[0] += 2.1
    assert not half.has_events()
    half.learn(report(dict.fromkeys(keys(request, 0), 1)))
    assert half.has_events()
    assert len(told(half)) == 1
    assert not half.has_events()


def test_of_several_kinds_of_kv_full_attention_is_told_once_for_its_first_group(make: Callable[..., Any]) -> None:
    half, request = make(KINDS, events=events_of()), Request("a", 42)
    half.manager = Tables()
    half.arrived(request)
    matched(half, request)
    runs = step(half, request, 0, 42).stores
    assert [run.cluster for run in runs] == [0, 1], "windows are stored, too"
    half.learn(report({key: 1 for run in runs for key in run.keys}))
    (event,) = half.take_events()
    assert (event.group_idx, event.block_size, event.block_hashes) == (2, BLOCK_TOKENS, request.block_hashes)
    half.learn(report(failed={*runs[0].keys[7:8], *runs[1].keys}))
    (gone,) = half.take_events()
    assert (gone.group_idx, gone.block_hashes) == (2, request.block_hashes[7:8])


def test_a_look_up_that_misses_a_window_alone_tells_no_removal(make: Callable[..., Any]) -> None:
    half, request, later = make(KINDS, events=events_of()), Request("a", 42), Request("b", 42)
    half.manager = Tables()
    half.arrived(request)
    matched(half, request)
    whole, window = step(half, request, 0, 42).stores
    for run in (whole, window):
        assert all(cache(half).put(run.keys, [bytes(64)] * len(run.keys), first=run.first))
    half.learn(report(dict.fromkeys(whole.keys, 1)))
    half.take_events()
    half.learn(report(failed=set(window.keys)))  # they are passed over from now on
    half.arrived(later)
    assert matched(half, later) == (0, False)
    assert half.take_events() == []


def test_blocks_with_a_gap_between_them_are_two_events(make: Callable[..., Any]) -> None:
    half, request = make(events=events_of()), Request("a", 22)
    half.arrived(request)
    matched(half, request)
    step(half, request, 0, 22)
    half.learn(report(dict.fromkeys(keys(request, 0, 2), 1)))
    assert told(half) == [("stored", [0], None), ("stored", [2], 1)]
