"""Puts acknowledged on receipt and written behind.

A read of one of their chunks waits at this worker until it is written, so clients read their own writes. A chunk that
cannot be written is lost, counted, and a miss: the write mode that the client asked for allows that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.address import Address
from kvstore.counts import WorkerCount
from kvstore.errors import KVStoreError
from kvstore.worker.calls import Calls
from kvstore.worker.threads import DaemonThreads

log = logging.getLogger(__name__)

WRITERS = 2
ACKNOWLEDGE_S = 0.05
"""How long writing waits for the acknowledgement to be sent."""


class PutsBehind:
    """The puts of one worker that are written behind. Thread-safe."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._changed = threading.Condition()
        self._pending: Counter[Address] = Counter()
        self._jobs = 0
        self._writers = DaemonThreads(WRITERS, "kvstore-puts-behind")

    @property
    def chunks_count(self) -> int:
        """Chunks that are being written behind, or wait for it."""
        return self._pending.total()

    @property
    def is_idle(self) -> bool:
        """True if there are none."""
        return not self._pending

    def submit(self, addresses: Sequence[Address], write: Callable[[], None], acknowledged: threading.Event) -> None:
        """Queues ``write``, which stores the chunks of these addresses and frees their memory.

        It begins once ``acknowledged`` is set, or a little later: otherwise the writing thread would make the
        acknowledging one wait for the GIL, up to 5 ms.
        """
        with self._changed:
            self._pending.update(addresses)
            self._jobs += 1
        self._calls.add(WorkerCount.PUTS_BEHIND)
        try:
            self._writers.submit(self._run, addresses, write, acknowledged)
        except BaseException:
            self._done(addresses)
            raise

    def settle(self, addresses: Sequence[Address], timeout_s: float) -> None:
        """Returns once none of these chunks is being written behind, or time is up."""
        if not self._pending:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._pending.keys().isdisjoint(addresses), timeout_s)

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until everything is written; returns True if that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Writes what is queued for at most ``timeout_s``; the rest is lost. Idempotent."""
        ends_s = time.monotonic() + timeout_s
        if not self.wait_empty(timeout_s):
            log.warning("worker.behind_lost chunks=%d", self.chunks_count)
        self._writers.shutdown(timeout_s=max(0.0, ends_s - time.monotonic()))

    def _run(self, addresses: Sequence[Address], write: Callable[[], None], acknowledged: threading.Event) -> None:
        try:
            acknowledged.wait(ACKNOWLEDGE_S)
            write()
        except KVStoreError as error:
            self._calls.add(WorkerCount.PUTS_BEHIND_LOST)
            log.info("worker.behind_lost chunks=%d why=%s", len(addresses), error)
        except Exception:
            self._calls.add(WorkerCount.PUTS_BEHIND_LOST)
            self._calls.add(WorkerCount.CALLS_FAILED)
            log.exception("worker.behind_failed")
        finally:
            self._done(addresses)

    def _done(self, addresses: Sequence[Address]) -> None:
        with self._changed:
            self._pending.subtract(addresses)
            for address in addresses:
                if self._pending[address] <= 0:
                    del self._pending[address]
            self._jobs -= 1
            self._changed.notify_all()
