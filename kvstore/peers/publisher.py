"""Publishes what this node's memory holds: changed digests, seldom enough and small enough for etcd.

Depends on the session: a new one publishes everything again, because the old keys go with their lease. It has a thread
of its own, so that no call waits for etcd (rule P1). Every step is a method, for tests with a clock of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.background import Decision, Loop
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format.checksum import checksum
from kvstore.meta.digests import SHARDS, Digests
from kvstore.meta.session import Session
from kvstore.meta.workers import WorkerRecord
from kvstore.node.counters import Counters
from kvstore.peers.digest import DIGEST_BYTES_MAX, encode
from kvstore.peers.limits import STEP_BYTES_MAX, PeerLimits
from kvstore.sources import Clock

log = logging.getLogger(__name__)

KEY_BYTES = 128
"""Bytes that a key and its envelope add to a digest, about."""
BURST_BYTES_MIN = DIGEST_BYTES_MAX + KEY_BYTES
"""After a quiet time, one second's share may be written at once, and never less than one digest."""
NOTHING = checksum(b"")
WITHDRAW_S = 1.0


class Source(Protocol):
    """The content to report: the memory of this node."""

    def changes(self) -> set[int]:
        """Returns the shards in which chunks came or went since the last call."""
        ...

    def prints(self, shard: int) -> npt.NDArray[np.uint32]:
        """Returns the sorted prints of a shard's chunks."""
        ...


class Publisher:
    """Keeps etcd in step with ``source``, under the session that ``begin`` names, for the worker of ``record``.

    ``peers`` returns how many others there are, to share what etcd bears.
    """

    def __init__(
        self,
        digests: Digests,
        source: Source,
        record: WorkerRecord,
        limits: PeerLimits,
        counters: Counters,
        clock: Clock,
        peers: Callable[[], int],
    ) -> None:
        self._digests = digests
        self._source = source
        self._record = record
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._peers = peers
        self._changed = threading.Condition()  # guards the session that is published under
        self._session: Session | None = None
        self._loop = Loop("kvstore-peers-publish", self._changed, self._next)
        self._due_s = 0.0
        """Time (monotonic) of the next step, unless a session begins before."""
        # Only the thread uses the fields below.
        self._told_in: Session | None = None
        self._is_listed = False
        self._sums: dict[int, int] = {}
        self._due: dict[int, None] = {}
        self._room_bytes = float(BURST_BYTES_MIN)
        self._filled_s = clock.monotonic_s()

    def start(self) -> None:
        """Starts the thread."""
        self._loop.start()

    def begin(self, session: Session) -> None:
        """Publishes under ``session`` from now on."""
        with self._changed:
            self._session, self._due_s = session, 0.0  # its peers know nothing yet
            self._changed.notify_all()

    def end(self, session: Session) -> None:
        """Notes that the session is over, and with it all that was published."""
        with self._changed:
            if self._session is session:
                self._session = None

    def step(self) -> None:
        """Publishes what is due, as far as the rate allows."""
        self._due |= dict.fromkeys(sorted(self._source.changes()))
        session = self._session
        if session is None:
            return
        if session is not self._told_in:
            self._told_in, self._is_listed = session, False
            self._sums, self._due = {}, dict.fromkeys(range(SHARDS))
        values, sums = self._chosen()
        while values or not self._is_listed:
            if not self._publish(session, values):
                self._due = dict.fromkeys(values) | self._due
                break
            self._sums |= sums
            values, sums = self._chosen()

    def close(self, timeout_s: float) -> None:
        """Asks others to read no more from here, and ends the thread. Idempotent."""
        already = self._loop.closed
        self._loop.close(timeout_s)
        session = self._session
        if already or session is None or not session.alive:
            return
        try:
            self._digests.withdraw(session, min(WITHDRAW_S, timeout_s))
        except KVStoreError:
            pass  # it goes with the session

    def _chosen(self) -> tuple[dict[int, bytes], dict[int, int]]:
        """Returns the digests to write now, oldest change first, and their sums; unchanged ones are no longer due."""
        now_s, rate = self._clock.monotonic_s(), self._limits.rate_bytes_per_s(self._peers())
        room = self._room_bytes + (now_s - self._filled_s) * rate
        room, self._filled_s = min(room, max(rate, BURST_BYTES_MIN)), now_s
        values: dict[int, bytes] = {}
        sums: dict[int, int] = {}
        left = STEP_BYTES_MAX
        for shard in list(self._due):
            value = encode(self._source.prints(shard))
            total = checksum(value)
            if total != self._sums.get(shard, NOTHING):
                size = len(value) + KEY_BYTES
                if size > min(room, left):
                    break
                room, left = room - size, left - size
                values[shard], sums[shard] = value, total
            del self._due[shard]
        self._room_bytes = room
        return values, sums

    def _publish(self, session: Session, values: dict[int, bytes]) -> bool:
        """Writes digests; False if they have to be written again."""
        try:
            record = None if self._is_listed else self._record
            self._digests.publish(session, values, record, self._limits.meta_deadline_s)
        except KVStoreError as error:
            # The write may have been done all the same: reading the same digest twice does no harm.
            log.debug("peers.not_published %s", error)
            return False
        self._is_listed = True
        self._counters.add(NodeCount.PEERS_SYNCS)
        self._counters.add(NodeCount.PEERS_DIGESTS, len(values))
        self._counters.add(NodeCount.PEERS_DIGEST_BYTES, sum(map(len, values.values())))
        return True

    def _next(self) -> Decision:
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return self._due_s - now_s
        self._due_s = now_s + self._limits.sync_interval_s
        return self.step
