"""Barriers: while a clear deletes, nobody pins what it may be about to delete (gc/PROTOCOL.md, P5).

    /kv/<root>/clearing/<id>    the order of a clear that is deleting, under a lease that it renews

Apart from ``clears.py``: nodes obey an order long before and after that, and a node alone has nobody to tell, but pins.
"""

from __future__ import annotations

from kvstore.errors import PermissionDenied, Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.store import LeaseGone, LeaseId, Meta
from kvstore.sources import Clock

BARRIER_S = 60
"""A barrier goes this long after its clear has died."""


class Barrier:
    """A barrier that was put up. Call ``check`` before each deletion."""

    def __init__(self, meta: Meta, lease: LeaseId, sent_s: float, clock: Clock) -> None:
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

    def __init__(self, meta: Meta, keys: Keys, clock: Clock) -> None:
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
            raise Unavailable("etcd lost a lease that it gave a moment ago: clear again") from gone
        return Barrier(self._meta, lease, sent_s, self._clock)

    def orders(self, timeout_s: float) -> list[bytes]:
        """Returns the orders of all barriers that stand. Raises Unavailable."""
        return [kv.value for kv in self._meta.list(self._keys.barriers, timeout_s).items]
