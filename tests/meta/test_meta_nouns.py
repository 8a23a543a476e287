"""Namespaces, pins and root bindings: the same over every store, and with replies lost on the way."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from kvstore.address import Address
from kvstore.errors import InvalidRequest, LayoutMismatch, RootMismatch, SessionLost, Unavailable
from kvstore.layout import Layout
from kvstore.meta import namespaces as namespaces_module
from kvstore.meta.cluster import bind_root, bound_root
from kvstore.meta.keys import Keys, PinId, parse_id
from kvstore.meta.memory import MemoryMeta, MemoryStore
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.pins import ADDRESSES_MAX, TTL_S_MAX, Pins
from kvstore.meta.session import Session
from kvstore.meta.store import Put
from kvstore.namespace import Namespace, NamespaceDigest
from kvstore.sources import RandomIds
from tests.kit.cases import for_each
from tests.kit.etcd import PATIENCE_S
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule
from tests.meta.conftest import Store

KEYS = Keys(bytes(16))
LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8)
NAMESPACE = NamespaceDigest(bytes(32))


def addresses(count: int) -> list[Address]:
    packed = os.urandom(16 * count)
    return [Address(packed[16 * number : 16 * number + 16]) for number in range(count)]


def session_of(store: Store) -> Session:
    return Session.open(store.meta, store.keys, clock=store.clock, ids=RandomIds(), ttl_s=60)


class Node:
    """One node over a store that can fail."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.meta = FaultyMeta(MemoryMeta(self.store))
        self.session = Session.open(self.meta, KEYS, clock=self.clock, ids=RandomIds())
        self.pins = Pins(self.meta, KEYS, lambda: self.session)

    def refs(self) -> int:
        return len(self.store.list(KEYS.refs).items)


@pytest.fixture
def node() -> Node:
    return Node()


# ---------------------------------------------------------------------------------------------- namespaces


def test_a_name_stands_for_one_layout(store: Store) -> None:
    namespaces = Namespaces(store.meta, store.keys)
    first = Namespace.of("llama/ü", LAYOUT, fingerprint="a")
    assert namespaces.list() == () and namespaces.find(first.digest) is None
    namespaces.claim(first)
    before = store.meta.operations_count
    namespaces.claim(first)
    assert store.meta.operations_count - before == 1, "one read where it is known already"
    variant = Namespace.of("llama/ü", LAYOUT, fingerprint="b", attributes={"rope": "yarn"})
    other_tenant = Namespace.of("llama/ü", replace(LAYOUT, layers=3), tenant="t")
    Namespaces(store.other, store.keys).claim(variant)
    namespaces.claim(other_tenant)
    with pytest.raises(
        LayoutMismatch, match=r"layers=2.*but.*layers=4.*was asked for: use the existing layout, or another"
    ):
        namespaces.claim(Namespace.of("llama/ü", replace(LAYOUT, layers=4)))
    assert set(namespaces.list()) == {first, variant, other_tenant}
    assert namespaces.find(variant.digest) == variant
    assert Namespaces(store.meta, Keys(os.urandom(16))).list() == (), "another root's"


def test_of_two_nodes_claiming_different_layouts_at_once_one_wins(store: Store) -> None:
    claims = [Namespace.of("m", replace(LAYOUT, layers=1 + number % 2), str(number)) for number in range(8)]
    outcomes: list[int | None] = []

    def claim(namespace: Namespace) -> None:
        try:
            Namespaces(store.meta, store.keys).claim(namespace, PATIENCE_S)
            outcomes.append(namespace.layout.layers)
        except LayoutMismatch:
            outcomes.append(None)

    threads = [threading.Thread(target=claim, args=(one,)) for one in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    winners = [layers for layers in outcomes if layers]
    assert len(outcomes) == 8 and len(winners) == 4 and len(set(winners)) == 1
    assert {one.layout.layers for one in Namespaces(store.meta, store.keys).list()} == set(winners)


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.NOT_SENT, Fault.LATE])
def test_a_claim_whose_reply_was_lost_is_read_back(node: Node, fault: Fault) -> None:
    node.meta.add(Rule(fault, ("txn",), times=1))
    namespaces = Namespaces(node.meta, KEYS)
    namespaces.claim(Namespace.of("m", LAYOUT))
    node.meta.land()
    assert len(namespaces.list()) == 1
    namespaces.claim(Namespace.of("m", LAYOUT, "2"))
    assert len(namespaces.list()) == 2


def test_variants_of_one_name_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "VARIANTS_MAX", 3)
    namespaces = Namespaces(node.meta, KEYS)
    for number in range(3):
        namespaces.claim(Namespace.of("m", LAYOUT, str(number)))
    with pytest.raises(InvalidRequest, match="the limit is 3"):
        namespaces.claim(Namespace.of("m", LAYOUT, "one too many"))
    namespaces.claim(Namespace.of("m", LAYOUT, "0"))


def test_damaged_namespace_records_are_reported(node: Node) -> None:
    namespace = Namespace.of("m", LAYOUT)
    node.store.txn((), _put(KEYS.namespace_digest(namespace.digest), Namespace.of("other", LAYOUT).to_json()))
    with pytest.raises(RootMismatch, match="damaged"):
        Namespaces(node.meta, KEYS).find(namespace.digest)
    node.store.txn((), _put(KEYS.namespace_name("", "broken"), b"{}"))
    with pytest.raises(RootMismatch, match="not a namespace claim"):
        Namespaces(node.meta, KEYS).claim(Namespace.of("broken", LAYOUT))


# ---------------------------------------------------------------------------------------------- pins


def test_pins_count_until_they_are_released(store: Store) -> None:
    session = session_of(store)
    pins = Pins(store.meta, store.keys, lambda: session)
    chunks = addresses(5)
    first = pins.pin("job/ü 1", chunks[:4], 60, 1024, NAMESPACE)
    second = pins.pin("job2", chunks[2:], 3600, 512, NAMESPACE)
    assert [pins.refcount(chunk) for chunk in chunks] == [1, 1, 2, 2, 1]
    assert pins.refcount(Address(bytes(16))) == 0
    assert first.addresses == tuple(chunks[:4]) and first.addresses_count == 4
    assert set(Pins(store.other, store.keys, lambda: session).list()) == {first, second}
    assert pins.list("job2") == (second,) and pins.list("job") == ()
    assert pins.unpin("job/ü 1", first.id)
    assert not pins.unpin("job/ü 1", first.id)
    assert not pins.unpin("job2", first.id)
    assert not store.meta.keep_alive(first.lease), "its lease goes with it"
    session.close()
    assert pins.list() == (second,), "a pin outlives the session that asked for it"


def test_a_pin_ends_with_its_own_lease(store: Store) -> None:
    session = session_of(store)
    pins = Pins(store.meta, store.keys, lambda: session)
    pin = pins.pin("me", addresses(2), 2, 32, NAMESPACE)
    watch = store.meta.watch(store.keys.refs, pin.revision + 1)
    store.pass_time(2)
    batch = watch.next(PATIENCE_S)
    assert batch is not None and batch[0].kv is None
    assert pins.list() == ()


def test_the_largest_pin_fits_and_larger_ones_are_refused(store: Store) -> None:
    session = session_of(store)
    pins = Pins(store.meta, store.keys, lambda: session)
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
def test_bad_pins_are_invalid(node: Node, owner: str, count: int, ttl_s: int, tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        node.pins.pin(owner, addresses(count), ttl_s, tokens, NAMESPACE)
    with pytest.raises(InvalidRequest, match="has 3 bytes"):
        node.pins.pin("me", [Address(b"abc")], 60, 1, NAMESPACE)
    assert node.refs() == 0


def test_p2_a_dead_session_pins_nothing(node: Node) -> None:
    node.store.revoke(node.session.lease)
    with pytest.raises(SessionLost):
        node.pins.pin("me", addresses(1), 60, 16, NAMESPACE)
    assert node.refs() == 0


def test_p3_a_pin_whose_reply_was_lost_is_read_back(node: Node) -> None:
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1))
    pin = node.pins.pin("me", addresses(1), 60, 16, NAMESPACE)
    assert node.pins.list() == (pin,)


@pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.LATE])
def test_p3_a_pin_that_is_not_there_is_not_claimed_and_cannot_land_later(node: Node, fault: Fault) -> None:
    node.meta.add(Rule(fault, ("txn",), times=1))
    with pytest.raises(Unavailable):
        node.pins.pin("me", addresses(1), 60, 16, NAMESPACE)
    node.meta.land()
    assert node.refs() == 0
    node.pins.pin("me", addresses(1), 60, 16, NAMESPACE)
    assert node.refs() == 1


def test_p3_a_pin_that_cannot_be_read_back_is_taken_back(node: Node) -> None:
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1), Rule(Fault.NOT_SENT, ("get",), times=1))
    with pytest.raises(Unavailable):
        node.pins.pin("me", addresses(1), 60, 16, NAMESPACE)
    assert node.refs() == 0


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.NOT_SENT, Fault.LATE])
def test_p3_an_unpin_whose_reply_was_lost_is_read_back(node: Node, fault: Fault) -> None:
    pin = node.pins.pin("me", addresses(1), 60, 16, NAMESPACE)
    node.meta.add(Rule(fault, ("txn",), times=1))
    assert node.pins.unpin("me", pin.id)
    assert node.refs() == 0
    # Put again under the very same key, as nobody should: what arrives late was meant for the one before.
    node.store.txn((), _put(KEYS.ref("me", pin.id), pin.to_bytes()))
    node.meta.land()
    assert [one.id for one in node.pins.list()] == [pin.id], "a late unpin takes no other pin away"


@for_each("value", [b"", b"KVREF1\0\0", b"KVREF1\0\0\xff\0\0\0{}", b"KVREF1\0\0\x02\0\0\0{}abc", b"KVREF2\0\0"])
def test_a_ref_that_cannot_be_understood_is_never_ignored(node: Node, value: bytes) -> None:
    node.store.txn((), _put(KEYS.ref("me", PinId(bytes(16))), value))
    with pytest.raises(RootMismatch, match="is not a ref"):
        node.pins.list()


def test_another_root_under_a_known_url_is_a_wrong_mount(store: Store) -> None:
    url = f"file:///mnt/{os.urandom(4).hex()}"
    one, two = os.urandom(16), os.urandom(16)
    assert bound_root(store.meta, url) is None
    bind_root(store.meta, url, one)
    bind_root(store.other, url, one)
    assert bound_root(store.other, url) == one
    with pytest.raises(RootMismatch, match="is the right file system mounted"):
        bind_root(store.meta, url, two)
    bind_root(store.meta, url + "/2", two)


# ---------------------------------------------------------------------------------------------- roots


@for_each("fault", [Fault.REPLY_LOST, Fault.NOT_SENT])
def test_a_binding_whose_reply_was_lost_is_read_back(node: Node, fault: Fault) -> None:
    node.meta.add(Rule(fault, ("txn",), times=1))
    bind_root(node.meta, "file:///a", bytes(16))
    assert bound_root(node.meta, "file:///a") == bytes(16)
    node.meta.add(Rule(Fault.NOT_SENT, ("txn",)))
    with pytest.raises(Unavailable):
        bind_root(node.meta, "file:///b", bytes(16))


# ---------------------------------------------------------------------------------------------- keys


def test_names_that_people_choose_cannot_leave_their_place() -> None:
    for owner in ("../../x", "a/b", "%2f", "a b", "ü", "\0"):
        key = KEYS.ref(owner, PinId(bytes(16)))
        assert key.count("/") == KEYS.refs.count("/") + 1
    assert KEYS.namespace_name("a", "bc") != KEYS.namespace_name("ab", "c")
    assert KEYS.parse_session(KEYS.generation) is None
    assert parse_id("A" * 32) is None and parse_id("0" * 30) is None and parse_id("0" * 32) == bytes(16)
    with pytest.raises(InvalidRequest, match="root id"):
        Keys(b"short")
    with pytest.raises(InvalidRequest, match="Unicode"):
        KEYS.refs_of("\ud800")


def _put(key: str, value: bytes) -> list[Put]:
    return [Put(key, value)]
