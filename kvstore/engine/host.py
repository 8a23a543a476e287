"""A process as one of those that share a root of one host: what it maps and asks for, its part in collecting."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.metrics import Counters, NodeCount
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.gc_state import HostGcState
from kvstore.errors import KVStoreError
from kvstore.format.places import CHUNKS
from kvstore.host import tables as shared_file
from kvstore.host.room import Collecting, HostRoom, limit_on
from kvstore.host.tables import HoldTable, InUse, Number, Own, Shared, live_tables, smallest
from kvstore.root.posix import PosixRoot, translated

UNKNOWN_BYTES = 64 << 20
UNKNOWN_SHARE = 0.01
"""Bytes that may be written to a root of unknown use before it is listed: the smaller of these."""
WAKES_SHARE = 0.75
"""A collector starts immediately if more of the capacity is used, else later: short programs never start one."""


@dataclass(frozen=True, slots=True)
class HostBounds:
    """The capacity and the time to live that a process asks for; None: no limit."""

    max_bytes: int | None = None
    ttl_s: float | None = None

    def __bool__(self) -> bool:
        return self.max_bytes is not None or self.ttl_s is not None


LIMITED_S = 1.0
"""Time between two looks of a process without a limit at what the others ask for."""


class HostMember:
    """This process on one root. Ended by ``leave``."""

    def __init__(self, root: PosixRoot, bound: HostBounds) -> None:
        """Raises RootMismatch where the files of ``host`` were removed while others use the root; the root's errors."""
        self.bound = bound
        self._root = root
        self.folder = folder = root.path
        self._in_use = InUse(folder)
        self._room: HostRoom | None = None

        def make() -> None:
            is_empty = next(iter(root.list(CHUNKS)), None) is None
            most = bound.max_bytes or 0
            shared_file.make(folder, 0 if is_empty else max(0, most - int(min(UNKNOWN_BYTES, UNKNOWN_SHARE * most))))

        with translated("open", f"{folder}/host"):
            try:
                self._in_use.join(lambda: shared_file.is_made(folder), make)
                self.shared = Shared(folder)
                self.table = HoldTable(folder)
            except BaseException:
                self._in_use.close()
                raise
        numbers = self.table.numbers
        numbers[Own.MAX_BYTES], numbers[Own.TTL_MS] = bound.max_bytes or 0, int(1000 * (bound.ttl_s or 0))
        self.collecting = Collecting(folder) if bound else None
        self._limit()
        atexit.register(self._end_collector)

    @property
    def is_collecting(self) -> bool:
        return self.collecting is not None and self.collecting.is_running

    @property
    def used_bytes(self) -> int:
        return self.shared[Number.USED]

    def view(self, known: PresenceCache, counters: Counters) -> HostGcState:
        """What the node knows of evictions, with its room."""
        refused: Callable[[], None] = lambda: counters.add(NodeCount.PUT_REFUSED_FULL)  # noqa: E731
        wake: Callable[..., None] = self._limit_again if self.collecting is None else self.collecting.wake
        self._room = HostRoom(self.shared, self.table, refused, wake)
        return HostGcState(self.shared, self.table, known, self._room)

    def leave(self) -> None:
        atexit.unregister(self._end_collector)
        self._end_collector()
        if self.table.is_open:
            if self._room is not None:
                self._room.close()
            self.table.close()
            self._limit()
            self.shared.close()
        self._in_use.close()

    def _end_collector(self) -> None:
        """Ends it, also when the program ends without ``leave``: what is put behind may still be written then."""
        if self.collecting is not None:
            self.collecting.close()

    def _limit_again(self, *, at_once: bool) -> None:
        """Has a process without a limit set that of the others again: the one that set it may have been killed."""
        if at_once and time.monotonic() - self._limited_s >= LIMITED_S:
            self._limit()

    def _limit(self) -> None:
        self._limited_s = time.monotonic()
        try:
            max_bytes = smallest(live_tables(self.folder, self.shared))[0]
            limit = limit_on(self._root, max_bytes, self.shared) if max_bytes else 0
        except (OSError, KVStoreError):
            return
        self.shared[Number.LIMIT], self.shared[Number.WAKES_AT] = limit, int(WAKES_SHARE * limit)
