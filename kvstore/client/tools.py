"""The tools that the calls of one port share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.client.caller import Caller
from kvstore.client.limits import ClientLimits
from kvstore.client.renewing import Renewing
from kvstore.counts import ClientCount, Counts
from kvstore.node.lanes import Lanes
from kvstore.node.limits import Limits
from kvstore.sources import Clock
from kvstore.wire.watch import Watch
from kvstore.writes import WriteMode


class FileLanes:
    """The threads that read handed-over files, and those that copy within memory; started on demand. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._lanes: Lanes | None = None
        self._copiers: Lanes | None = None

    def get(self) -> Lanes:
        """Returns the lanes for files."""
        with self._lock:
            self._lanes = self._lanes or self._made(2)
            return self._lanes

    def copiers(self) -> Lanes:
        """Returns the lanes that never wait for a device, so that memory is read while the root hangs."""
        with self._lock:
            self._copiers = self._copiers or self._made(1)
            return self._copiers

    def _made(self, requests: int) -> Lanes:
        limits = Limits()
        return Lanes(requests * limits.width, limits.width, limits.queue_max, limits.stall_s, self.clock)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        with self._lock:
            for lanes in (self._lanes, self._copiers):
                if lanes is not None:
                    lanes.close()


@dataclass(frozen=True, slots=True)
class Tools:
    """The caller, counters, limits, watch, lanes and lease renewal of one port."""

    caller: Caller
    counters: Counts[ClientCount]
    limits: ClientLimits
    watch: Watch
    lanes: FileLanes
    renewing: Renewing
    write: WriteMode | None
    """The default write mode of puts; None: the worker's."""
