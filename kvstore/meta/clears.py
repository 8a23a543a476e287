"""Orders to clear by selection, the answers of nodes that have dropped the chunks, and the barrier against pins.

    /kv/<root>/clears/<id>               an order, under a lease that its issuer renews
    /kv/<root>/cleared/<id>/<session>    a node has obeyed it; under its session's lease, until the order is done
    /kv/<root>/clearing/<id>             the order of a clear that is deleting, under a lease that it renews: until
                                         then no node pins what it may be about to delete (gc/PROTOCOL.md, P5)

The content of an order is opaque here, because metadata know no chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.clock import Clock
from kvstore.errors import PermissionDenied, Unavailable
from kvstore.meta.keys import Keys, SessionId, parse_id
from kvstore.meta.session import Session, live_sessions
from kvstore.meta.store import KeyValue, LeaseGone, LeaseId, MetadataStore, Snapshot, Watch

PASSING_S = 60
"""How long an order is kept after it was issued, last renewed, or done."""
BARRIER_S = 60
"""A barrier ends this long after its clear has died."""
LOST_LEASE = "etcd lost a lease that it gave a moment ago: clear again"
_WAITING, _DONE = b"\x00", b"\x01"


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """An order as read; its content is None if it is no longer kept. ``is_done`` when the root has nothing of it."""

    id: bytes
    content: bytes | None
    is_done: bool


class Clears:
    """The orders of one root."""

    def __init__(self, meta: MetadataStore, keys: Keys, *, passing_s: int = PASSING_S) -> None:
        self._meta = meta
        self._keys = keys
        self.passing_s = passing_s

    def publish(self, order: bytes, content: bytes, timeout_s: float) -> LeaseId:
        """Publishes a new order, whose id is unused, to all nodes; returns the lease that ``renew`` takes.

        Raises Unavailable: the order may have been published.
        """
        return self._put(order, _WAITING + content, timeout_s)

    def renew(self, lease: LeaseId, timeout_s: float) -> bool:
        """Keeps an order for another ``passing_s``; False if it is over. Raises Unavailable."""
        return self._meta.keep_alive(lease, timeout_s)

    def done(self, order: bytes, content: bytes, timeout_s: float) -> None:
        """Announces to all nodes that the root has no chunk of the order any more. Raises Unavailable."""
        self._put(order, _DONE + content, timeout_s)

    def answer(self, session: Session, order: bytes, timeout_s: float) -> None:
        """Answers that this node has obeyed an order. Raises SessionLost, Unavailable."""
        session.put(self._keys.clear_answer(order, session.id), b"", timeout_s)

    def withdraw(self, session: Session, order: bytes, timeout_s: float) -> None:
        """Withdraws this session's answer to an order that is done, or no longer kept. Raises Unavailable."""
        self._meta.delete(self._keys.clear_answer(order, session.id), timeout_s)

    def silent(self, order: bytes, timeout_s: float) -> set[SessionId]:
        """Returns the sessions of live nodes that have not answered. Raises Unavailable."""
        # Read the sessions last: one that begins in between has read the order at its start, and answers as well.
        found = self._meta.list(self._keys.clear_answers(order), timeout_s).items
        answers = {SessionId(id) for kv in found if (id := parse_id(kv.key.rpartition("/")[2])) is not None}
        return live_sessions(self._meta, self._keys, timeout_s) - answers

    def snapshot(self, timeout_s: float) -> Snapshot:
        return self._meta.list(self._keys.clears, timeout_s)

    def watch(self, from_revision: int) -> Watch:
        return self._meta.watch(self._keys.clears, from_revision)

    def read(self, key: str, found: KeyValue | None) -> PublishedOrder | None:
        """Parses a key as found, None if it is gone; returns None for a key that this version does not know."""
        order = parse_id(key.removeprefix(self._keys.clears))
        if order is None or found is None:
            return None if order is None else PublishedOrder(order, None, True)
        return PublishedOrder(order, found.value[1:], found.value[:1] == _DONE)

    def _put(self, order: bytes, value: bytes, timeout_s: float) -> LeaseId:
        lease = self._meta.grant(self.passing_s, timeout_s)
        try:
            self._meta.put(self._keys.clear_order(order), value, lease, timeout_s)
        except LeaseGone as gone:
            raise Unavailable(LOST_LEASE) from gone
        return lease


class Barrier:
    """A barrier that was put up. Call ``check`` before each deletion."""

    def __init__(self, meta: MetadataStore, lease: LeaseId, sent_s: float, clock: Clock) -> None:
        self._meta = meta
        self._lease = lease
        self._clock = clock
        self._sent_s = sent_s

    @property
    def stands(self) -> bool:
        """True while it certainly stands: half of its time is left, in which a running deletion can end."""
        return self._clock.monotonic_s() < self._sent_s + BARRIER_S / 2

    def check(self) -> None:
        """Raises Unavailable unless it stands: then pins may be taken again, and nothing may be deleted."""
        if not self.stands:
            raise Unavailable("etcd did not keep the barrier against pins while chunks were deleted: clear again")

    def renew(self, timeout_s: float) -> None:
        """Keeps it up. Raises Unavailable."""
        sent_s = self._clock.monotonic_s()
        if not self._meta.keep_alive(self._lease, timeout_s):
            sent_s = float("-inf")  # it went, and cannot come back
        self._sent_s = sent_s

    def take_down(self, timeout_s: float) -> None:
        """Allows pins again, once nothing is being deleted any more. If etcd does not answer, the lease ends it."""
        self._sent_s = float("-inf")
        try:
            self._meta.revoke(self._lease, timeout_s)
        except (Unavailable, PermissionDenied):
            pass


class Barriers:
    """The barriers of one root."""

    def __init__(self, meta: MetadataStore, keys: Keys, clock: Clock) -> None:
        self._meta = meta
        self._keys = keys
        self._clock = clock

    def put_up(self, id: bytes, order: bytes, timeout_s: float) -> Barrier:
        """Puts up a new barrier. Raises Unavailable: then it may be there until its time is over."""
        sent_s = self._clock.monotonic_s()
        lease = self._meta.grant(BARRIER_S, timeout_s)
        try:
            self._meta.put(self._keys.barrier(id), order, lease, timeout_s)
        except LeaseGone as gone:
            raise Unavailable(LOST_LEASE) from gone
        return Barrier(self._meta, lease, sent_s, self._clock)

    def orders(self, timeout_s: float) -> list[bytes]:
        return [kv.value for kv in self._meta.list(self._keys.barriers, timeout_s).items]
