"""A process as one of those that share a root of one host: what it maps and asks for, its part in collecting."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.core.metrics import Counters, NodeCount
from kvstore.core.process import Program, gc_command
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.gc_state import HostGcState
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.places import CHUNKS
from kvstore.host import tables as shared_file
from kvstore.host.eviction import settle_left
from kvstore.host.tables import (
    COLLECTOR,
    HoldTable,
    HostRoom,
    InUse,
    Number,
    Own,
    Shared,
    is_locked,
    limit_on,
    live_tables,
    smallest,
)
from kvstore.root.posix import PosixRoot, translated

log = logging.getLogger(__name__)

# The part of this process in collecting. One process of the host runs the collector as a child, which ends with it,
# even if it is killed. A child and not a thread: listing and evicting take no time of this interpreter. The process
# that has the lock of the file ``host/collector.lock`` collects; the others check now and then whether it is free.


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
            if not self.is_running and (self._is_needed or time.monotonic() >= starts_s):
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
            return not is_locked(f"{self._folder}/{COLLECTOR}", os.O_CREAT | os.O_NOFOLLOW)
        except KVStoreError as error:
            self._again_s = time.monotonic() + AGAIN_S_MAX
            log.warning("collecting.failed %s", error)
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
        if now_s < self._again_s or not self._is_free():
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


UNKNOWN_BYTES = 64 << 20
UNKNOWN_SHARE = 0.01
"""Bytes that may be written to a root of unknown use before it is listed: the smaller of these."""
WAKES_SHARE = 0.75
"""A collector starts immediately if more of the capacity is used, else later: short programs never start one."""


LIMITED_S = 1.0
"""Time between two looks of a process without a limit at what the others ask for."""


class HostMember:
    """This process on one root. Ended by ``leave``."""

    def __init__(self, root: PosixRoot, max_bytes: int | None = None, ttl_s: float | None = None) -> None:
        """``max_bytes`` and ``ttl_s`` are what this process asks for; None: no limit.

        Raises RootMismatch where the files of ``host`` were removed while others use the root; the root's errors.
        """
        self.max_bytes = max_bytes or 0
        self._root = root
        self.folder = folder = root.path
        self._in_use = InUse(folder)
        self._room: HostRoom | None = None

        def make() -> None:
            is_empty = next(iter(root.list(CHUNKS)), None) is None
            unknown_bytes = int(min(UNKNOWN_BYTES, UNKNOWN_SHARE * self.max_bytes))
            shared_file.make(folder, 0 if is_empty else max(0, self.max_bytes - unknown_bytes))

        with translated("open", f"{folder}/host"):
            try:
                self._in_use.join(lambda: shared_file.is_made(folder), make)
                self.shared = Shared(folder)
                settle_left(folder, self.shared)
                self.table = HoldTable(folder)
            except BaseException:
                self._in_use.close()
                raise
        numbers = self.table.numbers
        numbers[Own.MAX_BYTES], numbers[Own.TTL_MS] = self.max_bytes, int(1000 * (ttl_s or 0))
        self.collecting = None if max_bytes is None and ttl_s is None else Collecting(folder)
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
        wake: Callable[..., None] = self._limit_again if self.collecting is None else self.collecting.wake
        self._room = HostRoom(self.shared, self.table, refused, wake)
        return HostGcState(self.folder, self.shared, self.table, known, self._room)

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

    def _limit_again(self, *, at_once: bool) -> None:
        """Has a process without a limit set that of the others again: the one that set it may have been killed."""
        if at_once and time.monotonic() - self._limited_s >= LIMITED_S:
            self._limit()

    def _limit(self) -> None:
        self._limited_s = time.monotonic()
        try:
            max_bytes = smallest(live_tables(self.folder, self.shared))[0]
            limit = limit_on(self._root, max_bytes, self.shared) if max_bytes else 0
        except (OSError, KVStoreError):
            return
        self.shared[Number.LIMIT], self.shared[Number.WAKES_AT] = limit, int(WAKES_SHARE * limit)
