"""What the calls of one port share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.client.caller import Caller
from kvstore.client.counters import ClientCounters
from kvstore.client.limits import ClientLimits
from kvstore.node.lanes import Lanes
from kvstore.node.limits import Limits
from kvstore.sources import Clock
from kvstore.wire.watch import Watch


class FileLanes:
    """The threads that read files which workers handed over; made when the first one comes. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._lanes: Lanes | None = None

    def get(self) -> Lanes:
        """The lanes."""
        with self._lock:
            if self._lanes is None:
                limits = Limits()
                self._lanes = Lanes(2 * limits.width, limits.width, limits.queue_max, limits.stall_s, self.clock)
            return self._lanes

    def close(self) -> None:
        """Ends them. Idempotent."""
        with self._lock:
            if self._lanes is not None:
                self._lanes.close()


@dataclass(frozen=True, slots=True)
class Tools:
    """Who sends calls, who counts, who looks at the time, who reads files."""

    caller: Caller
    counters: ClientCounters
    limits: ClientLimits
    watch: Watch
    lanes: FileLanes
    deferred: bool
    """Whether puts are acknowledged once a worker has their bytes."""
