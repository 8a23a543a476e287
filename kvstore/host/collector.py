"""The collector of a root that the processes of one host share: one of them runs it as a child.

A child and not a thread: listing and evicting take no time of this process's interpreter, and the store needs nothing
of its code. It ends with this process, even when that is killed (``children``). The process that has the lock of
the file ``host/collector.lock`` collects; the others check now and then whether it is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque

from kvstore.core.process import Program, gc_command
from kvstore.errors import Unavailable
from kvstore.host.tables import COLLECTOR
from kvstore.root.posix import FILE_MODE

log = logging.getLogger(__name__)

START_S = 10.0
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
        starts_s = time.monotonic() + START_S
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
