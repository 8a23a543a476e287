"""The order to clear reaches every node, and no copy of a selected chunk escapes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from kvstore.census.selection import ClearOrder
from kvstore.codec.image import make_images
from kvstore.core.buffers import planes_of
from kvstore.core.clock import SystemClock
from kvstore.core.metrics import Counters
from kvstore.core.namespace import Namespace
from kvstore.engine.clear import ClearsFollower
from kvstore.engine.engine import Engine
from kvstore.errors import Unavailable
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.clears import ORDERS_MAX, Clears
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session
from kvstore.meta.store import MetadataStore
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.tiers.arena import SealedArena
from kvstore.tiers.memory import MemoryTier
from tests.kit.census import LAYOUT, ModelNode, closing, tokens
from tests.kit.etcd import eventually
from tests.kit.fake_meta import CountingIds, FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule
from tests.kit.patience import slowness
from tests.kit.stores import kv_of

KEYS = Keys(b"r" * 16)
NAMESPACE = Namespace.of("m", LAYOUT)


def order() -> ClearOrder:
    return ClearOrder(frozenset({NAMESPACE.id}), 1.0)


class Obedient:
    """A node as the follower sees it."""

    def __init__(self, meta: MemoryMetadata) -> None:
        self.obeyed: list[list[ClearOrder]] = []
        self.all: list[ClearOrder] = []
        self.refilled: list[ClearOrder] | None = None
        self.can = True
        self.clears = Clears(meta, KEYS)
        self.follower = ClearsFollower(cast(Engine, self), self.clears, 1.0)

    def obey(self, new: list[ClearOrder], orders: list[ClearOrder]) -> bool:
        self.obeyed.append(new)
        self.all = orders
        return self.can

    def refill(self, cleared: list[ClearOrder]) -> None:
        assert self.refilled is None
        self.refilled = cleared


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def meta(store: MemoryStore) -> MemoryMetadata:
    return MemoryMetadata(store)


@pytest.fixture
def nodes() -> Iterator[tuple[ModelNode, ModelNode, FaultyMeta]]:
    files, store = MemoryFiles(), MemoryStore()
    good, bad = (ModelNode(MemoryRoot(files), store, label) for label in ("stable", "canary"))
    with closing(good, bad):
        faulty = FaultyMeta(good.member.meta)
        good.member.clears = Clears(faulty, good.member.keys)
        yield good, bad, faulty


def test_nothing_is_deleted_where_the_others_could_not_be_told(nodes: tuple[ModelNode, ModelNode, FaultyMeta]) -> None:
    good, bad, faulty = nodes
    bad.put(1)
    bad.drain()
    faulty.add(Rule(Fault.NOT_SENT, key="clears/"))
    with pytest.raises(Unavailable):
        good.member.clear_selected(bad.selection)
    assert len(good.on_root()) == 4
    faulty.heal()
    assert good.member.clear_selected(bad.selection).chunks == 4


def test_a_clear_whose_end_could_not_be_told_may_be_repeated(nodes: tuple[ModelNode, ModelNode, FaultyMeta]) -> None:
    good, bad, faulty = nodes
    bad.put(1)
    bad.drain()
    faulty.add(Rule(Fault.NOT_SENT, operations=("txn",), key="clears/"))
    with pytest.raises(Unavailable):
        good.member.clear_selected(bad.selection)
    assert good.on_root() == [] and bad.in_memory(1, bad) == 0
    faulty.heal()
    cleared = good.member.clear_selected(bad.selection)
    assert (cleared.chunks, cleared.unconfirmed) == (0, ())


def test_a_node_that_lost_its_session_reads_the_orders_again(nodes: tuple[ModelNode, ModelNode, FaultyMeta]) -> None:
    good, bad, _ = nodes
    bad.put(1)
    bad.drain()
    for _ in range(2):
        assert good.serves(1, bad) == 4
    before = good.session
    good.member.presence.current().give_up("for this test")
    cleared = bad.member.clear_selected(bad.selection)
    assert cleared.chunks == 4
    eventually(lambda: good.in_memory(1, bad) == 0)
    eventually(lambda: good.member.stats()["session_alive"] == 1)
    assert good.session != before and good.serves(1, bad) == 0


def test_an_order_that_cannot_be_obeyed_yet_is_not_answered(meta: MemoryMetadata, store: MemoryStore) -> None:
    node, others = Obedient(meta), Clears(MemoryMetadata(store), KEYS)
    session = Session.open(meta, KEYS, clock=SystemClock(), ids=CountingIds(), ttl_s=60)
    node.can = False
    published = others.publish(b"1" * 16, order().to_json(), 1.0)
    node.follower._session = session  # its steps are taken here, without its thread
    for _ in range(2):
        assert node.follower.step(0.0)
    assert others.silent(b"1" * 16, 1.0) == {session.id}
    node.can = True
    assert node.follower.step(0.0)
    assert others.silent(b"1" * 16, 1.0) == set()
    published.done(1.0)
    assert node.follower.step(0.5)
    assert node.obeyed[-1] == [], "reads may have cached its chunks during the sweep"
    count = len(node.obeyed)
    assert node.follower.step(0.5) and len(node.obeyed) == count, "once is enough"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_cleared_namespace_is_forbidden_until_a_while_after_the_end(meta: MemoryMetadata, is_known: bool) -> None:
    """A process that begins later drops nothing: its local disk takes in what was put since."""
    node = Obedient(meta)
    node.clears.passing_s = 2 * round(slowness())
    node.follower._session = Session.open(meta, KEYS, clock=SystemClock(), ids=CountingIds(), ttl_s=60)
    published = node.clears.publish(b"1" * 16, order().to_json(), 1.0)
    if is_known:
        assert node.follower.step(0.0) and node.all == [order()]
    published.done(1.0)
    assert node.follower.step(0.5) and node.all == [order()] * is_known
    assert node.refilled == [order()] and (is_known or not node.obeyed)
    eventually(lambda: node.follower.step(0.1) and node.all == [])
    assert len(node.clears.snapshot(1.0).items) == 1


def test_an_order_that_ends_forbids_nothing_more_and_nonsense_forbids_nothing(meta: MemoryMetadata) -> None:
    node = Obedient(meta)
    node.follower._session = Session.open(meta, KEYS, clock=SystemClock(), ids=CountingIds(), ttl_s=60)
    node.clears.publish(b"1" * 16, order().to_json(), 1.0)
    meta.put(KEYS.clear_in_progress(b"2" * 16), b"from a later version")
    meta.put(f"{KEYS.clears}foreign", b"\x00")
    assert node.follower.step(0.0) and node.all == [order()]
    meta.delete(KEYS.clear_in_progress(b"1" * 16))
    assert node.follower.step(0.5) and node.all == []


def test_answers_go_with_their_order(meta: MemoryMetadata) -> None:
    """Else each clear leaves a key of each node in etcd as long as its session lives, which may be for months."""
    node = Obedient(meta)
    session = Session.open(meta, KEYS, clock=SystemClock(), ids=CountingIds(), ttl_s=60)
    node.follower._session = session
    ids = [bytes([number]) * 16 for number in range(3)]
    first, *_ = [node.clears.publish(id, order().to_json(), 1.0) for id in ids]
    assert node.follower.step(0.0) and answers(meta) == set(ids)
    first.done(1.0)
    meta.delete(KEYS.clear_in_progress(ids[1]))
    assert node.follower.step(0.5) and node.follower.step(0.1)
    assert answers(meta) == {ids[2]}
    faulty = FaultyMeta(meta)
    node.follower._clears = Clears(faulty, KEYS)
    faulty.add(Rule(Fault.NOT_SENT, operations=("delete",)))
    meta.delete(KEYS.clear_in_progress(ids[2]))
    assert not node.follower.step(0.5) and answers(meta) == {ids[2]}
    faulty.heal()
    assert node.follower.step(0.5) and answers(meta) == set(), "tried again"


def answers(meta: MetadataStore, keys: Keys = KEYS) -> set[bytes]:
    """Returns the orders that etcd has answers for."""
    found = meta.list(f"{keys.prefix}cleared/").items
    return {bytes.fromhex(each.key.split("/")[-2]) for each in found}


def test_an_order_is_kept_as_long_as_its_sweep_takes(nodes: tuple[ModelNode, ModelNode, FaultyMeta]) -> None:
    """Nodes that forgot it in between would take its chunks back."""
    passing_s = 4 * round(slowness())
    good, bad, _ = nodes
    bad.put(1)
    bad.drain()
    assert good.serves(1, bad) == 4
    clears = good.member.clears = Clears(good.member.meta, good.member.keys, passing_s=passing_s)
    lasted = threading.Event()

    def slow(done: int, total: int) -> None:
        if total and not lasted.is_set():
            assert not lasted.wait(1.5 * passing_s)
            lasted.set()
            assert len(clears.snapshot(1.0).items) == 1

    cleared = good.member.clear_selected(bad.selection, slow)
    assert lasted.is_set() and (cleared.chunks, cleared.unconfirmed) == (4, ())
    assert good.in_memory(1, bad) == bad.in_memory(1, bad) == 0
    eventually(lambda: answers(good.member.meta, good.member.keys) == set())


def test_an_order_that_passed_before_its_sweep_was_over_is_not_confirmed(
    nodes: tuple[ModelNode, ModelNode, FaultyMeta],
) -> None:
    """If etcd did not answer for a minute, nodes may have read a chunk again after it was deleted."""
    good, bad, faulty = nodes
    bad.put(1)
    bad.drain()
    lasting, read = good.member.clears, Clears(good.member.meta, good.member.keys)
    good.member.clears = Clears(faulty, good.member.keys, passing_s=1)
    faulty.add(Rule(Fault.NOT_SENT, ("keep_alive",)))

    def slow(done: int, total: int) -> None:
        if total:
            eventually(lambda: read.snapshot(1.0).items == ())
            faulty.heal()

    with pytest.raises(Unavailable, match="clear again"):
        good.member.clear_selected(bad.selection, slow)
    good.member.clears = lasting
    assert good.member.clear_selected(bad.selection).unconfirmed == ()


def test_orders_are_bounded(meta: MemoryMetadata) -> None:
    clears = Clears(meta, KEYS)
    for number in range(ORDERS_MAX + 3):
        clears.publish(number.to_bytes(16, "big"), b"{}", 1.0).done(1.0)
    assert clears.trim(1.0) == 3 and clears.trim(1.0) == 0
    kept = {each.key for each in clears.snapshot(1.0).items}
    assert KEYS.clear_done(bytes(16)) not in kept and len(kept) == ORDERS_MAX


def test_what_a_peer_still_has_does_not_come_into_memory_but_own_puts_do() -> None:
    tier = MemoryTier(SealedArena(1 << 20).open(), Counters(), FakeClock())
    chain = chain_of(1, 4)
    for first, fetched, stays in ((0, True, False), (0, False, True), (1, True, False)):
        slot = tier.claim(chain, first)
        assert slot is not None
        if first == 0:
            make(chain, 0, slot.memory)
            tier.forbid(order())
        else:
            make(chain, first, slot.memory)  # claimed before, and complete only now
        tier.ready([slot], fetched=fetched)
        assert bool(tier.leading(chain, first)) == stays
    assert tier.drop_ordered(order()) == 1 and tier.leading(chain) == 0
    assert tier.stats()["memory_held_bytes"] == 0
    tier.close()


def chain_of(number: int, chunks: int) -> ChunkKeys:
    return ChunkKeys.of(NAMESPACE, np.asarray(tokens(number, chunks), np.uint32))


def make(chain: ChunkKeys, index: int, image: memoryview) -> None:
    source = planes_of(kv_of(LAYOUT, tokens(1, len(chain))), LAYOUT)
    make_images(chain, [index], source, [image], CountingIds())


def test_a_lost_watch_is_read_afresh(meta: MemoryMetadata) -> None:
    faulty = FaultyMeta(meta)
    node = Obedient(meta)
    node.follower = ClearsFollower(cast(Engine, node), Clears(faulty, KEYS), 1.0)
    node.follower._session = Session.open(meta, KEYS, clock=SystemClock(), ids=CountingIds(), ttl_s=60)
    assert node.follower.step(0.0) and node.obeyed == []
    faulty.cut_watches()
    node.clears.publish(b"1" * 16, order().to_json(), 1.0)
    assert node.follower.step(0.5) and node.obeyed == []
    assert node.follower.step(0.5) and node.obeyed == [[order()]]
