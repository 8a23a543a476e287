"""Namespaces, root bindings and keys: the same over every store, and with replies lost on the way."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest, LayoutMismatch, RootMismatch, Unavailable
from kvstore.meta.cluster import bind_root, bound_root
from kvstore.meta.keys import Keys, PinId, parse_id
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.store import Put
from kvstore.testing import MetadataClients
from tests.kit.cases import for_each
from tests.kit.etcd import PATIENCE_S
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule

KEYS = Keys(bytes(16))
LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8)


def test_name_stands_for_one_layout(store: MetadataClients) -> None:
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
    with pytest.raises(LayoutMismatch, match=r"layers=2.*but.*layers=4"):
        namespaces.claim(Namespace.of("llama/ü", replace(LAYOUT, layers=4)))
    assert set(namespaces.list()) == {first, variant, other_tenant}
    assert namespaces.find(variant.digest) == variant
    assert Namespaces(store.meta, Keys(os.urandom(16))).list() == (), "another root's"


def test_one_of_two_layouts_claimed_at_once_wins(store: MetadataClients) -> None:
    claims = [Namespace.of("m", replace(LAYOUT, layers=1 + number % 2), str(number)) for number in range(8)]
    outcomes: list[int | None] = []

    def claim(namespace: Namespace) -> None:
        try:
            Namespaces(store.meta, store.keys).claim(namespace, PATIENCE_S)
            outcomes.append(namespace.layout.layers)
        except LayoutMismatch:
            outcomes.append(None)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(claim, claims))
    winners = [layers for layers in outcomes if layers]
    assert len(outcomes) == 8 and len(winners) == 4 and len(set(winners)) == 1
    assert {one.layout.layers for one in Namespaces(store.meta, store.keys).list()} == set(winners)


@for_each("fault", [Fault.REPLY_LOST, Fault.NOT_SENT, Fault.LATE])
def test_claim_with_a_lost_reply_is_read_back(fault: Fault) -> None:
    meta = FaultyMeta(MemoryMetadata())
    meta.add(Rule(fault, ("txn",), times=1))
    namespaces = Namespaces(meta, KEYS)
    namespaces.claim(Namespace.of("m", LAYOUT))
    meta.land()
    assert len(namespaces.list()) == 1
    namespaces.claim(Namespace.of("m", LAYOUT, "2"))
    assert len(namespaces.list()) == 2


def test_damaged_namespace_record_is_refused() -> None:
    meta, namespace = MemoryMetadata(), Namespace.of("m", LAYOUT)
    wrong = Put(KEYS.namespace_digest(namespace.digest), Namespace.of("other", LAYOUT).to_json())
    meta.txn((), [wrong, Put(KEYS.namespace_name("", "broken"), b"{}")])
    with pytest.raises(RootMismatch, match="damaged"):
        Namespaces(meta, KEYS).find(namespace.digest)
    with pytest.raises(RootMismatch, match="not a namespace claim"):
        Namespaces(meta, KEYS).claim(Namespace.of("broken", LAYOUT))


def test_another_root_at_a_known_url_is_refused(store: MetadataClients) -> None:
    url = f"file:///mnt/{os.urandom(4).hex()}"
    one, two = os.urandom(16), os.urandom(16)
    assert bound_root(store.meta, url) is None
    bind_root(store.meta, url, one)
    bind_root(store.other, url, one)
    assert bound_root(store.other, url) == one
    with pytest.raises(RootMismatch, match="is the right file system mounted"):
        bind_root(store.meta, url, two)
    bind_root(store.meta, url + "/2", two)


@for_each("fault", [Fault.REPLY_LOST, Fault.NOT_SENT])
def test_binding_with_a_lost_reply_is_read_back(fault: Fault) -> None:
    meta = FaultyMeta(MemoryMetadata())
    meta.add(Rule(fault, ("txn",), times=1))
    bind_root(meta, "file:///a", bytes(16))
    assert bound_root(meta, "file:///a") == bytes(16)
    meta.add(Rule(Fault.NOT_SENT, ("txn",)))
    with pytest.raises(Unavailable):
        bind_root(meta, "file:///b", bytes(16))


def test_chosen_names_stay_in_their_place() -> None:
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
