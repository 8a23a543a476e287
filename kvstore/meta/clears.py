"""Orders to clear, and the answers of nodes that have dropped the chunks.

    /kv/<root>/clears/doing/<id>         an order in progress, under a lease that its clear renews: until it ends no
                                         node pins what it may be about to delete (gc/PROTOCOL.md, P5)
    /kv/<root>/clears/done/<id>          an order that is done, for nodes that are away
    /kv/<root>/cleared/<id>/<session>    a node has obeyed it; under its session's lease, until the order is done

The content of an order is opaque here, because metadata know no chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.clock import Clock, SystemClock
from kvstore.errors import Unavailable
from kvstore.meta.keys import Keys, SessionId, parse_id
from kvstore.meta.session import Session, live_sessions
from kvstore.meta.store import Delete, KeyValue, LeaseGone, LeaseId, MetadataStore, Put, Snapshot, Watch

ORDERS_MAX = 256
"""Limit on orders that are kept; beyond it, the oldest are removed."""
PASSING_S = 60
"""How long an order in progress is kept after it was issued or renewed. It forbids so long after its end."""


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """An order as read; its content is None if its key ended. ``is_done`` when the root has nothing of it."""

    id: bytes
    content: bytes | None
    is_done: bool


class PublishedClear:
    """An order in progress. Call ``check`` before each deletion."""

    def __init__(self, clears: Clears, id: bytes, content: bytes, lease: LeaseId, sent_s: float) -> None:
        self.id = id
        self._clears = clears
        self._content = content
        self._lease = lease
        self._sent_s = sent_s

    def check(self) -> None:
        """Raises Unavailable unless it certainly is in force: else nodes may pin, or take back, what is deleted.

        Half of its time is left then, in which a running deletion can end.
        """
        if self._clears.clock.monotonic_s() >= self._sent_s + self._clears.passing_s / 2:
            raise Unavailable("etcd did not keep the order while chunks were deleted: clear again")

    def renew(self, timeout_s: float) -> None:
        """Keeps it in force. Raises Unavailable."""
        sent_s = self._clears.clock.monotonic_s()
        if not self._clears.meta.keep_alive(self._lease, timeout_s):
            sent_s = float("-inf")  # it ended, and cannot come back
        self._sent_s = sent_s

    def done(self, timeout_s: float) -> None:
        """Announces to all nodes that the root has no chunk of the order any more. Raises Unavailable."""
        keys, meta = self._clears.keys, self._clears.meta
        self.check()
        ends = Delete(keys.clear_in_progress(self.id)), Put(keys.clear_done(self.id), self._content)
        meta.txn((), ends, timeout_s)
        self._sent_s = float("-inf")


class Clears:
    """The orders of one root."""

    def __init__(
        self, meta: MetadataStore, keys: Keys, clock: Clock | None = None, *, passing_s: int = PASSING_S
    ) -> None:
        self.meta = meta
        self.keys = keys
        self.clock = clock or SystemClock()
        self.passing_s = passing_s

    def publish(self, id: bytes, content: bytes, timeout_s: float) -> PublishedClear:
        """Publishes a new order, whose id is unused, to all nodes. Raises Unavailable: it may have been published."""
        sent_s = self.clock.monotonic_s()
        lease = self.meta.grant(self.passing_s, timeout_s)
        try:
            self.meta.put(self.keys.clear_in_progress(id), content, lease, timeout_s)
        except LeaseGone as gone:
            raise Unavailable("etcd lost a lease that it gave a moment ago: clear again") from gone
        return PublishedClear(self, id, content, lease, sent_s)

    def in_progress(self, timeout_s: float) -> list[bytes]:
        """Returns the orders of clears that may be deleting. Raises Unavailable."""
        return [kv.value for kv in self.meta.list(self.keys.clearing, timeout_s).items]

    def answer(self, session: Session, order: bytes, timeout_s: float) -> None:
        """Answers that this node has obeyed an order. Raises SessionLost, Unavailable."""
        session.put(self.keys.clear_answer(order, session.id), b"", timeout_s)

    def withdraw(self, session: Session, order: bytes, timeout_s: float) -> None:
        """Withdraws this session's answer to an order that is done, or no longer kept. Raises Unavailable."""
        self.meta.delete(self.keys.clear_answer(order, session.id), timeout_s)

    def silent(self, order: bytes, timeout_s: float) -> set[SessionId]:
        """Returns the sessions of live nodes that have not answered. Raises Unavailable."""
        # Read the sessions last: one that begins in between has read the order at its start, and answers as well.
        found = self.meta.list(self.keys.clear_answers(order), timeout_s).items
        answers = {SessionId(id) for kv in found if (id := parse_id(kv.key.rpartition("/")[2])) is not None}
        return live_sessions(self.meta, self.keys, timeout_s) - answers

    def snapshot(self, timeout_s: float) -> Snapshot:
        return self.meta.list(self.keys.clears, timeout_s)

    def watch(self, from_revision: int) -> Watch:
        return self.meta.watch(self.keys.clears, from_revision)

    def read(self, key: str, found: KeyValue | None) -> PublishedOrder | None:
        """Parses a key as found, None if it is gone; returns None for a key that this version does not know."""
        state, _, text = key.removeprefix(self.keys.clears).partition("/")
        order = parse_id(text)
        if order is None:
            return None
        return PublishedOrder(order, None if found is None else found.value, state == "done")

    def trim(self, timeout_s: float) -> int:
        """Removes the oldest orders that are done beyond ORDERS_MAX; returns how many. Raises Unavailable."""
        done = self.meta.list(self.keys.clear_done(b""), timeout_s).items
        kept = sorted(done, key=lambda kv: kv.create_revision)
        for kv in kept[: max(0, len(kept) - ORDERS_MAX)]:
            self.meta.delete(kv.key, timeout_s)
        return max(0, len(kept) - ORDERS_MAX)
