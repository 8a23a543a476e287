"""etcd's part: a write under ``gc/`` becomes an event of every watch; a snapshot, and a restore from it (C13)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.configs import Config, Dropped
from tests.model.state import (
    DEAD,
    FENCING,
    KEY_CHAIN,
    LIVE,
    NOT_TAKEN,
    OUT,
    RESTORED,
    SEQ_CHAIN,
    UP,
    Condemned,
    Event,
    Node,
    Snapshot,
    State,
)
from tests.model.world import dead_node

Step = tuple[str, State]


def write_gc(s: State, condemned: tuple[Condemned | None, ...], rev: int) -> State:
    """One transaction under ``gc/``, with its link of the chain (C1); closing a sweep needs no revision."""
    snapshot = s.snapshot
    if type(snapshot) is Snapshot:
        snapshot = snapshot._replace(events_count=snapshot.events_count + 1)
    event = Event(rev, listed(condemned))
    nodes = tuple([n._replace(lag=n.lag + 1) if n.status == UP or n.status == FENCING else n for n in s.nodes])
    return s._replace(condemned=condemned, rev=rev, log=(*s.log, event), snapshot=snapshot, nodes=nodes)


def listed(condemned: tuple[Condemned | None, ...]) -> tuple[int, ...]:
    """For each address the stamp that a reader of ``gc/`` finds it condemned by, or 0."""
    return tuple([key.stamp if key is not None and key.listed else 0 for key in condemned])


def steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the steps that etcd takes by itself."""
    if s.snapshot == NOT_TAKEN and k.rollback:
        yield "SNAPSHOT", _take(s)
    elif type(s.snapshot) is Snapshot:
        yield "RESTORE", _restore(s, s.snapshot, k, dropped)
    if k.other_shard and s.rev < 1:
        yield "other_shard.condemn", write_gc(s, s.condemned, s.rev + 1)


def _take(s: State) -> State:
    sessions = tuple((n.status in LIVE, n.announced, n.named, n.ref) for n in s.nodes)
    nodes = tuple(n._replace(written=0) for n in s.nodes)
    return s._replace(snapshot=Snapshot(s.condemned, s.rev, sessions, 0), nodes=nodes)


def _restore(s: State, snapshot: Snapshot, k: Config, dropped: Dropped) -> State:
    lost_count = snapshot.events_count
    nodes = tuple(
        _restored(n, known, announced, named, ref, lost_count, k, dropped)
        for n, (known, announced, named, ref) in zip(s.nodes, snapshot.sessions, strict=True)
    )
    log = s.log[: len(s.log) - lost_count]
    return s._replace(condemned=snapshot.condemned, rev=snapshot.rev, log=log, snapshot=RESTORED, nodes=nodes)


def _restored(
    n: Node,
    known: bool,
    announced: int,
    named: tuple[int, ...],
    ref: int,
    lost_count: int,
    k: Config,
    dropped: Dropped,
) -> Node:
    if n.status == OUT or n.status == DEAD:
        return n
    if not known:
        return dead_node(k)  # it learns that at its next keepalive; until then I1 excepts it
    saw_lost = (n.status == UP or n.status == FENCING) and n.lag < lost_count
    broken = KEY_CHAIN if n.written and "no_key_chain" not in dropped else 0
    if saw_lost and "no_seq_chain" not in dropped:
        broken |= SEQ_CHAIN
    return n._replace(
        lag=0 if saw_lost else max(0, n.lag - lost_count),
        announced=announced,
        named=named,
        ref=n.ref if ref == n.ref else -abs(n.ref),
        broken=broken,
    )
