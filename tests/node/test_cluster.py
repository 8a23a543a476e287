"""Nodes in a cluster, with a real etcd: what is stored there, what never is, and what happens while it is silent."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client import Store
from kvstore.engine.settings import Limits
from kvstore.errors import RootMismatch, SessionLost, Unavailable
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMetadata
from kvstore.meta.keys import Keys
from tests.kit.etcd import eventually, frozen, running_etcd
from tests.kit.stores import SMALL, TINY, kv_of, member_of, same

pytestmark = pytest.mark.slow

TOKENS = np.arange(6 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
PATIENT = Limits(meta_deadline_s=20.0)
QUICK = Limits(meta_deadline_s=2.0)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def store(tmp_root: Path, etcd: EmbeddedEtcd) -> Iterator[Store]:
    with kvstore.open(str(tmp_root), etcd=etcd.endpoints, limits=PATIENT) as opened:
        yield opened


def test_no_chunk_costs_an_etcd_operation(store: Store) -> None:
    cache = store.namespace("m", TINY)
    kv_operations = member_of(store).meta
    tokens = np.arange(500 * TINY.chunk_tokens)
    kv = np.ones(TINY.shape(len(tokens)), np.int8)
    before = kv_operations.operations_count
    for start in range(20):
        prompt = tokens + start
        assert cache.match(prompt) in (0, len(prompt))
        cache.put(prompt, kv)
        assert cache.get(prompt)[0] == len(prompt)
        with cache.hold(prompt) as hold:
            hold.view()
        cache.blocks.put([start.to_bytes(16, "big")], [b"block"])
        cache.blocks.match([start.to_bytes(16, "big")])
    assert kv_operations.operations_count - before < 20, "keepalives may fall into it"


def test_an_empty_mount_point_is_not_taken_for_the_root(tmp_root: Path, etcd: EmbeddedEtcd) -> None:
    mount = tmp_root / "mnt"
    with kvstore.open(str(mount), etcd=etcd.endpoints) as store:
        store.namespace("m", SMALL).put(TOKENS, KV)
    shutil.rmtree(mount)
    mount.mkdir()
    with pytest.raises(RootMismatch, match="mounted"):
        kvstore.open(str(mount), etcd=etcd.endpoints)
    assert not list(mount.iterdir()), "nothing was written into it"
    with kvstore.open(str(tmp_root / "other")) as foreign:
        foreign.namespace("m", SMALL)
    mount.rmdir()
    shutil.move(tmp_root / "other", mount)
    with pytest.raises(RootMismatch):
        kvstore.open(str(mount), etcd=etcd.endpoints)


@contextmanager
def without_answers(etcd: EmbeddedEtcd, how: str) -> Iterator[None]:
    """An etcd that is not there, or does not run."""
    if how == "frozen":
        with frozen(etcd.pid):
            yield
        return
    etcd.stop()
    try:
        yield
    finally:
        etcd.start()


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_while_etcd_does_not_answer_chunks_go_on_and_pins_say_so(tmp_root: Path, tmp_path: Path, how: str) -> None:
    with running_etcd(tmp_path) as etcd, kvstore.open(str(tmp_root), etcd=etcd.endpoints, limits=QUICK) as store:
        cache = store.namespace("m", SMALL)
        with without_answers(etcd, how):
            assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)
            assert same(cache.get(TOKENS)[1], KV)
            with cache.hold(TOKENS) as hold:
                assert hold.tokens == len(TOKENS)
            for call in (
                lambda: cache.pin(TOKENS, ttl=60),
                lambda: cache.refcount(TOKENS),
                store.pins,
                lambda: store.namespace("new", SMALL),
            ):
                with pytest.raises(Unavailable):
                    call()
            with pytest.raises(Unavailable):
                kvstore.open(str(tmp_root), etcd=etcd.endpoints, limits=QUICK)

        def pinned() -> bool:
            try:
                return cache.pin(TOKENS, ttl=60).tokens == len(TOKENS)
            except (Unavailable, SessionLost):
                return False  # the calls above may have taken longer than a session lives without etcd

        eventually(pinned)
        assert store.stats()["session_alive"] == 1
        store.namespace("new", SMALL)


def test_a_node_that_is_dropped_leaves_the_cluster(tmp_root: Path, etcd: EmbeddedEtcd) -> None:
    store = kvstore.open(str(tmp_root), etcd=etcd.endpoints, limits=PATIENT)
    root = member_of(store).node.identity.root
    store.close()
    before = set(threading.enumerate())
    with closing(EtcdMetadata(etcd.endpoints)) as meta, pytest.warns(ResourceWarning, match="dropped without close"):
        cache = kvstore.open(str(tmp_root), etcd=etcd.endpoints, limits=PATIENT).namespace("m", SMALL)
        cache.put(TOKENS, KV)
        assert meta.list(Keys(root).sessions).items
        del cache
        gc.collect()
        eventually(lambda: not meta.list(Keys(root).sessions).items)
    eventually(lambda: not set(threading.enumerate()) - before)
