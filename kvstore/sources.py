"""Sources of time and ids, always given to a constructor, so that a run replays from a seed."""

from __future__ import annotations

import os
import time
from typing import Protocol

_SUSPEND_AWARE = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Two clocks: one shared by hosts (roughly), one that only moves forward on this host."""

    def now_s(self) -> float:
        """Wall time in seconds since the epoch; used for recency stamps, never for safety."""
        ...

    def monotonic_s(self) -> float:
        """Monotonic time in seconds; used for deadlines and leases."""
        ...


class Ids(Protocol):
    """New identifiers that nobody else makes."""

    def fresh(self) -> bytes:
        """16 random bytes."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        # A lease runs on while a host is suspended, so its holder's clock must too.
        return time.clock_gettime(_SUSPEND_AWARE)


class RandomIds:
    """Ids from the system's random source; two containers with the same pid never meet."""

    def fresh(self) -> bytes:
        return os.urandom(16)
