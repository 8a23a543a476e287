"""The key ``gc/room``: what collectors ask nodes to report, and how much each may write before it was counted.

It makes the limit independent of how late anything is: all nodes together may write, beyond what a collector has
counted, no more than lies between the stop mark and the capacity, and nothing once it has counted up to that mark.
"""

from __future__ import annotations

import logging
import math

from kvstore.errors import Unavailable
from kvstore.meta.interface import Absent, LeaseGone, LeaseId, Meta, Put, ValueIs
from kvstore.meta.keys import Keys
from kvstore.meta.usage import Room
from kvstore.sources import Clock
from kvstore_gc.capacity import LATE_S_MIN, Watermarks, drop_stray
from kvstore_gc.collectors import Collectors
from kvstore_gc.reports import Reports

log = logging.getLogger(__name__)

REPORTS_PER_S = 100
"""What all nodes together are asked not to exceed."""
PACE_S_MIN = 0.1
STEP_SHARE = 1 / 4
"""Of a node's share of the room between the high watermark and the stop mark: it reports when it wrote so much."""
CHANGE_SHARE = 1 / 8
"""By so much what a node may write must have changed for a new word, unless there are new reports."""
SPARE_SHARE = 1 / 8
"""For nodes that join before the next word: one more for so many, at least one."""
WORDS_PER_PACE = 10
COUNTED_S = 0.25
"""How old the number of nodes may be."""
AGAIN_S = 0.25
"""A collector that found the key to be another one's looks again after this: nodes write freely until it is there."""


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
        if self._said is None or _is_news(self._said, room):
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
                self._again_s = self._said_s + AGAIN_S


def room_of(watermarks: Watermarks, nodes_count: int, revision: int) -> Room:
    """What there is room for when the reports up to ``revision`` are counted (gc/PROTOCOL.md, section 6).

    Together nodes may write what lies between the stop mark and the capacity, at any level below the mark: a larger
    allowance at a lower level would still be in the hands of a node that hears of nothing since.
    """
    level, nodes_count = watermarks.level, max(1, nodes_count)
    pace_s = max(PACE_S_MIN, nodes_count / REPORTS_PER_S)
    if level is None:
        return Room(revision, None, None, pace_s)  # the first survey goes on: nodes say where they begin
    shares = nodes_count + max(1, round(nodes_count * SPARE_SHARE))
    beyond_bytes = 0.0 if level.over(watermarks.stop) else (1 - watermarks.stop) * level.capacity_bytes
    band_bytes = (watermarks.stop - watermarks.high) * level.capacity_bytes
    return Room(revision, int(beyond_bytes / shares), max(1, int(STEP_SHARE * band_bytes / nodes_count)), pace_s)


def _is_news(said: Room, room: Room) -> bool:
    if said.allowance_bytes is None or room.allowance_bytes is None:
        return said.allowance_bytes != room.allowance_bytes
    changed = abs(room.allowance_bytes - said.allowance_bytes)
    return (
        room.revision > said.revision
        or room.pace_s != said.pace_s
        or changed > CHANGE_SHARE * max(room.allowance_bytes, said.allowance_bytes)
    )
