"""A store that was closed: every call raises StoreClosed. One that was dropped instead warns, and its threads end."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvstore
import kvstore.aio
from kvstore.census.selection import Selection
from kvstore.client.cache import Cache, close_when_dropped
from kvstore.client.store import Store
from kvstore.errors import StoreClosed
from kvstore.segments.rope import Rope
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.programs import ended
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
def store_opener(way: str, root: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores of one kind."""
    if way in ("embedded", "memory"):
        yield lambda: kvstore.open(root, memory=64 << 20 if way == "memory" else 0)
        return
    with serving(root) as served:
        yield lambda: connected(served, bulk=way)


@contextmanager
def opener(way: str, root: Path) -> Iterator[Callable[[], Opened]]:
    with store_opener(way, root) as open_store:
        yield lambda: Opened(open_store())


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


# Stores that were not closed: they warn, and their threads end

ROPE = Rope(10_000.0, TINY.head_dim)
SERVING = ("kvstore-call", "kvstore-bulk", "kvstore-puts-behind", "kvstore-worker", "kvstore-leases")
"""Names of the threads that a worker has."""
PATHS = ("memory", "grpc", "tcp", "shared")


def use(store: Store) -> Cache:
    """Calls everything that has threads, or gives threads work."""
    cache = store.namespace("m", TINY)
    cache.put(TOKENS, kv_of(TINY, TOKENS))
    out = np.empty(TINY.shape(len(TOKENS)), TINY.numpy_dtype)
    assert cache.get(TOKENS)[0] == cache.get(TOKENS, out) == len(TOKENS)
    with cache.hold(TOKENS) as hold:
        assert len(hold.view()) == 8
        assert len(list(hold.layers())) == TINY.layers
        assert hold.read_into(out) == len(TOKENS)
    cache.pin(TOKENS, ttl=60).release()
    assert all(cache.blocks.put(KEYS, [b"abc"] * 3))
    with cache.blocks.hold(KEYS) as blocks:
        assert all(blocks.get(KEYS, [bytearray(3) for _ in KEYS]))
    return cache


@contextmanager
def expected_warning() -> Iterator[None]:
    """Checks that a store is dropped within, and that its threads end."""
    before = _threads()
    with pytest.warns(ResourceWarning, match=r"kvstore: the store of .* dropped without close\(\)"):
        yield
        gc.collect()
    eventually(lambda: not _threads() - before)


def _threads() -> set[threading.Thread]:
    """The live threads of stores; a worker of this process has others, which come and go as it is called."""
    found = {each for each in threading.enumerate() if each.name.startswith("kvstore-")}
    return {each for each in found if not each.name.startswith(SERVING)}


@for_each("path", PATHS)
def test_a_dropped_store_warns_and_its_threads_end(path: str, tmp_root: Path) -> None:
    with store_opener(path, tmp_root) as open_store:
        with expected_warning():
            cache = use(open_store())  # the store is gone by now, and its cache keeps it open
            assert cache.match(TOKENS) == len(TOKENS)
            del cache
        with open_store() as store:
            assert store.namespace("m", TINY).match(TOKENS) == len(TOKENS)


@for_each("path", PATHS)
def test_a_hold_keeps_a_dropped_store_open(path: str, tmp_root: Path) -> None:
    with store_opener(path, tmp_root) as open_store, expected_warning():
        hold = use(open_store()).hold(TOKENS)
        blocks = use(open_store()).blocks.hold(KEYS)
        gc.collect()
        assert len(hold.view()) == 8
        assert blocks.get(KEYS, [bytearray(3) for _ in KEYS]) == [True] * 3
        with pytest.warns(ResourceWarning, match="a hold was dropped"):
            del hold, blocks


def held_segments(segments: kvstore.Segments) -> object:
    return segments.hold(segments.find(TOKENS))


HOLDS: dict[str, Callable[[Cache], object]] = {
    "tokens": lambda cache: cache.hold(TOKENS),
    "blocks": lambda cache: cache.blocks.hold(KEYS),
    "segments": lambda cache: held_segments(cache.segments(ROPE, chunk_tokens=TINY.chunk_tokens)),
}


@for_each("what", HOLDS)
@for_each("path", ["memory", "grpc"])
def test_a_dropped_hold_warns_and_is_released(path: str, what: str, tmp_root: Path) -> None:
    kv = np.ones(TINY.shape(len(TOKENS)), np.float16)
    with store_opener(path, tmp_root) as open_store, open_store() as store:
        cache = store.namespace("m", replace(TINY, dtype="float16"))
        cache.put(TOKENS, kv)
        cache.blocks.put(KEYS, [b"abc"] * 3)
        cache.segments(ROPE, chunk_tokens=TINY.chunk_tokens).put(TOKENS, kv)
        with pytest.warns(ResourceWarning, match=r"a hold was dropped without release\(\)") as warned:
            hold = HOLDS[what](cache)
            assert store.stats()["holds"] == 1
            del hold
            gc.collect()
        line = inspect.getsource(sys.modules[__name__]).splitlines()[warned[0].lineno - 1]
        assert warned[0].filename == __file__ and line.strip() == "del hold"
        eventually(lambda: store.stats()["holds"] == 0, "it is released")


def test_a_store_may_be_dropped_by_a_thread_that_has_the_lock_that_closing_needs() -> None:
    class Port:
        """Nothing but something to drop."""

    lock, closed = threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    port = Port()
    close_when_dropped(port, close, "a test")  # type: ignore[arg-type]
    with lock, pytest.warns(ResourceWarning, match="the store of a test"):
        del port
        assert not closed.is_set()
    assert closed.wait(PATIENCE_S)


FORKING = """
import gc, os, sys, threading, warnings
import kvstore

warnings.simplefilter("error")
store = kvstore.open(sys.argv[1])
child = os.fork()
if not child:
    del store
    gc.collect()
    os._exit(len([each for each in threading.enumerate() if each.name == "kvstore-closing"]))
assert os.waitpid(child, 0)[1] == 0
assert store.namespaces() == []
store.close()
"""


def test_a_forked_child_closes_nothing(tmp_root: Path) -> None:
    assert not ended(sys.executable, "-c", FORKING, str(tmp_root), check=True).stderr


@for_each(
    "ends",
    [
        "",
        "sys.exit(0)",
        "raise ValueError",
        "del store; gc.collect()",
        "child = fork(put); child.start(); child.join()",
    ],
)
def test_w3_what_was_put_behind_is_on_the_root_when_a_program_ends(tmp_root: Path, ends: str) -> None:
    program = f"""if True:
        import gc, multiprocessing, sys
        import kvstore
        from tests.client.test_closed import KV, TINY, TOKENS

        fork = lambda work: multiprocessing.get_context("fork").Process(target=work)

        def put():
            global store
            store = kvstore.open(sys.argv[1], memory=64 << 20)
            store.namespace("m", TINY).put(TOKENS, KV, write="behind")

        if "fork" not in {ends!r}:
            put()
        {ends}
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(tmp_root)], check=False, timeout=PATIENCE_S)
    with kvstore.open(str(tmp_root)) as store:
        assert store.namespace("m", TINY).match(TOKENS) == len(TOKENS)
