"""The hit ratio counts each request of a caller once, whichever calls the request makes: the truth is a replay's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.replay import Content, Plan, expect, generate, replay, replay_layout
from kvstore.replay.content import KvBytes
from kvstore.replay.trace import BLOCK_TOKENS, Request
from kvstore.tokens import TokenArray
from kvstore.worker.exposition import Exposition
from tests.worker.serving import serving

REQUESTS = generate(60, seed=3)
FEW = generate(14, seed=3)
LAYOUT = replay_layout(8)
CONTENT = Content(LAYOUT, 0)
WAYS = ("embedded", "embedded, memory", "grpc", "tcp", "shared")

Ratio = tuple[int, int]
"""Tokens matched, and tokens asked for."""
Counted = Callable[[], Ratio]


@contextmanager
def opened(way: str, root: Path) -> Iterator[tuple[Store, Counted]]:
    """A store by one way, and a function that reads the two counters."""
    if "embedded" in way:
        memory = (64 << 20) * ("memory" in way)
        with kvstore.open(root, memory=memory) as store:

            def of_stats() -> Ratio:
                found = store.stats()
                return int(found["tokens_matched"]), int(found["tokens_asked"])

            yield store, of_stats
        return
    with serving(root) as served:
        registry = CollectorRegistry()
        registry.register(Exposition(served.worker, "0"))

        def of_metrics() -> Ratio:
            samples = {
                sample.name: sample.value
                for family in text_string_to_metric_families(generate_latest(registry).decode())
                for sample in family.samples
            }
            return int(samples["kvstore_tokens_matched_total"]), int(samples["kvstore_tokens_asked_total"])

        with kvstore.connect(served.address, bulk=way) as store:
            yield store, of_metrics


def match_get_put(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    """Gets and puts, whatever the match found: an engine need not look at its answer."""
    cache.match(tokens)
    cache.get(tokens, out=np.empty_like(kv))
    cache.put(tokens, kv)


def get_put(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    cache.get(tokens)
    cache.put(tokens, kv)


def match_hold_view_put(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    cache.match(tokens)
    with cache.hold(tokens) as hold:
        hold.view()
        hold.read_into(np.empty_like(kv))
    cache.put(tokens, kv)


def layers_put(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    with cache.hold(tokens) as hold:
        for _ in hold.layers():
            pass
    cache.put(tokens, kv)


def pinned(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    cache.match(tokens)
    with cache.pin(tokens), cache.hold(tokens):
        pass
    cache.put(tokens, kv)


def blocks(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    count = len(tokens) // BLOCK_TOKENS
    keys = [sha256(tokens[: stop * BLOCK_TOKENS].tobytes()).digest() for stop in range(1, count + 1)]
    found = cache.blocks.match(keys)
    with cache.blocks.hold(keys) as hold:
        assert sum(hold.present) == found
    buffers = [bytearray(LAYOUT.chunk_bytes) for _ in keys]
    assert cache.blocks.get(keys[:found], buffers[:found]) == [True] * found
    cache.blocks.put(keys, buffers)


USES = (match_get_put, get_put, match_hold_view_put, layers_put, pinned, blocks)


def truth(requests: list[Request]) -> Ratio:
    return expect(requests).blocks * BLOCK_TOKENS, sum(each.full_blocks for each in requests) * BLOCK_TOKENS


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_and_the_counters_say_the_same(tmp_root: Path, way: str) -> None:
    with opened(way, tmp_root) as (store, counted):
        report = replay(REQUESTS, lambda: nullcontext(store), Plan("trace", 8))  # type: ignore[arg-type, return-value]
        assert report.ok, report.failures
        assert counted() == (report.tally.tokens_matched, report.tally.tokens) == truth(REQUESTS)
        matched, asked = counted()
        assert report.hit_ratio == matched / asked


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
def test_each_request_counts_once(tmp_root: Path, way: str, use: Callable[..., None]) -> None:
    with opened(way, tmp_root) as (store, counted):
        cache = store.namespace("trace", LAYOUT)
        for request in FEW:
            tokens = CONTENT.tokens(request)
            use(cache, tokens, np.zeros(LAYOUT.shape(len(tokens)), LAYOUT.numpy_dtype))
        assert counted() == truth(FEW)
