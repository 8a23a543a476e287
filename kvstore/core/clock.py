"""Sources of time and ids, always given to a constructor, so that a run replays from a seed."""

from __future__ import annotations

import os
import time
from functools import partial
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
    """New identifiers, unique everywhere."""

    def fresh(self) -> bytes:
        """16 random bytes."""
        ...


class SystemClock:
    """The machine's clocks: functions of C, because every call asks them several times."""

    now_s = staticmethod(time.time)
    # A lease runs on while a host is suspended, so its holder's clock must too.
    monotonic_s = staticmethod(partial(time.clock_gettime, _SUSPEND_AWARE))


class RandomIds:
    """Ids from the system's random source; two containers with the same pid never meet."""

    fresh = staticmethod(partial(os.urandom, 16))
