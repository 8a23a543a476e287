"""The hit ratio counts each request of a caller once, whichever calls the request makes: the truth is a replay's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.client.bulk.way import Bulk
from kvstore.client.cache import Cache
from kvstore.client.lookups import LookUps
from kvstore.client.spreading import Marks, Spreading
from kvstore.client.store import Store
from kvstore.namespace import Namespace
from kvstore.node.counters import LOOKED_MAX
from kvstore.replay import Content, Plan, expect, generate, replay, replay_layout
from kvstore.replay.content import KvBytes
from kvstore.replay.trace import BLOCK_TOKENS, Request
from kvstore.tokens import TokenArray
from kvstore.worker.exposition import Exposition
from tests.kit.cases import for_each
from tests.kit.workers import Served, connected, serving

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
    with serving(root) as served, kvstore.connect(served.address, bulk=Bulk.of(way)) as store:
        yield store, partial(of_metrics, served)


class Turns(Spreading):
    """Sends each call to another worker than the one before it, as where all are busy in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def chosen(self, marks: Marks, workers: Sequence[str], avoided: Collection[str] = ()) -> str:
        self._turn += 1
        return workers[self._turn % len(workers)]


@contextmanager
def taking_turns(way: str, root: Path) -> Iterator[tuple[Store, Counted]]:
    """A store over two workers of one root that take turns, and a function that adds up their counters."""
    with ExitStack() as ends:
        workers = [ends.enter_context(serving(root)) for _ in range(2)]
        store = ends.enter_context(connected(*workers, bulk=way))
        store._port.endpoints._spreading = Turns()  # type: ignore[attr-defined]

        def in_all() -> Ratio:
            each = [of_metrics(served) for served in workers]
            return sum(matched for matched, _ in each), sum(asked for _, asked in each)

        yield store, in_all


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


@for_each("way", WAYS)
def test_a_replay_and_the_counters_say_the_same(tmp_root: Path, way: str) -> None:
    with opened(way, tmp_root) as (store, counted):
        report = replay(REQUESTS, lambda: nullcontext(store), Plan("trace", 8))  # type: ignore[arg-type, return-value]
        assert report.ok, report.failures
        assert counted() == (report.tally.tokens_matched, report.tally.tokens) == truth(REQUESTS)
        matched, asked = counted()
        assert report.hit_ratio == matched / asked


@for_each("use, way", zip(USES, itertools.cycle(WAYS)))
def test_each_request_counts_once(tmp_root: Path, way: str, use: Callable[..., None]) -> None:
    with opened(way, tmp_root) as (store, counted):
        cache = store.namespace("trace", LAYOUT)
        for request in FEW:
            tokens = CONTENT.tokens(request)
            use(cache, tokens, np.zeros(LAYOUT.shape(len(tokens)), LAYOUT.numpy_dtype))
        assert counted() == truth(FEW)


@for_each("use, way", zip(USES, itertools.cycle(["grpc", "tcp", "shared"])))
def test_a_request_counts_once_where_its_calls_go_to_different_workers(
    tmp_root: Path, way: str, use: Callable[..., None]
) -> None:
    with taking_turns(way, tmp_root) as (store, counted):
        cache = store.namespace("trace", LAYOUT)
        for request in FEW:
            tokens = CONTENT.tokens(request)
            use(cache, tokens, np.zeros(LAYOUT.shape(len(tokens)), LAYOUT.numpy_dtype))
        assert counted() == truth(FEW)


def test_a_read_of_what_a_look_up_found_follows_it_once() -> None:
    lookups, space, prompt = LookUps(), Namespace("m", LAYOUT), bytes(range(64))
    lookups.add(space, prompt, 32)
    assert not lookups.take(Namespace("another", LAYOUT), prompt) and not lookups.take(space, prompt[:48])
    assert lookups.take(space, prompt[:32]) and not lookups.take(space, prompt)
    lookups.add(space, prompt, 32)
    lookups.add(space, prompt[:48], 32)
    assert lookups.take(space, prompt) and lookups.take(space, prompt[:48])
    assert not lookups.take(space, prompt[:32])


def test_a_put_ends_the_look_up_that_missed() -> None:
    lookups, space, prompt = LookUps(), Namespace("m", LAYOUT), bytes(range(64))
    lookups.add(space, prompt, 0)
    lookups.forget(space, prompt)
    assert not lookups.take(space, prompt)


def test_look_ups_that_nobody_reads_take_no_more_and_more_memory() -> None:
    lookups, space = LookUps(), Namespace("m", LAYOUT)
    for number in range(2 * LOOKED_MAX):
        lookups.add(space, number.to_bytes(4) + bytes(4), 4)
    assert len(lookups._waiting) == len(lookups._found) == LOOKED_MAX
    assert not lookups.take(space, bytes(8)) and lookups.take(space, (2 * LOOKED_MAX - 1).to_bytes(4) + bytes(4))
