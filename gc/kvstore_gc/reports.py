"""The reports of nodes and collectors under ``usage/``, followed by one watch, and this collector's own.

``capacity.py`` does the arithmetic. Safety does not depend on reports: one that is lost or late makes the level too
high or too low until the next survey, and nodes stop by themselves if theirs are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.interface import KeyValue, LeaseGone, Watch, WatchLost
from kvstore.meta.keys import SessionId
from kvstore.meta.session import live_sessions
from kvstore.meta.usage import Usage
from kvstore_gc.capacity import Watermarks
from kvstore_gc.collectors import Collectors
from kvstore_gc.site import Site

ANSWER_S = 3.0
"""Time for nodes to answer before a survey. A node that does not answer is waited for once."""
POLL_S = 0.02
BATCHES_MAX = 1000
"""Batches read in one go, so that the thread gets to its other work."""


class Reports:
    """One thread calls ``follow``, ``tell`` and ``wait``, another one ``unheard``."""

    def __init__(self, site: Site, collectors: Collectors, watermarks: Watermarks) -> None:
        self._meta = site.meta
        self._keys = site.keys
        self._clock = site.clock
        self._timeout_s = site.timeout_s
        self._collectors = collectors
        self._watermarks = watermarks
        self._watch: Watch | None = None
        self._written_at: dict[SessionId, int] = {}
        self._asked_at = 0
        self._mine: set[SessionId] = set()
        self._me: SessionId | None = None
        self._told_bytes = self._base_bytes = 0
        self._silent: frozenset[SessionId] = frozenset()
        self.revision = 0
        """All reports up to this revision were read."""

    def follow(self, wait_s: float = 0.0) -> None:
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
                    self.revision = max(self.revision, event.revision)
                wait_s = 0.0
        except WatchLost:
            self._watch.close()
            self._watch = None
            self._read()

    def tell(self) -> None:
        """Reports the bytes that this collector has deleted, if they changed. Raises Unavailable, PermissionDenied."""
        mine, reaped_bytes = self._collectors.me, self._watermarks.reaped_bytes
        if mine is None:
            return
        if mine[0] != self._me:
            # Bytes that the report before this one lacked are left to the others' next surveys: it may have arrived.
            self._me, self._base_bytes, self._told_bytes = mine[0], reaped_bytes, reaped_bytes
            self._mine.add(mine[0])
        if reaped_bytes == self._told_bytes:
            return
        usage = Usage(0, reaped_bytes - self._base_bytes)
        try:
            self._meta.put(self._keys.usage_of(mine[0]), usage.to_json(), mine[1], self._timeout_s)
        except LeaseGone as gone:
            raise Unavailable("the collector's lease ended: it joins again") from gone
        self._told_bytes = reaped_bytes

    def unheard(self, pause: Callable[[float], object]) -> frozenset[SessionId]:
        """The nodes that have not reported since a collector asked for it, after waiting for them a little.

        From another thread than ``follow``. Raises Unavailable, PermissionDenied, and what ``pause`` raises.
        """
        until_s = self._clock.monotonic_s() + ANSWER_S
        while True:
            asked = self._meta.get(self._keys.gc_room, self._timeout_s)
            live = frozenset(live_sessions(self._meta, self._keys, self._timeout_s))
            missing = live
            if asked is not None:
                self._asked_at = asked.create_revision
                missing = frozenset(id for id in live if self._written_at.get(id, 0) <= asked.create_revision)
            if missing <= self._silent or self._clock.monotonic_s() >= until_s:
                self._silent = missing
                return missing
            pause(POLL_S)

    @property
    def reporters_count(self) -> int:
        """The nodes, and other collectors, whose reports were read and have not ended."""
        return len(self._written_at)

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def _read(self) -> None:
        snapshot = self._meta.list(self._keys.usage, self._timeout_s)
        found = {kv.key for kv in snapshot.items}
        for reporter in list(self._written_at):
            if self._keys.usage_of(reporter) not in found:
                self._take(self._keys.usage_of(reporter), None)
        for kv in snapshot.items:
            self._take(kv.key, kv)
        self._watch = self._meta.watch(self._keys.usage, snapshot.revision + 1)
        self.revision = snapshot.revision

    def _take(self, key: str, kv: KeyValue | None) -> None:
        reporter = self._keys.parse_session(key)
        if reporter is None or reporter in self._mine:
            return
        if kv is None:
            self._written_at.pop(reporter, None)
            self._watermarks.gone(reporter)
            return
        try:
            usage = Usage.from_json(kv.value)
        except InvalidRequest:
            return  # nonsense: its node is not followed, and stops when it is not counted
        self._written_at[reporter] = kv.mod_revision
        self._watermarks.reported(reporter, usage, is_answer=0 < self._asked_at < kv.mod_revision)
