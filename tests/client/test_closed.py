"""A store that was closed: every call raises StoreClosed, also one that runs in another thread meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.census.selection import Selection
from kvstore.errors import StoreClosed
from tests.kit.cases import for_each
from tests.kit.patience import eventually
from tests.kit.stores import TINY, kv_of
from tests.kit.workers import connected, serving

TOKENS = range(8 * TINY.chunk_tokens)
KV = kv_of(TINY, TOKENS)
KEYS = [bytes([number]) * 16 for number in range(3)]
WAYS = ("embedded", "memory", "grpc", "tcp", "shared")


class Opened:
    """A store with something in it, and one of everything that a store gives."""

    def __init__(self, store: kvstore.Store) -> None:
        self.store = store
        self.cache = cache = store.namespace("m", TINY)
        cache.put(TOKENS, KV)
        cache.blocks.put(KEYS, [b"abc"] * 3)
        self.holds = [cache.hold(TOKENS), cache.hold([])]
        self.block_hold = cache.blocks.hold(KEYS)
        self.pin = cache.pin(TOKENS, ttl=60)


@contextmanager
def opener(way: str, root: Path) -> Iterator[Callable[[], Opened]]:
    if way in ("embedded", "memory"):
        yield lambda: Opened(kvstore.open(root, memory=64 << 20 if way == "memory" else 0))
        return
    with serving(root) as served:
        yield lambda: Opened(connected(served, bulk=way))


def buffers() -> list[bytearray]:
    return [bytearray(3) for _ in KEYS]


READS: dict[str, Callable[[Opened], object]] = {
    "match": lambda it: it.cache.match(TOKENS),
    "match nothing": lambda it: it.cache.match([]),
    "get": lambda it: it.cache.get(TOKENS),
    "get nothing": lambda it: it.cache.get([1]),
    "get into": lambda it: it.cache.get(TOKENS, np.empty(TINY.shape(len(TOKENS)), TINY.numpy_dtype)),
    "hold": lambda it: it.cache.hold(TOKENS),
    "hold nothing": lambda it: it.cache.hold([]),
    "blocks match": lambda it: it.cache.blocks.match(KEYS),
    "blocks match nothing": lambda it: it.cache.blocks.match([]),
    "blocks present": lambda it: it.cache.blocks.present(KEYS),
    "blocks get": lambda it: it.cache.blocks.get(KEYS, buffers()),
    "blocks get nothing": lambda it: it.cache.blocks.get([], []),
    "blocks hold": lambda it: it.cache.blocks.hold(KEYS),
    "blocks hold nothing": lambda it: it.cache.blocks.hold([]),
    "stats": lambda it: it.store.stats(),
    "stats of each": lambda it: it.store.stats_each(),
    "namespaces": lambda it: it.store.namespaces(),
}
HELD: dict[str, Callable[[Opened], object]] = {
    **{
        f"{name} {number}": lambda it, call=call, number=number: call(it.holds[number])  # type: ignore[misc]
        for number in (0, 1)
        for name, call in {
            "read a hold": lambda hold: hold.read_into(np.empty(TINY.shape(len(TOKENS)), TINY.numpy_dtype)),
            "view": lambda hold: hold.view(),
            "layers": lambda hold: list(hold.layers()),
        }.items()
    },
    "read a hold of blocks": lambda it: it.block_hold.get(KEYS, buffers()),
}
WRITES: dict[str, Callable[[Opened], object]] = {
    "put": lambda it: it.cache.put(TOKENS, KV),
    "put nothing": lambda it: it.cache.put([], KV[:, :, :0]),
    "blocks put": lambda it: it.cache.blocks.put(KEYS, [b"abc"] * 3),
    "blocks put nothing": lambda it: it.cache.blocks.put([], []),
    "pin": lambda it: it.cache.pin(TOKENS),
    "release a pin": lambda it: it.pin.release(),
    "refcount": lambda it: it.cache.refcount(TOKENS),
    "pins": lambda it: it.store.pins(),
    "unpin": lambda it: it.store.unpin("owner/" + "ab" * 16),
    "namespace": lambda it: it.store.namespace("new", TINY),
    "clear": lambda it: it.cache.clear(),
    "clear by selection": lambda it: it.store.clear(Selection(tenant="nobody")),
    "prefetch": lambda it: it.cache.prefetch(TOKENS),
    "evict first": lambda it: it.cache.evict_first(TOKENS),
    "operations": lambda it: it.store.operations(),
}


@for_each("way", WAYS)
def test_every_call_says_that_the_store_is_closed(way: str, tmp_root: Path) -> None:
    with opener(way, tmp_root) as opened:
        it = opened()
        it.store.close()
        for name, call in {**READS, **HELD, **WRITES}.items():
            with pytest.raises(StoreClosed, match="the store is closed: open it again"):
                pytest.fail(f"{name} gave {call(it)!r}")
        it.block_hold.release()
        for hold in it.holds:
            hold.release()
        with pytest.raises(StoreClosed):
            it.holds[0].view()
        with pytest.raises(StoreClosed), it.store:
            pass
        it.store.close()


@for_each("way", WAYS[2:])
def test_so_does_the_control_of_workers(way: str, tmp_root: Path) -> None:
    with opener(way, tmp_root) as opened:
        it = opened()
        control = it.store.control
        it.store.close()
        for call in (
            control.workers,
            lambda: control.lookup(it.cache, TOKENS),
        ):
            with pytest.raises(StoreClosed):
                call()


STEADY = ("match", "get into", "blocks match", "blocks present", "blocks get")
"""Calls whose result is always the same, so that a miss is seen."""


def repeat(name: str, call: Callable[[Opened], object], it: Opened, first: object, wrong: list[object]) -> None:
    """Repeats a call until the store is closed; notes what else it raises, and what else than ``first`` it gives."""
    try:
        while True:
            found = call(it)
            if name in STEADY and found != first:
                wrong.append((name, found))
    except StoreClosed:
        pass
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test names it
        wrong.append((name, error))


@pytest.mark.slow
@for_each("delay_s", [0.0, 0.05])
@for_each("way", WAYS)
def test_calls_that_run_while_it_is_closed_end_with_their_result_or_that(
    way: str, delay_s: float, tmp_root: Path
) -> None:
    racing = {name: READS[name] for name in STEADY} | HELD | {name: WRITES[name] for name in ("put", "blocks put")}
    with opener(way, tmp_root) as opened:
        it = opened()
        wrong: list[object] = []
        threads = [
            threading.Thread(target=repeat, args=(name, call, it, call(it), wrong)) for name, call in racing.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(delay_s)
        it.store.close()
        eventually(lambda: not any(thread.is_alive() for thread in threads), "the end of the calls")
        assert not wrong
