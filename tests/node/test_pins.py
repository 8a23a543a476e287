"""Pins of a node: twins on the root where metadata are shared, what is really there, what a lost etcd changes."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli.app import app
from kvstore.client.cache import Cache
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.buffers import token_array
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.namespace import Namespace
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken, KVStoreError, Overloaded, RootMismatch, SessionLost, Unavailable
from kvstore.format import places
from kvstore.format.header import Generation
from kvstore.format.keyset import ChunkKeys
from kvstore.fsck import adopt
from kvstore.meta.embedded_etcd import EmbeddedEtcd, packaged_etcd
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.pins import StoredPin
from kvstore.root.fences import list_twins, read_twin
from kvstore.root.identity import SHARD_BITS_DEFAULT, create_or_open, newest_number, publish
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.etcd import eventually, running_etcd
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.ports import free_port
from tests.kit.programs import ended
from tests.kit.stores import TINY, kv_of, member_of, member_on, same, store_on

TOKENS = np.arange(6 * TINY.chunk_tokens)
KV = kv_of(TINY, TOKENS)
CHAIN = ChunkKeys.of(Namespace.of("m", TINY), token_array(TOKENS))
LIMITS = Limits()


class Shared:
    """A cluster in memory: stores on one root and one etcd, both of which can fail on demand."""

    def __init__(self, files: MemoryFiles | None = None) -> None:
        self.files = files or MemoryFiles()
        self.etcd = MemoryStore()
        self.meta = MemoryMetadata(self.etcd)
        self.root = FaultyRoot(MemoryRoot(self.files))

    @contextmanager
    def store(self, limits: Limits = LIMITS) -> Iterator[Store]:
        member = member_on(self.root, limits, meta=self.meta, in_cluster=True)
        with Store(LocalTransport(member)) as opened:
            yield opened

    @property
    def keys(self) -> Keys:
        identity = create_or_open(self.root.inner, RandomIds())
        return Keys(identity.root)

    def refs(self) -> list[bytes]:
        return [kv.value for kv in self.etcd.list(self.keys.refs).items]

    def twins(self) -> list[bytes | None]:
        return [read_twin(self.root.inner, name) for name in list_twins(self.root.inner)]


def filled(store: Store) -> Cache:
    cache = store.namespace("m", TINY)
    cache.put(TOKENS, KV)
    return cache


def remove_chunk(root: Root, index: int) -> None:
    """Deletes a chunk behind the node's back, as a damaged disk or another hand might."""
    assert root.remove(places.chunk(CHAIN.addresses[index], CHAIN.namespace.id, SHARD_BITS_DEFAULT))


def test_c5_a_pin_of_a_cluster_has_a_twin_and_one_of_a_lone_node_has_none() -> None:
    cluster, alone = Shared(), MemoryRoot()
    with cluster.store() as store:
        pin = filled(store).pin(TOKENS, ttl=60)
        assert cluster.refs() == cluster.twins() and len(cluster.twins()) == 1
        assert pin.release() and cluster.refs() == cluster.twins() == []
    with store_on(alone) as store:
        assert filled(store).pin(TOKENS, ttl=60).tokens == len(TOKENS)
        assert list(list_twins(alone)) == []


def test_p4_a_pin_counts_the_tokens_that_are_really_there() -> None:
    cluster = Shared()
    with cluster.store() as store:
        cache = filled(store)
        assert cache.match(TOKENS) == len(TOKENS), "and so it is remembered"
        remove_chunk(cluster.root.inner, 4)
        pin = cache.pin(TOKENS, ttl=60)
        assert pin.tokens == 4 * TINY.chunk_tokens
        assert pin.release()
        remove_chunk(cluster.root.inner, 0)
        assert cache.pin(TOKENS, ttl=60).tokens == 0
        assert cluster.refs() == cluster.twins() == [], "a pin on nothing is none"


def test_p4_what_a_pin_misses_is_protected_once_it_is_put_again() -> None:
    cluster = Shared()
    with cluster.store() as store:
        cache = filled(store)
        assert cache.match(TOKENS) == len(TOKENS)
        remove_chunk(cluster.root.inner, 5)
        cache.pin(TOKENS, ttl=60)
        (content,) = cluster.twins()
        assert content is not None
        assert StoredPin.from_bytes(content, "twin").addresses == tuple(CHAIN.addresses)


def test_p1_the_hold_outlives_the_put_or_there_is_no_pin() -> None:
    """The session dies while the ref is being put: nobody holds the chunks, so the pin must not be acknowledged."""
    cluster = Shared()
    with cluster.store() as store:
        cache = filled(store)
        hang = Hang()
        cluster.root.set_rules([Rule("publish", hang, lambda name: name.startswith(places.PINS), times=1)])
        failed: list[Exception] = []

        def pin() -> None:
            try:
                cache.pin(TOKENS, ttl=60)
            except KVStoreError as error:
                failed.append(error)

        thread = threading.Thread(target=pin)
        thread.start()
        assert hang.reached.wait(PATIENCE_S)
        member_of(store).node.holds.drop_all()
        hang.release.set()
        thread.join(PATIENCE_S)
        assert [type(error) for error in failed] == [HoldBroken]
        assert cluster.refs() == cluster.twins() == []
        cluster.root.set_rules([])
        assert cache.pin(TOKENS, ttl=60).tokens == len(TOKENS)


def test_quotas_are_limits_of_the_node() -> None:
    cluster = Shared()
    with cluster.store(Limits(pins_per_owner_max=1, pins_max=2)) as store:
        cache = filled(store)
        first = cache.pin(TOKENS, ttl=60, owner="a")
        with pytest.raises(Overloaded, match="owner 'a' has 1 pins"):
            cache.pin(TOKENS, ttl=60, owner="a")
        cache.pin(TOKENS, ttl=60, owner="b")
        with pytest.raises(Overloaded, match="this store has 2 pins"):
            cache.pin(TOKENS, ttl=60, owner="c")
        assert first.release() and cache.pin(TOKENS, ttl=60, owner="c").tokens == len(TOKENS)


def test_c6_a_node_of_a_wiped_etcd_serves_and_refuses_pins_until_adoption() -> None:
    cluster = Shared()
    with cluster.store() as store:
        pin = filled(store).pin(TOKENS, ttl=600, owner="job")
    wiped = Shared(cluster.files)
    with wiped.store() as store:
        cache = store.namespace("m", TINY)
        assert same(cache.get(TOKENS)[1], KV) and cache.put(TOKENS, KV).tokens_present == len(TOKENS)
        with pytest.raises(Unavailable, match=r"cannot pin"):
            cache.pin(TOKENS, ttl=60)
        assert store.pins() == [] and store.stats()["protected"] == 0
        adopted = adopt(wiped.root, create_or_open(wiped.root, RandomIds()), wiped.meta)
        assert (adopted.pins_restored_count, adopted.generation) == (1, 2)
        assert [(one.id, one.owner, one.tokens) for one in store.pins()] == [(pin.record.id, "job", len(TOKENS))]
        # The session that found them to differ was ended with the adoption; the next one agrees.
        _beat(store)
        # It protects before it is handed out, and refuses pins until then: Unavailable says to try again.
        eventually(lambda: not _refuses(cache))
        assert store.stats()["protected"] == 1
        assert cache.pin(TOKENS, ttl=60).release() and store.unpin(pin.record.id)
        assert wiped.twins() == []


def test_c5_clear_keeps_what_only_a_twin_pins_and_refuses_where_one_cannot_be_read() -> None:
    cluster = Shared()
    with cluster.store() as store:
        pin = filled(store).pin(TOKENS[: 2 * TINY.chunk_tokens], ttl=600, owner="job")
    wiped = Shared(cluster.files)
    with wiped.store() as store:
        cache = store.namespace("m", TINY)
        assert cache.clear().chunks == 4 and cache.match(TOKENS) == 2 * TINY.chunk_tokens
        root = wiped.root.inner
        staged = places.staged(RandomIds().fresh(), 0)
        root.stage(staged, [memoryview(b"torn")], stamp_ns=0, durable=True)
        root.publish(staged, places.twin("torn", bytes(16)), durable=True)
        with pytest.raises(RootMismatch, match=r"pins/torn/0+ is not a ref.*deploy/RUNBOOK.md"):
            cache.clear()
        root.remove(places.twin("torn", bytes(16)))
        assert store.unpin(pin.record.id), "by its id, although etcd knows nothing of it"
        assert cache.clear().chunks == 2


def test_c6_a_generation_that_moves_on_without_etcd_is_noticed_by_the_next_session() -> None:
    cluster = Shared()
    with cluster.store() as store:
        cache = filled(store)
        generation = Generation(newest_number(cluster.root) + 1, bytes(16))
        publish(cluster.root, generation, ids=RandomIds(), clock=SystemClock())
        for kv in cluster.etcd.list(cluster.keys.sessions).items:
            cluster.etcd.revoke(kv.lease)
        _beat(store)
        eventually(lambda: store.stats()["sessions_lost"] >= 1 and store.stats()["session_alive"] == 1)
        with pytest.raises(Unavailable):
            cache.pin(TOKENS, ttl=60)


def _beat(store: Store) -> None:
    """Makes a node notice now that its session ended; by itself it would within a third of its ttl."""
    try:
        member_of(store).presence.current().beat()
    except KVStoreError:
        pass  # it has noticed


# ---------------------------------------------------------------------------------------------- with a real etcd


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="kvstore")
    return result.exit_code, result.output


def _refuses(cache: Cache) -> bool:
    try:
        cache.pin(TOKENS, ttl=60, owner="try").release()
    except (Unavailable, SessionLost):
        return True
    return False


@pytest.mark.slow
def test_c6_an_etcd_restored_from_a_snapshot_has_pins_of_before_and_after_it(tmp_root: Path, tmp_path: Path) -> None:
    """Follows deploy/RUNBOOK.md with an etcdctl of 3.5.1, which can neither bump revisions nor mark them compacted."""
    root, folder, snapshot = str(tmp_root), tmp_path / "etcd", tmp_path / "snapshot.db"
    program = packaged_etcd()
    assert program is not None
    peer_port = free_port()

    def etcdctl(*arguments: str) -> None:
        ended(Path(program).with_name("etcdctl"), *arguments, env={"ETCDCTL_API": "3"}, check=True)

    with (
        EmbeddedEtcd(folder, peer_port=peer_port, binary=program) as etcd,
        kvstore.open(root, etcd=etcd.endpoints, limits=LIMITS) as store,
    ):
        cache = filled(store)
        removed = cache.pin(TOKENS, ttl=600, owner="removed")
        etcdctl("--endpoints", etcd.endpoints, "snapshot", "save", str(snapshot))
        assert removed.release()
        later = cache.pin(TOKENS, ttl=600, owner="later")
        etcd.stop()
        shutil.rmtree(folder / "data")
        peer = f"http://127.0.0.1:{peer_port}"
        etcdctl(
            *("snapshot", "restore", str(snapshot), "--data-dir", str(folder / "data"), "--name", "kvstore"),
            *("--initial-cluster", f"kvstore={peer}", "--initial-advertise-peer-urls", peer),
        )
        etcd.start()
        assert same(cache.get(TOKENS)[1], KV)
        code, said = command("fsck", root, "--adopt", "--etcd", etcd.endpoints)
        assert code == 0 and "generation 1 -> 2" in said and "pins: 1 restored, 0 known" in said, said
        assert {one.id for one in store.pins()} == {removed.record.id, later.record.id}, "one too many, none too few"
        eventually(lambda: not _refuses(cache))
        assert store.unpin(removed.record.id) and store.unpin(later.record.id)


@pytest.mark.slow
def test_c6_a_copy_of_a_root_becomes_a_root_of_its_own(tmp_root: Path, tmp_path: Path) -> None:
    """Follows deploy/RUNBOOK.md: another id in FORMAT, then adoption."""
    with running_etcd(tmp_path / "etcd") as etcd:
        first, copy = tmp_root / "first", tmp_root / "copy"
        with kvstore.open(str(first), etcd=etcd.endpoints) as store:
            filled(store).pin(TOKENS, ttl=600, owner="job")
            shutil.copytree(first, copy)
            fields = json.loads((copy / "FORMAT").read_text())
            (copy / "FORMAT").write_text(json.dumps(fields | {"root": RandomIds().fresh().hex()}))
            code, said = command("fsck", str(copy), "--adopt", "--repair", "--etcd", etcd.endpoints)
            assert code == 0 and "generation 1 -> 2: 0 sessions ended" in said and "pins: 1 restored" in said, said
            with kvstore.open(str(copy), etcd=etcd.endpoints) as other:
                theirs = other.namespace("m", TINY)
                assert same(theirs.get(TOKENS)[1], KV) and theirs.refcount(TOKENS) == 1
                (pin,) = other.pins()
                assert theirs.pin(TOKENS, ttl=60).release() and other.unpin(pin.id)
            assert [one.owner for one in store.pins()] == ["job"], "the first one's pin is another"
            assert store.stats()["protected"] == 1
