"""The incarnations of a node's publications, and the record on the root that says which session used them.

Separate from chunks and images, which ask for them: one counter serves the whole node, so that no two are equal.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Callable

from kvstore.errors import KVStoreError
from kvstore.format import header
from kvstore.format.header import Incarnation, LineageId, Writer
from kvstore.root.identity import publish_writer
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids
from kvstore.version import VERSION

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Wait between two attempts at a record that the root refused."""
OWED_MAX = 16
"""Limit on sessions whose record is still to be written; beyond it, the oldest stay unknown."""


class Incarnations:
    """The incarnations of one node. Thread-safe. ``session`` returns the id of the session that it writes under."""

    def __init__(
        self, root: Root, session: Callable[[], bytes], node: bytes, clock: Clock, ids: Ids, label: str = ""
    ) -> None:
        header.check_label(label)
        self._root = root
        self._session = session
        self._node = node
        self._clock = clock
        self._ids = ids
        self._label = label
        self._numbers = itertools.count(int.from_bytes(ids.fresh()[:4], "big"))
        self._lock = threading.Lock()
        self._current: tuple[bytes, LineageId] | None = None
        self._owed: dict[bytes, float] = {}
        """Sessions that wrote and have no record yet, each with the time (monotonic) of the next attempt."""

    @property
    def owes_record(self) -> bool:
        """True if ``record`` has something to do."""
        return bool(self._owed)

    def fresh(self) -> Incarnation:
        """Returns an incarnation for one publication now."""
        return self.fresh_each(1)[0]

    def fresh_each(self, count: int) -> list[Incarnation]:
        """Returns incarnations for ``count`` publications now."""
        current, now_s = self._current, self._clock.now_s()
        if current is None or current[0] != self._session():
            current = self._begin()
        return [header.incarnation(current[1], now_s, next(self._numbers)) for _ in range(count)]

    def renewed(self, found: Incarnation) -> Incarnation:
        """Returns an incarnation for publishing again what this node or another wrote before as ``found``."""
        return header.renewed(found, next(self._numbers))

    def record(self) -> None:
        """Writes on the root who this node is, once for each of its sessions, before it publishes what that session
        wrote.

        Called on lanes, after ``fresh``. Never raises KVStoreError: chunks without a record have an unknown writer,
        which is no reason not to store them, and a later publication tries again.
        """
        if self._owed:
            for session in [*self._owed]:
                self._record(session)

    def _begin(self) -> tuple[bytes, LineageId]:
        with self._lock:
            session = self._session()
            if self._current is None or self._current[0] != session:
                self._current = (session, header.lineage_id(session))
                self._owed[session] = self._clock.monotonic_s()
                while len(self._owed) > OWED_MAX:
                    del self._owed[next(iter(self._owed))]
            return self._current

    def _record(self, session: bytes) -> None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            if now_s < self._owed.get(session, math.inf):
                return
            self._owed[session] = now_s + RETRY_S  # set before the attempt, so that no other lane tries too
        try:
            publish_writer(self._root, self._writer(session), ids=self._ids, clock=self._clock)
        except KVStoreError as error:
            log.warning(
                "lineage.not_recorded %s %s", session.hex(), str(error)
            )  # not the error itself, whose traceback keeps callers' memory
            return
        with self._lock:
            self._owed.pop(session, None)

    def _writer(self, session: bytes) -> Writer:
        return Writer(
            session=session.hex(),
            node=self._node.hex(),
            host=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            started_s=round(self._clock.now_s(), 3),
            python=sys.version.partition(" ")[0],
            label=self._label,
        )
