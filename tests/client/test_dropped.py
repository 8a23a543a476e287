"""Stores that nobody closed: they warn, and their threads end, whoever drops them and whenever that is."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvstore
import kvstore.aio
from kvstore.client.cache import Cache, close_when_dropped
from kvstore.client.pool import Bulk
from kvstore.client.store import Store
from kvstore.segments.rope import Rope
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import TINY, kv_of
from tests.kit.workers import serving

TOKENS = range(8 * TINY.chunk_tokens)
KV = kv_of(TINY, TOKENS)
ROPE = Rope(10_000.0, TINY.head_dim)
KEYS = [bytes([number]) * 16 for number in range(3)]
SERVING = ("kvstore-call", "kvstore-bulk", "kvstore-puts-behind", "kvstore-worker", "kvstore-leases")
"""Names of the threads that a worker has."""
PATHS = ("embedded", "grpc", "tcp", "shared")


@contextmanager
def opener(path: str, root: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores of one kind."""
    if path == "embedded":
        yield lambda: kvstore.open(str(root), memory=64 << 20)
        return
    with serving(root) as served:
        yield lambda: kvstore.connect(served.address, bulk=Bulk.of(path))


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
    with opener(path, tmp_root) as open_store:
        with expected_warning():
            cache = use(open_store())  # the store is gone by now, and its cache keeps it open
            assert cache.match(TOKENS) == len(TOKENS)
            del cache
        with open_store() as store:
            assert store.namespace("m", TINY).match(TOKENS) == len(TOKENS)


@for_each("path", PATHS)
def test_a_hold_keeps_a_dropped_store_open(path: str, tmp_root: Path) -> None:
    with opener(path, tmp_root) as open_store, expected_warning():
        hold = use(open_store()).hold(TOKENS)
        blocks = use(open_store()).blocks.hold(KEYS)
        gc.collect()
        assert len(hold.view()) == 8
        assert blocks.get(KEYS, [bytearray(3) for _ in KEYS]) == [True] * 3
        with pytest.warns(ResourceWarning, match="a hold was dropped"):
            del hold, blocks


HELD: dict[str, Callable[[Cache], object]] = {
    "tokens": lambda cache: cache.hold(TOKENS),
    "blocks": lambda cache: cache.blocks.hold(KEYS),
    "segments": lambda cache: cache.segments(ROPE, chunk_tokens=TINY.chunk_tokens).find_held(TOKENS),
}


@for_each("what", HELD)
@for_each("path", ["embedded", "grpc"])
def test_a_dropped_hold_warns_and_is_released(path: str, what: str, tmp_root: Path) -> None:
    kv = np.ones(TINY.shape(len(TOKENS)), np.float16)
    with opener(path, tmp_root) as open_store, open_store() as store:
        cache = store.namespace("m", replace(TINY, dtype="float16"))
        cache.put(TOKENS, kv)
        cache.blocks.put(KEYS, [b"abc"] * 3)
        cache.segments(ROPE, chunk_tokens=TINY.chunk_tokens).put(TOKENS, kv)
        with pytest.warns(ResourceWarning, match=r"a hold was dropped without release\(\)") as warned:
            hold = HELD[what](cache)
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
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_root)], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert not ended.stderr


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
        from tests.client.test_dropped import KV, TINY, TOKENS

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
