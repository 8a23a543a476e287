"""What ``stats`` and metrics count is the same whichever way a call goes: look-ups, and requests of callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.store import Store
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


# Look-ups


def hold_and_view(cache: Cache) -> None:
    with cache.hold(LONGER) as hold:
        hold.view()
        hold.read_into(np.empty_like(KV))


def hold_blocks(cache: Cache) -> None:
    with cache.blocks.hold([*KEYS, bytes(16)]) as hold:
        hold.get(KEYS, buffers(len(KEYS)))


LONGER = np.arange(8 * SMALL.chunk_tokens)
LOOKUPS: dict[str, tuple[Callable[[Cache], object], int, int]] = {
    "match": (lambda cache: cache.match(LONGER), 8, 6),
    "get": (lambda cache: cache.get(LONGER), 8, 6),
    "hold": (hold_and_view, 8, 6),
    "put": (lambda cache: cache.put(TOKENS, KV), 0, 0),
    "match of blocks": (lambda cache: cache.blocks.match([*KEYS, bytes(16)]), 6, 5),
    "hold of blocks": (hold_blocks, 6, 5),
}
"""Calls, and the chunks or blocks that each requests and finds."""


@for_each("way", ["here", *WAYS])
def test_lookups_count_in_match_hold_and_get(tmp_root: Path, way: str) -> None:
    with opened(tmp_root / "root", way) as (store, count):
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        cache.blocks.put(KEYS, [bytes(BLOCK_BYTES)] * len(KEYS))
        for name, (call, requested, found) in LOOKUPS.items():
            before = count("tokens_asked"), count("tokens_matched")
            call(cache)
            size = SMALL.chunk_tokens
            rise = count("tokens_asked") - before[0], count("tokens_matched") - before[1]
            assert rise == (requested * size, found * size), name


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
