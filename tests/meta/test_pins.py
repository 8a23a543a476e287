"""Pins, their twins on the root (rule C5), quotas, and damaged records."""

from __future__ import annotations

import os
import random

import pytest

from kvstore.core.address import Address
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import NamespaceDigest
from kvstore.errors import InvalidRequest, Overloaded, PermissionDenied, RootMismatch, SessionLost, Unavailable
from kvstore.format import places
from kvstore.meta.keys import Keys, PinId
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.pins import ADDRESSES_MAX, TTL_S_MAX, PinQuota, Pins, StoredPin
from kvstore.meta.session import Session
from kvstore.meta.store import Put
from kvstore.root.fences import list_twins, read_twin
from kvstore.root.memory import MemoryRoot
from kvstore.testing import MetadataClients
from tests.kit.cases import for_each
from tests.kit.etcd import PATIENCE_S
from tests.kit.fake_meta import CountingIds, FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule
from tests.kit.faulty_root import EIO, ENOSPC, EROFS, FaultyRoot
from tests.kit.faulty_root import Rule as RootRule
from tests.kit.roots import twins_on

KEYS = Keys(bytes(range(16)))
NAMESPACE = NamespaceDigest(bytes(32))


def addresses(count: int) -> list[Address]:
    packed = os.urandom(16 * count)
    return [Address(packed[16 * number : 16 * number + 16]) for number in range(count)]


class Node:
    """A session over a store and a root that both can be made to fail."""

    def __init__(self, quota: PinQuota | None = None) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.meta = FaultyMeta(MemoryMetadata(self.store), sleep=self.clock.advance)
        self.root = FaultyRoot(MemoryRoot())
        self.session = Session.open(self.meta, KEYS, clock=self.clock, ids=CountingIds())
        twins = twins_on(self.root, self.clock)
        self.pins = Pins(self.meta, KEYS, lambda: self.session, clock=self.clock, twins=twins, quota=quota)

    def pin(self, owner: str = "me") -> StoredPin:
        return self.pins.pin(owner, addresses(3), 60, 48, NAMESPACE)

    @property
    def refs(self) -> dict[str, bytes]:
        return {kv.key: kv.value for kv in self.store.list(KEYS.refs).items}

    @property
    def twins(self) -> dict[str, bytes]:
        found = {str(name): read_twin(self.root.inner, name) for name in list_twins(self.root.inner)}
        return {name: content for name, content in found.items() if content is not None}


def pins_of(store: MetadataClients) -> tuple[Pins, Session]:
    session = Session.open(store.meta, store.keys, clock=store.clock, ids=RandomIds(), ttl_s=60)
    return Pins(store.meta, store.keys, lambda: session), session


def test_pins_count_until_they_are_released(store: MetadataClients) -> None:
    pins, session = pins_of(store)
    chunks = addresses(5)
    first = pins.pin("job/ü 1", chunks[:4], 60, 1024, NAMESPACE)
    ref = store.meta.get(store.keys.ref("job/ü 1", first.id))
    second = pins.pin("job2", chunks[2:], 3600, 512, NAMESPACE)
    assert [pins.refcount(chunk) for chunk in chunks] == [1, 1, 2, 2, 1]
    assert pins.refcount(Address(bytes(16))) == 0
    assert first.addresses == tuple(chunks[:4]) and first.addresses_count == 4
    assert set(Pins(store.other, store.keys, lambda: session).list()) == {first, second}
    assert pins.list("job2") == (second,) and pins.list("job") == ()
    assert pins.unpin("job/ü 1", first.id)
    assert not pins.unpin("job/ü 1", first.id)
    assert not pins.unpin("job2", first.id)
    assert ref is not None and not store.meta.keep_alive(ref.lease), "its lease goes with it"
    session.close()
    assert pins.list() == (second,), "a pin outlives the session that asked for it"


def test_pin_ends_with_its_own_lease(store: MetadataClients) -> None:
    pins, _ = pins_of(store)
    pins.pin("me", addresses(2), 2, 32, NAMESPACE)
    watch = store.meta.watch(store.keys.refs, store.meta.list(store.keys.refs).revision + 1)
    store.pass_time(2)
    batch = watch.next(PATIENCE_S)
    assert batch is not None and batch[0].kv is None
    assert pins.list() == ()


def test_largest_pin_fits_and_larger_is_refused(store: MetadataClients) -> None:
    pins, _ = pins_of(store)
    chunks = addresses(ADDRESSES_MAX)
    pin = pins.pin("o" * 256, chunks, TTL_S_MAX, 1 << 24, NAMESPACE, PATIENCE_S)
    assert pins.refcount(chunks[-1], PATIENCE_S) == 1
    assert pins.unpin("o" * 256, pin.id)
    with pytest.raises(InvalidRequest, match="split it into several pins"):
        pins.pin("me", [*chunks, chunks[0]], 60, 1, NAMESPACE)


@for_each(
    "owner, count, ttl_s, tokens",
    [
        ("", 1, 60, 1),
        ("o" * 257, 1, 60, 1),
        ("me", 0, 60, 1),
        ("me", 1, 0, 1),
        ("me", 1, TTL_S_MAX + 1, 1),
        ("me", 1, 1, -1),
    ],
)
def test_bad_pin_is_invalid(owner: str, count: int, ttl_s: int, tokens: int) -> None:
    node = Node()
    with pytest.raises(InvalidRequest, match="expected"):
        node.pins.pin(owner, addresses(count), ttl_s, tokens, NAMESPACE)
    with pytest.raises(InvalidRequest, match="has 3 bytes"):
        node.pins.pin("me", [Address(b"abc")], 60, 1, NAMESPACE)
    assert node.refs == node.twins == {}


def test_c5_pin_has_a_twin_until_it_is_released() -> None:
    node = Node()
    pin = node.pin("job/ü")
    assert node.twins == {places.twin("job/ü", pin.id): pin.to_bytes()}
    assert list(node.refs.values()) == [pin.to_bytes()]
    assert node.pins.unpin("job/ü", pin.id) and not node.pins.unpin("job/ü", pin.id)
    assert (node.twins, node.refs) == ({}, {})
    assert list(node.root.inner.list(places.PINS)) == [], "nor a folder for each owner that ever was"
    assert list(node.root.inner.list(places.STAGING)) == []


@for_each("operation, fault, error", [("publish", ENOSPC, Overloaded), ("stage", EROFS, PermissionDenied)])
def test_c5_root_that_refuses_the_twin_refuses_the_pin(operation: str, fault: object, error: type[Exception]) -> None:
    node = Node()
    node.root.set_rules([RootRule(operation, fault)])  # type: ignore[arg-type]
    before = node.meta.operations_count
    with pytest.raises(error):
        node.pin()
    assert node.refs == node.twins == {}
    assert node.meta.operations_count - before == 2, "the quotas were read, and no key was put before the twin"


@for_each("fault", [Fault.NOT_SENT, Fault.LATE, Fault.REPLY_LOST])
def test_p3_failed_pin_leaves_neither_ref_nor_twin(fault: Fault) -> None:
    node = Node()
    node.meta.add(Rule(fault, ("txn", "get")))
    with pytest.raises(Unavailable):
        node.pin()
    node.meta.heal()
    node.meta.land()
    assert node.refs == node.twins == {}
    node.pin()
    assert len(node.refs) == 1


def test_p3_pin_with_a_lost_reply_is_read_back() -> None:
    node = Node()
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1))
    pin = node.pin()
    assert node.pins.list() == (pin,)
    assert list(node.refs.values()) == list(node.twins.values()) == [pin.to_bytes()]


def test_c5_failed_pin_with_a_stuck_twin_protects_longer() -> None:
    node = Node()
    node.meta.add(Rule(Fault.NOT_SENT, ("txn",)))
    node.root.set_rules([RootRule("remove", EIO)])
    with pytest.raises(Unavailable, match="injected"):
        node.pin()
    assert len(node.twins) == 1 and node.refs == {}


@for_each("is_restored", [True, False])
def test_p2_dead_session_pins_nothing(is_restored: bool) -> None:
    """The store was restored, or the session has ended in it: no collector waits for this node."""
    node = Node()
    found = node.store.get(node.session.key)
    assert found is not None
    if is_restored:
        node.store.txn((), (Put(found.key, b"of another timeline", found.lease),))
    else:
        node.store.revoke(node.session.lease)
    with pytest.raises(SessionLost):
        node.pin()
    assert node.refs == node.twins == {}


@for_each("fault", [Fault.REPLY_LOST, Fault.NOT_SENT, Fault.LATE])
def test_p3_unpin_with_a_lost_reply_is_read_back(fault: Fault) -> None:
    node = Node()
    pin = node.pin()
    node.meta.add(Rule(fault, ("txn",), times=1))
    assert node.pins.unpin("me", pin.id)
    assert node.refs == node.twins == {}
    # Put again under the very same key, as nobody should: what arrives late was meant for the one before.
    node.store.txn((), [Put(KEYS.ref("me", pin.id), pin.to_bytes())])
    node.meta.land()
    assert [one.id for one in node.pins.list()] == [pin.id], "a late unpin takes no other pin away"


def test_c5_twin_stays_until_its_key_is_deleted() -> None:
    node = Node()
    pin = node.pin()
    node.meta.add(Rule(Fault.NOT_SENT, ("txn", "revoke")))
    with pytest.raises(Unavailable):
        node.pins.unpin("me", pin.id)
    assert len(node.refs) == len(node.twins) == 1
    node.meta.heal()
    node.root.set_rules([RootRule("remove", EIO, times=1)])
    with pytest.raises(Unavailable):
        node.pins.unpin("me", pin.id)
    assert (len(node.refs), len(node.twins)) == (0, 1)
    assert node.pins.unpin("me", pin.id), "asked again it removes what is left"
    assert node.twins == {}


def test_c5_unpin_removes_the_twin_a_wiped_etcd_left() -> None:
    node, wiped = Node(), Node()
    pin, other = node.pin("a/b"), node.pin("a/b")
    wiped.pins = Pins(wiped.meta, KEYS, lambda: wiped.session, clock=wiped.clock, twins=twins_on(node.root, node.clock))
    assert not wiped.pins.unpin("a", pin.id), "another owner's"
    assert wiped.pins.unpin("a/b", pin.id)
    assert list(node.twins) == [places.twin("a/b", other.id)]


@for_each("owner", [".", "..", "../..", "a/../b", "/", "ü" * 128, "o" * 256, "=", "%2E", " ", "\0", "a\nb"])
def test_any_owner_has_a_twin_inside_the_folder(owner: str) -> None:
    node = Node()
    pin = node.pin(owner)
    (name,) = node.twins
    folders, file_name = name.split("/")[:-1], name.split("/")[-1]
    assert folders[0] == places.PINS and len(folders) == 2 and folders[1] not in ("", ".", "..")
    assert places.parse_twin(file_name) == pin.id and len(folders[1]) <= 255
    assert StoredPin.from_bytes(node.twins[name], name).owner == owner
    assert node.pins.unpin(owner, pin.id) and not node.twins


def test_owner_over_its_quota_is_refused() -> None:
    node = Node(PinQuota(per_owner_max=2, pins_max=4))
    first = node.pin("a")
    node.pin("a")
    with pytest.raises(Overloaded, match="owner 'a' has 2 pins"):
        node.pin("a")
    node.pin("a/b")
    node.pin("b")
    with pytest.raises(Overloaded, match="this store has 4 pins"):
        node.pin("c")
    assert len(node.refs) == len(node.twins) == 4
    assert node.pins.unpin("a", first.id)
    node.pin("c")


def test_damaged_record_is_refused() -> None:
    """An address that is read wrongly is one that no pin protects."""
    node = Node()
    content = node.pin().to_bytes()
    node.store.txn((), [Put(KEYS.ref("me", PinId(bytes(16))), content[:-1])])
    with pytest.raises(RootMismatch, match="is not a ref"):
        node.pins.list()
    for size in range(len(content)):
        with pytest.raises(RootMismatch, match="pins/x is not a ref"):
            StoredPin.from_bytes(content[:size], "pins/x")
    source = random.Random(1)
    for at in range(len(content) - 3 * 16, len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << source.randrange(8)
        with pytest.raises(RootMismatch, match="checksum"):
            StoredPin.from_bytes(bytes(flipped), "pins/x")
