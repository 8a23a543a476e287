"""The keys with which a collector speaks to nodes: ``gc/full``, that the root is full, and ``gc/room``, what is left.

Both lie under the lease of the collector, and so end with it.  Apart from the level that they follow (``capacity.py``)
and the rule for what nodes may write (``room.py``), which do no I/O.
"""

from __future__ import annotations

import logging
import math

from kvstore.errors import Unavailable
from kvstore.meta.interface import Absent, Delete, KeyValue, LeaseGone, LeaseId, Meta, Put, ValueIs
from kvstore.meta.keys import Keys
from kvstore.meta.usage import Room
from kvstore.sources import Clock
from kvstore_gc.capacity import LATE_S_MIN, Level, Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.reports import Reports
from kvstore_gc.room import WORDS_PER_PACE, is_news, room_of

log = logging.getLogger(__name__)

SIGN_AGAIN_S = 5.0
"""How long after another collector was found to have put ``gc/full`` we look again."""
ROOM_AGAIN_S = 0.25
"""How long for ``gc/room``: nodes write freely until it is there."""
COUNTED_S = 0.25
"""How old the number of nodes may be."""


class FullSign:
    """The key ``gc/full``, which makes nodes shed puts; it lies under this collector's lease, and so ends with it.

    Several collectors may want it: the first one puts it, the others look again from time to time.
    """

    def __init__(self, meta: Meta, keys: Keys, collectors: Collectors, clock: Clock, timeout_s: float = 5.0) -> None:
        self._meta = meta
        self._key = keys.gc_full
        self._collectors = collectors
        self._clock = clock
        self._timeout_s = timeout_s
        self._put_by: bytes | None = None
        self._looked_by: bytes | None = None
        self._again_s = 0.0

    @property
    def is_shown(self) -> bool:
        """Whether this collector put it."""
        return self._put_by is not None

    def follow(self, watermarks: Watermarks) -> None:
        """Puts or takes back the sign where the level asks for it. Raises Unavailable, PermissionDenied.

        Between the high watermark and the stop mark it stays as it is, so that it does not flicker.
        """
        level, mine = watermarks.level, self._collectors.me
        if level is None or mine is None:
            return
        if self._put_by != mine[0]:
            self._put_by = None  # what was put under an older lease has ended with it
        if self._looked_by != mine[0]:
            # Else a sign that no lease ends would refuse puts for ever, also on an empty root.
            drop_stray(self._meta, self._meta.get(self._key, self._timeout_s), self._timeout_s)
            self._looked_by = mine[0]
        if level.over(watermarks.stop) and self._put_by is None:
            self._put(*mine, level)
        elif self._put_by is not None and not level.over(watermarks.high):
            self._meta.txn((ValueIs(self._key, self._put_by),), (Delete(self._key),), self._timeout_s)
            self._put_by = None
            log.warning("gc.full_over used_bytes=%d capacity_bytes=%d", level.used_bytes, level.capacity_bytes)

    def _put(self, collector: bytes, lease: LeaseId, level: Level) -> None:
        if self._clock.monotonic_s() < self._again_s:
            return
        try:
            won = self._meta.txn((Absent(self._key),), (Put(self._key, collector, lease),), self._timeout_s).succeeded
        except LeaseGone as gone:
            raise Unavailable("the collector's lease ended: it joins again") from gone
        found = None
        if not won:
            found = self._meta.get(self._key, self._timeout_s)
            won = found is not None and found.value == collector  # ours, whose reply was lost
        if won:
            self._put_by = collector
            log.warning(
                "gc.full nodes shed puts until the root is below its high watermark: used_bytes=%d capacity_bytes=%d",
                level.used_bytes,
                level.capacity_bytes,
            )
        elif not drop_stray(self._meta, found, self._timeout_s):
            self._again_s = self._clock.monotonic_s() + SIGN_AGAIN_S


class RoomSign:
    """Puts the key under this collector's lease, and follows the level. One thread.

    Where several collectors run one of them has it; the others look from time to time whether it is gone.
    """

    def __init__(
        self, meta: Meta, keys: Keys, collectors: Collectors, reports: Reports, clock: Clock, timeout_s: float = 5.0
    ) -> None:
        self._meta = meta
        self._keys = keys
        self._collectors = collectors
        self._reports = reports
        self._clock = clock
        self._timeout_s = timeout_s
        self._said: Room | None = None
        self._said_by: LeaseId | None = None
        self._said_s = 0.0
        self._again_s = 0.0
        self._nodes_count, self._counted_s = 0, -math.inf

    def follow(self, watermarks: Watermarks) -> None:
        """Says what there is room for, where that has changed. Raises Unavailable, PermissionDenied."""
        mine, now_s = self._collectors.me, self._clock.monotonic_s()
        if mine is None or not watermarks.is_known or now_s < self._again_s:
            return
        if self._said_by != mine[1]:
            self._said = None  # what was put under an older lease ends with it
        if self._said is not None and now_s - self._said_s < self._said.pace_s / WORDS_PER_PACE:
            return
        if now_s - self._counted_s >= COUNTED_S:
            self._nodes_count, self._counted_s = self._meta.count(self._keys.sessions, self._timeout_s), now_s
        room = room_of(watermarks, self._nodes_count, self._reports.revision)
        watermarks.late_s = LATE_S_MIN + 2 * room.pace_s
        if self._said is None or is_news(self._said, room):
            self._say(room, mine[1])

    def _say(self, room: Room, lease: LeaseId) -> None:
        key = self._keys.gc_room
        compare = Absent(key) if self._said is None else ValueIs(key, self._said.to_json())
        self._said_s = self._clock.monotonic_s()
        try:
            won = self._meta.txn((compare,), (Put(key, room.to_json(), lease),), self._timeout_s).succeeded
        except LeaseGone as gone:
            raise Unavailable("the collector's lease ended: it joins again") from gone
        if won:
            self._said, self._said_by = room, lease
            return
        found = self._meta.get(key, self._timeout_s)
        if found is not None and found.lease == lease:  # ours, whose reply was lost
            self._said, self._said_by = Room.from_json(found.value), lease
        else:
            self._said = None
            if found is not None and not drop_stray(self._meta, found, self._timeout_s):
                self._again_s = self._said_s + ROOM_AGAIN_S


def drop_stray(meta: Meta, found: KeyValue | None, timeout_s: float) -> bool:
    """Deletes a key that lies under no lease, as found; whether it did. Raises Unavailable, PermissionDenied.

    Collectors put their signs under a lease.  One without was put by hand, or by a tool that copied etcd without its
    leases: nobody's end would end it.
    """
    if found is None or found.lease:
        return False
    log.warning("gc.stray_key key=%s has no lease, so no collector put it: deleted", found.key)
    return meta.txn((ValueIs(found.key, found.value),), (Delete(found.key),), timeout_s).succeeded
