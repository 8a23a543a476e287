"""The follower: a node's work with one session, and what it must leave to the next one.

Separate from the view, which only applies what it is given: these tests are about who gives it, and until when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.engine.coordination import ClusterMember, Coordination
from kvstore.engine.open import join
from kvstore.errors import HoldBroken, Overloaded, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.header import Generation
from kvstore.format.places import Name
from kvstore.meta.cluster import Agreed
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.session import ANNOUNCED_MAX, SessionManager, SessionRecord
from kvstore.meta.store import WatchLost
from kvstore.meta.usage import Capacity
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.clusters import NODE_LIMITS, SPACE, TIMINGS, Cluster, cluster, eventually, prompt, put
from tests.kit.faulty_root import EIO, EROFS, FaultyRoot, Rule
from tests.kit.followers import SWEEP, Alone, nothing
from tests.kit.stores import TINY, kv_of, same

READ_ONLY = [Rule(each, EROFS) for each in "stage publish discard move make_folder remove remove_folder".split()]


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.node.close()


def latest(alone: Alone) -> int:
    """The revision of the last write that is not the node's own report."""
    revision = alone.meta.list(alone.keys.gc).revision
    return revision - (revision in [kv.mod_revision for kv in alone.meta.list(alone.keys.usage).items])


def test_v2_what_an_old_session_has_fetched_is_not_applied_in_the_next_one(alone: Alone) -> None:
    old, new = alone.session(), alone.session()
    alone.follower.begin(old)
    alone.meta.put(alone.keys.gc_capacity, Capacity(1, is_full=True).to_json())

    def meanwhile() -> None:
        alone.meta.fetched = nothing
        alone.follower.end(old)
        alone.meta.delete(alone.keys.gc_capacity)
        alone.follower.begin(new)

    alone.meta.fetched = meanwhile
    alone.follower.step(0.0)
    assert alone.view.protects and alone.view.revision == latest(alone)
    alone.view.check_room()
    alone.meta.put(alone.keys.gc_capacity, Capacity(1, is_full=True).to_json())
    alone.follower.step(0.0)
    assert alone.view.revision == latest(alone), "the new session's events are"


def test_v2_a_reread_for_an_old_session_changes_nothing_in_the_next_one(alone: Alone) -> None:
    old, new, chain = alone.session(), alone.session(), prompt(1, 1)
    alone.follower.begin(old)
    holds = []

    def lost() -> None:
        alone.meta.fetched = nothing
        alone.meta.opening = meanwhile
        raise WatchLost("compacted")

    def meanwhile() -> None:
        alone.meta.opening = nothing
        alone.follower.end(old)
        alone.meta.put(alone.keys.gc_capacity, Capacity(1, is_full=True).to_json())
        alone.follower.begin(new)
        holds.append(alone.node.hold(chain))

    alone.meta.fetched = lost
    alone.follower.step(0.0)
    assert alone.view.protects and alone.view.revision == latest(alone)
    assert holds[0].born == alone.view.revision, "not older than everything"
    with pytest.raises(Overloaded):
        alone.view.check_room()


def test_v2_a_match_after_the_session_died_outlives_its_end(alone: Alone) -> None:
    """It believed nothing because of the session, whose end is told to one after another: a get between is no miss."""
    session, chain = alone.session(), prompt(1, 1)
    alone.follower.begin(session)
    before = alone.node.hold(chain)
    session.give_up("as if etcd had been silent for too long")
    after = alone.node.hold(chain)
    alone.follower.end(session)
    alone.node.holds.check(after)
    with pytest.raises(HoldBroken):
        alone.node.holds.check(before)


def test_v3_a_watch_that_is_refused_is_lost_and_read_afresh(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    alone.meta.put(alone.keys.gc_capacity, Capacity(1, is_full=True).to_json())

    def refuse() -> None:
        alone.meta.fetched = nothing
        raise PermissionDenied("the token has expired")

    alone.meta.fetched = refuse
    alone.follower.step(0.0)
    assert session.alive and alone.view.protects
    assert alone.node.counters.snapshot()["watches_lost"] == 1
    assert alone.view.revision == latest(alone)
    alone.meta.delete(alone.keys.gc_capacity)
    alone.follower.step(0.0)
    alone.view.check_room()


@pytest.mark.parametrize("value", [b"[" * 100_000, b"{}", b"\xff"])
def test_c1_a_session_does_not_begin_on_a_chain_that_is_garbage(alone: Alone, value: bytes) -> None:
    alone.meta.put(alone.keys.gc_seq, value)
    with pytest.raises(Unavailable, match="cannot be read"):
        alone.follower.begin(alone.session())
    assert not alone.view.protects
    alone.meta.delete(alone.keys.gc_seq)
    alone.follower.begin(alone.session())
    assert alone.view.protects


def test_a_session_whose_start_fails_does_not_stay() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    alone = Alone(root, lambda: Agreed(Generation(1, bytes(16))))
    root.set_rules([Rule("list", EIO, places.TRASH.__eq__)])
    presence = SessionManager(alone.meta, alone.keys)
    presence.attach(alone.follower.begin, alone.follower.end)
    presence.start()
    try:
        eventually(lambda: root.struck and not alone.meta.list(alone.keys.sessions).items)
        assert not alone.view.protects
        root.set_rules(())
        eventually(lambda: alone.view.protects)
        assert len(alone.meta.list(alone.keys.sessions).items) == 1
    finally:
        presence.close()
        alone.node.close()


# Nodes that cannot protect


@contextmanager
def aside(c: Cluster, root: Root | None = None) -> Iterator[ClusterMember]:
    """A node that joins, though it is not known whether it will protect anything."""
    member = join(
        root or c.root, c.identity, MemoryMetadata(c.store), limits=NODE_LIMITS, clock=SystemClock(),
        ids=RandomIds(), sharing=Coordination.CLUSTER,
    )  # fmt: skip
    try:
        yield member
    finally:
        member.close()


def assert_stands_aside(c: Cluster, member: ClusterMember) -> None:
    """It serves, protects nothing, refuses to pin, and no sweep waits for it."""
    chain = prompt(1, 8)
    member.claim_namespace(SPACE)
    count, kv = Store(LocalTransport(member)).namespace(SPACE.name, TINY).get(chain.tokens)
    assert count == len(chain.tokens) and same(kv, kv_of(TINY, chain.tokens))
    assert not member.node.gc_view.protects and member.stats()["protected"] == 0
    with pytest.raises(Unavailable, match="protects nothing"):
        member.pin(chain, 60.0, "me")
    found = c.store.get(member.presence.current().key)
    assert found is not None and SessionRecord.from_json(found.value).announced == ANNOUNCED_MAX
    session = member.presence.current()
    assert member.node.hold(chain).count == 8, "which keeps nobody away"
    timings = replace(TIMINGS, announce_lag_max_s=1.0, grace_max_s=2.0)
    sweeper = c.collector(timings=timings)
    with patch.object(sweeper, "check"):  # a collector refuses, too, while root and etcd disagree
        assert sweeper.sweep(c.plans(chain)).reaped.count == 8
    assert member.presence.current() is session, "it was not revoked to get on"


def test_c6_a_node_of_another_generation_stands_aside() -> None:
    with cluster() as c:
        first = c.node()
        put(first, prompt(1, 8))
        other = Generation(2, b"o" * 16).to_json()
        MemoryMetadata(c.store).put(Keys(c.identity.root).generation, other)
        with aside(c) as member:
            assert_stands_aside(c, member)


def test_c6_a_node_that_stood_aside_protects_once_root_and_etcd_agree() -> None:
    """Nobody else ends its session: an adoption was done before it began, or did not see its key."""
    with cluster() as c:
        c.node()
        meta, key = MemoryMetadata(c.store), Keys(c.identity.root).generation
        agreed = meta.get(key)
        assert agreed is not None
        meta.put(key, Generation(2, b"o" * 16).to_json())
        with aside(c) as member:
            assert not member.node.gc_view.protects
            meta.put(key, agreed.value)
            eventually(lambda: member.node.gc_view.protects)


def test_c4_a_node_that_cannot_fence_because_its_root_is_read_only_stands_aside() -> None:
    with cluster() as c:
        first = c.node()
        put(first, prompt(1, 8))
        c.root.make_folder(places.trash_folder(SWEEP))
        with aside(c, FaultyRoot(c.root, READ_ONLY)) as member:
            assert_stands_aside(c, member)
        assert Name(f"{places.TRASH}/{SWEEP.hex()}") in c.leftovers()
        c.node()
        assert c.leftovers() == [], "a node that can fence does it"
