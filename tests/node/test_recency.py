"""Recency without etcd and without atime: the mtimes after readers and writers used a chain."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Store
from kvstore.core.buffers import token_array
from kvstore.core.recency import quantum_of, stamp_ns
from kvstore.engine.settings import Limits
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.root.interface import Stat
from kvstore.root.posix import PosixRoot
from tests.kit.stores import TINY, SetClock, chunk_files, kv_of, member_of, store_on

NOW_S = 1_800_000_000.0
QUANTUM_S = Limits().quantum_s
CHUNKS = 6
TOKENS = np.arange(CHUNKS * TINY.chunk_tokens)


def drain(store: Store) -> None:
    member_of(store).node.drain()


def mtimes(root: Path) -> list[int]:
    """The chunks' mtimes, newest first."""
    return sorted((file.stat().st_mtime_ns for file in chunk_files(root)), reverse=True)


def chain_stamps(now_s: float, count: int = CHUNKS, uses: int = 0) -> list[int]:
    return [stamp_ns(quantum_of(now_s, QUANTUM_S), depth, uses=uses) for depth in range(count)]


def test_readers_renew_once_per_quantum_parents_no_later_than_children(tmp_root: Path) -> None:
    clock = SetClock(NOW_S)
    with store_on(tmp_root, clock=clock) as store:
        cache = store.namespace("m", TINY)
        cache.put(TOKENS, kv_of(TINY, TOKENS))
        for _ in range(3):
            cache.get(TOKENS)
        drain(store)
        assert store.stats()["refreshed"] == 0, "what is of this quantum is not renewed"
        clock.wall_s += QUANTUM_S
        for _ in range(5):
            cache.get(TOKENS[: 3 * TINY.chunk_tokens])
            drain(store)
        assert store.stats()["refreshed"] == 3
        assert mtimes(tmp_root) == chain_stamps(clock.wall_s, 3, uses=1) + chain_stamps(NOW_S)[3:]
        cache.get(TOKENS)
        drain(store)
        assert mtimes(tmp_root) == chain_stamps(clock.wall_s, uses=1)


def test_views_and_layers_renew_their_chunks(tmp_root: Path) -> None:
    clock = SetClock(NOW_S)
    with store_on(tmp_root, clock=clock) as store:
        cache = store.namespace("m", TINY)
        cache.put(TOKENS, kv_of(TINY, TOKENS))
        for uses, reads in ((1, "view"), (2, "layers")):
            clock.wall_s += QUANTUM_S
            with cache.hold(TOKENS) as hold:
                assert list(getattr(hold, reads)())
            drain(store)
            assert mtimes(tmp_root) == chain_stamps(clock.wall_s, uses=uses)


def test_a_renewal_looks_again_right_before_its_touch(tmp_root: Path) -> None:
    calls: list[tuple[str, str]] = []

    class Noting(PosixRoot):
        def stat(self, name: Name) -> Stat | None:
            calls.append(("stat", threading.current_thread().name))
            return super().stat(name)

        def touch(self, name: Name, stamp_ns: int) -> bool:
            calls.append(("touch", threading.current_thread().name))
            return super().touch(name, stamp_ns)

    clock = SetClock(NOW_S)

    def renewing(store: Store) -> list[str]:
        calls.clear()
        store.namespace("m", TINY).get(TOKENS)
        drain(store)
        return [call for call, thread in calls if thread == "kvstore-refresh"]

    with store_on(Noting(tmp_root), clock=clock) as first, store_on(Noting(tmp_root), clock=clock) as second:
        first.namespace("m", TINY).put(TOKENS, kv_of(TINY, TOKENS))
        clock.wall_s += QUANTUM_S
        # Both read before either renews: nobody's look at the read tells it that there is nothing to do.
        used = member_of(second).node.refresher.used
        assert renewing(first) == ["stat"] * CHUNKS + ["stat", "touch"] * CHUNKS
        assert renewing(first) == [], "what is known to be renewed costs nothing"
        calls.clear()
        namespace = first.namespace("m", TINY).namespace
        used(ChunkKeys.of(namespace, token_array(TOKENS)))
        drain(second)
        assert [call for call, _ in calls] == ["stat"] * CHUNKS
    assert mtimes(tmp_root) == chain_stamps(clock.wall_s, uses=1), "and it is one use"


@pytest.mark.parametrize("prefix", [0, 3 * TINY.chunk_tokens])
def test_a_chunk_is_never_staler_than_its_child_while_a_put_extends_an_old_prefix(tmp_root: Path, prefix: int) -> None:
    clock = SetClock(NOW_S)
    half = 3 * TINY.chunk_tokens
    stamps_at_publish: list[list[int]] = []

    class Noting(PosixRoot):
        def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
            if name.startswith("chunks/"):
                stamps_at_publish.append(mtimes(tmp_root))
            return super().publish(staged, name, durable=durable)

    kv = kv_of(TINY, TOKENS)
    with store_on(Noting(tmp_root), clock=clock) as store:
        cache = store.namespace("m", TINY)
        cache.put(TOKENS[:half], kv[:, :, :half])
        clock.wall_s += 5 * QUANTUM_S
        stamps_at_publish.clear()
        cache.put(TOKENS, kv[:, :, prefix:], prefix=prefix)
    renewed, written = chain_stamps(clock.wall_s, 3, uses=1), chain_stamps(clock.wall_s)
    assert stamps_at_publish == [renewed + written[3:count] for count in (3, 4, 5)]


def test_a_host_whose_clock_is_behind_does_not_make_a_chunk_staler(tmp_root: Path) -> None:
    with store_on(tmp_root, clock=SetClock(NOW_S)) as store:
        store.namespace("m", TINY).put(TOKENS, kv_of(TINY, TOKENS))
    before = mtimes(tmp_root)
    with store_on(tmp_root, clock=SetClock(NOW_S - 10 * QUANTUM_S)) as behind:
        behind.namespace("m", TINY).get(TOKENS)
        drain(behind)
    assert mtimes(tmp_root) == before


def test_a_renewal_that_the_root_refuses_fails_no_read(tmp_root: Path) -> None:
    clock = SetClock(NOW_S)
    with store_on(tmp_root, clock=clock) as store:
        cache = store.namespace("m", TINY)
        cache.put(TOKENS, kv_of(TINY, TOKENS))
        clock.wall_s += QUANTUM_S
        cache.get(TOKENS)
        for file in chunk_files(tmp_root):
            file.unlink()
        clock.wall_s += QUANTUM_S
        assert cache.get(TOKENS)[0] == 0
        drain(store)
