"""What ``stats`` and metrics count is the same whichever way a call goes: look-ups, and requests of callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.core.address import TokenArray
from kvstore.replay import Content, expect, generate, replay_layout
from kvstore.replay.runner import KvBytes
from kvstore.replay.trace import BLOCK_TOKENS
from tests.kit.administration import damage_payload
from tests.kit.arenas import serving_memory
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, kv_of
from tests.kit.transports import WAYS
from tests.kit.workers import connected, eventually, serving

TOKENS = np.arange(6 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
KEYS = [bytes([number]) * 16 for number in range(1, 6)]
BLOCK_BYTES = 5_000
Count = Callable[[str], int]


@contextmanager
def opened(root: Path, way: str, *, has_memory: bool = False) -> Iterator[tuple[Store, Count]]:
    """A store by one way, and a function that reads a counter of its node."""
    with ExitStack() as undo:
        if way == "here":
            memory = (64 << 20) * has_memory
            store = undo.enter_context(kvstore.open(root, memory=memory, max_bytes=None))
            yield store, lambda name: int(store.stats()[name])
        else:
            root.mkdir()
            served = undo.enter_context(serving_memory(root) if has_memory else serving(root))
            yield (
                undo.enter_context(connected(served, bulk=way)),
                lambda name: served.member.node.counters.snapshot()[name],
            )


# Look-ups: the expected figures are those of a trace.

REQUESTS = generate(14, seed=3)
LAYOUT = replay_layout(8)
CONTENT = Content(LAYOUT, 0)


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


def blocks(cache: Cache, tokens: TokenArray, kv: KvBytes) -> None:
    count = len(tokens) // BLOCK_TOKENS
    keys = [sha256(tokens[: stop * BLOCK_TOKENS].tobytes()).digest() for stop in range(1, count + 1)]
    found = cache.blocks.match(keys)
    with cache.blocks.hold(keys) as hold:
        assert sum(hold.present) == found
    buffers = [bytearray(LAYOUT.chunk_bytes) for _ in keys]
    assert cache.blocks.get(keys[:found], buffers[:found]) == [True] * found
    cache.blocks.put(keys, buffers)


USES = {match_get_put: 2, get_put: 1, match_hold_view_put: 2, blocks: 2}
"""Look-ups of each use."""


@for_each("way", ["here", *WAYS])
@for_each("use", USES)
def test_lookups_count_in_match_hold_and_get(tmp_root: Path, way: str, use: Callable[..., None]) -> None:
    with opened(tmp_root / "root", way) as (store, count):
        cache = store.namespace("trace", LAYOUT)
        for request in REQUESTS:
            tokens = CONTENT.tokens(request)
            use(cache, tokens, np.zeros(LAYOUT.shape(len(tokens)), LAYOUT.numpy_dtype))
        matched, asked = expect(REQUESTS).blocks, sum(each.full_blocks for each in REQUESTS)
        assert count("tokens_matched") == USES[use] * matched * BLOCK_TOKENS
        assert count("tokens_asked") == USES[use] * asked * BLOCK_TOKENS


# Requests: one get or put of a caller is one.


def buffers(count: int) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


def read_held(cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        hold.read_into(np.empty_like(KV))


def read_layers(cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        assert len(list(hold.layers())) == SMALL.layers


def read_held_blocks(cache: Cache) -> None:
    with cache.blocks.hold(KEYS) as hold:
        hold.get(KEYS, buffers(len(KEYS)))


GETS: dict[str, Callable[[Cache], object]] = {
    "get": lambda cache: cache.get(TOKENS),
    "get of a part": lambda cache: cache.get([*TOKENS[:32].tolist(), *range(900, 964)]),
    "get of nothing": lambda cache: cache.get(TOKENS + 10_000),
    "read of a hold": read_held,
    "layers of a hold": read_layers,
    "blocks and a miss": lambda cache: cache.blocks.get([*KEYS, bytes(16)], buffers(len(KEYS) + 1)),
    "blocks of a hold": read_held_blocks,
}
PUTS: dict[str, Callable[[Cache], object]] = {
    "put": lambda cache: cache.put(TOKENS + 20_000, KV),
    "put of what is there": lambda cache: cache.put(TOKENS, KV),
    "many blocks": lambda cache: cache.blocks.put([bytes([n]) * 16 for n in range(100, 148)], [bytes(1 << 20)] * 48),
    "blocks that are there": lambda cache: cache.blocks.put(KEYS, [bytes(BLOCK_BYTES)] * len(KEYS)),
}


@for_each("has_memory", [False, True])
@for_each("way", ["here", *WAYS])
def test_each_get_and_put_is_one_request(tmp_root: Path, way: str, has_memory: bool) -> None:
    with opened(tmp_root / "root", way, has_memory=has_memory) as (store, count):
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV, write="through")
        cache.blocks.put(KEYS, [bytes(BLOCK_BYTES)] * len(KEYS), write="through")
        for counter, calls in (("requests_put", PUTS), ("requests_get", GETS)):
            for name, call in calls.items():
                before = count(counter)
                call(cache)
                assert count(counter) - before == 1, name
        if not has_memory:
            for path in sorted((tmp_root / "root" / "chunks").rglob("*")):
                if path.is_file():
                    damage_payload(path)
            before = count("requests_get")
            assert cache.get(TOKENS)[0] == 0
            assert count("requests_get") - before == 1, "also if it is repeated because of damage"


@for_each("way, path", [("shared", "unix"), ("tcp", "tcp"), ("grpc", "grpc")])
def test_payload_bytes_count_by_direction_and_path(way: str, path: str) -> None:
    with serving() as served, connected(served, bulk=way) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        cache.get(TOKENS)
        expected = {("in", path): KV.nbytes, ("out", path): KV.nbytes}
        eventually(lambda: served.worker.service.calls.moved_bytes() == expected, "they are counted soon")
