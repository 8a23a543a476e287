"""One get or put of a caller is one request of ``stats``: the same calls count the same, whichever way they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import kvstore
from kvstore.client import Cache
from tests.kit.administration import damage_payload
from tests.kit.arenas import serving_memory
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, kv_of
from tests.kit.transports import WAYS
from tests.kit.workers import connected, serving

TOKENS = np.arange(6 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
KEYS = [bytes([number]) * 16 for number in range(1, 6)]
BLOCK_BYTES = 5_000
Counted = tuple[Cache, Callable[[str], int]]


@contextmanager
def in_process(root: Path, *, has_memory: bool) -> Iterator[Counted]:
    with kvstore.open(root, memory=(64 << 20) * has_memory, max_bytes=None) as store:
        yield store.namespace("m", SMALL), lambda name: int(store.stats()[name])


@contextmanager
def through_worker(root: Path, way: str, *, has_memory: bool) -> Iterator[Counted]:
    root.mkdir()
    with ExitStack() as undo:
        served = undo.enter_context(serving_memory(root) if has_memory else serving(root))
        store = undo.enter_context(connected(served, bulk=way))
        yield store.namespace("m", SMALL), lambda name: served.member.node.counters.snapshot()[name]


@contextmanager
def opened(root: Path, way: str, *, has_memory: bool) -> Iterator[Counted]:
    place = (
        in_process(root, has_memory=has_memory) if way == "here" else through_worker(root, way, has_memory=has_memory)
    )
    with place as (cache, count):
        cache.put(TOKENS, KV, write="through")
        cache.blocks.put(KEYS, [bytes(BLOCK_BYTES)] * len(KEYS), write="through")
        yield cache, count


def buffers(count: int) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


def read_held(cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        hold.read_into(np.empty_like(KV))


def read_layers(cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        assert len(list(hold.layers())) == SMALL.layers


def view(cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        hold.view()


def read_held_blocks(cache: Cache) -> None:
    with cache.blocks.hold(KEYS) as hold:
        hold.get(KEYS, buffers(len(KEYS)))


CALLS: dict[str, Callable[[Cache], object]] = {
    "get": lambda cache: cache.get(TOKENS),
    "get into": lambda cache: cache.get(TOKENS, np.empty_like(KV)),
    "get of a part": lambda cache: cache.get([*TOKENS[:32].tolist(), *range(900, 964)]),
    "get of nothing": lambda cache: cache.get(TOKENS + 10_000),
    "read of a hold": read_held,
    "layers of a hold": read_layers,
    "view of a hold": view,
    "blocks": lambda cache: cache.blocks.get(KEYS, buffers(len(KEYS))),
    "blocks and a miss": lambda cache: cache.blocks.get([*KEYS, bytes(16)], buffers(len(KEYS) + 1)),
    "no block": lambda cache: cache.blocks.get([bytes(16)], buffers(1)),
    "blocks of a hold": read_held_blocks,
}


PUTS: dict[str, Callable[[Cache], object]] = {
    "put": lambda cache: cache.put(TOKENS + 20_000, KV),
    "put of what is there": lambda cache: cache.put(TOKENS, KV),
    "blocks": lambda cache: cache.blocks.put([bytes([99]) * 16], [bytes(BLOCK_BYTES)]),
    "many blocks": lambda cache: cache.blocks.put([bytes([n]) * 16 for n in range(100, 148)], [bytes(1 << 20)] * 48),
    "blocks that are there": lambda cache: cache.blocks.put(KEYS, [bytes(BLOCK_BYTES)] * len(KEYS)),
}


@for_each("has_memory", [False, True])
@for_each("way", ["here", *WAYS])
def test_each_put_is_one_request(tmp_root: Path, way: str, has_memory: bool) -> None:
    grown = {}
    with opened(tmp_root / "root", way, has_memory=has_memory) as (cache, count):
        for name, call in PUTS.items():
            before = count("requests_put")
            call(cache)
            grown[name] = count("requests_put") - before
    assert grown == dict.fromkeys(PUTS, 1)


@for_each("has_memory", [False, True])
@for_each("way", ["here", *WAYS])
def test_each_get_is_one_request(tmp_root: Path, way: str, has_memory: bool) -> None:
    grown = {}
    with opened(tmp_root / "root", way, has_memory=has_memory) as (cache, count):
        for name, call in CALLS.items():
            before = count("requests_get")
            call(cache)
            grown[name] = count("requests_get") - before
    assert grown == dict.fromkeys(CALLS, 1)


@for_each("way", ["here", *WAYS])
def test_a_get_that_asks_again_for_what_is_damaged_is_one_request(tmp_root: Path, way: str) -> None:
    with opened(tmp_root / "root", way, has_memory=False) as (cache, count):
        for path in sorted((tmp_root / "root" / "chunks").rglob("*")):
            if path.is_file():
                damage_payload(path)
        before = count("requests_get")
        assert cache.get(TOKENS)[0] == 0
        assert count("requests_get") - before == 1
        assert cache.blocks.get(KEYS, buffers(len(KEYS))) == [False] * len(KEYS)
        assert count("requests_get") - before == 2
