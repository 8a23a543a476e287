"""Pins with their twins on the root (rule C5), quotas, and damaged records. Pins in etcd alone: test_meta_nouns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from kvstore.address import Address
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, RootMismatch, SessionLost, Unavailable
from kvstore.format import places
from kvstore.meta.keys import Keys, PinId
from kvstore.meta.memory import MemoryMeta, MemoryStore
from kvstore.meta.pins import PinQuota, PinRecord, Pins
from kvstore.meta.session import Session
from kvstore.meta.store import Compare, Delete, Put, TxnResult
from kvstore.namespace import NamespaceDigest
from kvstore.root.fences import list_twins, read_twin, remove_twin, write_twin
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryRoot
from kvstore.sources import RandomIds
from tests.kit.cases import for_each
from tests.kit.fake_meta import CountingIds, FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule
from tests.kit.faulty_root import EIO, ENOSPC, EROFS, FaultyRoot
from tests.kit.faulty_root import Rule as RootRule
from tests.meta.conftest import Store

KEYS = Keys(bytes(range(16)))
NAMESPACE = NamespaceDigest(bytes(32))


def addresses(count: int) -> list[Address]:
    return [Address(bytes([number % 256]) * 16) for number in range(count)]


class RootTwins:
    """Twins on a root, without lanes."""

    def __init__(self, root: Root, clock: FakeClock) -> None:
        self._root = root
        self._clock = clock

    def write(self, owner: str, pin: PinId, content: bytes) -> None:
        write_twin(self._root, owner, pin, content, ids=RandomIds(), clock=self._clock)

    def remove(self, owner: str, pin: PinId) -> bool:
        return remove_twin(self._root, owner, pin)


class Node:
    """A session over a store and a root that both can be made to fail."""

    def __init__(self, quota: PinQuota | None = None) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.meta = FaultyMeta(MemoryMeta(self.store), sleep=self.clock.advance)
        self.root = FaultyRoot(MemoryRoot())
        self.session = Session.open(self.meta, KEYS, clock=self.clock, ids=CountingIds())
        twins = RootTwins(self.root, self.clock)
        self.pins = Pins(self.meta, KEYS, lambda: self.session, clock=self.clock, twins=twins, quota=quota)

    def pin(self, owner: str = "me") -> PinRecord:
        return self.pins.pin(owner, addresses(3), 60, 48, NAMESPACE)

    @property
    def refs(self) -> dict[str, bytes]:
        return {kv.key: kv.value for kv in self.store.list(KEYS.refs).items}

    @property
    def twins(self) -> dict[str, bytes]:
        found = {str(name): read_twin(self.root.inner, name) for name in list_twins(self.root.inner)}
        return {name: content for name, content in found.items() if content is not None}


def test_c5_a_pin_has_a_twin_with_the_same_content_until_it_is_released() -> None:
    node = Node()
    pin = node.pin("job/ü")
    assert node.twins == {places.twin("job/ü", pin.id): pin.to_bytes()}
    assert list(node.refs.values()) == [pin.to_bytes()]
    assert node.pins.unpin("job/ü", pin.id) and not node.pins.unpin("job/ü", pin.id)
    assert (node.twins, node.refs) == ({}, {})
    assert list(node.root.inner.list(places.PINS)) == [], "nor a folder for each owner that ever was"
    assert list(node.root.inner.list(places.STAGING)) == []


def test_c5_the_twin_is_there_before_the_key() -> None:
    node = Node()
    node.root.set_rules([RootRule("publish", ENOSPC, nth=1)])
    before = node.meta.operations_count
    with pytest.raises(Overloaded):
        node.pin()
    assert node.refs == node.twins == {}
    assert node.meta.operations_count - before == 2, "the quotas were looked at, and nothing was put"


@for_each("fault", [Fault.NOT_SENT, Fault.LATE, Fault.REPLY_LOST])
def test_c5_a_pin_that_failed_leaves_no_twin(fault: Fault) -> None:
    node = Node()
    node.meta.add(Rule(fault, ("txn", "get"), key="", times=None))
    with pytest.raises(Unavailable):
        node.pin()
    node.meta.heal()
    node.meta.land()
    assert node.refs == node.twins == {}


def test_c5_a_failed_pin_whose_twin_cannot_be_removed_only_protects_longer() -> None:
    node = Node()
    node.meta.add(Rule(Fault.NOT_SENT, ("txn",)))
    node.root.set_rules([RootRule("remove", EIO)])
    with pytest.raises(Unavailable, match="injected"):
        node.pin()
    assert len(node.twins) == 1 and node.refs == {}


def test_p2_a_pin_is_put_only_while_the_session_s_key_is_as_last_written() -> None:
    """The store was restored, or the session has ended in it: no collector waits for this node."""
    node = Node()
    found = node.store.get(node.session.key)
    assert found is not None
    node.store.txn((), (Put(found.key, b"of another timeline", found.lease),))
    with pytest.raises(SessionLost):
        node.pin()
    assert node.refs == {} and node.twins == {}


def test_p3_a_pin_whose_reply_was_lost_has_both() -> None:
    node = Node()
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1))
    pin = node.pin()
    assert list(node.refs.values()) == list(node.twins.values()) == [pin.to_bytes()]


def test_c5_the_twin_stays_until_the_key_is_known_to_be_gone() -> None:
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


def test_c5_unpin_removes_the_twin_that_a_wiped_etcd_left() -> None:
    node, wiped = Node(), Node()
    pin, other = node.pin("a/b"), node.pin("a/b")
    wiped.pins = Pins(
        wiped.meta, KEYS, lambda: wiped.session, clock=wiped.clock, twins=RootTwins(node.root, node.clock)
    )
    assert not wiped.pins.unpin("a", pin.id), "another owner's"
    assert wiped.pins.unpin("a/b", pin.id)
    assert list(node.twins) == [places.twin("a/b", other.id)]


@for_each("owner", [".", "..", "../..", "a/../b", "/", "ü" * 128, "o" * 256, "=", "%2E", " ", "\0", "a\nb"])
def test_any_owner_has_a_twin_of_its_own_inside_the_folder(owner: str) -> None:
    node = Node()
    pin = node.pin(owner)
    (name,) = node.twins
    folders, file_name = name.split("/")[:-1], name.split("/")[-1]
    assert folders[0] == places.PINS and len(folders) == 2 and folders[1] not in ("", ".", "..")
    assert places.parse_twin(file_name) == pin.id and len(folders[1]) <= 255
    assert PinRecord.from_bytes(node.twins[name], name).owner == owner
    assert node.pins.unpin(owner, pin.id) and not node.twins


# ---------------------------------------------------------------------------------------------- quotas


def test_an_owner_over_its_quota_is_refused_and_others_are_not() -> None:
    node = Node(PinQuota(per_owner_max=2, pins_max=4))
    first = node.pin("a")
    node.pin("a")
    with pytest.raises(Overloaded, match=r"owner 'a' has 2 pins, the limit is 2: unpin some \(kvstore ls --pins\)"):
        node.pin("a")
    node.pin("a/b")
    node.pin("b")
    with pytest.raises(Overloaded, match="this store has 4 pins, the limit is 4"):
        node.pin("c")
    assert len(node.refs) == len(node.twins) == 4
    assert node.pins.unpin("a", first.id)
    node.pin("c")


def test_count_is_of_the_prefix_alone_and_of_what_lives(store: Store) -> None:
    prefix = store.prefix + "counted/"
    lease = store.meta.grant(60)
    for number in range(200):
        store.meta.put(f"{prefix}{number}", b"x" * 2000, lease if number % 2 else 0)  # type: ignore[arg-type]
    store.meta.put(store.prefix + "counted", b"")
    store.meta.put(store.prefix + "counted0", b"")
    assert store.other.count(prefix) == 200
    store.meta.revoke(lease)
    assert store.other.count(prefix) == store.meta.count(prefix) == 100
    assert store.meta.count(store.prefix + "none/") == 0


# ---------------------------------------------------------------------------------------------- records


def test_a_record_that_lost_or_changed_an_address_is_refused() -> None:
    node = Node()
    content = node.pin().to_bytes()
    for size in range(len(content)):
        with pytest.raises(RootMismatch, match="pins/x is not a ref"):
            PinRecord.from_bytes(content[:size], "pins/x")
    source = random.Random(1)
    packed_at = len(content) - 3 * 16
    for at in range(packed_at, len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << source.randrange(8)
        with pytest.raises(RootMismatch, match="checksum"):
            PinRecord.from_bytes(bytes(flipped), "pins/x")


def test_a_root_that_refuses_twins_refuses_pins() -> None:
    node = Node()
    node.root.set_rules([RootRule("stage", EROFS)])
    with pytest.raises(KVStoreError) as raised:
        node.pin()
    assert not isinstance(raised.value, InvalidRequest)
    assert node.refs == node.twins == {}


def test_p3_unpinning_removes_what_it_looked_at_and_nothing_else() -> None:
    """A removal that arrives late must not meet another ref under its key."""
    node = Node()
    pin, key = node.pin(), ""
    real = node.meta.txn

    def txn(
        compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        nonlocal key
        if not key:
            key = operations[0].key
            MemoryMeta(node.store).put(key, replace(pin, id=PinId(b"o" * 16)).to_bytes())
        return real(compares, operations, timeout_s)

    with patch.object(node.meta, "txn", txn):
        assert not node.pins.unpin("me", pin.id)
    assert list(node.refs) == [key]
