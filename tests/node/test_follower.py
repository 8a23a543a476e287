"""The follower: a node's work with one session, and what it must leave to the next one; without threads or waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.engine.coordination import ClusterMember
from kvstore.errors import HoldBroken, Overloaded, SessionLost, Unavailable
from kvstore.format import places
from kvstore.format.header import Generation
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.format.places import Name
from kvstore.meta.cluster import Agreed
from kvstore.meta.keys import Keys, SweepId, part_of
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.session import ANNOUNCED_MAX, Session, SessionManager, SessionRecord
from kvstore.meta.store import Absent, Delete, Put, ValueIs, WatchLost
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from kvstore.meta.usage import Capacity
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.clusters import NODE_LIMITS, SPACE, Cluster, cluster, eventually, prompt, put
from tests.kit.descriptors import refuse_a_thread
from tests.kit.faulty_root import EIO, EROFS, FaultyRoot, Rule
from tests.kit.followers import ALONE_LIMITS, SWEEP, Alone, SilentWatch, nothing
from tests.kit.stores import TINY, kv_of, member_on, same

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
        raise WatchLost("the token has expired")

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


def test_a_node_whose_followers_thread_cannot_be_started_protects_in_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = refuse_a_thread(monkeypatch, "kvstore-follower")
    with cluster() as c:
        member = c.node()
        put(member, prompt(1, 8))
        assert refused and c.collector().sweep(c.plans(prompt(1, 8))).reaped.count == 8, "it announces"


# Announcements, beliefs and releases: one rule of gc/PROTOCOL.md each

CHAIN = prompt(5, 4)
LONG_S = 1e6


@contextmanager
def alone_with(**limits: Any) -> Iterator[Alone]:
    made = Alone(limits=replace(ALONE_LIMITS, **limits))
    try:
        yield made
    finally:
        made.node.close()


def condemn(alone: Alone, number: int, before: int = 0, count: int = 1, chain: ChunkKeys = CHAIN) -> None:
    """Sweeps of the first ``count`` chunks begin, as link ``number`` of the chain behind ``before``."""
    keys, sweep = alone.keys, SweepId(bytes([number]) * 16)
    records = {part_of(victim): Condemned.of_victims(sweep, b"c" * 16, [victim]) for victim in chain.addresses[:count]}
    assert len(records) == count
    link = Seq(bytes([number]) * 16, bytes([before]) * 16 if before else NO_NONCE)
    now = alone.meta.get(keys.gc_seq)
    compare = Absent(keys.gc_seq) if now is None else ValueIs(keys.gc_seq, now.value)
    puts = [Put(keys.condemned_in(part), record.to_bytes()) for part, record in records.items()]
    alone.meta.txn((compare,), (*puts, Put(keys.gc_seq, link.to_json())))


def lose_watch(alone: Alone) -> None:
    """The watch is lost at its next event, as by a compaction."""

    def lost() -> None:
        alone.meta.fetched = nothing
        raise WatchLost("compacted")

    alone.meta.fetched = lost


def end_sweep(alone: Alone, number: int, before: int) -> None:
    """That sweep ends, as the next link of the chain."""
    victim, keys = CHAIN.addresses[0], alone.keys
    link = Seq(bytes([number]) * 16, bytes([before]) * 16)
    now = alone.meta.get(keys.gc_seq)
    assert now is not None
    writes = (Delete(keys.condemned_in(part_of(victim))), Put(keys.gc_seq, link.to_json()))
    assert alone.meta.txn((ValueIs(keys.gc_seq, now.value),), writes).succeeded


def test_a_node_that_holds_nothing_announces_a_sweep_that_it_has_seen(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    condemn(alone, 1)
    alone.follower.step(0.0)
    assert session.announced == alone.view.revision > 0


def test_a1_what_the_view_has_not_applied_is_not_announced(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    condemn(alone, 1)
    alone.follower.step(0.0)
    before, seen = session.announced, alone.view.revision
    alone.following.watch = SilentWatch()
    condemn(alone, 2, before=1)
    for _ in range(3):
        alone.follower.step(0.0)
    assert session.announced == before == seen < alone.meta.list(alone.keys.gc).revision


def record(alone: Alone, session: Session) -> SessionRecord:
    found = alone.meta.get(session.key)
    assert found is not None
    read = SessionRecord.from_json(found.value)
    return replace(read, held=b"".join(sorted(read.held[at : at + 16] for at in range(0, len(read.held), 16))))


NAMES = b"".join(sorted(CHAIN.addresses))
"""All of the chain, although one chunk is condemned: what is kept keeps its prefix."""


def test_a2_what_an_older_hold_has_of_a_sweep_is_announced_with_it() -> None:
    with alone_with(hold_linger_s=1e-9) as alone:
        session = alone.session()
        alone.follower.begin(session)
        hold = alone.node.holds.take(CHAIN)
        condemn(alone, 1)
        alone.follower.step(0.0)
        assert alone.view.condemns(CHAIN.addresses[0]) and alone.node.holds.take(CHAIN).count == 0
        assert record(alone, session) == SessionRecord(alone.view.revision, 1, NAMES)
        session.txn()
        assert record(alone, session).held == NAMES, "every write says it again (P2)"
        alone.node.holds.release(hold)
        assert alone.node.holds.announcement(alone.view).held == b""


def test_a2_hold_between_two_sweeps_is_named_for_the_second(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    condemn(alone, 1, chain=prompt(3, 1))
    alone.follower.step(0.0)
    alone.node.holds.take(CHAIN)
    condemn(alone, 2, before=1)
    alone.follower.step(0.0)
    assert record(alone, session).held == NAMES


def test_a2_names_are_taken_back_once_no_sweep_is_in_flight(alone: Alone) -> None:
    """Or each pin would write them again."""
    session = alone.session()
    alone.follower.begin(session)
    alone.node.holds.take(CHAIN)
    condemn(alone, 1)
    alone.follower.step(0.0)
    assert record(alone, session).held == NAMES
    end_sweep(alone, 2, before=1)
    alone.follower.step(0.0)
    assert record(alone, session) == SessionRecord(alone.view.revision, 2)
    alone.follower.step(0.0)
    assert record(alone, session).write == 2, "once"


def test_a2_what_was_named_is_named_for_a_while_after_the_hold_has_ended(alone: Alone) -> None:
    """Or the next sweep of the round takes the parents of what this one has spared, and it could not be reached."""
    session = alone.session()
    alone.follower.begin(session)
    hold, other = alone.node.holds.take(CHAIN), alone.node.holds.take(prompt(2, 1))
    condemn(alone, 1)
    alone.follower.step(0.0)
    alone.node.holds.release(hold)
    alone.node.holds.release(other)
    assert len(alone.node.holds.announcement(alone.view).held) == len(NAMES)
    assert [each for _, each in alone.node.holds._lingering] == [hold], "what was not named is over"
    alone.node.holds.age_all()
    assert len(alone.node.holds.announcement(alone.view).held) == len(NAMES)
    alone.node.holds.drop_protecting()
    assert alone.node.holds.announcement(alone.view).held == b""


def test_a2_no_sweep_that_an_older_hold_may_find_chunks_of_is_announced(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    hold = alone.node.holds.take(CHAIN, whatever=True)
    condemn(alone, 1)
    alone.follower.step(0.0)
    assert session.announced == 0 and alone.view.condemns(CHAIN.addresses[0])
    hold.found = (CHAIN,)
    alone.follower.step(0.0)
    assert record(alone, session) == SessionRecord(alone.view.revision, 1, NAMES)


def test_a2_sweeps_of_more_held_chunks_than_can_be_named_wait() -> None:
    with alone_with(held_names_max=1) as alone:
        session = alone.session()
        alone.follower.begin(session)
        hold = alone.node.holds.take(CHAIN)
        condemn(alone, 1, count=2)
        alone.follower.step(0.0)
        assert session.announced == 0
        alone.node.holds.release(hold)
        alone.follower.step(0.0)
        assert record(alone, session) == SessionRecord(alone.view.revision, 1)


def test_a2_what_is_held_and_condemned_is_renewed(alone: Alone) -> None:
    """So the next round chooses other chunks."""
    used: list[KeySet] = []
    alone.node.holds._used = used.append
    alone.follower.begin(alone.session())
    hold = alone.node.holds.take(CHAIN)
    condemn(alone, 1)
    alone.follower.step(0.0)
    assert used == [hold.chain]


def test_a3_nothing_is_announced_once_the_chain_of_sweeps_has_gone_on(alone: Alone) -> None:
    """The store may have been restored: the view's last revision is then nobody's history."""
    session = alone.session()
    alone.follower.begin(session)
    hold = alone.node.holds.take(CHAIN, whatever=True)
    condemn(alone, 1)
    alone.follower.step(0.0)
    alone.following.watch = SilentWatch()
    condemn(alone, 2, before=1)
    alone.node.holds.release(hold)
    alone.follower.step(0.0)
    assert session.announced == 0


def test_v3_after_a_lost_watch_a_session_whose_last_write_is_lost_ends(alone: Alone) -> None:
    """The watch was lost because the store was restored: the session's key is there, as it was before."""
    session = alone.session()
    alone.follower.begin(session)
    old = alone.meta.get(session.key)
    assert old is not None
    session.txn((), announced=1)
    alone.meta.put(session.key, old.value, old.lease)

    lose_watch(alone)
    with pytest.raises(SessionLost):
        alone.follower.step(0.0)
    assert not session.alive


def test_v3_holds_of_before_a_lost_watch_are_older_than_everything(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    hold = alone.node.holds.take(CHAIN)
    hold.born = int(LONG_S)  # revisions of before count for nothing in a store that was restored

    lose_watch(alone)
    alone.follower.step(0.0)
    condemn(alone, 1)
    alone.follower.step(0.0)
    assert session.alive and record(alone, session) == SessionRecord(alone.view.revision, 1, NAMES)
    alone.node.holds.check(hold)


def test_v3_a_watch_that_fell_silent_on_a_restored_store_ends_the_session(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    alone.follower.step(0.0)
    alone.following.watch = SilentWatch()
    condemn(alone, 1)
    alone.following.heard_s -= LONG_S
    alone.follower.step(0.0)
    assert session.alive, "what has just been written may be on its way"
    alone.following.heard_s -= LONG_S
    alone.follower.step(0.0)
    assert not session.alive


def test_h4_nothing_is_read_under_a_hold_once_the_session_is_over(alone: Alone) -> None:
    """The end is told some moments later: a collector that saw the lease go does not wait for that."""
    session = alone.session()
    alone.follower.begin(session)
    hold = alone.node.holds.take(CHAIN)
    alone.node.holds.check(hold)
    session.give_up("as if its ttl had passed")
    with pytest.raises(HoldBroken):
        alone.node.holds.check(hold)


def test_h4_a_node_that_lags_sends_no_keepalive(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    assert alone.follower.keeps_up()
    alone.follower._stepped_s -= LONG_S
    before = session._acknowledged_s
    session.beat()
    assert not alone.follower.keeps_up() and session._acknowledged_s == before


def test_v2_holds_end_with_their_session_and_do_not_come_back_with_the_next(alone: Alone) -> None:
    old = alone.session()
    alone.follower.begin(old)
    hold = alone.node.holds.take(CHAIN)
    alone.follower.end(old)
    alone.follower.begin(alone.session())
    assert alone.view.protects
    with pytest.raises(HoldBroken):
        alone.node.holds.check(hold)


def test_v2_what_was_held_before_a_session_protects_nothing_and_ends_with_its_start(alone: Alone) -> None:
    hold = alone.node.holds.take(CHAIN)
    assert hold.born is None
    alone.follower.begin(alone.session())
    with pytest.raises(HoldBroken):
        alone.node.holds.check(hold)


# Nodes that cannot protect


@contextmanager
def aside(c: Cluster, root: Root | None = None) -> Iterator[ClusterMember]:
    """A node that joins, though it is not known whether it will protect anything."""
    member = member_on(root or c.root, NODE_LIMITS, meta=MemoryMetadata(c.store), in_cluster=True)
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
    sweeper = c.collector()
    with patch.object(sweeper, "check"):  # a collector refuses, too, while root and etcd disagree
        assert sweeper.sweep(c.plans(chain)).reaped.count == 8
    assert member.presence.current() is session, "it was not revoked to get on"


def test_c6_a_node_of_another_generation_stands_aside_until_root_and_etcd_agree() -> None:
    """Nobody else ends its session: an adoption was done before it began, or did not see its key."""
    with cluster() as c:
        put(c.node(), prompt(1, 8))
        meta, key = MemoryMetadata(c.store), Keys(c.identity.root).generation
        agreed = meta.get(key)
        assert agreed is not None
        meta.put(key, Generation(2, b"o" * 16).to_json())
        with aside(c) as member:
            assert_stands_aside(c, member)
            meta.put(key, agreed.value)
            eventually(lambda: member.node.gc_view.protects)


def test_c4_a_node_that_cannot_fence_because_its_root_is_read_only_stands_aside_until_it_can() -> None:
    with cluster() as c:
        put(c.node(), prompt(1, 8))
        c.root.make_folder(places.trash_folder(SWEEP))
        root = FaultyRoot(c.root, READ_ONLY)
        with aside(c, root) as member:
            assert_stands_aside(c, member)
            assert member.presence.current().alive and Name(f"{places.TRASH}/{SWEEP.hex()}") in c.leftovers()
            root.set_rules(())
            eventually(lambda: member.node.gc_view.protects)
        assert c.leftovers() == []
