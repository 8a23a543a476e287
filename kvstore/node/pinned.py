"""The pins taken through this node: they keep their chunks in its memory for a while.

Separate from the pins in etcd, which keep collectors away: these only limit what memory evicts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.address import Address
from kvstore.node.memory_tier import MemoryTier
from kvstore.sources import Clock


class PinnedInMemory:
    """Pins keep at most half of memory: the rest must go on serving callers that pin nothing. Thread-safe."""

    def __init__(self, memory: MemoryTier, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[float, list[Address]]] = {}

    def add(self, pin_id: str, addresses: Sequence[Address], seconds: float) -> None:
        """Keeps a pin's chunks that are in memory there, until it is removed or ``seconds`` are over."""
        self.expire()
        bytes_max = self._memory.size_bytes // 2
        kept: list[Address] = []
        for address in addresses:
            if self._memory.stats()["memory_pinned_bytes"] >= bytes_max:
                break
            if self._memory.pin([address])[0]:
                kept.append(address)
        with self._lock:
            self._pins[pin_id] = (self._clock.monotonic_s() + seconds, kept)

    def remove(self, pin_id: str) -> None:
        """Notes that the pin has ended."""
        with self._lock:
            _, kept = self._pins.pop(pin_id, (0.0, []))
        self._memory.unpin(kept)

    def expire(self) -> None:
        """Drops the pins whose time is over."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            ended = [pin_id for pin_id, (ends_s, _) in self._pins.items() if ends_s <= now_s]
        for pin_id in ended:
            self.remove(pin_id)
