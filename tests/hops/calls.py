"""The calls whose hops are counted, and the paths to a store on which they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.client.cache import Cache, Hold
from kvstore.client.pool import Bulk
from kvstore.engine.open import open_member
from kvstore.engine.settings import Limits, TierSettings
from kvstore.worker.server import Worker
from tests.hops.recording import Function, Recorder
from tests.kit.patience import NEVER_S, eventually
from tests.kit.transports import tokens_and_kv

CHUNKS = 8
LAYOUT = Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16)
"""32 KiB a chunk."""
BLOCK_BYTES = 64 << 10
MEMORY_BYTES = 64 << 20
LIMITS = Limits(flush_s=0.01, behind_after_s=NEVER_S)
"""Threads that write behind would work for no call. What waits at the end is given up: no test reads it."""
WAYS = ("embedded", "embedded, memory", "shared", "shared, memory", "tcp", "grpc")


def _read_layers(hold: Hold) -> int:
    """Reads each layer, and uses the last one until the thread that reads ahead has ended.

    A hold that is released before that cuts the connection, and the next round would have to dial.
    """
    for layer, _, _ in hold.layers():
        if layer == LAYOUT.layers - 1:
            eventually(lambda: all(thread.name != "kvstore-layers" for thread in threading.enumerate()))
    return hold.tokens


@contextmanager
def cache_by(way: str, root: Path) -> Iterator[Cache]:
    """A cache by one way: in this process, or through a worker that is in this process as well."""
    path, _, memory = way.partition(", ")
    memory_bytes = MEMORY_BYTES if memory else 0
    if path == "embedded":
        with kvstore.open(str(root), memory=memory_bytes, limits=LIMITS) as store:
            yield store.namespace("hops", LAYOUT)
        return
    member = open_member(str(root), settings=TierSettings.of(memory_bytes), limits=LIMITS)
    worker = Worker(member, "127.0.0.1:0")
    try:
        with kvstore.connect(worker.start(), bulk=Bulk.of(path)) as store:
            yield store.namespace("hops", LAYOUT)
    finally:
        worker.stop()
        member.close()


def hops_by(way: str, root: Path) -> dict[str, set[Function]]:
    """The functions that each call typically enters on one way."""
    recorder = Recorder()
    with recorder.installed(), cache_by(way, root) as cache:
        return {name: recorder.typical(*call) for name, call in _calls(cache).items()}


def _calls(cache: Cache) -> dict[str, tuple[Callable[[Any], object], Callable[[], Any]]]:
    """Yields each call with a function that makes its argument anew, outside of the count, for each round."""
    tokens, kv = tokens_and_kv(CHUNKS, seed=0, layout=LAYOUT)
    target, block, key = np.empty_like(kv), bytearray(BLOCK_BYTES), b"block of the hops"
    numbers = count(1)
    assert cache.put(tokens, kv).chunks_written == CHUNKS
    assert cache.blocks.put([key], [block]) == [True]

    def nothing() -> None:
        return None

    def get(_: None) -> None:
        assert cache.get(tokens, target) == len(tokens)

    def put(new: tuple[Any, Any]) -> None:
        assert cache.put(*new).chunks_written == CHUNKS

    def match(_: None) -> None:
        assert cache.match(tokens) == len(tokens)

    def in_hold(use: Callable[[Hold], int]) -> Callable[[None], None]:
        def call(_: None) -> None:
            with cache.hold(tokens) as hold:
                assert use(hold)

        return call

    def get_block(_: None) -> None:
        assert cache.blocks.get([key], [block]) == [True]

    def put_block(number: int) -> None:
        assert cache.blocks.put([b"a block of the hops %d" % number], [block]) == [True]

    return {
        "get": (get, nothing),
        "put": (put, lambda: tokens_and_kv(CHUNKS, seed=next(numbers), layout=LAYOUT)),
        "match": (match, nothing),
        "view": (in_hold(lambda hold: len(hold.view()) == CHUNKS), nothing),
        "layers": (in_hold(_read_layers), nothing),
        "get block": (get_block, nothing),
        "put block": (put_block, lambda: next(numbers)),
    }
