"""A node's announcements, beliefs and releases: one rule of gc/PROTOCOL.md each, without threads or waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import HoldBroken, SessionLost
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.meta.keys import SweepId
from kvstore.meta.session import Session, SessionRecord
from kvstore.meta.store import Absent, Delete, Event, Put, ValueIs, WatchLost
from kvstore.meta.sweeps import NO_NONCE, Condemned, Seq
from tests.kit.clusters import prompt
from tests.kit.followers import ALONE_LIMITS, Alone, nothing

CHAIN = prompt(1, 4)
LONG_S = 1e6


class Silent:
    """A watch that reports nothing more, like one on a store that was restored to an older revision."""

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        return None

    def close(self) -> None: ...


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.node.close()


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
    records = {
        victim[0] if alone.view._shard_bits == 8 else 0: Condemned.of_victims(sweep, b"c" * 16, [victim])
        for victim in chain.addresses[:count]
    }
    assert len(records) == count
    link = Seq(bytes([number]) * 16, bytes([before]) * 16 if before else NO_NONCE)
    now = alone.meta.get(keys.gc_seq)
    compare = Absent(keys.gc_seq) if now is None else ValueIs(keys.gc_seq, now.value)
    puts = [Put(keys.condemned_in(shard), record.to_bytes()) for shard, record in records.items()]
    alone.meta.txn((compare,), (*puts, Put(keys.gc_seq, link.to_json())))


def end_sweep(alone: Alone, number: int, before: int) -> None:
    """The sweep of that shard ends, as the next link of the chain."""
    victim, keys = CHAIN.addresses[0], alone.keys
    link = Seq(bytes([number]) * 16, bytes([before]) * 16)
    now = alone.meta.get(keys.gc_seq)
    assert now is not None
    shard = victim[0] if alone.view._shard_bits == 8 else 0
    writes = (Delete(keys.condemned_in(shard)), Put(keys.gc_seq, link.to_json()))
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
    alone.following.watch = Silent()
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
    condemn(alone, 1, chain=prompt(2, 1))
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
    alone.following.watch = Silent()
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

    def lost() -> None:
        alone.meta.fetched = nothing
        raise WatchLost("compacted")

    alone.meta.fetched = lost
    with pytest.raises(SessionLost):
        alone.follower.step(0.0)
    assert not session.alive


def test_v3_holds_of_before_a_lost_watch_are_older_than_everything(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    hold = alone.node.holds.take(CHAIN)
    hold.born = int(LONG_S)  # revisions of before count for nothing in a store that was restored

    def lost() -> None:
        alone.meta.fetched = nothing
        raise WatchLost("compacted")

    alone.meta.fetched = lost
    alone.follower.step(0.0)
    condemn(alone, 1)
    alone.follower.step(0.0)
    assert session.alive and record(alone, session) == SessionRecord(alone.view.revision, 1, NAMES)
    alone.node.holds.check(hold)


def test_v3_a_watch_that_fell_silent_on_a_restored_store_ends_the_session(alone: Alone) -> None:
    session = alone.session()
    alone.follower.begin(session)
    alone.follower.step(0.0)
    alone.following.watch = Silent()
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
