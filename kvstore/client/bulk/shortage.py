"""Whether this process has run out of file descriptors: then for a while only paths are taken that need few.

Apart from the connections, because all of a client share it: the descriptors are those of the process.
"""

from __future__ import annotations

import errno
import logging
import resource
import threading
import time
from collections.abc import Callable

from kvstore.counts import ClientCount, Counts
from kvstore.wire.bulk.channel import LinkShort

log = logging.getLogger(__name__)

PAUSE_S = 60.0
"""How long the paths that need many descriptors are left alone."""
SHARE = 32
"""Of so many descriptors that the process may have, one bulk connection may be there: each needs four."""


class Shortage:
    """What a client knows of it. Thread-safe."""

    def __init__(self, counters: Counts[ClientCount], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._ends_s = float("-inf")
        self._has_warned = False

    @property
    def is_on(self) -> bool:
        """Whether files, leases and memory of a worker are to be left alone."""
        return self._monotonic_s() < self._ends_s

    def note(self, error: BaseException) -> bool:
        """Begins it where ``error`` says that descriptors ran out, and says whether it does. Warns once in all."""
        if not is_short(error):
            return False
        with self._lock:
            self._ends_s = self._monotonic_s() + PAUSE_S
            warns, self._has_warned = not self._has_warned, True
        self._counters.add(ClientCount.DESCRIPTORS_SHORT)
        if warns:
            log.warning(
                "client.descriptors_short limit=%d: reads go over connections that need fewer; raise the limit "
                "(ulimit -n), 1024 is enough for a client",
                _limit(),
            )
        return True


def is_short(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that this process or host has no more file descriptors."""
    while error is not None:
        if isinstance(error, LinkShort) or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            return True
        error = error.__cause__
    return False


def links_max(most: int) -> int:
    """How many bulk connections there may be to one worker, of ``most``, with the descriptors of this process."""
    return max(1, min(most, _limit() // SHARE))


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
