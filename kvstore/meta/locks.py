"""A lock that ends with its holder's session: advisory, to save work, never for safety.

A holder that was paused for longer than its session lasts goes on as if it still had the lock; whoever needs more than
"mostly one at a time" compares revisions in the transaction that matters.
"""

from __future__ import annotations

from types import TracebackType

from kvstore.errors import Overloaded, SessionLost, Unavailable
from kvstore.meta.deadline import TRIES_MAX, Deadline
from kvstore.meta.interface import Absent, Delete, LeaseGone, Meta, ModifiedAt, Put, WatchLost
from kvstore.meta.keys import Keys
from kvstore.meta.session import Session
from kvstore.sources import Ids, RandomIds

ACQUIRE_S = 10.0
POLL_S = 5.0
REQUEST_S_MIN = 0.05


class Lock:
    """The lock ``name`` of one root, for one holder. As a context it waits up to 10 s and raises Overloaded."""

    def __init__(self, meta: Meta, keys: Keys, name: str, session: Session, ids: Ids | None = None) -> None:
        self.name = name
        self._meta = meta
        self._key = keys.lock(name)
        self._session = session
        self._holder = f"{session.id.hex()} {(ids or RandomIds()).fresh().hex()}".encode()
        self._revision: int | None = None

    @property
    def held(self) -> bool:
        """Whether this holder has it, as far as it can know."""
        return self._revision is not None and self._session.alive

    def acquire(self, timeout_s: float = ACQUIRE_S) -> bool:
        """Takes the lock, waiting up to ``timeout_s``; False where somebody else kept it.

        Raises SessionLost, or Unavailable where the store did not answer.
        """
        deadline = Deadline(timeout_s)
        tries_left = TRIES_MAX
        while True:
            self._session.check()
            try:
                puts = (Put(self._key, self._holder, self._session.lease),)
                result = self._meta.txn((Absent(self._key),), puts, deadline.left_s(0.6))
            except Unavailable:
                tries_left -= 1
                if not tries_left or deadline.over:
                    raise
            except LeaseGone as gone:
                raise SessionLost(f"session {self._session.id.hex()} ended: take the lock in a new one") from gone
            else:
                if result.succeeded:
                    self._revision = result.revision
                    return True
            # Also the reading back of a lost reply, this one's or an earlier one's: the value says whose it is.
            found = self._meta.get(self._key, deadline.left_s())
            if found is not None and found.value == self._holder:
                self._revision = found.mod_revision
                return True
            if found is not None:
                self._wait(found.mod_revision + 1, deadline)
            # Too late for another try: one that is cut short could take the lock without our knowing.
            if deadline.left_s() < REQUEST_S_MIN:
                return False

    def release(self, timeout_s: float | None = None) -> bool:
        """Gives the lock up. False where the store could not confirm it: then it ends with the session. Idempotent."""
        revision, self._revision = self._revision, None
        if revision is None:
            return True
        deadline = Deadline(timeout_s)
        try:
            self._meta.txn((ModifiedAt(self._key, revision),), (Delete(self._key),), deadline.left_s(0.6))
            return True
        except Unavailable:
            pass
        try:
            found = self._meta.get(self._key, deadline.left_s())
        except Unavailable:
            return False
        return found is None or found.mod_revision != revision

    def __enter__(self) -> Lock:
        if not self.acquire():
            raise Overloaded(f"lock {self.name!r} was held by somebody else for {ACQUIRE_S:g} s: try again later")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _wait(self, from_revision: int, deadline: Deadline) -> None:
        """Waits for a change of the key, a little at a time, so that a lost watch costs some seconds."""
        watch = self._meta.watch(self._key, from_revision)
        try:
            watch.next(min(POLL_S, deadline.left_s()))
        except WatchLost:
            pass  # the next round reads the key afresh
        finally:
            watch.close()
