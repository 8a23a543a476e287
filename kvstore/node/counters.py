"""Counts of what a node did, and how long its tiers took; the numbers behind ``stats()`` and the metrics."""

from __future__ import annotations

from kvstore.counts import Counts, NodeCount
from kvstore.node.timings import Operation, TierName, TierTimings, Timed


class Counters(Counts[NodeCount]):
    """Monotonic counts since the node started; thread-safe."""

    def __init__(self) -> None:
        super().__init__(NodeCount)
        self.tiers = TierTimings()
        """How long the tiers take."""

    def timed(self, tier: TierName, operation: Operation) -> Timed:
        """Around one step of a tier."""
        return self.tiers.timed(tier, operation)

    def add_read(self, payload_bytes: int, chunks: int = 1) -> None:
        """Chunks read and verified, ``payload_bytes`` in all."""
        with self._lock:
            self._counts[NodeCount.CHUNKS_READ] += chunks
            self._counts[NodeCount.BYTES_READ] += payload_bytes
