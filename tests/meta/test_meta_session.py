"""Sessions and presence (rules V1, V2, C2), on a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from kvstore.core.clock import RandomIds
from kvstore.errors import InvalidRequest, SessionLost, Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session, SessionManager, SessionRecord
from kvstore.meta.store import Absent, LeaseId, Put
from kvstore.meta.workers import WorkerRecord, WorkerRegistry
from kvstore.testing import MetadataClients
from tests.kit.descriptors import refuse_a_thread
from tests.kit.etcd import PATIENCE_S, eventually
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule

KEYS = Keys(bytes(16))
TTL_S = 15


class Node:
    """A session over a store that can fail, with a clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.meta = FaultyMeta(MemoryMetadata(self.store), sleep=self.clock.advance)
        self.session = self.open()

    def open(self) -> Session:
        return Session.open(self.meta, KEYS, clock=self.clock, ids=RandomIds(), ttl_s=TTL_S)

    def record(self) -> SessionRecord | None:
        found = self.store.get(self.session.key)
        return None if found is None else SessionRecord.from_json(found.value)


@pytest.fixture
def node() -> Node:
    return Node()


def test_session_begins_with_its_key_under_its_lease(store: MetadataClients) -> None:
    session = Session.open(store.meta, store.keys, clock=store.clock, ids=RandomIds(), ttl_s=60)
    found = store.other.get(session.key)
    assert found is not None and found.lease == session.lease
    assert SessionRecord.from_json(found.value) == SessionRecord(announced=0, write=0)
    assert session.alive and session.announced == 0
    result = session.txn((Absent(store.prefix + "x"),), (Put(store.prefix + "x", b"1"),), announced=7)
    assert result.succeeded and session.announced == 7
    assert not session.txn((Absent(store.prefix + "x"),), (), announced=8).succeeded
    assert session.announced == 7 and session.alive
    session.close()
    session.close()
    assert store.other.get(session.key) is None
    assert not session.alive


def test_v2_session_without_keepalives_is_dead_for_ever(node: Node) -> None:
    node.meta.add(Rule(Fault.NOT_SENT, ("keep_alive",)))
    node.clock.advance(TTL_S - 0.1)
    with pytest.raises(Unavailable):
        node.session.beat()
    assert node.session.alive
    node.clock.advance(0.1)
    assert not node.session.alive
    node.meta.heal()
    node.session.beat()
    assert not node.session.alive
    with pytest.raises(SessionLost, match="no keepalive was acknowledged for 15 s"):
        node.session.check()
    with pytest.raises(SessionLost):
        node.session.txn((), (Put("x", b""),))
    assert node.store.get("x") is None


def test_v2_ttl_counts_from_the_sending_of_a_keepalive(node: Node) -> None:
    node.clock.advance(TTL_S / 3)
    node.meta.add(Rule(Fault.DELAY, ("keep_alive",), delay_s=4, times=1))
    node.session.beat()  # sent at 5 s, answered at 9 s: lasts until 20 s, not 24 s
    node.clock.advance(10.9)
    assert node.session.alive
    node.clock.advance(0.1)
    assert not node.session.alive


def test_v2_answer_after_the_end_does_not_revive(node: Node) -> None:
    node.clock.advance(TTL_S - 1)
    node.meta.add(Rule(Fault.DELAY, ("keep_alive",), delay_s=0.99, times=1))
    inner_keep_alive = node.meta.keep_alive

    def late(lease: LeaseId, timeout_s: float | None = None) -> bool:
        answer = inner_keep_alive(lease, timeout_s)
        node.clock.advance(1)
        return answer

    node.meta.keep_alive = late  # type: ignore[method-assign]
    node.session.beat()
    assert not node.session.alive


def test_v2_dropped_lease_ends_the_session(node: Node) -> None:
    node.store.revoke(node.session.lease)
    node.session.beat()
    assert not node.session.alive
    with pytest.raises(SessionLost, match="no longer knows its lease"):
        node.session.check()


def test_keepalive_never_waits_past_the_session_end(node: Node) -> None:
    node.meta.add(Rule(Fault.HANG, ("keep_alive",)))
    node.clock.advance(TTL_S - 2)
    with pytest.raises(Unavailable):
        node.session.beat()
    assert node.clock.monotonic_s() == 1000 + TTL_S
    assert not node.session.alive


def test_c2_lost_reply_is_settled_by_reading_back(node: Node) -> None:
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1))
    assert node.open().txn((), (Put("first", b""),)).succeeded, "also the first write"
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1))
    result = node.session.txn((), (Put("x", b"1"),), announced=5)
    assert result.succeeded
    found = node.store.get("x")
    assert found is not None and found.mod_revision == result.revision
    assert node.record() == SessionRecord(announced=5, write=1)
    assert node.session.txn((), (Put("y", b"1"),)).succeeded


def test_c2_late_write_that_lands_first_joins_the_chain(node: Node) -> None:
    node.meta.add(Rule(Fault.LATE, ("txn",), times=1))
    with pytest.raises(Unavailable):
        node.session.txn((), (Put("late", b""),), announced=5)
    assert node.meta.land() == 1
    assert node.session.txn((), (Put("next", b""),)).succeeded
    assert node.session.announced == 5 and node.session.alive
    node.meta.add(Rule(Fault.NOT_SENT, ("txn",), times=1))
    with pytest.raises(Unavailable):
        node.session.txn((), (Put("x", b"1"),), announced=6)
    assert node.store.get("x") is None and node.session.announced == 5, "what did not arrive is never claimed"


def test_c2_late_write_after_the_next_one_is_void(node: Node) -> None:
    node.meta.add(Rule(Fault.LATE, ("txn",), times=1))
    with pytest.raises(Unavailable):
        node.session.txn((), (Put("late", b""),), announced=9)
    assert node.session.txn((), (Put("next", b""),), announced=5).succeeded
    assert node.meta.land() == 1
    assert node.store.get("late") is None
    assert node.record() == SessionRecord(announced=5, write=2)
    assert node.session.txn((), ()).succeeded


def test_c2_failed_read_back_is_made_up_for_later(node: Node) -> None:
    node.meta.add(Rule(Fault.REPLY_LOST, ("txn",), times=1), Rule(Fault.NOT_SENT, ("get",), times=1))
    with pytest.raises(Unavailable):
        node.session.txn((), (Put("x", b""),), announced=3)
    assert node.session.txn((), (Put("y", b""),)).succeeded
    assert node.session.announced == 3


def test_c2_store_back_in_time_ends_the_session(node: Node) -> None:
    before = node.store.get(node.session.key)
    assert before is not None
    assert node.session.txn((), (Put("pin", b""),)).succeeded
    # As after a restore from a snapshot: the key is there, but with an earlier write.
    node.store.txn((), (Put(node.session.key, before.value, node.session.lease),))
    with pytest.raises(SessionLost, match="lost its last write"):
        node.session.txn((), (Put("x", b""),))
    assert not node.session.alive and node.store.get("x") is None


def test_on_lost_is_called_once(node: Node) -> None:
    lost: list[Session] = []
    told = threading.Event()

    def on_lost(session: Session) -> None:
        lost.append(session)
        told.set()

    node.session.start(on_lost)
    node.clock.advance(TTL_S)
    assert not node.session.alive  # whoever looks wakes the thread
    assert told.wait(PATIENCE_S)
    node.session.close()
    assert lost == [node.session]


@pytest.fixture
def shared() -> MemoryStore:
    return MemoryStore()


def has_session(presence: SessionManager) -> bool:
    try:
        presence.current()
    except Unavailable:
        return False
    return True


def test_v1_session_is_hidden_until_its_hooks_are_done(shared: MemoryStore) -> None:
    presence = SessionManager(MemoryMetadata(shared), KEYS)
    may_go_on = threading.Event()
    begun = threading.Event()

    def slow(session: Session) -> None:
        assert shared.get(session.key) is not None, "the session first"
        begun.set()
        may_go_on.wait(PATIENCE_S)

    presence.attach(slow)
    presence.start()
    assert begun.wait(PATIENCE_S)
    assert not has_session(presence)
    may_go_on.set()
    eventually(lambda: has_session(presence))
    presence.close()
    assert shared.list(KEYS.sessions).items == ()
    with pytest.raises(Unavailable, match="left the cluster"):
        presence.current()


def test_hooks_run_again_after_a_loss(shared: MemoryStore) -> None:
    meta = MemoryMetadata(shared)
    workers = WorkerRegistry(meta, KEYS)
    told: list[tuple[str, Session]] = []
    lease_at_loss: list[bool] = []
    presence = SessionManager(meta, KEYS)

    def on_lost(session: Session) -> None:
        lease_at_loss.append(shared.keep_alive(session.lease))
        told.append(("lost", session))

    presence.attach(lambda session: told.append(("new", session)), on_lost)
    presence.start(wait_s=PATIENCE_S)
    first = presence.current()
    presence.attach(lambda session: workers.register(session, WorkerRecord("h:1")))
    eventually(lambda: list(workers.list()) == [first.id])
    # Its chain is broken, as by a rollback: the lease itself is still there.
    shared.txn((), (Put(first.key, SessionRecord(0, 77).to_json(), first.lease),))
    with pytest.raises(SessionLost):
        first.txn((), ())
    eventually(lambda: has_session(presence) and presence.current() is not first)
    second = presence.current()
    eventually(lambda: list(workers.list()) == [second.id])
    assert told == [("new", first), ("lost", first), ("new", second)]
    assert lease_at_loss == [True], "on_lost comes before the lease is revoked"
    assert [kv.key for kv in shared.list(KEYS.sessions).items] == [second.key]
    presence.close()
    assert told[-1] == ("new", second), "leaving is no loss"


def test_failed_start_of_a_session_is_repeated(shared: MemoryStore) -> None:
    meta = FaultyMeta(MemoryMetadata(shared))
    presence = SessionManager(meta, KEYS)
    tries: list[Session] = []

    def on_new(session: Session) -> None:
        tries.append(session)
        if len(tries) == 1:
            raise Unavailable("not yet")

    meta.add(Rule(Fault.NOT_SENT, times=2))
    presence.attach(on_new)
    presence.start()
    with pytest.raises(Unavailable, match="no session at the moment"):
        presence.current()
    eventually(lambda: has_session(presence))
    assert len(tries) == 2 and tries[0] is not tries[1] and not tries[0].alive
    presence.close()
    meta.add(Rule(Fault.NOT_SENT))
    with pytest.raises(Unavailable, match="no session at the moment"):
        SessionManager(meta, KEYS).start(wait_s=0.05)


@pytest.mark.parametrize("name", ["session", "hook"])
def test_a_session_whose_threads_cannot_be_started_is_followed_by_another(
    shared: MemoryStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has as many as it may have, for a moment."""
    presence, refused = SessionManager(MemoryMetadata(shared), KEYS), refuse_a_thread(monkeypatch, name)
    presence.attach(lambda session: threading.Thread(target=session.check, name="hook", daemon=True).start())
    presence.start()
    eventually(lambda: has_session(presence))
    assert refused and len(shared.list(KEYS.sessions).items) == 1
    presence.close()


def test_workers_are_listed_while_their_session_lives(store: MetadataClients) -> None:
    workers = WorkerRegistry(store.meta, store.keys)
    session = Session.open(store.meta, store.keys, clock=store.clock, ids=RandomIds(), ttl_s=60)
    other = Session.open(store.other, store.keys, clock=store.clock, ids=RandomIds(), ttl_s=60)
    record = WorkerRecord("10.0.0.7:7070", version="0.1.0", host="node-ü", pid=42)
    workers.register(session, WorkerRecord("10.0.0.7:1"))
    workers.register(session, record)
    WorkerRegistry(store.other, store.keys).register(other, WorkerRecord("10.0.0.8:7070"))
    store.meta.put(store.keys.workers + "future", b"{}")
    store.meta.put(store.keys.workers + "0" * 32, b"[1]")
    assert workers.list() == {session.id: record, other.id: WorkerRecord("10.0.0.8:7070")}
    workers.deregister(other)
    assert set(workers.list()) == {session.id}
    session.close()
    assert workers.list() == {}
    with pytest.raises(SessionLost):
        workers.register(session, record)
    store.meta.revoke(other.lease)
    with pytest.raises(SessionLost, match="again in a new one"):
        workers.register(other, record)


def test_worker_record_has_an_address() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        WorkerRecord("")
