"""An etcd that was wiped, restored or exchanged learns from the root what it must know (rule C6)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvstore.core.clock import RandomIds
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.fsck import Options, adopt, fsck
from kvstore.fsck.adopt import Adopted
from kvstore.meta.cluster import Agreed, Foreign, read_generation
from kvstore.meta.keys import Keys, SessionId, SweepId, part_of
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.pins import Pins, StoredPin
from kvstore.meta.session import Session
from kvstore.meta.store import OPERATIONS_MAX, Absent, MetadataStore, Put
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from kvstore.root.fences import list_twins, remove_twin
from kvstore.root.identity import newest_number
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryRoot
from tests.kit.cases import for_each
from tests.kit.damage import LAYOUT, Filled, fill, read, write
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta
from tests.kit.faulty_meta import Rule as MetaRule
from tests.kit.faulty_root import EIO, OPERATIONS, FaultyRoot
from tests.kit.faulty_root import Rule as RootRule
from tests.kit.roots import join_root, twins_on


@dataclass
class Cluster:
    """A root with chunks and an etcd with nodes, pins and sweeps in flight."""

    clock: FakeClock = field(default_factory=FakeClock)
    filled: Filled = field(default_factory=lambda: fill(MemoryRoot()))

    def __post_init__(self) -> None:
        self.root = self.filled.root
        self.keys = Keys(self.filled.identity.root)
        self.store = MemoryStore(self.clock)
        self.meta = MemoryMetadata(self.store)
        assert isinstance(join_root(self.meta, self.root, self.keys), Agreed)
        Namespaces(self.meta, self.keys).claim(self.filled.namespace)

    def session(self) -> Session:
        return Session.open(self.meta, self.keys, clock=self.clock, ids=RandomIds())

    def pin(self, owner: str = "me", ttl_s: int = 600) -> StoredPin:
        session = self.session()
        pins = Pins(self.meta, self.keys, lambda: session, clock=self.clock, twins=twins_on(self.root, self.clock))
        try:
            return pins.pin(owner, self.filled.chain.addresses[:2], ttl_s, 8, self.filled.namespace.digest)
        finally:
            session.close()

    def condemn(self, index: int, *, named: bool = True, taken: bool = True) -> SweepId:
        """A sweep of chunk ``index``, which it has condemned and taken to its trash, as far as it came."""
        sweep = SweepId(RandomIds().fresh())
        name, address = self.filled.name(index), self.filled.chain.addresses[index]
        self.root.make_folder(places.trash_folder(sweep))
        if named:
            condemn_key(self.meta, self.keys, part_of(address), sweep)
        if taken:
            assert self.root.move(name, places.trashed(sweep, name, bytes(8)), make_folder=False)
        return sweep

    def wipe(self) -> None:
        """etcd comes back with nothing in it."""
        self.store = MemoryStore(self.clock)
        self.meta = MemoryMetadata(self.store)

    def adopt(self, meta: MetadataStore | None = None, root: Root | None = None) -> Adopted:
        return adopt(root or self.root, self.filled.identity, meta or self.meta, clock=self.clock)

    def pins(self) -> list[StoredPin]:
        return [StoredPin.from_bytes(kv.value, kv.key) for kv in self.meta.list(self.keys.refs).items]


def condemn_key(meta: MetadataStore, keys: Keys, part: int, sweep: SweepId) -> None:
    """Puts a sweep's key and the next link of the chain (rules G2, C1)."""
    before = meta.get(keys.gc_seq)
    prev = Seq.from_json(before.value).nonce if before else NO_NONCE
    record = Condemned.of_victims(sweep, bytes(16), [])
    puts = (Put(keys.condemned_in(part), record.to_bytes()), Put(keys.gc_seq, Seq(RandomIds().fresh(), prev).to_json()))
    assert meta.txn((Absent(keys.condemned_in(part)),), puts).succeeded


def test_every_namespace_of_the_root_is_recorded_once() -> None:
    filled = fill(MemoryRoot(), 1, "one")
    fill(filled.root, 1, "two")
    meta = MemoryMetadata()
    adopted = adopt(filled.root, filled.identity, meta)
    assert (adopted.added_count, adopted.known_count, adopted.refused) == (2, 0, [])
    known = Namespaces(meta, Keys(filled.identity.root)).list()
    assert {namespace.name for namespace in known} == {"one", "two"}
    assert filled.namespace.digest in {namespace.digest for namespace in known}
    adopted = adopt(filled.root, filled.identity, meta)
    assert (adopted.added_count, adopted.known_count, adopted.refused) == (0, 2, [])


def test_wrong_namespace_records_are_left_out() -> None:
    filled = fill(MemoryRoot(), 0)
    other = Namespace.of("other", LAYOUT)
    write(filled.root, places.namespace_record(other.digest), filled.namespace.to_json())
    third = Namespace.of("third", LAYOUT)
    write(filled.root, places.namespace_record(third.digest), b"{}")
    adopted = adopt(filled.root, filled.identity, MemoryMetadata())
    assert adopted.added_count == 1
    assert sorted(line.partition(":")[0] for line in adopted.refused) == sorted(
        [places.namespace_record(other.digest), places.namespace_record(third.digest)]
    )


def test_layout_that_the_root_claims_is_kept() -> None:
    filled = fill(MemoryRoot(), 0, "model")
    for chunk_tokens in range(5, 12):
        rival = Namespace.of("model", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=chunk_tokens))
        write(filled.root, places.namespace_record(rival.digest), rival.to_json())
    meta = MemoryMetadata()
    adopted = adopt(filled.root, filled.identity, meta)
    assert adopted.added_count == 1 and len(adopted.refused) == 7
    assert [namespace.digest for namespace in Namespaces(meta, Keys(filled.identity.root)).list()] == [
        filled.namespace.digest
    ]


def test_c6_adoption_makes_the_next_generation() -> None:
    cluster = Cluster()
    before = cluster.meta
    cluster.wipe()
    assert isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Foreign)
    adopted = cluster.adopt()
    assert isinstance(join_root(before, cluster.root, cluster.keys), Foreign)
    assert (adopted.previous, adopted.generation) == (1, 2)
    standing = join_root(cluster.meta, cluster.root, cluster.keys)
    assert isinstance(standing, Agreed) and standing.generation.number == 2
    assert (cluster.adopt().previous, newest_number(cluster.root)) == (2, 3), "it may be repeated"


def test_c6_unreadable_generation_is_followed_by_the_next() -> None:
    cluster = Cluster()
    write(cluster.root, places.generation(7), b"torn")
    assert isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Foreign)
    assert cluster.adopt().generation == 8
    assert isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Agreed)


def test_c6_root_and_etcd_differ_during_adoption() -> None:
    """Otherwise a node could join while it runs, be told that it is protected, and lose what it holds."""
    cluster = Cluster()
    cluster.session()
    seen: list[tuple[str, bool]] = []

    class Looking(FaultyMeta):
        """Joins before every write, as a node may at any time."""

        def revoke(self, lease: int, timeout_s: float | None = None) -> None:
            seen.append(("revoke", isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Agreed)))
            cluster.meta.revoke(lease, timeout_s)  # type: ignore[arg-type]

        def txn(self, *arguments, **options):  # type: ignore[no-untyped-def]
            seen.append(("txn", isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Agreed)))
            return super().txn(*arguments, **options)

    cluster.adopt(Looking(cluster.meta))
    assert [agreed for _, agreed in seen] == [False] * len(seen) and {what for what, _ in seen} == {"revoke", "txn"}
    assert isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Agreed)


def test_c6_one_of_two_concurrent_adoptions_fails() -> None:
    cluster = Cluster()

    class Slow(FaultyMeta):
        """Another adoption begins and ends within one step of this one."""

        other: Adopted | None = None

        def list(self, prefix: str, timeout_s: float | None = None):  # type: ignore[no-untyped-def]
            if self.other is None:
                self.other = cluster.adopt()
            return super().list(prefix, timeout_s)

    with pytest.raises(Unavailable, match="another `kvstore fsck --adopt`"):
        cluster.adopt(Slow(cluster.meta))
    standing = join_root(cluster.meta, cluster.root, cluster.keys)
    assert isinstance(standing, Agreed) and standing.generation.number == 3


def test_c6_every_session_is_ended() -> None:
    cluster = Cluster()
    sessions = [cluster.session() for _ in range(3)]
    cluster.meta.put(cluster.keys.worker(sessions[0].id), b"{}", sessions[0].lease)
    lease = cluster.meta.grant(60)
    cluster.meta.put(cluster.keys.collector(SessionId(bytes(16))), b"", lease)
    cluster.meta.put(cluster.keys.gc_capacity, b"", lease)
    cluster.meta.put(cluster.keys.session(SessionId(b"\1" * 16)), b"{}")
    assert cluster.adopt().sessions_count == 5
    for prefix in (cluster.keys.sessions, cluster.keys.workers, cluster.keys.collectors, cluster.keys.gc_capacity):
        assert cluster.meta.count(prefix) == 0
    for session in sessions:
        session.beat()
        assert not session.alive


def test_c6_session_begun_after_adoption_stays() -> None:
    """It has found root and etcd to agree, so it protects; its node would hear of its end too late."""
    cluster = Cluster()
    began: list[Session] = []

    class Joining(FaultyMeta):
        def txn(self, compares, operations, timeout_s=None):  # type: ignore[no-untyped-def]
            done = super().txn(compares, operations, timeout_s)
            if any(operation.key == cluster.keys.generation for operation in operations):
                began.append(cluster.session())
            return done

    cluster.wipe()
    cluster.adopt(Joining(cluster.meta))
    assert len(began) == 1 and cluster.meta.count(cluster.keys.sessions) == 1


def test_c6_sweeps_are_undone() -> None:
    cluster = Cluster()
    before = {index: read(cluster.root, cluster.filled.name(index)) for index in range(4)}
    cluster.condemn(0)
    cluster.condemn(1, named=False)
    cluster.condemn(2, taken=False)
    adopted = cluster.adopt()
    assert (adopted.trash_count, adopted.condemned_count) == (3, 2)
    assert {index: read(cluster.root, cluster.filled.name(index)) for index in range(4)} == before
    assert list(cluster.root.list(places.TRASH)) == [] and cluster.meta.count(cluster.keys.condemned) == 0
    assert fsck(cluster.root, cluster.filled.identity).is_clean


def test_c6_newer_chunk_is_not_replaced_from_the_trash() -> None:
    cluster = Cluster()
    cluster.condemn(0)
    newer = cluster.filled.content(0)
    write(cluster.root, cluster.filled.name(0), newer)
    cluster.adopt()
    assert read(cluster.root, cluster.filled.name(0)) == newer
    assert list(cluster.root.list(places.TRASH)) == []


def test_c1_sweep_keys_are_deleted_with_links_of_the_chain() -> None:
    cluster = Cluster()
    shards = 2 * OPERATIONS_MAX
    for shard in range(shards):
        condemn_key(cluster.meta, cluster.keys, shard, SweepId(RandomIds().fresh()))
    last = cluster.meta.get(cluster.keys.gc_seq)
    assert last is not None
    watch = cluster.meta.watch(cluster.keys.gc, last.mod_revision + 1)
    assert cluster.adopt().condemned_count == shards
    events = watch.next(0.0) or ()
    nonce = Seq.from_json(last.value).nonce
    for link in (Seq.from_json(event.kv.value) for event in events if event.key == cluster.keys.gc_seq and event.kv):
        assert link.prev == nonce
        nonce = link.nonce
    assert nonce != Seq.from_json(last.value).nonce
    assert {event.revision for event in events if event.kv is None} <= {
        event.revision for event in events if event.key == cluster.keys.gc_seq
    }, "every deletion came with a link"


def test_c1_link_is_put_even_without_sweeps() -> None:
    cluster = Cluster()
    cluster.wipe()
    cluster.adopt()
    assert cluster.meta.get(cluster.keys.gc_seq) is not None
    cluster.meta.put(cluster.keys.gc_seq, b"damaged")
    cluster.adopt()
    found = cluster.meta.get(cluster.keys.gc_seq)
    assert found is not None and Seq.from_json(found.value).prev == NO_NONCE


def test_c6_running_collector_is_named() -> None:
    cluster = Cluster()

    class Collecting(FaultyMeta):
        """A collector that was not stopped: it condemns before each of our first ``times`` writes."""

        times = 2

        def txn(self, compares, operations, timeout_s=None):  # type: ignore[no-untyped-def]
            if self.times and any(operation.key == cluster.keys.gc_seq for operation in operations):
                self.times -= 1
                shard = cluster.meta.count(cluster.keys.condemned)
                sweep = SweepId(RandomIds().fresh())
                cluster.root.make_folder(places.trash_folder(sweep))
                condemn_key(cluster.meta, cluster.keys, shard, sweep)
            return super().txn(compares, operations, timeout_s)

    assert cluster.adopt(Collecting(cluster.meta)).condemned_count == 2
    assert list(cluster.root.list(places.TRASH)) == [] and cluster.meta.count(cluster.keys.condemned) == 0
    busy = Collecting(cluster.meta)
    busy.times = 10_000
    with pytest.raises(Unavailable, match="stop all collectors"):
        cluster.adopt(busy)
    assert isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Foreign)


def test_c5_pins_are_restored_for_the_time_left() -> None:
    cluster = Cluster()
    long, short, ended = cluster.pin("a/b", 600), cluster.pin("b", 200), cluster.pin("c", 50)
    cluster.wipe()
    cluster.clock.advance(100)
    adopted = cluster.adopt()
    assert (adopted.pins_restored_count, adopted.pins_known_count, adopted.pins_ended_count) == (2, 0, 1)
    assert {(one.owner, one.id, one.packed, one.expires_s) for one in cluster.pins()} == {
        (one.owner, one.id, one.packed, one.expires_s) for one in (long, short)
    }
    cluster.clock.advance(101)
    assert [one.owner for one in cluster.pins()] == ["a/b"]
    cluster.clock.advance(400)
    assert cluster.pins() == []
    assert len(list(list_twins(cluster.root))) == 3, "twins are left to their owners and to collectors"
    assert places.twin(ended.owner, ended.id) in set(list_twins(cluster.root))


def test_c5_known_pins_keep_their_lease() -> None:
    cluster = Cluster()
    cluster.pin()
    before = cluster.meta.list(cluster.keys.refs).items
    adopted = cluster.adopt()
    assert (adopted.pins_restored_count, adopted.pins_known_count) == (0, 1)
    assert cluster.meta.list(cluster.keys.refs).items == before


def test_c5_slow_clock_makes_no_pin_longer() -> None:
    cluster = Cluster()
    cluster.pin(ttl_s=60)
    cluster.wipe()
    cluster.clock.advance(-10_000)
    cluster.adopt()
    cluster.clock.advance(61)
    assert cluster.pins() == []


def test_c5_wrong_twins_are_named() -> None:
    cluster = Cluster()
    good, moved = cluster.pin("good"), cluster.pin("moved")
    cluster.wipe()
    write(cluster.root, places.twin("torn", bytes(16)), b"KVREF1\0\0")
    content = read(cluster.root, places.twin("moved", moved.id))
    remove_twin(cluster.root, "moved", moved.id)
    assert content is not None
    write(cluster.root, places.twin("elsewhere", moved.id), content)
    write(cluster.root, Name(f"{places.PINS}/notes.txt"), b"")
    adopted = cluster.adopt()
    assert [one.id for one in cluster.pins()] == [good.id] and adopted.pins_restored_count == 1
    assert len(adopted.refused) == 3 and all("deploy/RUNBOOK.md" in line for line in adopted.refused)
    assert any(places.twin("torn", bytes(16)) in line for line in adopted.refused)
    assert any("pins/notes.txt" in line for line in adopted.refused), "a link to a folder of twins looks like this too"
    assert isinstance(join_root(cluster.meta, cluster.root, cluster.keys), Agreed), "collectors stop by themselves"


def messy() -> Cluster:
    """Wiped, with pins, sweeps and sessions of all kinds; adopting it takes every step."""
    cluster = Cluster()
    cluster.pin("a")
    cluster.pin("b")
    cluster.condemn(1, named=False)
    cluster.wipe()
    cluster.condemn(0)
    cluster.condemn(2, taken=False)
    cluster.session()
    lease = cluster.meta.grant(60)
    cluster.meta.put(cluster.keys.collector(SessionId(bytes(16))), b"", lease)
    return cluster


def ends_clean(cluster: Cluster, before: dict[int, bytes | None]) -> None:
    """Adopted again, everything is as it should be."""
    cluster.adopt()
    standing = join_root(cluster.meta, cluster.root, cluster.keys)
    assert isinstance(standing, Agreed) and standing.generation.number == newest_number(cluster.root)
    assert {index: read(cluster.root, cluster.filled.name(index)) for index in before} == before
    assert list(cluster.root.list(places.TRASH)) == [] and cluster.meta.count(cluster.keys.condemned) == 0
    assert {one.owner for one in cluster.pins()} == {"a", "b"}
    assert [one.name for one in Namespaces(cluster.meta, cluster.keys).list()] == ["model"]
    assert cluster.meta.count(cluster.keys.sessions) == cluster.meta.count(cluster.keys.collectors) == 0
    report = fsck(cluster.root, cluster.filled.identity, Options(repair=True, live_sessions=set(), staging_age_s=0.0))
    assert {finding.kind.value for finding in report.findings} <= {"orphan_staging", "young_staging"}


def stopped_at(cluster: Cluster, meta: MetadataStore, root: Root) -> bool:
    """True if adopting stopped before its end; if so, nobody may believe that root and etcd agree."""
    try:
        cluster.adopt(meta, root)
    except KVStoreError:
        mine, theirs = newest_number(cluster.root), read_generation(cluster.meta, cluster.keys)
        assert theirs is None or theirs.number == mine
        return True
    return False


@for_each("fault", [Fault.NOT_SENT, Fault.REPLY_LOST])
def test_c6_adoption_killed_at_any_etcd_call_is_repeatable(fault: Fault) -> None:
    stops = 0
    for skip_count in range(10_000):
        cluster = messy()
        before = whole(cluster)
        meta = FaultyMeta(cluster.meta)
        meta.add(MetaRule(fault, skip_count=skip_count, times=1), MetaRule(Fault.NOT_SENT, skip_count=skip_count))
        if not stopped_at(cluster, meta, cluster.root):
            break
        stops += 1
        ends_clean(cluster, before)
    assert stops >= 18


def whole(cluster: Cluster) -> dict[int, bytes | None]:
    """The chunks, wherever sweeps have taken them."""
    found: dict[int, bytes | None] = {}
    names = [Name(f"{places.TRASH}/{folder.name}") for folder in cluster.root.list(places.TRASH)]
    trashed = {
        entry.name.rpartition(".")[0]: f"{name}/{entry.name}" for name in names for entry in cluster.root.list(name)
    }
    for index in range(6):
        name = cluster.filled.name(index)
        found[index] = read(cluster.root, Name(trashed.get(name.rpartition("/")[2], name)))
    return found


def test_c6_adoption_killed_at_any_root_call_is_repeatable() -> None:
    stops = 0
    for operation in sorted(OPERATIONS):
        for nth in range(1, 10_000):
            cluster = messy()
            before = whole(cluster)
            root = FaultyRoot(cluster.root, [RootRule(operation, EIO, nth=nth)])
            if not stopped_at(cluster, cluster.meta, root):
                break
            stops += 1
            ends_clean(cluster, before)
    assert stops >= 20
