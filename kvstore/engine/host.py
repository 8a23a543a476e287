"""A process as one of those that share a root of one host: what it maps and asks for, its part in collecting."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.metrics import Counters, NodeCount
from kvstore.engine.gc_state import GcState
from kvstore.engine.presence_cache import PresenceCache
from kvstore.errors import KVStoreError
from kvstore.format.keyset import KeySet
from kvstore.format.places import CHUNKS
from kvstore.host import tables as shared_file
from kvstore.host.collector import Collecting
from kvstore.host.room import HostRoom, limit_on
from kvstore.host.tables import BATCH_MAX, RING, HoldTable, InUse, Number, Own, Run, Shared, live_tables, smallest
from kvstore.root.posix import PosixRoot, error_of, translated

# What one process knows of evictions on its host: which chunks are being evicted, and which are gone.
#
# Everything here reads mapped memory: a match or a hold costs no system call.


SETTLE_S = 1.0
POLL_S = 0.001
_TAIL, _SETTLED = int(Number.TAIL), int(Number.SETTLED)
NOTHING: frozenset[bytes] = frozenset()


class HostGcState(GcState):
    """The evictions of one root as this process sees them. Thread-safe."""

    revision = 0

    def __init__(self, shared: Shared, table: HoldTable, known: PresenceCache, usage: HostRoom) -> None:
        self.lock = nullcontext()
        """Nothing: a hold needs no lock here."""
        self.usage: HostRoom = usage
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
        if run is not None:
            self._table.remove(run)

    # What is condemned

    @property
    def listings(self) -> int:
        return self._shared[Number.LISTINGS]

    def settle(self, wanted: KeySet) -> bool:
        """Waits, up to SETTLE_S, for the batch that is being evicted if it has any of these chunks."""
        ends_s = time.monotonic() + SETTLE_S
        while self.leading(wanted) < len(wanted):
            if time.monotonic() > ends_s:
                return False
            time.sleep(POLL_S)
        return True

    @property
    def is_calm(self) -> bool:
        return not self._evicting()

    def leading(self, wanted: KeySet) -> int:
        return self._leading(wanted.addresses) if self._evicting() else len(wanted)

    def _leading(self, addresses: Sequence[Address]) -> int:
        evicting = self._evicting()
        if evicting.isdisjoint(addresses):
            return len(addresses)
        return next(at for at, address in enumerate(addresses) if address in evicting)

    def unswept(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        evicting = self._evicting()
        if not evicting:
            return np.ones(len(wanted), np.bool_)
        return np.array([address not in evicting for address in wanted.addresses], np.bool_)

    def stays(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns that all chunks of a put are there: it kept them."""
        return np.ones(len(wanted), np.bool_)

    # Room

    def check_room(self, size_bytes: int = 0) -> None:
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
            # Forget them once more: a lookup that began before their deletion may have cached them since.
            self._known.forget_each(b"".join(self._unsettled))
        self._unsettled = frozenset(left[at : at + ADDRESS_BYTES] for at in range(0, len(left), ADDRESS_BYTES))
        self._seen = tail


UNKNOWN_BYTES = 64 << 20
UNKNOWN_SHARE = 0.01
"""Bytes that may be written to a root of unknown use before it is listed: the smaller of these."""
WAKES_SHARE = 0.75
"""A collector starts immediately if more of the capacity is used, else later: short programs never start one."""


@dataclass(frozen=True, slots=True)
class HostBounds:
    """The capacity and the time to live that a process asks for; None: no limit."""

    max_bytes: int | None = None
    ttl_s: float | None = None

    def __bool__(self) -> bool:
        return self.max_bytes is not None or self.ttl_s is not None


LIMITED_S = 1.0
"""Time between two looks of a process without a limit at what the others ask for."""


class HostMember:
    """This process on one root. Ended by ``leave``."""

    def __init__(self, root: PosixRoot, bound: HostBounds) -> None:
        """Raises RootMismatch where the files of ``host`` were removed while others use the root; the root's errors."""
        self.bound = bound
        self._root = root
        self.folder = folder = root.path
        self._in_use = InUse(folder)
        self._room: HostRoom | None = None

        def make() -> None:
            is_empty = next(iter(root.list(CHUNKS)), None) is None
            most = bound.max_bytes or 0
            shared_file.make(folder, 0 if is_empty else max(0, most - int(min(UNKNOWN_BYTES, UNKNOWN_SHARE * most))))

        with translated("open", f"{folder}/host"):
            try:
                self._in_use.join(lambda: shared_file.is_made(folder), make)
                self.shared = Shared(folder)
                self.table = HoldTable(folder)
            except BaseException:
                self._in_use.close()
                raise
        numbers = self.table.numbers
        numbers[Own.MAX_BYTES], numbers[Own.TTL_MS] = bound.max_bytes or 0, int(1000 * (bound.ttl_s or 0))
        self.collecting = Collecting(folder) if bound else None
        self._limit()
        atexit.register(self._end_collector)

    @property
    def is_collecting(self) -> bool:
        return self.collecting is not None and self.collecting.is_running

    @property
    def used_bytes(self) -> int:
        return self.shared[Number.USED]

    def view(self, known: PresenceCache, counters: Counters) -> HostGcState:
        """What the node knows of evictions, with its room."""
        refused: Callable[[], None] = lambda: counters.add(NodeCount.PUT_REFUSED_FULL)  # noqa: E731
        self._room = HostRoom(self.shared, self.table, refused, self._wake)
        return HostGcState(self.shared, self.table, known, self._room)

    def leave(self) -> None:
        atexit.unregister(self._end_collector)
        self._end_collector()
        if self.table.is_open:
            if self._room is not None:
                self._room.close()
            self.table.close()
            self._limit()
            self.shared.close()
        self._in_use.close()

    def _end_collector(self) -> None:
        """Ends it, also when the program ends without ``leave``: what is put behind may still be written then."""
        if self.collecting is not None:
            self.collecting.close()

    def _wake(self, *, at_once: bool) -> None:
        if self.collecting is not None:
            self.collecting.wake(at_once=at_once)
        elif at_once and time.monotonic() - self._limited_s >= LIMITED_S:
            self._limit()  # the process that set the limit may have been killed

    def _limit(self) -> None:
        self._limited_s = time.monotonic()
        try:
            max_bytes = smallest(live_tables(self.folder, self.shared))[0]
            limit = limit_on(self._root, max_bytes, self.shared) if max_bytes else 0
        except (OSError, KVStoreError):
            return
        self.shared[Number.LIMIT], self.shared[Number.WAKES_AT] = limit, int(WAKES_SHARE * limit)
