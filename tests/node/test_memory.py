"""The arguments of a call are freed when it returns: no cycle of ours keeps the caller's arrays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client import Store
from kvstore.errors import InvalidRequest
from tests.kit.faulty_root import ENOSPC, FaultyRoot, Rule
from tests.kit.stores import SMALL, kv_of, same

TOKENS = np.arange(8 * SMALL.chunk_tokens, dtype=np.uint32)
KV = kv_of(SMALL, TOKENS)


@pytest.fixture(autouse=True)
def without_the_cyclic_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_array_read_into_is_let_go_of(store: Store) -> None:
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, KV)
    out = np.empty_like(KV)
    cache.get(TOKENS, out=out)
    with cache.hold(TOKENS) as hold:
        hold.read_into(out)
        for _ in hold.layers():
            pass
    watched = weakref.ref(out)
    del out
    assert watched() is None
    count, found = cache.get(TOKENS)
    assert count == len(TOKENS)
    whole = found.base
    assert whole is not None
    watched = weakref.ref(whole)
    del found, whole
    assert watched() is None


def test_an_array_whose_put_failed_is_let_go_of(store: Store, root: FaultyRoot) -> None:
    cache = store.namespace("m", SMALL)
    root.set_rules([Rule("stage", ENOSPC, nth=3)])
    kv = KV.copy()
    watched = weakref.ref(kv)
    assert cache.put(TOKENS, kv).reason == "full"
    del kv
    assert watched() is None


def test_a_caller_may_reuse_its_tokens_while_a_hold_lives(store: Store) -> None:
    cache = store.namespace("m", SMALL)
    tokens = TOKENS.copy()
    cache.put(tokens, KV)
    with cache.hold(tokens) as hold:
        tokens[:] = 7
        out = np.zeros_like(KV)
        assert hold.read_into(out) == len(TOKENS) and same(out, KV)
    assert cache.match(TOKENS) == len(TOKENS)
    assert store.stats()["miss_damaged"] == 0


def test_arrays_of_the_other_byte_order_are_refused(store: Store) -> None:
    cache = store.namespace("m", SMALL)
    for swapped in (KV.view(np.uint16).astype(">u2"), KV.astype(">f2")):
        with pytest.raises(InvalidRequest, match="dtype"):
            cache.put(TOKENS, swapped)
        with pytest.raises(InvalidRequest, match="dtype"):
            cache.get(TOKENS, out=swapped)
