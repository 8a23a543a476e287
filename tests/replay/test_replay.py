"""A replay of 200 requests against a real store, exact; and against stores with one defect each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.core.results import PutResult
from kvstore.replay import Content, ReplayPlan, expect, generate, replay, replay_layout
from kvstore.replay.runner import OVERLOADED_TRIES_MAX, Lane
from kvstore.replay.trace import BLOCK_TOKENS, TraceRequest
from tests.kit.cases import for_each

pytestmark = pytest.mark.slow

REQUESTS = generate(200, seed=11)
PLAN = ReplayPlan("trace", bytes_per_token=8)


def opener(url: str) -> Callable[[], Store]:
    return functools.partial(kvstore.open, url)


def test_every_hit_and_every_byte_is_as_the_trace_contains(tmp_root_url: str) -> None:
    expected = expect(REQUESTS)
    report = replay(REQUESTS, opener(tmp_root_url), PLAN)
    assert report.ok, report.failures
    assert report.tally.tokens_matched == report.tokens_expected == expected.blocks * BLOCK_TOKENS > 100_000
    assert report.tally.tokens_got == report.tally.tokens_matched
    assert report.tally.chunks_written == expected.chunks_unique
    assert report.tally.bytes_put == expected.chunks_unique * BLOCK_TOKENS * 8
    assert report.tally.bytes_got == expected.blocks * BLOCK_TOKENS * 8
    assert report.tally.requests == 200 and report.tally.wrong_bytes == 0
    assert report.hit_ratio == report.tally.tokens_matched / sum(BLOCK_TOKENS * each.full_blocks for each in REQUESTS)


def test_several_callers_write_each_chunk_once_and_all_of_them(tmp_root_url: str) -> None:
    served: list[int] = []
    report = replay(REQUESTS, opener(tmp_root_url), ReplayPlan("trace", 8, threads=3), served.append)
    assert report.ok, report.failures
    assert report.tally.chunks_written == expect(REQUESTS).chunks_unique
    assert report.tokens_expected is None
    assert report.tally.requests == sum(served) == 200


# The check must be able to fail: each of these stores is wrong in one way, and the report has to say so.


class Sabotaged:
    """A cache with one call replaced, from its tenth time on."""

    def __init__(self, cache: Cache, name: str, wrong: Callable[..., Any]) -> None:
        self._cache = cache
        self._name = name
        self._wrong = wrong
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        honest = getattr(self._cache, name)
        if name != self._name:
            return honest

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            return honest(*args, **kwargs) if self._calls < 10 else self._wrong(self._cache, *args, **kwargs)

        return call


def flipped_byte(cache: Cache, tokens: Any, out: Any) -> int:
    got = cache.get(tokens, out=out)
    out[1, 1, got - 1, 0, -1] ^= 1
    return got


def nothing_written(cache: Cache, tokens: Any, out: Any) -> int:
    return int(out.shape[2])


def another_prefix(cache: Cache, tokens: Any, out: Any) -> int:
    """Chunks in the wrong order: each is a chunk of this very prompt, under another prefix."""
    got = cache.get(tokens, out=out)
    out[...] = out[:, :, ::-1].copy()
    return got


def shortened_hit(cache: Cache, tokens: Any) -> int:
    return max(0, cache.match(tokens) - BLOCK_TOKENS)


def invented_hit(cache: Cache, tokens: Any) -> int:
    return min(cache.match(tokens) + BLOCK_TOKENS, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS)


def short_read(cache: Cache, tokens: Any, out: Any) -> int:
    return cache.get(tokens, out=out[:, :, BLOCK_TOKENS:])


def lost_put(cache: Cache, tokens: Any, kv: Any, prefix: int, *, write: str) -> PutResult:
    return PutResult(len(tokens), kv.shape[2] // BLOCK_TOKENS, 0, kv.nbytes)


def part_of_a_put(cache: Cache, tokens: Any, kv: Any, prefix: int, *, write: str) -> PutResult:
    return cache.put(tokens[:-BLOCK_TOKENS], kv[:, :, :-BLOCK_TOKENS], prefix=prefix)


@for_each(
    "name, wrong, said",
    [
        ("get", flipped_byte, "wrong bytes"),
        ("get", nothing_written, "wrong bytes"),
        ("get", another_prefix, "wrong bytes"),
        ("get", short_read, "another number of tokens"),
        ("match", shortened_hit, "did not match what the trace contains"),
        ("match", invented_hit, "did not match what the trace contains"),
        ("put", lost_put, "did not match what the trace contains"),
        ("put", part_of_a_put, "left tokens out"),
    ],
)
def test_a_store_that_is_wrong_is_found_out(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any], said: str
) -> None:
    honest = Store.namespace

    def namespace(store: Store, *args: Any, **kwargs: Any) -> Any:
        return Sabotaged(honest(store, *args, **kwargs), name, wrong)

    monkeypatch.setattr(Store, "namespace", namespace)
    report = replay(REQUESTS, opener(f"file://{tmp_root}"), PLAN)
    assert not report.ok
    assert any(said in failure for failure in report.failures), report.failures
    assert report.tally.differences


class Refusing(Cache):
    """A cache that refuses the first few puts."""

    def __init__(self, times: int, reason: str = "overload") -> None:
        self.left = times
        self.reason = reason

    def match(self, *_: Any, **__: Any) -> int:
        return 0

    def put(self, tokens: Any, kv: Any, *_: Any, **__: Any) -> PutResult:
        self.left -= 1
        if self.left >= 0:
            return PutResult(0, 0, 0, 0, self.reason)
        return PutResult(len(tokens), 1, 0, kv.nbytes)


def test_put_into_an_overloaded_store_is_repeated() -> None:
    request = TraceRequest(0, 0, BLOCK_TOKENS, 1, (1,))
    content = Content(replay_layout(8))
    lane = Lane(Refusing(3), content, {0: 0}, 0.0)
    lane.serve(request)
    assert lane.tally.overloaded == 3 and lane.tally.chunks_written == 1
    for times, reason, tries in ((OVERLOADED_TRIES_MAX + 1, "overload", OVERLOADED_TRIES_MAX), (1, "full", 0)):
        lane = Lane(Refusing(times, reason), content, {0: 0}, 0.0)
        lane.serve(request)
        assert (lane.tally.overloaded, lane.tally.short_puts) == (tries, 1)
        assert f"refused: {reason}" in lane.tally.differences[0]
