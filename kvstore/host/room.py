"""The room that this process takes on a root of its host, and its part in making room there.

Every put counts in one number that all processes share: it adds its bytes before it writes, and takes back at its
end what it did not write. So the number is never too small, even if a process dies, and no put brings it above the
limit.

The collector keeps it below (``kvstore_gc.host``). One process runs it as a child, which ends with that process, even
if it is killed (``children``). A child and not a thread: listing and evicting take no time of this interpreter. The
process that has the lock of the file ``host/collector.lock`` collects; the others check now and then whether it is
free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from kvstore.core.process import Program, gc_command
from kvstore.core.validate import size
from kvstore.errors import Overloaded, StoreFull, Unavailable
from kvstore.host.tables import COLLECTOR, HoldTable, Number, Own, Shared, live_tables
from kvstore.root.posix import FILE_MODE, DiskFull, PosixRoot

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""A put waits so long for a collector to make room,"""
START_S = 10.0
"""and so long for one that is being started."""
POLL_S = 0.002
FULL_NS = 1_000_000_000
"""A collector that finds nothing to evict says so again in less; what one has left by dying does not count for long."""
ANSWER_S = 0.25
"""Time for a collector that runs to say that nothing can be evicted."""
WAITS = "no space for this put: eviction has not caught up, or no collector runs; retry shortly"
DISK_FREE_BYTES = 16 << 20
"""On a disk that is full before the limit is reached, so much stays free."""
DISK_FREE_SHARE = 1 / 64
"""... or this share of a small disk."""


def limit_on(root: PosixRoot, max_bytes: int, shared: Shared) -> int:
    """Returns ``max_bytes``, or less if the disk has no room for so much. Raises OSError and the root's errors."""
    space = root.space()
    if space.free_bytes is None:
        return max_bytes
    kept = DISK_FREE_BYTES if space.total_bytes is None else min(DISK_FREE_BYTES, DISK_FREE_SHARE * space.total_bytes)
    if space.free_bytes - kept >= max_bytes:
        return max_bytes
    # What puts have reserved and not yet written counts as used, and is still free. Read in this order, so that
    # concurrent changes make the limit smaller.
    used = shared[Number.USED]
    reserved = sum(table.numbers[Own.RESERVED] for table in live_tables(root.path, shared))
    return max(1, min(max_bytes, used - reserved + (root.space().free_bytes or 0) - int(kept)))


@dataclass(slots=True)
class HostReservation:
    """Room for one put. Its owner releases it once nothing of the put is on its way any more."""

    room: HostRoom
    size_bytes: int

    def release(self) -> None:
        """Gives back what was not written of it. Idempotent, and takes no lock, so that ``__del__`` may do it."""
        size_bytes, self.size_bytes = self.size_bytes, 0
        if size_bytes:
            self.room._released.append(size_bytes)
            self.room._settle()

    __del__ = release

    def __enter__(self) -> HostReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class HostRoom:
    """Counts of one process. Thread-safe."""

    def __init__(
        self, shared: Shared, table: HoldTable, refused: Callable[[], None], wake: Callable[..., None]
    ) -> None:
        """``refused`` is called for each put that gets no room, ``wake`` for each put, with ``at_once`` if room is
        short.
        """
        self._shared = shared
        self._table = table
        self._refused = refused
        self._wake = wake
        self._lock = threading.Lock()
        self._reserved = 0
        """Bytes of puts that have begun."""
        self._unsettled = 0
        """Bytes that were written of them."""
        self._released: deque[int] = deque()
        self._put_max = self._waiting = 0
        self._is_closed = False
        self.written_bytes = 0
        """Bytes of the files that this process published."""

    @property
    def is_full(self) -> bool:
        """True if nothing can be evicted, because all that there is is held or pinned."""
        return 0 <= time.monotonic_ns() - self._shared[Number.FULL] < FULL_NS

    def check(self, size_bytes: int = 0) -> None:
        """Raises Overloaded for a put of more bytes than the store may have, and while nothing can be evicted."""
        limit = self._shared[Number.LIMIT]
        if limit and size_bytes > limit:
            self._refused()
            raise StoreFull(
                f"this put has {size(size_bytes)}, and the store has room for {size(limit)}: put less at a time, or "
                "give it a larger max_bytes or disk"
            )
        if limit and self.is_full and self._shared[Number.USED] + size_bytes > limit:
            self._refused()
            raise _full()

    def reserve(
        self, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = START_S
    ) -> HostReservation:
        """Reserves the room that a put may take; waits for it up to WAIT_S, at most ``wait_s``. Raises Overloaded then,
        or StoreFull if nothing can be evicted.

        ``missing_bytes`` is called before that, and returns how much of the put is not stored already.
        """
        if self._take(size_bytes):
            return HostReservation(self, size_bytes)
        if missing_bytes is not None:
            size_bytes = missing_bytes()
        began_s, beats = time.monotonic(), self._shared[Number.BEATS]
        ends_s = began_s + min(wait_s, START_S)
        self._wait_for(size_bytes)
        try:
            while not self._take(size_bytes):
                self._wake(at_once=True)
                now_s = time.monotonic()
                if ends_s > now_s + WAIT_S and self._shared[Number.BEATS] != beats:
                    ends_s = now_s + WAIT_S  # a collector runs
                if now_s > ends_s or (self.is_full and now_s > began_s + ANSWER_S):
                    self._refused()
                    raise _full() if self.is_full else Overloaded(WAITS)
                time.sleep(POLL_S)
        finally:
            self._wait_for(-size_bytes)
        return HostReservation(self, size_bytes)

    def wrote(self, size_bytes: int) -> None:
        """Counts a published file."""
        with self._lock:
            self.written_bytes += size_bytes
            self._unsettled += size_bytes
            self._publish()
        self._settle()

    def removed(self, size_bytes: int) -> None:
        """Counts a deleted file."""
        self._shared.add(Number.USED, -size_bytes)
        self._shared.add(Number.DELETED, size_bytes)

    def refusal(self, full: DiskFull) -> Overloaded:
        """Has the collector make room on a full disk; returns the caller's error."""
        self._wake(at_once=True)
        return StoreFull(f"{full.said}; the store makes room if it has a limit (max_bytes=): put again in a moment")

    def close(self) -> None:
        """Gives back all that was reserved and not written, once nothing is written any more."""
        self._settle()
        with self._lock:
            self._is_closed = True
            written, self._unsettled = self._unsettled, 0
            self._shared.add(Number.WRITTEN, written)
            self._shared.add(Number.USED, written - self._reserved)
            self._reserved = 0

    def _wait_for(self, size_bytes: int) -> None:
        """Publishes the room that a put waits for, and that it no longer does."""
        with self._lock:
            self._waiting += size_bytes
            self._table.numbers[Own.WAITING] = self._waiting
        self._settle()  # a put that ended while we had the lock left that to us

    def _take(self, size_bytes: int) -> bool:
        shared = self._shared
        self._settle()
        with self._lock:
            used, limit = shared[Number.USED] + size_bytes, shared[Number.LIMIT]
            is_taken = not limit or used <= limit  # others would count what is added only to be taken back
            if is_taken:
                # First in the table: a process that sees it in the sum then finds it there.
                self._reserved += size_bytes
                self._publish()
                used = shared.add(Number.USED, size_bytes)
                is_taken = not limit or used <= limit
                if not is_taken:
                    shared.add(Number.USED, -size_bytes)
                    self._reserved -= size_bytes
                    self._publish()
            if is_taken and size_bytes > self._put_max:
                self._table.numbers[Own.PUT_MAX] = self._put_max = size_bytes
        self._settle()  # a put that ended while we had the lock left that to us
        if is_taken:
            self._wake(at_once=0 < shared[Number.WAKES_AT] < used)
        return is_taken

    def _settle(self) -> None:
        """Counts puts that have ended: what they wrote stays, what else they had reserved is free."""
        if self._is_closed:
            return
        while (self._released or self._unsettled > self._reserved) and self._lock.acquire(blocking=False):
            try:
                left = 0
                while self._released:
                    left += self._released.popleft()
                written, self._unsettled = self._unsettled, 0
                self._shared.add(Number.WRITTEN, written)
                self._shared.add(Number.USED, written - left)
                self._reserved -= left
                self._publish()
            finally:
                self._lock.release()

    def _publish(self) -> None:
        """Publishes how much is free again if this process ends now."""
        self._table.numbers[Own.RESERVED] = max(0, self._reserved - self._unsettled)


def _full() -> StoreFull:
    return StoreFull(
        "the store is full, and nothing can be evicted at the moment, because it is held or pinned: release what is "
        "not needed, and put again later"
    )


COLLECTS_AFTER_S = 10.0
"""A process whose first put is this long ago takes part: short programs never start a child, unless room is short."""
TICK_S = 0.25
AGAIN_S_MIN = 1.0
AGAIN_S_MAX = 60.0
"""Time before a child that ended by itself is started again; doubles each time that one lived for less than LIVED_S."""
LIVED_S = 10.0
STOP_S = 5.0
_NOT_FOR_IT = frozenset({"KVSTORE_ETCD", "KVSTORE_ROOT", "KVSTORE_ROOT_OPTIONS"})
"""Variables that say which store a command is for: the child's is the one that this process opened."""
_FOR_IT = {"OPENBLAS_NUM_THREADS": "1"}
"""Else numpy's import starts a thread for each core, which spins there; a collector computes no matrices."""


class Collecting:
    """This process's part in the collecting of one root. Does nothing before ``wake``."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._thread: threading.Thread | None = None
        self._closed = False
        self._is_needed = self._wakes = False
        # Of the thread.
        self._child: Program | None = None
        self._began_s = self._again_s = 0.0
        self._pause_s = AGAIN_S_MIN
        self._said: deque[str] = deque(maxlen=1)

    @property
    def is_running(self) -> bool:
        """True while the collector is a child of this process."""
        child = self._child
        return child is not None and child.running

    def wake(self, *, at_once: bool = False) -> None:
        """Notes that this process puts, and whether a collector is needed immediately. Never blocks for long."""
        if self._is_needed or self._closed or (self._thread is not None and not at_once):
            return
        with self._changed:
            if self._closed or self._pid != os.getpid():
                return
            self._is_needed = self._wakes = self._is_needed or at_once
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-collecting", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the child, by force after a while. Idempotent. Does nothing in a forked child of this process."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * STOP_S)

    def _run(self) -> None:
        starts_s = time.monotonic() + COLLECTS_AFTER_S
        while not self._closed:
            if not self.is_running and (self._is_needed or time.monotonic() >= starts_s) and self._is_free():
                self._start()
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wakes, TICK_S)
                self._wakes = False
        child, self._child = self._child, None
        if child is not None:
            child.stop(STOP_S)

    def _is_free(self) -> bool:
        """True if no collector runs. If two processes start a child, the second child ends."""
        try:
            fd = os.open(
                f"{self._folder}/{COLLECTOR}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
            )
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
        except OSError as error:
            log.debug("collecting.failed %s", error)
            return False

    def _start(self) -> None:
        now_s = time.monotonic()
        if self._child is not None:
            if self._child.exit_code:
                log.warning("collecting.ended exit_code=%s said=%r", self._child.exit_code, "".join(self._said))
            self._child = None
            is_short_lived = now_s - self._began_s < LIVED_S
            self._pause_s = min(2 * self._pause_s, AGAIN_S_MAX) if is_short_lived else AGAIN_S_MIN
            self._again_s = self._began_s + self._pause_s
        if now_s < self._again_s:
            return
        self._began_s = now_s
        command = gc_command(self._folder, module="kvstore_gc.host")
        if command is None:
            log.warning("collecting.impossible kvstore-gc cannot be run here: the root stays as full as it is")
            self._again_s = now_s + AGAIN_S_MAX
            return
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT} | _FOR_IT
        self._child = Program("collector", command, environment=environment, speaks=False, on_line=self._hear)
        try:
            self._child.start()
        except Unavailable as error:
            self._child, self._again_s = None, now_s + self._pause_s
            log.warning("collecting.failed %s", error)
            return
        log.info("collecting.started root=%s pid=%s", self._folder, self._child.pid)

    def _hear(self, line: str) -> None:
        self._said.append(line)
        log.info("collecting.said %s", line)
