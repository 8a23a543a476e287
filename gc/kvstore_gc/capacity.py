"""The space of the root between two listings, and what nodes may write (gc/PROTOCOL.md, section 6).

A listing is exact, but takes long. Until the next one, used bytes are those of the last listing, plus the bytes that
nodes reported to have written since, less those that were deleted. Where a listing and a report overlap, writes count
twice and deletions not at all until the next listing: eviction that begins too early is better than a full disk.

``Accounts`` does the arithmetic. ``Pressure`` reads reports and publishes the result, on a thread of its own, because
a cycle may take minutes. If the root hangs, that thread hangs as well: then the collector's lease ends, and its
record, and another one takes over. A cycle calls ``before_listing``, ``after_listing`` and ``deleted``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass

from kvstore.core.clock import Clock, SystemClock
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.meta.keys import SessionId
from kvstore.meta.session import live_sessions
from kvstore.meta.store import Absent, KeyValue, LeaseGone, LeaseId, ModifiedAt, Put, Watch, WatchLost
from kvstore.meta.usage import Capacity, UsageReport
from kvstore.root.interface import StorageSpace
from kvstore_gc.membership import Collectors
from kvstore_gc.site import Site
from kvstore_gc.threads import OutageLog, Stop, Stopped

log = logging.getLogger(__name__)

HEADROOM_SHARE = 0.05
"""The least share of the capacity that eviction keeps free ..."""
HEADROOM_SHARE_MAX = 0.25
"""... and the largest."""
GROWTH_S = 1.0
STEP, FADE = 1.5, 0.8
"""The headroom grows by this in each such time in which nodes lacked credit, and else shrinks."""
LATE_S = 1.0
"""Deletions that are reported within this time after a listing may have been before it, and are not subtracted."""

TICK_S = 0.25
"""Time between two ticks without a report, and between two looks at the free space."""
REST_S = 0.02
"""Time between two ticks while nodes write, and the shortest one."""
COUNT_S = 0.25
"""The greatest age of the number of nodes."""
PUBLISH_S_PER_NODE = 0.001
"""The record is written at most once in this time for each node that reads it."""
CHANGE_SHARE = 1 / 8
"""A credit, or used bytes, that changed by this share are published without a new report."""
BATCHES_MAX = 1000
"""Batches of events read in one go."""


@dataclass(frozen=True, slots=True)
class Level:
    """The space of the root: used bytes, the capacity, and the part of it that eviction keeps free."""

    used_bytes: int
    capacity_bytes: int
    headroom_bytes: int

    @property
    def target_bytes(self) -> int:
        """Eviction keeps used bytes below this."""
        return self.capacity_bytes - self.headroom_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes to evict."""
        return max(0, self.used_bytes - self.target_bytes)

    @property
    def spare_bytes(self) -> int:
        """What all nodes together may write before more is evicted.

        Half of the headroom at most. The other half is for nodes whose last credit was larger.
        """
        half_bytes = self.headroom_bytes // 2
        return min(half_bytes, max(0, self.capacity_bytes - half_bytes - self.used_bytes))


@dataclass(slots=True)
class _Reporter:
    """A node: its last report, and the counts from which on it changes the level."""

    last: UsageReport
    written_base: int = 0
    removed_base: int = 0
    written_then: int = 0
    """Bytes written when the listing under way began: the next base."""
    has_ended: bool = False
    had_ended: bool = False
    """True if its key had ended when the listing under way began."""

    @property
    def bytes_since(self) -> int:
        """Bytes by which it changed the used bytes since the last listing."""
        return self.last.written_bytes - self.written_base - (self.last.removed_bytes - self.removed_base)

    def count_from_now(self) -> None:
        """Counts nothing of its reports so far."""
        self.written_base = self.written_then = self.last.written_bytes
        self.removed_base = self.last.removed_bytes


class Accounts:
    """Follows the used bytes of one root. Thread-safe; does no I/O."""

    def __init__(self, max_bytes: int | None, clock: Clock | None = None) -> None:
        """``max_bytes`` limits what the root's files may take; None: all the space there is."""
        self.max_bytes = max_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        # Guarded by _lock, all below.
        self._free_bytes: int | None = None
        self._used_then_bytes: int | None = None
        """Used bytes when the free bytes were measured."""
        self._is_blocked = False
        # The last listing, and what was reported since.
        self._listed_bytes: int | None = None
        self._listed_s = -math.inf
        self._reporters: dict[SessionId, _Reporter] = {}
        self._silent: set[SessionId] = set()
        """Nodes that had not reported when the listing began."""
        self.deleted_bytes = self._deleted_base = 0
        self._largest_bytes = 0
        self._grown_s = self._clock.monotonic_s()
        self._growth = 1.0
        self._was_short = False

    # Listings and deletions

    def begin_listing(self, silent: Set[SessionId] = frozenset()) -> None:
        """Notes that the root is listed from now on. ``silent`` are nodes that have not reported yet."""
        with self._lock:
            self._silent = set(silent)
            for reporter in self._reporters.values():
                reporter.written_then, reporter.had_ended = reporter.last.written_bytes, reporter.has_ended

    def end_listing(self, used_bytes: int) -> None:
        """Notes the sum of all files that were listed. What nodes wrote since the listing began may count twice."""
        with self._lock:
            self._listed_s, self._listed_bytes = self._clock.monotonic_s(), used_bytes
            self._used_then_bytes = used_bytes
            self._deleted_base = self.deleted_bytes
            # A reporter whose key ended before the listing has no bytes that the listing lacks.
            self._reporters = {
                id: reporter
                for id, reporter in self._reporters.items()
                if not (reporter.has_ended and reporter.had_ended)
            }
            for reporter in self._reporters.values():
                reporter.written_base, reporter.removed_base = reporter.written_then, reporter.last.removed_bytes

    def deleted(self, size_bytes: int) -> None:
        """Notes that this collector deleted a file."""
        with self._lock:
            self.deleted_bytes += size_bytes
            self._is_blocked = False

    def blocked(self) -> None:
        """Notes that nothing can be evicted."""
        with self._lock:
            self._is_blocked = True

    def forget(self) -> None:
        """Forgets the last listing and what followed from it: another collector evicts from now on."""
        with self._lock:
            self._listed_bytes, self._growth, self._was_short, self._is_blocked = None, 1.0, False, False
            self._reporters = {id: reporter for id, reporter in self._reporters.items() if not reporter.has_ended}

    # Reports

    def reported(self, id: SessionId, usage: UsageReport) -> None:
        """Notes a report of a node."""
        with self._lock:
            reporter = self._reporters.setdefault(id, _Reporter(UsageReport()))
            before, reporter.last = reporter.last, reporter.last.latest(usage)
            reporter.has_ended = False
            removed_bytes = reporter.last.removed_bytes - before.removed_bytes
            self._is_blocked = self._is_blocked and not removed_bytes
            if id in self._silent:
                # The listing contains what it wrote before; only the next one shows how much it wrote since.
                self._silent.discard(id)
                reporter.count_from_now()
                return
            self._largest_bytes = max(self._largest_bytes, reporter.last.largest_put_bytes)
            if self._clock.monotonic_s() < self._listed_s + LATE_S:
                reporter.removed_base += removed_bytes

    def ended(self, id: SessionId) -> None:
        """Notes that the key of a reporter ended. Its bytes are still on the root."""
        with self._lock:
            if id in self._reporters:
                self._reporters[id].has_ended = True

    def measured(self, space: StorageSpace) -> None:
        """Notes the space as it is now."""
        with self._lock:
            self._free_bytes, self._used_then_bytes = space.free_bytes, self._used_bytes
            if self._clock.monotonic_s() - self._grown_s >= GROWTH_S:
                self._grown_s, most = self._clock.monotonic_s(), HEADROOM_SHARE_MAX / HEADROOM_SHARE
                self._growth = min(STEP * self._growth, most) if self._was_short else max(1.0, FADE * self._growth)
                self._was_short = False

    # Results

    @property
    def is_known(self) -> bool:
        """True if there is, or will be, a level: there is a limit, or free space is known."""
        return self.max_bytes is not None or self._free_bytes is not None

    @property
    def is_listed(self) -> bool:
        """True once the root was listed."""
        return self._listed_bytes is not None

    @property
    def is_full(self) -> bool:
        """True if nothing can be evicted, and no space is left for nodes to write."""
        with self._lock:
            level = self.level
            return self._is_blocked and level is not None and not level.spare_bytes

    @property
    def level(self) -> Level | None:
        """The level now; None before the first listing, or if neither free space nor a limit is known."""
        with self._lock:
            used_bytes = self._used_bytes
            if used_bytes is None:
                return None
            limits = [] if self.max_bytes is None else [self.max_bytes]
            if self._free_bytes is not None:
                then_bytes = used_bytes if self._used_then_bytes is None else self._used_then_bytes
                limits.append(then_bytes + self._free_bytes)
            if not limits:
                return None
            capacity_bytes = min(limits)
            headroom_bytes = self._growth * max(HEADROOM_SHARE * capacity_bytes, 2 * self._largest_bytes)
            return Level(used_bytes, capacity_bytes, int(min(headroom_bytes, HEADROOM_SHARE_MAX * capacity_bytes)))

    def record(self, revision: int, nodes_count: int) -> Capacity:
        """Returns what to publish: reports up to ``revision`` are counted."""
        with self._lock:
            level = self.level
            if level is None:
                return Capacity(revision)  # the first listing has not ended: nodes report where they begin
            self._was_short = self._was_short or 2 * level.spare_bytes < level.headroom_bytes // 2
            credit_bytes = level.spare_bytes // max(1, nodes_count)
            return Capacity(revision, level.used_bytes, level.capacity_bytes, credit_bytes, self.is_full)

    @property
    def _used_bytes(self) -> int | None:
        if self._listed_bytes is None:
            return None
        used_bytes = self._listed_bytes - (self.deleted_bytes - self._deleted_base)
        return max(0, used_bytes + sum(reporter.bytes_since for reporter in self._reporters.values()))


class Pressure:
    """Watches how full the root is for a cycle: reads the reports under ``usage/``, and writes ``gc/capacity``.

    ``start`` does so until a stop is requested.
    """

    def __init__(self, site: Site, max_bytes: int | None, collectors: Collectors | None = None) -> None:
        """Without ``collectors`` it only measures the free space: for a single cycle."""
        self._root = site.root
        self._meta = site.meta
        self._keys = site.keys
        self._clock = site.clock
        self._timeout_s = site.timeout_s
        self.accounts = Accounts(max_bytes, site.clock)
        self._collectors = collectors
        self._watch: Watch | None = None
        self._written_at: dict[SessionId, int] = {}
        """The revision of each live report."""
        self._revision = 0
        """All reports up to it were read."""
        self._published: Capacity | None = None
        self._published_at = 0
        """The mod_revision of our record; 0: it is not ours."""
        self._published_by: LeaseId | None = None
        self._published_s = -math.inf
        self._again_s = -math.inf
        self._nodes_count, self._counted_s = 0, -math.inf
        self._ticked_s = self._clock.monotonic_s()
        self._measured_s = -math.inf
        self._meta_outage = OutageLog("place", self._clock)
        self._root_outage = OutageLog("space", self._clock)
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """The bug that ended the thread: from then on nothing is published."""

    # Called by a cycle

    @property
    def level(self) -> Level | None:
        """The level now; None before the first listing, or if neither free space nor a limit is known."""
        return self.accounts.level

    @property
    def excess_bytes(self) -> int:
        """Bytes to evict; 0 if the level is unknown."""
        level = self.accounts.level
        return 0 if level is None else level.excess_bytes

    @property
    def leads(self) -> bool:
        """True if this collector publishes the capacity; or none does, because it is unknown."""
        if self._collectors is None or not self.accounts.is_known:
            return True
        me = self._collectors.me
        return me is not None and self._published_at > 0 and self._published_by == me[1]

    def before_listing(self) -> None:
        """Notes that the root is listed from now on. Raises the root's errors, Unavailable, PermissionDenied."""
        self.accounts.measured(self._root.space())
        is_first = self._collectors is not None and not self.accounts.is_listed
        self.accounts.begin_listing(self._silent_nodes() if is_first and self.accounts.is_known else frozenset())

    def after_listing(self, used_bytes: int) -> None:
        """Notes the sum of all files that were listed. From then on there is a level."""
        self.accounts.end_listing(used_bytes)

    def _silent_nodes(self) -> Set[SessionId]:
        """Returns the nodes that have not reported since a collector publishes."""
        record = self._meta.get(self._keys.gc_capacity, self._timeout_s)
        created = math.inf if record is None else record.create_revision
        sessions = live_sessions(self._meta, self._keys, self._timeout_s)
        return {SessionId(id) for id in sessions if self._written_at.get(SessionId(id), 0) <= created}

    # The thread

    @property
    def silent_s(self) -> float:
        """Seconds since the last tick ended. If it is long, the root or etcd hangs."""
        return self._clock.monotonic_s() - self._ticked_s

    @property
    def etcd_fails(self) -> bool:
        """True if etcd did not answer the last time."""
        return self._meta_outage.lasts

    def start(self, stop: Stop) -> None:
        """Starts the thread."""
        thread = threading.Thread(target=self._run, args=(stop,), name="kvstore-gc capacity", daemon=True)
        thread.start()
        self._thread = thread

    def join(self, timeout_s: float) -> None:
        """Waits for the thread after a stop was requested; if it hangs, it ends with the program."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def tick(self) -> None:
        """Does everything once. A failure is logged once; the next tick tries again."""
        if self._clock.monotonic_s() - self._measured_s >= TICK_S:
            self._measure()
        try:
            if self._collectors is not None:
                self._collectors.beat()
                self._follow()
                self._publish(self._collectors.me)
            self._meta_outage.ended()
        except KVStoreError as error:
            self._meta_outage.failed(error)
        self._ticked_s = self._clock.monotonic_s()

    def _run(self, stop: Stop) -> None:
        try:
            while True:
                self.tick()
                stop.pause(REST_S)
                if not self.excess_bytes:  # else a deletion is news as well
                    self._wait(stop, TICK_S - REST_S)
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self.failure = error
        finally:
            if self._watch is not None:
                self._watch.close()

    def _wait(self, stop: Stop, wait_s: float) -> None:
        """Waits for a report."""
        if self._collectors is None or self._meta_outage.lasts:
            stop.pause(wait_s)
            return
        try:
            self._follow(wait_s)
        except KVStoreError as error:
            self._meta_outage.failed(error)

    def _measure(self) -> None:
        try:
            self.accounts.measured(self._root.space())
            self._root_outage.ended()
        except KVStoreError as error:
            self._root_outage.failed(error)
        self._measured_s = self._clock.monotonic_s()

    # Reports

    def _follow(self, wait_s: float = 0.0) -> None:
        """Reads new reports, waiting up to ``wait_s`` for the first. Raises Unavailable, PermissionDenied."""
        if self._watch is None:
            self._read()
            return
        try:
            for _ in range(BATCHES_MAX):
                events = self._watch.next(wait_s)
                if events is None:
                    return
                for event in events:
                    self._take(event.key, event.kv)
                    self._revision = max(self._revision, event.revision)
                wait_s = 0.0
        except WatchLost:
            self._watch.close()
            self._watch = None
            self._read()

    def _read(self) -> None:
        snapshot = self._meta.list(self._keys.usage, self._timeout_s)
        found = {kv.key for kv in snapshot.items}
        for reporter in list(self._written_at):
            if self._keys.usage_of(reporter) not in found:
                self._take(self._keys.usage_of(reporter), None)
        for kv in snapshot.items:
            self._take(kv.key, kv)
        self._watch = self._meta.watch(self._keys.usage, snapshot.revision + 1)
        self._revision = snapshot.revision

    def _take(self, key: str, kv: KeyValue | None) -> None:
        reporter = self._keys.parse_session(key)
        if reporter is None:
            return
        if kv is None:
            self._written_at.pop(reporter, None)
            self.accounts.ended(reporter)
            return
        with suppress(InvalidRequest):  # its node is not counted, and stops
            usage = UsageReport.from_json(kv.value)
            self._written_at[reporter] = kv.mod_revision
            self.accounts.reported(reporter, usage)

    # The record

    def _publish(self, me: tuple[SessionId, LeaseId] | None) -> None:
        """Writes the record if it has changed. Raises Unavailable, PermissionDenied."""
        now_s = self._clock.monotonic_s()
        if me is None or not self.accounts.is_known or now_s < self._again_s:
            return
        if self._published_by != me[1]:
            self._published, self._published_at = None, 0  # a record under an older lease ends with it
        if self._published is not None and now_s - self._published_s < PUBLISH_S_PER_NODE * self._nodes_count:
            return
        if now_s - self._counted_s >= COUNT_S:
            self._nodes_count, self._counted_s = self._meta.count(self._keys.sessions, self._timeout_s), now_s
        # Those whose reports are counted have a share, also if they began after the sessions were counted.
        record = self.accounts.record(self._revision, max(self._nodes_count, len(self._written_at)))
        if self._published is None or is_news(self._published, record):
            self._write(record, me[1])

    def _write(self, record: Capacity, lease: LeaseId) -> None:
        self._published_s = self._clock.monotonic_s()
        if record.is_full and not (self._published and self._published.is_full):
            log.warning(
                "gc.full nodes refuse puts until something can be evicted: used_bytes=%s capacity_bytes=%s",
                record.used_bytes,
                record.capacity_bytes,
            )
        key = self._keys.gc_capacity
        compare = ModifiedAt(key, self._published_at) if self._published_at else Absent(key)
        try:
            written = self._meta.txn((compare,), (Put(key, record.to_json(), lease),), self._timeout_s)
        except LeaseGone as gone:
            raise Unavailable("the collector's lease ended: it joins again") from gone
        if written.succeeded:
            self._published, self._published_at, self._published_by = record, written.revision, lease
        else:
            self._published, self._published_at = None, 0
            self._yield_to(self._meta.get(key, self._timeout_s), lease)

    def _yield_to(self, other: KeyValue | None, lease: LeaseId) -> None:
        """Leaves the record to the collector that publishes."""
        if other is None:
            return
        if other.lease == lease:  # ours, whose reply was lost
            self._published_at, self._published_by = other.mod_revision, lease
        else:
            self._again_s = self._clock.monotonic_s() + TICK_S
            self.accounts.forget()


def is_news(published: Capacity, record: Capacity) -> bool:
    """True if nodes need ``record`` after ``published``."""
    return (
        record.revision > published.revision
        or record.is_full != published.is_full
        or (record.credit_bytes is None) != (published.credit_bytes is None)
        or _differ(record.credit_bytes or 0, published.credit_bytes or 0)
        or _differ(record.used_bytes or 0, published.used_bytes or 0)  # for people: nodes do not need it
    )


def _differ(now_bytes: int, then_bytes: int) -> bool:
    return abs(now_bytes - then_bytes) > CHANGE_SHARE * max(now_bytes, then_bytes)
