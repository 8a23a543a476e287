"""Follows clears by selection: one thread reads the orders, has them obeyed, and answers.

Every node of a cluster follows them, with memory or without: a node also forgets which chunks it knows to be present.
Separate from peers' digests, which nodes without memory do not follow. Rule P6 of kvstore/memory/MEMORY.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.background import Loop
from kvstore.census.selection import ClearOrder
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.meta.clears import Clears, OrderTold
from kvstore.meta.session import Session
from kvstore.meta.store import Watch, WatchLost

log = logging.getLogger(__name__)

WAIT_S = 0.5
RETRY_S = 1.0

Obey = Callable[[list[ClearOrder], list[ClearOrder]], bool]
"""``obey(new, all)``: drops what new orders name and forbids what all orders name; False if it is not done yet."""
Sweep = Callable[[list[ClearOrder]], None]
"""The slow part of an order, which nobody waits for."""


class ClearsFollower:
    """Follows orders while a session lives. It calls ``obey`` and ``sweep`` in its thread; they must not raise."""

    def __init__(self, clears: Clears, obey: Obey, sweep: Sweep, timeout_s: float) -> None:
        self._clears = clears
        self._obey = obey
        self._sweep = sweep
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._watch: Watch | None = None
        self._loop = Loop("kvstore-clears", self._changed, lambda: self._turn)
        # Only the thread uses the fields below.
        self._followed: Session | None = None
        self._orders: dict[bytes, ClearOrder] = {}
        self._obeyed: set[bytes] = set()
        self._asked: dict[bytes, bool] = {}
        """Orders whose issuer may wait for this session's answer, and whether they are done."""
        self._answered: set[bytes] = set()
        """Orders that this session has answered and that are not done."""
        self._told: set[bytes] = set()
        """All orders that this session has answered, done or not: each answer is a key in etcd."""
        self._stale: set[bytes] = set()
        """Answers to orders that are no longer kept. Their keys must go, or they last as long as the session."""
        self._unswept: list[ClearOrder] = []
        self._is_looser = False
        """True if an order ended, so that what it named is allowed again."""

    def begin(self, session: Session) -> None:
        """Follows orders from now on, as long as ``session`` lives."""
        with self._changed:
            self._session = session
            self._loop.start()
            self._changed.notify_all()

    def end(self, session: Session) -> None:
        """Notes that the session is over: its answers went with it. The orders themselves stay."""
        with self._changed:
            if self._session is session:
                self._session = None
            watch = self._watch
        if watch is not None:
            watch.close()

    def close(self, timeout_s: float) -> None:
        """Ends the watch and the thread. Idempotent."""
        with self._changed:
            self._loop.stop()
            self._session, watch = None, self._watch
        if watch is not None:
            watch.close()
        self._loop.close(timeout_s)

    def step(self, wait_s: float) -> bool:
        """Takes in new events, waiting up to ``wait_s`` for them; False if nothing can be heard at the moment."""
        session = self._session
        if session is None:
            return False
        try:
            if session is not self._followed or self._watch is None:
                self._read_afresh(session)
            else:
                for event in self._watch.next(wait_s) or ():
                    self._hear(self._clears.read(event.key, event.kv))
            self._answer(session)
        except WatchLost as lost:
            if not self._loop.closed:
                log.info("clears.watch_lost %s", lost)
            self._drop_watch()
            return True
        except KVStoreError as error:
            log.info("clears.not_followed %s", error)
            self._drop_watch()
            return False
        if self._unswept:
            swept, self._unswept = self._unswept, []
            self._sweep(swept)
        return True

    def _read_afresh(self, session: Session) -> None:
        self._drop_watch()
        snapshot = self._clears.snapshot(self._timeout_s)
        watch = self._clears.watch(snapshot.revision + 1)
        with self._changed:
            if self._session is not session:
                watch.close()
                return
            self._watch = watch
        if self._followed is not session:
            self._answered.clear()
            self._told.clear()
            self._stale.clear()
        self._followed, self._asked = session, {}
        told = [self._clears.read(each.key, each) for each in snapshot.items]
        for id in self._orders.keys() - {each.id for each in told if each is not None}:
            self._drop(id)
        for each in told:
            self._hear(each)

    def _hear(self, told: OrderTold | None) -> None:
        if told is None:
            return
        if told.content is None:
            self._drop(told.id)
            return
        if not told.is_done:
            self._asked[told.id] = False
        elif told.id in self._answered:
            self._asked[told.id] = True
            self._obeyed.discard(told.id)  # sweep again: it may have been read from the root meanwhile
        if told.id not in self._orders:
            try:
                self._orders[told.id] = ClearOrder.from_json(told.content)
            except InvalidRequest as error:
                self._asked.pop(told.id, None)  # from a later version: its issuer sees no answer from this node
                log.warning("clears.not_understood %s %s", told.id.hex(), error)

    def _drop(self, id: bytes) -> None:
        if self._orders.pop(id, None) is not None:
            self._is_looser = True
        self._obeyed.discard(id)
        self._asked.pop(id, None)
        self._answered.discard(id)
        if id in self._told:
            self._told.discard(id)
            self._stale.add(id)

    def _answer(self, session: Session) -> None:
        """Obeys new orders, and answers those that somebody waits for. The next step retries what is not done yet."""
        new = [id for id in self._orders if id not in self._obeyed]
        if new or self._is_looser:
            orders = [self._orders[id] for id in new]
            if self._obey(orders, list(self._orders.values())):
                self._is_looser = False
                self._obeyed.update(new)
                self._unswept += orders
        for id in self._asked.keys() & self._obeyed:
            self._told.add(id)
            self._stale.discard(id)
            self._clears.answer(session, id, self._timeout_s, done=self._asked[id])
            if self._asked.pop(id):
                self._answered.discard(id)
            else:
                self._answered.add(id)
        for id in [*self._stale]:
            self._clears.withdraw(session, id, self._timeout_s)
            self._stale.discard(id)

    def _drop_watch(self) -> None:
        with self._changed:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _turn(self) -> None:
        if not self.step(WAIT_S):
            self._wait(self._session)

    def _wait(self, session: Session | None) -> None:
        """Waits until there may be something to hear: a new session, or after ``RETRY_S`` the same one."""
        with self._changed:
            self._changed.wait_for(lambda: self._loop.closed or self._session not in (None, session), timeout=RETRY_S)
