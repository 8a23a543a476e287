"""The keys with which a collector speaks to nodes: ``gc/full`` (the root is full) and ``gc/room`` (how much is left).

Both lie under the lease of the collector, and so end with it. ``room_of`` makes the limit independent of how late
anything is: beyond what a collector has counted, all nodes together may write no more than lies between the stop mark
and the capacity, and nothing once it has counted up to that mark.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from kvstore.errors import Unavailable
from kvstore.meta.interface import Absent, Delete, KeyValue, LeaseGone, LeaseId, Put, ValueIs
from kvstore.meta.usage import Room
from kvstore_gc.capacity import LATE_S_MIN, Level, Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.reports import Reports
from kvstore_gc.site import Site

log = logging.getLogger(__name__)

FULL_AGAIN_S = 5.0
"""If another collector has put ``gc/full``, look again after this."""
ROOM_AGAIN_S = 0.25
"""If another collector has put ``gc/room``, look again after this: nodes write freely until it is there."""
COUNTED_S = 0.25
"""The greatest age of the number of nodes."""
SAID_S = 60.0
"""A root at its limit fills up again and again: the log says so once in this time."""
UNHEARD_S = 60.0
"""Nodes have heard the first word after this, and reported what they wrote before it."""

REPORTS_PER_S = 100
"""The limit of reports of all nodes together."""
PACE_S_MIN = 0.1
WORDS_PER_PACE = 10
"""The key is written at most this often in the time between two reports of a node."""
STEP_SHARE = 1 / 4
"""A node reports when it wrote this share of its part of the room between the high watermark and the stop mark."""
CHANGE_SHARE = 1 / 8
"""An allowance that changed by this share is news, also without new reports."""
SPARE_SHARE = 1 / 8
"""Spare shares, for nodes that join before the key is written again: one for every eight, at least one."""


def room_of(watermarks: Watermarks, nodes_count: int, revision: int) -> Room:
    """The room that nodes have when the reports up to ``revision`` are counted (gc/PROTOCOL.md, section 6).

    Together nodes may write what lies between the stop mark and the capacity, at any level below the mark: a larger
    allowance at a lower level would stay with a node that hears nothing any more.
    """
    level, nodes_count = watermarks.level, max(1, nodes_count)
    pace_s = max(PACE_S_MIN, nodes_count / REPORTS_PER_S)
    if level is None:
        return Room(revision, None, None, pace_s)  # the first survey goes on: nodes say where they begin
    shares = nodes_count + max(1, round(nodes_count * SPARE_SHARE))
    beyond_bytes = 0.0 if level.over(watermarks.stop) else (1 - watermarks.stop) * level.capacity_bytes
    band_bytes = (watermarks.stop - watermarks.high) * level.capacity_bytes
    step_bytes = max(1, int(STEP_SHARE * band_bytes / nodes_count))
    return Room(revision, int(beyond_bytes / shares), step_bytes, pace_s, level.used_bytes, level.capacity_bytes)


def is_news(said: Room, room: Room) -> bool:
    """True if others should hear of ``room``, after ``said``."""
    if said.allowance_bytes is None or room.allowance_bytes is None:
        return said.allowance_bytes != room.allowance_bytes
    return (
        room.revision > said.revision
        or room.pace_s != said.pace_s
        or _differ(room.allowance_bytes, said.allowance_bytes)
        or _differ(room.used_bytes or 0, said.used_bytes or 0)  # for people: nodes do not need it
    )


def _differ(now_bytes: int, then_bytes: int) -> bool:
    return abs(now_bytes - then_bytes) > CHANGE_SHARE * max(now_bytes, then_bytes)


class _Sign:
    """One key under this collector's lease. Several collectors may want it: the first one has it. One thread."""

    def __init__(self, site: Site, collectors: Collectors, key: str, again_s: float) -> None:
        self._clock = site.clock
        self._collectors = collectors
        self._key = key
        self._meta = site.meta
        self._timeout_s = site.timeout_s
        self._pause_s = again_s
        self._again_s = 0.0

    def _put(self, value: bytes, lease: LeaseId, before: bytes | None, *beside: Delete) -> tuple[bool, KeyValue | None]:
        """Puts the key if it still has the value ``before`` (None: if there is none), and does what is ``beside``.

        Returns whether it was put, else also the key as it is found. Raises Unavailable, PermissionDenied.
        """
        compare = Absent(self._key) if before is None else ValueIs(self._key, before)
        try:
            won = self._meta.txn((compare,), (Put(self._key, value, lease), *beside), self._timeout_s).succeeded
        except LeaseGone as gone:
            raise Unavailable("the collector's lease ended: it joins again") from gone
        return won, None if won else self._meta.get(self._key, self._timeout_s)

    def _yield_to(self, other: KeyValue | None) -> None:
        """Leaves the key to another collector for a while, unless it is a stray one, which is deleted."""
        if other is not None and not self._drop_stray(other):
            self._again_s = self._clock.monotonic_s() + self._pause_s

    def _drop_stray(self, found: KeyValue | None) -> bool:
        """Deletes a key that lies under no lease, as found; True if it did. Raises Unavailable, PermissionDenied.

        Collectors put their signs under a lease. One without was put by hand, or by a tool that copied etcd without
        its leases: it would never end.
        """
        if found is None or found.lease:
            return False
        log.warning("gc.stray_key key=%s has no lease, so no collector put it: deleted", found.key)
        return self._meta.txn((ValueIs(found.key, found.value),), (Delete(found.key),), self._timeout_s).succeeded


class FullSign(_Sign):
    """The key ``gc/full``, which makes nodes shed puts."""

    def __init__(self, site: Site, collectors: Collectors) -> None:
        super().__init__(site, collectors, site.keys.gc_full, FULL_AGAIN_S)
        self._put_by: bytes | None = None
        self._looked_by: bytes | None = None
        self._said_s = -SAID_S
        self._says_at = logging.WARNING

    @property
    def is_shown(self) -> bool:
        """True if this collector put it."""
        return self._put_by is not None

    def follow(self, watermarks: Watermarks) -> None:
        """Puts the sign or takes it back, as the level demands. Raises Unavailable, PermissionDenied.

        Between the high watermark and the stop mark it stays as it is, so that it does not flicker.
        """
        level, mine = watermarks.level, self._collectors.me
        if level is None or mine is None:
            return
        if self._put_by != mine[0]:
            self._put_by = None  # a sign that was put under an older lease has ended with it
        if self._looked_by != mine[0]:
            # Else a sign that no lease ends would refuse puts for ever, also on an empty root.
            self._drop_stray(self._meta.get(self._key, self._timeout_s))
            self._looked_by = mine[0]
        level = replace(level, used_bytes=level.used_bytes - watermarks.asked_bytes)
        if level.over(watermarks.stop) and self._put_by is None:
            self._show(*mine, level)
        elif self._put_by is not None and not level.over(watermarks.high):
            self._meta.txn((ValueIs(self._key, self._put_by),), (Delete(self._key),), self._timeout_s)
            self._put_by = None
            log.log(
                self._says_at, "gc.full_over used_bytes=%d capacity_bytes=%d", level.used_bytes, level.capacity_bytes
            )

    def _show(self, collector: bytes, lease: LeaseId, level: Level) -> None:
        if self._clock.monotonic_s() < self._again_s:
            return
        won, found = self._put(collector, lease, None)
        if not won and (found is None or found.value != collector):  # else it is ours, whose reply was lost
            self._yield_to(found)
            return
        self._put_by = collector
        now_s = self._clock.monotonic_s()
        self._says_at = logging.DEBUG
        if now_s >= self._said_s + SAID_S:
            self._said_s, self._says_at = now_s, logging.WARNING
        log.log(
            self._says_at,
            "gc.full nodes shed puts until the root is below its high watermark: used_bytes=%d capacity_bytes=%d",
            level.used_bytes,
            level.capacity_bytes,
        )


class RoomSign(_Sign):
    """The key ``gc/room``, which follows the level."""

    def __init__(self, site: Site, collectors: Collectors, reports: Reports) -> None:
        super().__init__(site, collectors, site.keys.gc_room, ROOM_AGAIN_S)
        self._sessions = site.keys.sessions
        self._reports = reports
        self._said: Room | None = None
        self._said_by: LeaseId | None = None
        self._said_s = 0.0
        self._unreported_bytes, self._began_s = 0, -UNHEARD_S
        self._nodes_count, self._counted_s = 0, -math.inf
        self._bounds = None

    def follow(self, watermarks: Watermarks) -> None:
        """Writes how much room there is, if that has changed. Raises Unavailable, PermissionDenied."""
        mine, now_s = self._collectors.me, self._clock.monotonic_s()
        if mine is None or not watermarks.is_known or now_s < self._again_s:
            return
        if self._said_by != mine[1]:
            self._said = None  # a key that was put under an older lease ends with it
        if self._said is not None and now_s - self._said_s < self._said.pace_s / WORDS_PER_PACE:
            return
        if now_s - self._counted_s >= COUNTED_S:
            self._nodes_count, self._counted_s = self._meta.count(self._sessions, self._timeout_s), now_s
        # Those whose reports are counted have a share, also if they began after the sessions were counted.
        nodes_count = max(self._nodes_count, self._reports.reporters_count)
        room = room_of(watermarks, nodes_count, self._reports.revision)
        watermarks.late_s = LATE_S_MIN + 2 * room.pace_s
        if self._said is None or is_news(self._said, room):
            self._say(room, mine[1])

    def close(self, watermarks: Watermarks) -> None:
        """Takes the word back, and leaves the level to those who write before the next collector (rule S6).

        They may still write what the word allowed: it counts as written. So does what those may have written that are
        gone since the survey. Raises Unavailable, PermissionDenied.
        """
        level, said, self._said = watermarks.level, self._said, None
        if self._bounds is None or level is None or said is None or said.allowance_bytes is None:
            return
        beyond_bytes = math.ceil((1 - watermarks.stop) * level.capacity_bytes) * (1 + watermarks.gone_count)
        # First the word: who joins after it hears none, and has to claim.
        taken = self._meta.txn((ValueIs(self._key, said.to_json()),), (Delete(self._key),), self._timeout_s)
        if taken.succeeded:
            used_bytes = level.used_bytes + self._claimed_bytes(self._clock.monotonic_s())
            self._bounds.leave(used_bytes + beyond_bytes, self._timeout_s)

    def _claimed_bytes(self, now_s: float) -> int:
        """Bytes that were claimed and not yet counted when the first word ended the claims.

        Nodes that have not heard that word report nothing yet.
        """
        return self._unreported_bytes if now_s - self._began_s < UNHEARD_S else 0

    def _say(self, room: Room, lease: LeaseId) -> None:
        self._said_s = self._clock.monotonic_s()
        before = None if self._said is None else self._said.to_json()
        beside: list[Delete] = []
        if self._bounds is not None and room.allowance_bytes is not None:
            if self._said is None or self._said.allowance_bytes is None:
                claimed_bytes = self._bounds.level_bytes(self._timeout_s)
                self._unreported_bytes = max(0, claimed_bytes - (room.used_bytes or 0))
                self._began_s = self._said_s
            beside.append(self._bounds.end_claims())  # from this word on nodes write what it allows, and nothing else
        won, found = self._put(room.to_json(), lease, before, *beside)
        if not won and found is not None and found.lease == lease:  # ours, whose reply was lost
            won, room = True, Room.from_json(found.value)
        if won:
            self._said, self._said_by = room, lease
        else:
            self._said = None
            self._yield_to(found)
