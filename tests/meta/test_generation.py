"""The agreement of etcd and root (rule C6): fresh, agreed and foreign ones, racing nodes, dying nodes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.core.clock import RandomIds, SystemClock
from kvstore.errors import RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.header import Generation
from kvstore.format.places import Name
from kvstore.meta.cluster import Agreed, Foreign, Standing, join_generation, read_generation
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.root.identity import newest_number, publish, read_newest
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryRoot
from kvstore.testing import MetadataClients
from tests.kit.cases import for_each
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule
from tests.kit.faulty_root import EIO, FaultyRoot
from tests.kit.faulty_root import Rule as RootRule
from tests.kit.roots import join_root

KEYS = Keys(bytes(range(16)))


def advance(root: Root, number: int) -> Generation:
    """Publishes a generation, as an adoption does."""
    return publish(root, Generation(number, RandomIds().fresh()), ids=RandomIds(), clock=SystemClock())


def write(root: Root, name: Name, content: bytes) -> None:
    staged = places.staged(RandomIds().fresh(), 0)
    root.stage(staged, [memoryview(content)], stamp_ns=0, durable=True)
    assert root.publish(staged, name, durable=True)


def test_first_node_makes_the_first_generation(store: MetadataClients) -> None:
    root = MemoryRoot()
    first = join_root(store.meta, root, store.keys)
    assert isinstance(first, Agreed) and first.generation.number == 1
    assert join_root(store.other, root, store.keys) == first
    assert read_newest(root) == read_generation(store.meta, store.keys) == first.generation
    assert [entry.name for entry in root.list(places.STAGING)] == []


def test_etcd_of_another_life_is_foreign() -> None:
    """Wiped, another cluster's, or restored from before an adoption; or the root is an older copy."""
    ours, theirs, root, copy = MemoryMetadata(), MemoryMetadata(), MemoryRoot(), MemoryRoot()
    join_root(theirs, MemoryRoot(), KEYS)
    first = join_root(ours, root, KEYS)
    assert isinstance(first, Agreed)
    wiped = MemoryMetadata()
    for _ in range(2):
        found = join_root(wiped, root, KEYS)
        assert isinstance(found, Foreign)
        assert "etcd has none" in found.why and "kvstore fsck ROOT --adopt --etcd" in found.why
    assert wiped.get(KEYS.generation) is None, "joining again does not make it ours"
    assert isinstance(join_root(theirs, root, KEYS), Foreign) and isinstance(join_root(ours, root, KEYS), Agreed)
    publish(copy, first.generation, ids=RandomIds(), clock=SystemClock())
    second = advance(root, 2)
    assert isinstance(join_root(ours, root, KEYS), Foreign)
    ours.put(KEYS.generation, second.to_json())
    assert isinstance(join_root(ours, root, KEYS), Agreed) and isinstance(join_root(ours, copy, KEYS), Foreign)


@for_each("fault", [Fault.REPLY_LOST, Fault.NOT_SENT, Fault.LATE])
def test_first_generation_with_a_lost_reply_is_read_back(fault: Fault) -> None:
    meta, root = FaultyMeta(MemoryMetadata()), MemoryRoot()
    meta.add(Rule(fault, ("txn",), times=1))
    found = join_root(meta, root, KEYS)
    meta.land()
    assert isinstance(found, Agreed) and join_root(meta, root, KEYS) == found


@for_each("operation", ["stage", "publish"])
def test_generation_missing_on_the_root_is_published_next(operation: str) -> None:
    meta, root = MemoryMetadata(), FaultyRoot(MemoryRoot())
    root.set_rules([RootRule(operation, EIO)])
    with pytest.raises(Unavailable):
        join_root(meta, root, KEYS)
    assert read_generation(meta, KEYS) is not None and newest_number(root) == 0
    root.set_rules([])
    found = join_root(meta, root, KEYS)
    assert isinstance(found, Agreed) and found.generation == read_generation(meta, KEYS)


def test_silent_etcd_or_root_makes_no_generation() -> None:
    meta, root = FaultyMeta(MemoryMetadata()), FaultyRoot(MemoryRoot())
    meta.add(Rule(Fault.NOT_SENT))
    with pytest.raises(Unavailable):
        join_root(meta, root, KEYS)
    meta.heal()
    root.set_rules([RootRule("list", EIO)])
    with pytest.raises(Unavailable):
        join_root(meta, root, KEYS)
    root.set_rules([])
    assert newest_number(root) == 0 and read_generation(meta, KEYS) is None


def test_racing_nodes_of_two_etcds_agree_with_one() -> None:
    root, stores = MemoryRoot(), [MemoryStore(), MemoryStore()]
    found: dict[int, list[Standing]] = {0: [], 1: []}
    start = threading.Barrier(8)

    def one(number: int) -> None:
        start.wait()
        found[number % 2].append(join_root(MemoryMetadata(stores[number % 2]), root, KEYS))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(8)))
    kinds = [{type(each) for each in found[side]} for side in (0, 1)]
    assert kinds in ([{Agreed}, {Foreign}], [{Foreign}, {Agreed}])


def test_difference_during_an_adoption_is_read_again() -> None:
    """The last step of an adoption falls between the two readings of a join."""
    meta, root = MemoryMetadata(), MemoryRoot()
    join_root(meta, root, KEYS)

    def read_root() -> Generation | None:
        before = read_newest(root)
        if before is not None and before.number == 1:
            meta.put(KEYS.generation, advance(root, 2).to_json())
        return before

    found = join_generation(meta, KEYS, RandomIds(), read_root=read_root, publish_root=lambda generation: generation)
    assert isinstance(found, Agreed) and found.generation.number == 2


NO_RECORDS = [b"", b"{}", b"[]", b"\xff", b'{"generation": 3, "cluster": "00"}']
NO_RECORDS += [b'{"generation": %s, "cluster": "%s"}' % (number, b"0" * 32) for number in (b"0", b'"3"', b"true")]


@for_each("content", NO_RECORDS)
def test_unreadable_record_is_foreign_and_named(content: bytes) -> None:
    meta, root = MemoryMetadata(), MemoryRoot()
    join_root(meta, root, KEYS)
    write(root, places.generation(3), content)
    with pytest.raises(RootMismatch, match="generations/3 on the root"):
        read_newest(root)
    found = join_root(meta, root, KEYS)
    assert isinstance(found, Foreign) and "generations/3 on the root" in found.why
    assert newest_number(root) == 3, "an adoption can still go on from it"
    other = MemoryMetadata()
    other.put(KEYS.generation, content)
    found = join_root(other, MemoryRoot(), KEYS)
    assert isinstance(found, Foreign) and KEYS.generation in found.why


def test_current_generation_is_the_highest_number() -> None:
    root = MemoryRoot()
    for number in (2, 10, 9):
        write(root, places.generation(number), Generation(number, bytes(16)).to_json())
    for odd in ("011", "x", "-12", "1e3", "12.tmp", "١٢", "9" * 19):
        assert places.parse_generation(odd) is None
        write(root, Name(f"{places.GENERATIONS}/{odd}"), b"")
    assert newest_number(root) == 10 and read_newest(root) == Generation(10, bytes(16))
