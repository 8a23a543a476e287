"""The promises of a put: parents first, first writer wins, holes are not built upon, nobody's work is undone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Layout
from kvstore.client import Store
from kvstore.errors import LayoutMismatch
from kvstore.format.places import Name
from kvstore.root.memory import MemoryRoot
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import SMALL, TINY, chunk_files, kv_of, same, store_on

TOKENS = np.arange(8 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with store_on(tmp_root) as opened:
        yield opened


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


def test_a_trailing_part_chunk_is_not_stored(store: Store) -> None:
    cache = store.namespace("m", SMALL)
    tokens = TOKENS[: 2 * SMALL.chunk_tokens + 5]
    result = cache.put(tokens, KV[:, :, : len(tokens)])
    assert result.tokens_present == 2 * SMALL.chunk_tokens and result.chunks_written == 2
    assert result.bytes_written == 2 * SMALL.chunk_bytes
    assert cache.match(tokens) == 2 * SMALL.chunk_tokens


def test_the_first_writer_wins_and_a_found_chunk_is_not_replaced(store: Store) -> None:
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, KV)
    other = kv_of(SMALL, TOKENS, b"other kernel")
    result = cache.put(TOKENS, other)
    assert (result.chunks_written, result.chunks_found, result.bytes_written) == (0, 8, 0)
    assert same(cache.get(TOKENS)[1], KV)


def test_put_with_a_prefix_stores_the_rest(store: Store) -> None:
    cache = store.namespace("m", SMALL)
    half = 4 * SMALL.chunk_tokens
    cache.put(TOKENS[:half], KV[:, :, :half])
    result = cache.put(TOKENS, KV[:, :, half:], prefix=half)
    assert (result.tokens_present, result.chunks_written) == (len(TOKENS), 4)
    assert same(cache.get(TOKENS)[1], KV)


def test_put_behind_a_hole_stores_nothing_and_deletes_nothing(store: Store, tmp_root: Path) -> None:
    cache = store.namespace("m", SMALL)
    half = 4 * SMALL.chunk_tokens
    size = SMALL.chunk_tokens
    first: dict[int, Path] = {}
    for end in range(size, half + 1, size):
        before = set(chunk_files(tmp_root)) if first else set()
        cache.put(TOKENS[:end], KV[:, :, :end])
        (first[end],) = set(chunk_files(tmp_root)) - before
    first[2 * size].unlink()
    result = cache.put(TOKENS, KV[:, :, half:], prefix=half)
    assert (result.tokens_present, result.chunks_written) == (size, 0)
    assert first[3 * size].exists() and first[4 * size].exists()
    assert cache.put(TOKENS, KV).chunks_written == 5
    assert same(cache.get(TOKENS)[1], KV)


def test_many_writers_of_one_prompt_publish_each_chunk_once(tmp_root: Path) -> None:
    stores = [store_on(tmp_root) for _ in range(4)]
    results = []
    barrier = threading.Barrier(len(stores))

    def put(store: Store) -> None:
        cache = store.namespace("m", SMALL)
        barrier.wait(PATIENCE_S)
        results.append(cache.put(TOKENS, KV))

    threads = [threading.Thread(target=put, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [result.tokens_present for result in results] == [len(TOKENS)] * 4
    assert sum(result.chunks_written for result in results) == 8
    for store in stores:
        assert same(store.namespace("m", SMALL).get(TOKENS)[1], KV)
        store.close()
    assert not list(tmp_root.glob("staging/*/*"))


def test_another_layout_under_the_same_name_is_refused_with_both_named(tmp_root: Path) -> None:
    with store_on(tmp_root) as store, store_on(tmp_root) as other:
        store.namespace("m", SMALL)
        for asked in (TINY, Layout(3, 2, 8, "bfloat16", 16), Layout(3, 2, 8, "float16", 32)):
            with pytest.raises(LayoutMismatch, match="another name") as refused:
                other.namespace("m", asked)
            assert str(SMALL) in str(refused.value) and str(asked) in str(refused.value)
        other.namespace("m", SMALL)
        other.namespace("m", TINY, tenant="somebody else")


@pytest.mark.parametrize("difference", ["name", "fingerprint", "tenant", "attributes"])
def test_namespaces_that_differ_share_nothing(store: Store, difference: str) -> None:
    one: dict[str, Any] = {"name": "m", "fingerprint": "f", "tenant": "t", "attributes": {"rope": "1"}}
    two = {**one, difference: {"rope": "2"} if difference == "attributes" else "other"}
    first, second = store.namespace(layout=SMALL, **one), store.namespace(layout=SMALL, **two)
    first.put(TOKENS, KV)
    assert second.match(TOKENS) == 0
    second.put(TOKENS, kv_of(SMALL, TOKENS, b"second"))
    assert same(first.get(TOKENS)[1], KV)
    assert same(second.get(TOKENS)[1], kv_of(SMALL, TOKENS, b"second"))


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


def test_no_reference_to_the_callers_array_is_kept(store: Store) -> None:
    import gc
    import weakref

    cache = store.namespace("m", SMALL)
    kv = KV.copy()
    watched = weakref.ref(kv)
    cache.put(TOKENS, kv)
    out = np.empty_like(KV)
    cache.get(TOKENS, out=out)
    watched_out = weakref.ref(out)
    del kv, out
    gc.collect()
    assert watched() is None and watched_out() is None


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=12),
)
def test_match_and_get_agree_with_a_set_of_prefixes(prompts: list[list[int]]) -> None:
    layout, size = TINY, TINY.chunk_tokens
    stored: set[tuple[int, ...]] = set()
    with store_on(MemoryRoot()) as store:
        cache = store.namespace("m", layout)
        for prompt in prompts:
            expected = 0
            while tuple(prompt[: expected + size]) in stored and expected + size <= len(prompt):
                expected += size
            assert cache.match(prompt) == expected
            kv = kv_of(layout, prompt)
            count, found = cache.get(prompt)
            assert count == expected and same(found, kv[:, :, :expected])
            cache.put(prompt, kv[:, :, expected:], prefix=expected)
            stored.update(tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size))
