"""The promises of a put: parents first, first writer wins, holes are not built upon, nobody's work is undone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore.client import Store
from kvstore.core.results import PutResult
from kvstore.format.places import Name
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import SMALL, TINY, kv_of, same, store_on

TOKENS = np.arange(8 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)


def test_chunks_become_visible_parents_first(tmp_root: Path) -> None:
    published: list[str] = []

    class Noting(PosixRoot):
        def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
            published.append(name)
            return super().publish(staged, name, durable=durable)

    with store_on(Noting(tmp_root)) as store:
        cache = store.namespace("m", SMALL)
        for end in range(SMALL.chunk_tokens, len(TOKENS) + 1, SMALL.chunk_tokens):
            cache.put(TOKENS[:end], KV[:, :, :end])
        order = [name for name in published if name.startswith("chunks/")]
    for file in tmp_root.glob("chunks/*/*"):
        file.unlink()
    published.clear()
    with store_on(Noting(tmp_root)) as store:
        store.namespace("m", SMALL).put(TOKENS, KV)
    assert [name for name in published if name.startswith("chunks/")] == order


def test_many_writers_of_one_prompt_publish_each_chunk_once(tmp_root: Path) -> None:
    stores = [store_on(tmp_root) for _ in range(4)]
    barrier = threading.Barrier(len(stores))

    def put(store: Store) -> PutResult:
        cache = store.namespace("m", SMALL)
        barrier.wait(PATIENCE_S)
        return cache.put(TOKENS, KV)

    with ThreadPoolExecutor(len(stores)) as threads:
        results = list(threads.map(put, stores))
    assert [result.tokens_present for result in results] == [len(TOKENS)] * 4
    assert sum(result.chunks_written for result in results) == 8
    for store in stores:
        assert same(store.namespace("m", SMALL).get(TOKENS)[1], KV)
        store.close()
    assert not list(tmp_root.glob("staging/*/*"))


def test_a_cold_match_looks_at_logarithmically_many_files(tmp_root: Path) -> None:
    tokens = np.arange(512 * TINY.chunk_tokens)
    kv = np.zeros(TINY.shape(len(tokens)), np.int8)
    with store_on(tmp_root) as store:
        store.namespace("m", TINY).put(tokens[: 300 * TINY.chunk_tokens], kv[:, :, : 300 * TINY.chunk_tokens])
    root = FaultyRoot(PosixRoot(tmp_root))
    with store_on(root) as store:
        cache = store.namespace("m", TINY)
        root.calls.clear()
        assert cache.match(tokens) == 300 * TINY.chunk_tokens
        assert root.calls["stat"] <= 11
        root.calls.clear()
        assert cache.match(tokens[: 300 * TINY.chunk_tokens]) == 300 * TINY.chunk_tokens
        assert not root.calls, "what is remembered is not looked at again"
