"""Counts of a node's actions and timings of its tiers: the numbers behind ``stats()`` and the metrics."""

from __future__ import annotations

from kvstore.counts import NodeCount, RequestCounts
from kvstore.node.timings import TierTimings


class Counters(RequestCounts):
    """Monotonic counts since the node started; thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = TierTimings()
        """Timings of the tiers."""
        self.timed = self.tiers.timed
        """Times one step of a tier."""

    def add_read(self, payload_bytes: int, chunks: int = 1) -> None:
        """Adds ``chunks`` read and verified chunks of ``payload_bytes`` in all."""
        with self._lock:
            self._counts[NodeCount.CHUNKS_READ] += chunks
            self._counts[NodeCount.BYTES_READ] += payload_bytes
