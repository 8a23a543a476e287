"""A watch on the file: it reads the history whenever the connection has seen a change."""

from __future__ import annotations

import time

from kvstore.errors import Unavailable
from kvstore.meta.deadline import Deadline
from kvstore.meta.interface import Event, WatchLost
from kvstore.meta.sqlite.connection import LOOK_S, Connection

SILENT_S_MAX = 30.0


class SqliteWatch:
    """See ``interface.Watch``. Gives up, with WatchLost, when the file could not be read for 30 s."""

    def __init__(self, connection: Connection, prefix: str, from_revision: int) -> None:
        self._connection = connection
        self._prefix = prefix
        self._from_revision = from_revision
        self._openings = connection.openings
        self._read_s = time.monotonic()
        self.closed = False

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        """See ``interface.Watch``."""
        ends_s = time.monotonic() + timeout_s
        while True:
            seen = self._connection.changes
            events = self._look(max(LOOK_S, ends_s - time.monotonic()))
            left_s = ends_s - time.monotonic()
            if events or left_s <= 0:
                return events or None
            self._connection.wait(lambda seen=seen: self.closed or self._connection.changes != seen, left_s)  # type: ignore[misc]

    def close(self) -> None:
        """See ``interface.Watch``."""
        self.closed = True
        self._connection.wake()

    def _look(self, timeout_s: float) -> tuple[Event, ...]:
        """Returns the events since the last look. Raises WatchLost."""
        prefix, from_revision = self._prefix, self._from_revision
        if self.closed:
            raise WatchLost("the watch is closed")
        try:
            events, following = self._connection.call(
                f"watch {prefix}", lambda store: store.events(prefix, from_revision), Deadline(timeout_s)
            )
        except Unavailable as error:
            if self.closed:
                raise WatchLost("the watch is closed") from error
            silent_s = time.monotonic() - self._read_s
            if silent_s < SILENT_S_MAX:
                return ()
            raise WatchLost(f"watch of {prefix!r}: the file could not be read for {silent_s:.0f} s: {error}") from error
        if self._connection.openings > max(1, self._openings):
            raise WatchLost(f"watch of {prefix!r}: the file was removed or replaced: read the prefix afresh")
        self._from_revision, self._read_s = following, time.monotonic()
        if self.closed:
            raise WatchLost("the watch is closed")
        return events
