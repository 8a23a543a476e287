"""What one process knows of evictions on its host: which chunks are being evicted, and which are gone.

The node asks it as it asks the view of a cluster's sweeps (``node.view``). Everything here reads mapped memory: a match
or a hold costs no system call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, Address, Addressed
from kvstore.host.room import Room
from kvstore.host.tables import BATCH_MAX, RING, HoldTable, Number, Run, Shared
from kvstore.node.known import Known
from kvstore.root.posix import error_of

SETTLE_S = 1.0
POLL_S = 0.001
_TAIL, _SETTLED = int(Number.TAIL), int(Number.SETTLED)
NOTHING: frozenset[bytes] = frozenset()


class HostView:
    """The evictions of one root as this process sees them. Thread-safe."""

    revision = 0

    def __init__(self, shared: Shared, table: HoldTable, known: Known, usage: Room) -> None:
        self.lock = nullcontext()
        """Nothing: a hold needs no lock here."""
        self.usage = usage
        self._shared = shared
        self._numbers = shared.numbers
        self._table = table
        self._known = known
        self._changes = threading.Lock()
        self._seen = shared[Number.TAIL]
        """Entries of the log up to here are forgotten."""
        self._unsettled = NOTHING
        self._read_log(self._seen)

    # Holds

    @property
    def protects(self) -> bool:
        """True until the store is closed; False in a forked child."""
        return self._table.is_open

    def protect(self, packed: bytes) -> Run | None:
        """Keeps chunks from being evicted until ``unprotect``; look for them, or ask ``leading``, after this."""
        if not packed or not self._table.is_open:
            return None
        try:
            run = self._table.add(packed)
        except OSError as cause:
            raise error_of("write", self._table.path, cause) from cause
        self._shared.fence()  # the table, then the log
        return run

    def unprotect(self, run: Run | None) -> None:
        """Ends what ``protect`` returned, once."""
        if run is not None:
            self._table.remove(run)

    # What is condemned

    @property
    def listings(self) -> int:
        """How often the root was listed."""
        return self._shared[Number.LISTINGS]

    def settle(self, wanted: Addressed) -> bool:
        """Waits, up to SETTLE_S, for the batch that is being evicted if it has any of these chunks."""
        ends_s = time.monotonic() + SETTLE_S
        while self.leading(wanted) < len(wanted):
            if time.monotonic() > ends_s:
                return False
            time.sleep(POLL_S)
        return True

    @property
    def sweeps(self) -> int:
        """Never changes: a put keeps what it builds on (``protect``)."""
        return 0

    @property
    def is_calm(self) -> bool:
        """True if nothing is being evicted."""
        return not self._evicting()

    def leading(self, wanted: Addressed) -> int:
        """Returns how many leading chunks are not being evicted."""
        evicting = self._evicting()
        if not evicting or evicting.isdisjoint(wanted.addresses):
            return len(wanted)
        return next(at for at, address in enumerate(wanted.addresses) if address in evicting)

    def condemns(self, address: Address) -> bool:
        """True if an address counts as absent."""
        return address in self._evicting()

    def allowed(self, addresses: Sequence[Address]) -> Sequence[int]:
        """Returns the offsets of those that are not being evicted."""
        evicting = self._evicting()
        if not evicting or evicting.isdisjoint(addresses):
            return range(len(addresses))
        return [at for at, address in enumerate(addresses) if address not in evicting]

    def unswept(self, wanted: Addressed) -> npt.NDArray[np.bool_]:
        """Returns which chunks are not being evicted."""
        unswept = np.zeros(len(wanted), np.bool_)
        unswept[list(self.allowed(wanted.addresses))] = True
        return unswept

    def stays(self, wanted: Addressed) -> npt.NDArray[np.bool_]:
        """Returns that all chunks of a put are there: it kept them."""
        return np.ones(len(wanted), np.bool_)

    # Room

    @property
    def is_full(self) -> bool:
        """True if nothing can be evicted."""
        return self.usage.is_full

    def check_room(self, size_bytes: int = 0) -> None:
        """Raises Overloaded for a put that will never fit, and while nothing can be evicted."""
        self.usage.check(size_bytes)

    def _evicting(self) -> frozenset[bytes]:
        """The chunks of a batch that is not settled. Forgets what the log names up to now."""
        tail = self._numbers[_TAIL]
        if tail != self._seen or (self._unsettled and self._numbers[_SETTLED] >= tail):
            with self._changes:
                self._read_log(tail)
        return self._unsettled

    def _read_log(self, tail: int) -> None:
        """Applies the log up to ``tail``; the order of the loads is that of ``tests/model/host.py``."""
        shared, settled = self._shared, self._shared[Number.SETTLED]
        if tail < self._seen:
            return  # another thread was faster
        first = min(self._seen, max(settled, tail - BATCH_MAX))
        is_overrun = tail - first > RING - BATCH_MAX
        entries = b"" if is_overrun else shared.entries(first, tail)
        is_overrun = is_overrun or shared[Number.TAIL] + BATCH_MAX - first > RING
        if is_overrun:
            self._known.clear()
            first = max(settled, tail - BATCH_MAX)
            entries = shared.entries(first, tail)
        elif tail > self._seen:
            self._known.forget_each(entries[(self._seen - first) * ADDRESS_BYTES :])
        settled = shared[Number.SETTLED]
        left = entries[max(0, settled - first) * ADDRESS_BYTES :]
        if self._unsettled:
            # Forget them once more: whoever looked before they were deleted has remembered them since.
            self._known.forget_each(b"".join(self._unsettled))
        self._unsettled = frozenset(left[at : at + ADDRESS_BYTES] for at in range(0, len(left), ADDRESS_BYTES))
        self._seen = tail
