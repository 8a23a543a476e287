"""Workers found through the cluster's metadata: the list follows arrivals and departures, and outlives an outage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.failover import Caller
from kvstore.client.limits import ClientLimits
from kvstore.client.remote import Discovery, RemoteTransport
from kvstore.client.store import Store
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.engine.open import join, open_member
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.cluster import bind_root
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.store import KeyValue
from kvstore.root.identity import create_or_open
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.transport.status import CallFailed
from kvstore.worker.server import Worker
from tests.kit.etcd import frozen
from tests.kit.faulty_meta import FaultyMeta
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.wire import KV, TOKENS
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving, tokens_of

META_S = 60.0
"""What a call that waits for a frozen etcd would take, and more than all of them take on a busy machine."""
LIVELY = ClientLimits(refresh_s=0.05)


@dataclass
class Cluster:
    """One root and its metadata, in memory; workers join and leave."""

    files: MemoryFiles = field(default_factory=MemoryFiles)
    store: MemoryStore = field(default_factory=MemoryStore)

    @contextmanager
    def worker(self) -> Iterator[Served]:
        clock, ids, root, meta = SystemClock(), RandomIds(), MemoryRoot(self.files), MemoryMetadata(self.store)
        identity = create_or_open(root, ids)
        bind_root(meta, f"memory://{identity.root.hex()}", identity.root)
        member = join(root, identity, meta, limits=Limits(), clock=clock, ids=ids)
        worker = Worker(member, "127.0.0.1:0")
        try:
            worker.start()
            workers = MemoryMetadata(self.store)
            eventually(lambda: worker.address in Discovery(workers, identity.root.hex()).addresses(), "it is listed")
            yield Served(worker, member)
        finally:
            worker.drain(WAIT_S)
            member.close()

    def connected(self, root: str | None = None) -> Store:
        return Store(RemoteTransport([], LIVELY, discovery=Discovery(MemoryMetadata(self.store), root)))


def known(store: Store) -> set[str]:
    port = store._port
    assert isinstance(port, RemoteTransport)
    return {endpoint.address for endpoint in port.endpoints.every()}


def test_workers_that_come_and_go_are_followed() -> None:
    cluster = Cluster()
    with ExitStack() as stack, cluster.worker() as first:
        with cluster.connected() as store:
            assert known(store) == {first.address}
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, KV)
            with cluster.worker() as second:
                eventually(lambda: known(store) == {first.address, second.address}, "the second one is found")
            eventually(lambda: known(store) == {first.address}, "it is let go")
            assert same(cache.get(TOKENS)[1], KV)
            third = stack.enter_context(cluster.worker())
            eventually(lambda: known(store) == {first.address, third.address}, "a third one is found")
            first.worker.drain(WAIT_S)
            eventually(lambda: known(store) == {third.address}, "the first one is let go")
            assert same(cache.get(TOKENS)[1], KV)
            assert store.stats()["client_misses_unreachable"] == 0


def test_a_hold_outlives_its_workers_listing() -> None:
    """A worker that is no longer listed may still serve: calls that began there end there."""
    cluster = Cluster()
    with cluster.worker() as first, cluster.worker() as second, cluster.connected() as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        with cache.hold(TOKENS) as hold:
            (holder,) = [each for each in (first, second) if len(each.worker.service.holds)]
            holder.worker._deregister()
            eventually(lambda: holder.address not in known(store), "it is let go")
            out = np.empty_like(KV)
            assert hold.read_into(out) == len(TOKENS)
            assert same(out, KV)
        assert len(holder.worker.service.holds) == 0


def test_the_list_stays_when_the_metadata_do_not_answer_or_are_empty() -> None:
    cluster = Cluster()
    with cluster.worker() as first:
        meta = FaultyMeta(MemoryMetadata(cluster.store))
        with Store(RemoteTransport([], LIVELY, discovery=Discovery(meta, None))) as store:
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, KV)
            first.worker._deregister()
            asked = meta.operations_count
            eventually(lambda: meta.operations_count > asked + 2, "the list is read again")
            assert same(cache.get(TOKENS)[1], KV)
            meta.close()
            assert same(cache.get(TOKENS)[1], KV)
            assert known(store) == {first.address}


def test_several_roots_in_one_cluster_have_to_be_told_apart() -> None:
    store = MemoryStore()
    one, other = Cluster(store=store), Cluster(store=store)
    with one.worker() as first, other.worker() as second:
        ids = [served.member.node.identity.root.hex() for served in (first, second)]
        with pytest.raises(InvalidRequest, match="etcd knows 2 roots") as error:
            one.connected()
        assert all(root in str(error.value) for root in ids)
        with one.connected(ids[0]) as connected:
            assert known(connected) == {first.address}
        with one.connected(ids[1]) as connected:
            assert known(connected) == {second.address}


@pytest.mark.slow
def test_through_etcd_which_may_then_freeze(tmp_root: Path) -> None:
    with EmbeddedEtcd(tmp_root / "etcd") as etcd, ExitStack() as stack:
        for _ in range(2):
            member = open_member(str(tmp_root / "root"), etcd.endpoints, limits=Limits(meta_deadline_s=META_S))
            stack.callback(member.close)
            worker = Worker(member, "127.0.0.1:0")
            worker.start()
            stack.callback(worker.stop)
        with kvstore.connect(etcd=etcd.endpoints, limits=ClientLimits(refresh_s=0.2)) as store:
            eventually(lambda: len(known(store)) == 2, "both are found")
            cache = store.namespace("m", SMALL)
            with frozen(etcd.pid):
                began_s = time.monotonic()
                for number in range(3):
                    tokens = tokens_of(number, len(TOKENS))
                    assert cache.put(tokens, kv_of(SMALL, tokens)).tokens_present == len(tokens)
                    assert same(cache.get(tokens)[1], kv_of(SMALL, tokens))
                assert time.monotonic() - began_s < META_S / 2, "none of it waits for etcd"
            with cache.pin(tokens_of(0, len(TOKENS))) as pin:
                assert pin.tokens == len(TOKENS)


@pytest.mark.slow
def test_etcd_that_is_not_there(tmp_root: Path) -> None:
    with kvstore.connect(etcd="127.0.0.1:1", limits=ClientLimits(probe_s=0.5)) as store:
        with pytest.raises(Unavailable, match=r"^etcd at .* did not answer .*; until then no worker is known"):
            store.namespace("m", SMALL)


# Errors name what failed


class Frozen(MemoryMetadata):
    """An etcd that does not answer in the time that it is given."""

    waited_s: float | None = None

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        Frozen.waited_s = timeout_s
        raise Unavailable("etcd: get: DEADLINE_EXCEEDED: check that etcd runs")


def test_a_new_namespace_while_etcd_is_frozen_names_etcd() -> None:
    with serving() as served, connected(served, limits=ClientLimits(pin_s=3.0)) as store:
        member = served.member
        member._namespaces = Namespaces(Frozen(), member.keys)
        with pytest.raises(Unavailable, match="namespace 'm' is new to this node, which needs etcd: etcd: get"):
            store.namespace("m", SMALL)
        # The worker hears of it before its client gives up, or the client could not name etcd.
        assert Frozen.waited_s is not None and Frozen.waited_s < 3.0


def test_what_one_worker_says_tells_more_than_the_silence_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [
        CallFailed(Unavailable("etcd did not answer"), True, False),
        CallFailed(Unavailable("worker b did not answer"), False, False),
    ]

    def at(*_: object, **__: object) -> object:
        raise failures.pop(0)

    monkeypatch.setattr(Caller, "at", at)
    with kvstore.connect("127.0.0.1:1", "127.0.0.1:2") as store, pytest.raises(Unavailable, match=r"^etcd did not"):
        store.unpin("owner/" + "0" * 32)
    assert not failures
