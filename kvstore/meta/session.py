"""A session: a node's leased presence, and the chain of its writes.

When a session dies, everything under its lease dies with it, and so must everything that the node believed because of
it. Rule V2: a session is dead, for ever, once no keepalive was acknowledged for its ttl. The node measures that itself,
from the moment when it *sent* the last acknowledged one, which is never later than the moment at which the store drops
the lease.
"""

from __future__ import annotations

import json
import logging
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.address import ADDRESS_BYTES
from kvstore.core.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, SessionLost, Unavailable
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.store import (
    TIMEOUT_S,
    Absent,
    Compare,
    Delete,
    EtcdDeadline,
    LeaseGone,
    LeaseId,
    MetadataStore,
    ModifiedAt,
    Put,
    TxnResult,
    WatchLost,
)

log = logging.getLogger(__name__)

TTL_S = 10
TTL_S_MIN = 2  # etcd gives no shorter lease
TTL_S_MAX = 3600
ANNOUNCED_MAX = (1 << 63) - 1
_CLOSED = "it was closed"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The value of a session's key: the revision it has announced, and the number of its last write.

    ``held`` are packed addresses of chunks that it holds and a sweep up to that revision condemns: collectors spare
    them (rule A2).
    """

    announced: int
    write: int
    held: bytes = b""

    def to_json(self) -> bytes:
        held = b64encode(self.held).decode()
        fields = {"announced": self.announced, "write": self.write, "held": held}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> SessionRecord:
        try:
            fields = parse_json(value)
            found = cls(int(fields["announced"]), int(fields["write"]), b64decode(fields["held"], validate=True))
        except (ValueError, KeyError, TypeError, OverflowError) as cause:
            raise InvalidRequest(f"not a session record: {cause}") from cause
        if len(found.held) % ADDRESS_BYTES:
            raise InvalidRequest(f"not a session record: {len(found.held)} bytes of addresses of {ADDRESS_BYTES} each")
        return found


_FIRST = SessionRecord(announced=0, write=0)


def check_session_ttl(ttl_s: int) -> None:
    """Raises InvalidRequest if ``ttl_s`` is not from 2 to 3600 s."""
    if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
        raise InvalidRequest(f"session ttl_s={ttl_s!r}: expected a whole number from {TTL_S_MIN} to {TTL_S_MAX}")


def live_sessions(meta: MetadataStore, keys: Keys, timeout_s: float) -> set[SessionId]:
    """The sessions of a root that live now. Raises Unavailable."""
    found = (keys.parse_session(kv.key) for kv in meta.list(keys.sessions, timeout_s).items)
    return {session for session in found if session is not None}


class Session:
    """One live session. Made by ``open``; ``start`` keeps it alive in a thread; ends with ``close`` or by itself.

    ``on_lost`` is called once, in that thread, when the session died by itself: drop whatever depends on it.
    """

    def __init__(
        self,
        meta: MetadataStore,
        keys: Keys,
        session: SessionId,
        *,
        clock: Clock,
        ttl_s: int,
        lease: LeaseId,
        sent_s: float,
        written_at: int,
    ) -> None:
        self.id = session
        self.key = keys.session(session)
        self.ttl_s = ttl_s
        self.lease = lease  # keys under it disappear with the session
        self.opened_s = sent_s  # monotonic; its key did not exist before
        self._meta = meta
        self._clock = clock
        self._lock = threading.Lock()
        self._acknowledged_s = sent_s
        self._lost: str | None = None
        self._ended = threading.Event()
        self._lease_ended = False
        self._on_lost: Callable[[Session], None] | None = None
        self._keeps_up: Callable[[], bool] | None = None
        self._thread: threading.Thread | None = None
        # The chain: one write after the other, each compared with the revision of the one before (rules A3, P2, C2).
        # ``_unsettled`` are writes on top of ``_written_at`` whose replies were lost: any one of them may yet land.
        self._chain = threading.Lock()
        self._record = _FIRST
        self._written_at = written_at
        self._unsettled: dict[int, SessionRecord] = {}

    @classmethod
    def open(
        cls,
        meta: MetadataStore,
        keys: Keys,
        *,
        clock: Clock,
        ids: Ids,
        ttl_s: int = TTL_S,
        timeout_s: float | None = None,
    ) -> Session:
        """Opens a new session with a fresh id, its key written under its lease with announced = 0.

        Raises InvalidRequest for a ttl outside 2 to 3600 s, Unavailable if the store did not answer.
        """
        check_session_ttl(ttl_s)
        deadline = EtcdDeadline(timeout_s, clock)
        session, sent_s = SessionId(ids.fresh()), clock.monotonic_s()
        lease = meta.grant(ttl_s, deadline.left_s())
        key = keys.session(session)
        try:
            # Compared, although the id is fresh: a put that was sent twice could land again later and break the chain.
            written = meta.txn((Absent(key),), (Put(key, _FIRST.to_json(), lease),), deadline.left_s(0.6))
            assert written.succeeded, "session ids are never used again (rule W2)"
            written_at = written.revision
        except LeaseGone as gone:
            raise Unavailable("the session's lease ended before its key was written: try again") from gone
        except Unavailable:
            found = meta.get(key, deadline.left_s())
            if found is None:
                raise
            written_at = found.mod_revision
        return cls(meta, keys, session, clock=clock, ttl_s=ttl_s, lease=lease, sent_s=sent_s, written_at=written_at)

    @property
    def announced(self) -> int:
        return self._record.announced

    @property
    def alive(self) -> bool:
        """True while the session can be relied on (rule V2). Once False, False for ever."""
        with self._lock:
            if self._lost is None and self._clock.monotonic_s() - self._acknowledged_s >= self.ttl_s:
                self._lost = f"no keepalive was acknowledged for {self.ttl_s} s"
                self._ended.set()  # wakes the thread, which calls on_lost
            return self._lost is None

    @property
    def silent_s(self) -> float:
        """Seconds since the last acknowledged keepalive was sent: at ``ttl_s`` the session is over."""
        with self._lock:
            return max(0.0, self._clock.monotonic_s() - self._acknowledged_s)

    def check(self) -> None:
        """Raises SessionLost, with the reason, unless the session is alive."""
        if not self.alive:
            raise self._broken(str(self._lost))

    def only_while(self, keeps_up: Callable[[], bool]) -> None:
        """Sends keepalives only while ``keeps_up`` returns True: a node that lags must not delay others (rule H4)."""
        self._keeps_up = keeps_up

    def give_up(self, reason: str) -> None:
        """Ends a session that cannot be relied on as if it had died by itself: calls ``on_lost``."""
        log.warning("session.given_up %s %s", self.id.hex(), reason)
        self._end(reason)

    def start(self, on_lost: Callable[[Session], None] | None = None) -> None:
        """Keeps the session alive in a daemon thread, every third of its ttl."""
        self._on_lost = on_lost
        thread = threading.Thread(target=self._run, name=f"session {self.id.hex()[:8]}", daemon=True)
        thread.start()
        self._thread = thread  # only now: one that could not be started cannot be joined

    def beat(self) -> None:
        """Sends one keepalive and waits for its answer, at most a third of the ttl and never past the session's end."""
        sent_s = self._clock.monotonic_s()
        with self._lock:
            left_s = self._acknowledged_s + self.ttl_s - sent_s
        if left_s <= 0 or not self.alive or not (self._keeps_up is None or self._keeps_up()):
            return
        exists = self._meta.keep_alive(self.lease, min(self.ttl_s / 3, left_s))
        if not exists:
            self._lease_ended = True
            self._end("the store no longer knows its lease")
            return
        # An answer after the session's end changes nothing: others may have acted on its death already.
        if self.alive:
            with self._lock:
                self._acknowledged_s = max(self._acknowledged_s, sent_s)

    def txn(
        self,
        compares: Sequence[Compare] = (),
        operations: Sequence[Put | Delete] = (),
        *,
        announced: int | None = None,
        held: bytes = b"",
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Applies a transaction that also requires the session to be alive in the store, as the next link of its chain.

        ``announced`` replaces the announced revision, together with ``held``, which is what the session holds of the
        sweeps up to it. A lost reply is settled by reading back the session's key, which carries the number of the
        write. Raises SessionLost if the chain is broken (the session is then dead), Unavailable if the outcome stays
        unknown, LeaseGone for an operation's own lease.
        """
        if announced is not None and not 0 <= announced <= ANNOUNCED_MAX:
            raise InvalidRequest(f"announced={announced!r}: expected a revision")
        deadline = EtcdDeadline(timeout_s, self._clock)
        if not self._chain.acquire(timeout=deadline.left_s()):
            raise Unavailable("the session is busy with another transaction: the call may be repeated")
        try:
            while True:
                self.check()
                result = self._write(compares, operations, None if announced is None else (announced, held), deadline)
                if result is not None:
                    return result
        finally:
            self._chain.release()

    def put(self, key: str, value: bytes, timeout_s: float | None = None) -> None:
        """Puts a key of this session's own under its lease, outside the chain: sending it again does no harm.

        Raises SessionLost if the session ended, Unavailable.
        """
        self.check()
        try:
            self._meta.put(key, value, self.lease, timeout_s)
        except LeaseGone as gone:
            raise SessionLost(f"session {self.id.hex()} ended: do it again in a new one") from gone

    def check_chain(self, timeout_s: float | None = None) -> None:
        """Reads the session's key back, to check that the store still has this session's last write (rule C2).

        Raises SessionLost if it has not (the session is then dead), Unavailable if that stays unknown.
        """
        deadline = EtcdDeadline(timeout_s, self._clock)
        if not self._chain.acquire(timeout=deadline.left_s()):
            raise Unavailable("the session is busy with another transaction: the call may be repeated")
        try:
            self.check()
            self._settle(deadline)
        finally:
            self._chain.release()

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the session and revokes its lease; if the store cannot be reached, the lease expires. Idempotent.

        Drop what depends on the session first: others may act on its end as soon as the lease is revoked.
        """
        deadline = EtcdDeadline(timeout_s)
        self._end(_CLOSED)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_s(0.5))
        with self._lock:
            revoke, self._lease_ended = not self._lease_ended, True
        if revoke:
            try:
                self._meta.revoke(self.lease, deadline.left_s())
            except (Unavailable, PermissionDenied):
                pass  # it ends by itself within its ttl

    def _write(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        announcement: tuple[int, bytes] | None,
        deadline: EtcdDeadline,
    ) -> TxnResult | None:
        """Tries once to write the next link; None if an earlier write of ours has landed instead: then try again."""
        before = self._written_at
        number = max((self._record.write, *self._unsettled)) + 1
        announced, held = (self._record.announced, self._record.held) if announcement is None else announcement
        record = SessionRecord(announced, number, held)
        chained = (*compares, ModifiedAt(self.key, before))
        writes = (*operations, Put(self.key, record.to_json(), self.lease))
        try:
            result = self._meta.txn(chained, writes, deadline.left_s(0.6))
        except Unavailable:
            self._unsettled[number] = record
            landed = self._settle(deadline)
            if landed == number:
                return TxnResult(True, self._written_at)
            if self._written_at != before:
                return None
            raise  # not there, but perhaps on its way: unknown
        except LeaseGone:
            self._settle(deadline)  # raises SessionLost if it was our own lease
            raise
        if result.succeeded:
            self._record, self._written_at = record, result.revision
            self._unsettled.clear()
            return result
        self._settle(deadline)
        return result if self._written_at == before else None

    def _settle(self, deadline: EtcdDeadline) -> int:
        """Reads the session's key back; returns the number of the write that landed last. Raises SessionLost."""
        found = self._meta.get(self.key, deadline.left_s())
        if found is None:
            raise self._broken("its key is gone from the store")
        if found.mod_revision == self._written_at:
            return self._record.write
        record = next((one for one in self._unsettled.values() if one.to_json() == found.value), None)
        if record is None:
            raise self._broken("the store lost its last write (restored from a snapshot?)")
        self._record, self._written_at = record, found.mod_revision
        # The others were made on top of the revision before: since this one has landed, they never can.
        self._unsettled.clear()
        return record.write

    def _broken(self, reason: str) -> SessionLost:
        self._end(reason)
        return SessionLost(f"session {self.id.hex()} ended: {reason}: take holds and pins again in a new one")

    def _end(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s()):
            before_s = self._acknowledged_s
            try:
                self.beat()
            except KVStoreError:
                pass  # whatever the reason, only time decides: the session lives until its ttl is over
            if not self.alive:
                break
            if self._acknowledged_s == before_s:
                self._ended.wait(min(1.0, self.ttl_s / 15))  # not answered, or not sent because this node lags
        if self._lost != _CLOSED and self._on_lost is not None:
            self._on_lost(self)

    def _pause_s(self) -> float:
        """Returns the seconds until the next keepalive is due, a third of the ttl after the last one; 0 if late."""
        with self._lock:
            return max(0.0, self._acknowledged_s + self.ttl_s / 3 - self._clock.monotonic_s())


# Presence: a node's standing in the cluster, one session after another.
#
# A session never comes back (rule V2); presence begins the next one.


BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 2.0
BACKOFF_S_MAX_UNREADY = 30.0
"""The longest pause between sessions that cannot be used, such as while the root does not answer."""

SessionCall = Callable[[Session], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Hook:
    on_new: SessionCall
    on_lost: SessionCall | None


class SessionManager:
    """Always one session, as far as the store allows: after a lost one the next begins as soon as the store answers.

    Attach whatever depends on the session. ``on_new`` runs for every new session before ``current`` hands it out (rule
    V1: first the session, then the view, only then answers). If it raises it leaves nothing behind, and the session
    ends; the next one begins after a while. ``on_lost`` runs once for every session that
    ``on_new`` returned for and that died, before the lease is revoked and the next session begins; it must not raise.
    One thread runs them all.
    """

    def __init__(
        self, meta: MetadataStore, keys: Keys, *, clock: Clock | None = None, ids: Ids | None = None, ttl_s: int = TTL_S
    ) -> None:
        check_session_ttl(ttl_s)
        self._meta = meta
        self._keys = keys
        self._clock = clock or SystemClock()
        self._ids = ids or RandomIds()
        self._ttl_s = ttl_s
        self._changed = threading.Condition()
        self._hooks: list[_Hook] = []
        self._called: list[_Hook] = []
        self._session: Session | None = None
        self._heard_s = self._clock.monotonic_s()
        """The last time that the store acknowledged something of the sessions before this one."""
        self._ready = False
        self._why_none: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def attach(self, on_new: SessionCall, on_lost: SessionCall | None = None) -> None:
        """Adds hooks for what depends on the session, before or after ``start``."""
        with self._changed:
            self._hooks.append(_Hook(on_new, on_lost))
            self._changed.notify_all()

    def start(self, wait_s: float | None = None) -> None:
        """Starts the thread; with ``wait_s`` also waits for the first session.

        Only if asked to wait, raises Unavailable if none began in that time, PermissionDenied if the store refused.
        """
        assert self._thread is None, "presence is started once"
        thread = threading.Thread(target=self._run, name="presence", daemon=True)
        thread.start()
        self._thread = thread
        if wait_s is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._ready or isinstance(self._why_none, PermissionDenied), timeout=wait_s)
            if self._ready:
                return
            error = self._none()
        self.close(timeout_s=0.1)  # the caller has waited long enough; the thread ends with the request it is in
        raise error

    def current(self) -> Session:
        """Returns the live session. Raises Unavailable while there is none."""
        with self._changed:
            if self._ready and self._session is not None and self._session.alive:
                return self._session
            raise self._none()

    @property
    def silent_s(self) -> float:
        """Seconds since the store last acknowledged a keepalive, or the opening of a session; since the start at most.

        It grows while the store does not answer, and while this node may not have a session.
        """
        with self._changed:
            session, heard_s = self._session, self._heard_s
        return session.silent_s if session is not None else max(0.0, self._clock.monotonic_s() - heard_s)

    @property
    def margin_s(self) -> float:
        """Seconds until the session ends unless a keepalive is acknowledged; 0 while there is none."""
        with self._changed:
            session = self._session if self._ready else None
        return max(0.0, self._ttl_s - session.silent_s) if session is not None and session.alive else 0.0

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the session (without ``on_lost``) and the thread. Idempotent."""
        deadline = EtcdDeadline(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_s())

    def _run(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while not self._closed:
            try:
                session = Session.open(
                    self._meta, self._keys, clock=self._clock, ids=self._ids, ttl_s=self._ttl_s, timeout_s=TIMEOUT_S
                )
            except Exception as error:  # noqa: BLE001 - without this thread the node never has a session again
                self._note(error)
                self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
                continue
            log.debug("session.new %s", session.id.hex())
            with self._changed:
                self._session = session
            lived = self._live(session)
            self._leave(session)
            backoff_s = BACKOFF_S_MIN if lived else min(2 * backoff_s, BACKOFF_S_MAX_UNREADY)
            if not lived:
                self._pause(backoff_s)

    def _live(self, session: Session) -> bool:
        """Starts ``session``, runs the hooks and waits until it ends; False if the start or a hook failed.

        A session that is not ready must not stay: collectors would wait for it, and it announces nothing.
        """
        try:
            session.start(on_lost=self._wake)
            while session.alive and not self._closed:
                with self._changed:
                    uncalled = [hook for hook in self._hooks if hook not in self._called]
                    if not uncalled:
                        self._ready = True
                        self._changed.notify_all()
                        self._changed.wait_for(
                            lambda: self._closed or not session.alive or len(self._hooks) > len(self._called),
                            timeout=self._ttl_s,
                        )
                        continue
                for hook in uncalled:
                    hook.on_new(session)
                    self._called.append(hook)
        except Exception as error:  # noqa: BLE001 - as above: a thread that cannot be started, for example
            self._note(error)
            return False
        return True

    def _leave(self, session: Session) -> None:
        with self._changed:
            self._heard_s = self._clock.monotonic_s() - session.silent_s
            self._session, self._ready = None, False
            called, self._called = self._called, []
        if not self._closed:
            log.warning("session.lost %s", session.id.hex())
            # Before the lease is revoked: until then no other node acts on the session's death.
            for hook in reversed(called):
                if hook.on_lost is not None:
                    hook.on_lost(session)
        session.close(TIMEOUT_S / 2)

    def _wake(self, session: Session) -> None:
        with self._changed:
            self._changed.notify_all()

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            session = self._session
            self._changed.wait_for(lambda: self._closed or not (session is None or session.alive), timeout=pause_s)

    def _note(self, error: Exception) -> None:
        if not isinstance(error, KVStoreError | WatchLost | LeaseGone):
            log.error("session.failed", exc_info=error)
        with self._changed:
            self._why_none = error
            self._changed.notify_all()

    def _none(self) -> KVStoreError:
        if self._closed:
            return Unavailable("this node has left the cluster: open a new one")
        if isinstance(self._why_none, PermissionDenied):
            return PermissionDenied(str(self._why_none))
        return Unavailable(f"this node has no session at the moment: {self._why_none or 'it is being opened'}")
