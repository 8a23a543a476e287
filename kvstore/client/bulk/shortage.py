"""Shortage of file descriptors in this process: while it lasts, only paths that need few are used.

Separate from connections, because all connections of a client share it: descriptors belong to the process.
"""

from __future__ import annotations

import errno
import logging
import resource
import threading
import time
from collections.abc import Callable

from kvstore.counts import ClientCount
from kvstore.node.counters import Counts
from kvstore.wire.bulk.channel import LinkShort

log = logging.getLogger(__name__)

PAUSE_S = 60.0
"""How long the paths that need many descriptors are avoided."""
SHARE = 32
"""One bulk connection is allowed per this many descriptors of the process: each connection needs four."""


class Shortage:
    """The shortage as one client knows it. Thread-safe."""

    def __init__(self, counters: Counts[ClientCount], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._ends_s = float("-inf")
        self._has_warned = False

    @property
    def is_on(self) -> bool:
        """True while files, leases and memory of workers must not be used."""
        return self._monotonic_s() < self._ends_s

    def note(self, error: BaseException) -> bool:
        """Begins a shortage if ``error`` says that descriptors ran out; returns whether it does. Warns once in all."""
        if not is_short(error):
            return False
        with self._lock:
            self._ends_s = self._monotonic_s() + PAUSE_S
            warns, self._has_warned = not self._has_warned, True
        self.counters.add(ClientCount.DESCRIPTORS_SHORT)
        if warns:
            log.warning(
                "client.descriptors_short limit=%d: reads go over connections that need fewer; raise the limit "
                "(ulimit -n), 1024 is enough for a client",
                _limit(),
            )
        return True


def is_short(error: BaseException | None) -> bool:
    """True if ``error``, or its cause, is that this process or host has no more file descriptors."""
    while error is not None:
        if isinstance(error, LinkShort) or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            return True
        error = error.__cause__
    return False


def links_max(most: int) -> int:
    """Returns how many bulk connections one worker may have: at most ``most``, fewer if descriptors are few."""
    return max(1, min(most, _limit() // SHARE))


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
