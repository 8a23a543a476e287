"""Bytes that callers get count once each, where they were: in memory or on the root, however they travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import kvstore
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from tests.kit.arenas import MEMORY_BYTES, filled, lose, serving_memory
from tests.kit.cases import for_each
from tests.kit.patience import eventually
from tests.kit.transports import MEDIUM, WAYS, tokens_and_kv
from tests.kit.workers import connected, serving

COUNT = 40
TOKENS, KV = tokens_and_kv(COUNT)
KEYS = [bytes([number]) * 32 for number in range(COUNT)]
BLOCKS = [bytes([number]) * (5_000 + 100 * number) for number in range(COUNT)]
COUNTERS = {"memory": ("memory_hits", "memory_bytes"), "root": ("chunks_read", "bytes_read")}
"""Chunks and payload bytes that callers got, by the tier that had them."""


@contextmanager
def store_by(way: str, tier: str, root: Path) -> Iterator[Store]:
    """A store in this process, or over a worker, whose chunks are in memory and on the root, or on the root alone."""
    with ExitStack() as stack:
        if way == "embedded":
            yield stack.enter_context(kvstore.open(str(root), memory=MEMORY_BYTES if tier == "memory" else 0))
            return
        served = stack.enter_context(serving_memory(root) if tier == "memory" else serving(root))
        yield stack.enter_context(connected(served, bulk=way))


def got(cache: Cache) -> int:
    out = np.empty_like(KV)
    assert cache.get(TOKENS, out=out) == len(TOKENS)
    return out.nbytes


def viewed(cache: Cache) -> int:
    with cache.hold(TOKENS) as hold:
        return sum(view.nbytes for view in hold.view())


def by_layer(cache: Cache) -> int:
    with cache.hold(TOKENS) as hold:
        return sum(k.nbytes + v.nbytes for _, k, v in hold.layers())


def got_blocks(cache: Cache) -> int:
    buffers = [bytearray(len(block)) for block in BLOCKS]
    assert all(cache.blocks.get(KEYS, buffers))
    assert buffers == BLOCKS
    return sum(map(len, buffers))


@for_each("tier", ["memory", "root"])
@for_each("way", ["embedded", *WAYS])
def test_every_byte_counts_once_in_its_tier(way: str, tier: str, tmp_root: Path) -> None:
    with store_by(way, tier, tmp_root) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV, write="through")
        cache.blocks.put(KEYS, BLOCKS, write="through")
        for read in (got, viewed, by_layer, got_blocks):
            assert_counted(store, tier, partial(read, cache))


def assert_counted(store: Store, tier: str, read: Callable[[], int]) -> None:
    before = store.stats()
    payload_bytes = sum(read() for _ in range(3))
    want = {name: 0 for names in COUNTERS.values() for name in names}
    want.update(zip(COUNTERS[tier], (3 * COUNT, payload_bytes), strict=True))

    def counted() -> dict[str, float]:
        now = store.stats()
        return {name: now[name] - before[name] for name in want}

    # A client reports how much it has read of memory or files, and does not wait for the worker.
    eventually(lambda: counted()[COUNTERS[tier][1]] >= payload_bytes)
    assert counted() == want


@for_each("way", WAYS)
@for_each("read", [viewed, by_layer])
def test_a_prompt_in_two_tiers_counts_in_both(way: str, read: Callable[[Cache], int], tmp_root: Path) -> None:
    with serving_memory(tmp_root) as served, connected(served, bulk=way) as store:
        lose(served, filled(served, TOKENS, KV, MEDIUM), COUNT // 2, COUNT)
        assert read(store.namespace("m", MEDIUM)) == KV.nbytes
        eventually(lambda: store.stats()["bytes_read"] + store.stats()["memory_bytes"] >= KV.nbytes)
        stats = store.stats()
        assert stats["bytes_read"] + stats["memory_bytes"] == KV.nbytes
        assert stats["chunks_read"] + stats["memory_hits"] == COUNT
