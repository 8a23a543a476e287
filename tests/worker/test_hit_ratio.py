"""The hit ratio counts look-ups: the expected figures are those of the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.client.bulk.links import Bulk
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.replay import Content, expect, generate, replay_layout
from kvstore.replay.runner import KvBytes
from kvstore.replay.trace import BLOCK_TOKENS
from kvstore.tokens import TokenArray
from kvstore.worker.metrics import Exposition
from tests.kit.cases import for_each
from tests.kit.workers import Served, serving

REQUESTS = generate(14, seed=3)
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
    with serving(root) as served, kvstore.connect(served.address, bulk=Bulk.of(way)) as store:
        yield store, partial(of_metrics, served)


def of_metrics(served: Served) -> Ratio:
    """The two counters of a worker, as its metrics have them."""
    registry = CollectorRegistry()
    registry.register(Exposition(served.worker, "0"))
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    return int(samples["kvstore_tokens_matched_total"]), int(samples["kvstore_tokens_asked_total"])


def match_get_put(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    """Gets and puts, whatever the match found: an engine need not look at its answer."""
    cache.match(tokens)
    cache.get(tokens, out=np.empty_like(kv))
    cache.put(tokens, kv)


def uncounted_match_get_put(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    cache.match(tokens, counts=False)
    get_put(cache, tokens, kv)


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


USES = {
    match_get_put: 2,
    uncounted_match_get_put: 1,
    get_put: 1,
    match_hold_view_put: 2,
    layers_put: 1,
    pinned: 2,
    blocks: 2,
}
"""Look-ups of each use."""


@for_each("way", WAYS)
@for_each("use", USES)
def test_lookups_count_in_match_hold_and_get(tmp_root: Path, way: str, use: Callable[..., None]) -> None:
    with opened(way, tmp_root) as (store, counted):
        cache = store.namespace("trace", LAYOUT)
        for request in REQUESTS:
            tokens = CONTENT.tokens(request)
            use(cache, tokens, np.zeros(LAYOUT.shape(len(tokens)), LAYOUT.numpy_dtype))
        matched, asked = expect(REQUESTS).blocks, sum(each.full_blocks for each in REQUESTS)
        assert counted() == (USES[use] * matched * BLOCK_TOKENS, USES[use] * asked * BLOCK_TOKENS)
