"""The reports of nodes and collectors under ``usage/``, followed by one watch, and this collector's own.

Apart from the arithmetic (``growth.py``).  Nothing here is needed for safety: a report that is lost or late makes the
level too high or too low until the next survey, and nodes stop by themselves where theirs are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.interface import KeyValue, LeaseGone, Meta, Watch, WatchLost
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.usage import Usage
from kvstore.sources import Clock
from kvstore_gc.capacity import Watermarks
from kvstore_gc.collectors import Collectors

ANSWER_S = 3.0
"""How long nodes have to answer before a survey. One that does not is waited for once."""
POLL_S = 0.02
BATCHES_MAX = 1000
"""Read in one go, so that whoever follows does something else as well."""


class Reports:
    """One thread calls ``follow``, ``tell`` and ``wait``, another one ``unheard``."""

    def __init__(
        self,
        meta: Meta,
        keys: Keys,
        collectors: Collectors,
        watermarks: Watermarks,
        clock: Clock,
        timeout_s: float = 5.0,
    ) -> None:
        self._meta = meta
        self._keys = keys
        self._collectors = collectors
        self._watermarks = watermarks
        self._clock = clock
        self._timeout_s = timeout_s
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
        """Reads what was reported, waiting up to ``wait_s`` for the first. Raises Unavailable, PermissionDenied."""
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
        """Reports what this collector has deleted, where that changed. Raises Unavailable, PermissionDenied."""
        mine, reaped_bytes = self._collectors.me, self._watermarks.reaped_bytes
        if mine is None:
            return
        if mine[0] != self._me:
            # What the report before this one lacked is left to the next surveys of the others: it may have arrived.
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
        """Nodes that have not reported since a collector asked for it, after waiting for them a little.

        From another thread than the one that follows. Raises Unavailable, PermissionDenied, and what ``pause`` raises.
        """
        until_s = self._clock.monotonic_s() + ANSWER_S
        while True:
            asked = self._meta.get(self._keys.gc_room, self._timeout_s)
            found = self._meta.list(self._keys.sessions, self._timeout_s).items
            live = frozenset(id for kv in found if (id := self._keys.parse_session(kv.key)) is not None)
            missing = live
            if asked is not None:
                self._asked_at = asked.create_revision
                missing = frozenset(id for id in live if self._written_at.get(id, 0) <= asked.create_revision)
            if missing <= self._silent or self._clock.monotonic_s() >= until_s:
                self._silent = missing
                return missing
            pause(POLL_S)

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
            return  # of another version, or nonsense: its node is not followed, and stops when it is not counted
        self._written_at[reporter] = kv.mod_revision
        is_answer = 0 < self._asked_at < kv.mod_revision
        self._watermarks.reported(reporter, usage, is_answer=is_answer)
