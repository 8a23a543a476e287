"""The collector of a root that the processes of one host share: one of them is elected, and runs it as a child.

A child and not a thread: listing and sweeping take no time of this process's interpreter, and the store needs nothing
of its code. It ends with this process, even when that is killed (``children``). The elected process is the one whose
session owns the key ``collecting``: when it dies, so does the key, and another one starts a child. Nothing depends on
there being one: collectors may run twice, or not at all (gc/PROTOCOL.md, G7 and S6).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from kvstore.children import Program, gc_command
from kvstore.errors import KVStoreError, Unavailable
from kvstore.meta.bounds import Bound, Bounds
from kvstore.meta.interface import Absent, LeaseGone, Meta, Put
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.presence import Presence
from kvstore.meta.session import Session
from kvstore.parsing import parse_json
from kvstore.sources import Clock

log = logging.getLogger(__name__)

START_S = 10.0
"""A process whose first put is this long ago takes part: short programs never start a child, unless room is short."""
TICK_S = 1.0
INTERVAL_S = 60
"""Time between two rounds of the child; an urgent one, because the root fills up, begins at once."""
HUNG_S = 60.0
"""A child that is not among the collectors so long after its start is stopped, or hangs: another is started."""
LOST_S = 10.0
"""The limit for a child that was among them and no longer is: its lease has ended."""
AGAIN_S_MIN = 2.0
AGAIN_S_MAX = 60.0
"""Time before a child that ended by itself is started again; doubles each time that one lived for less than LIVED_S."""
LIVED_S = 10.0
STOP_S = 5.0
TIMEOUT_S = 2.0
_NOT_FOR_IT = frozenset({"KVSTORE_ETCD", "KVSTORE_ROOT", "KVSTORE_ROOT_OPTIONS"})
"""Variables that say which store a command is for: the child's is the one that this process opened."""
_FOR_IT = {"OPENBLAS_NUM_THREADS": "1"}
"""Else numpy's import starts a thread for each core, which spins there; a collector computes no matrices."""


class Collecting:
    """This process's part in the collecting of one root. Does nothing before ``wrote``."""

    def __init__(
        self,
        meta: Meta,
        keys: Keys,
        presence: Presence,
        clock: Clock,
        folder: str,
        bound: Bound,
        make_room: Callable[[], object],
    ) -> None:
        """``make_room`` spends the reserve of a disk that is so full that the metadata may not be written."""
        self.bound = bound
        self._meta = meta
        self._keys = keys
        self._bounds = Bounds(meta, keys)
        self._presence = presence
        self._clock = clock
        self._folder = folder
        self._make_room = make_room
        self._pid = os.getpid()
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wakes = False
        self._starts_s = 0.0
        # Of the thread.
        self._asked_in: SessionId | None = None
        self._child: Program | None = None
        self._began_s = 0.0
        self._seen_s = 0.0
        self._again_s = 0.0
        self._pause_s = AGAIN_S_MIN
        self._said: deque[str] = deque(maxlen=1)

    @property
    def is_running(self) -> bool:
        """True while the collector is a child of this process."""
        child = self._child
        return child is not None and child.running

    def wrote(self, at_once: bool) -> None:
        """Notes that this process puts, so that its bound counts, and that a collector is needed, perhaps at once."""
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                self._starts_s = self._clock.monotonic_s() + START_S
                self._thread = threading.Thread(target=self._run, name="kvstore-collecting", daemon=True)
                self._thread.start()
            if at_once and self._clock.monotonic_s() < self._starts_s:
                self._starts_s, self._wakes = 0.0, True
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
        while not self._closed:
            try:
                takes_part = self._clock.monotonic_s() >= self._starts_s
                if takes_part and not self.is_running:
                    self._make_room()  # before any write of metadata: an election is one
                session = self._presence.current()
                self._ask(session)
                if takes_part:
                    self._tick(session)
            except (KVStoreError, LeaseGone) as error:
                # Without metadata nobody can be elected either, so a child that runs goes on.
                log.debug("collecting.failed %s", error)
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wakes, timeout=TICK_S)
                self._wakes = False
        self._stop()

    def _tick(self, session: Session) -> None:
        if not self._is_elected(session):
            self._stop()
        elif not self.is_running:
            self._start()
        else:
            self._look()

    def _ask(self, session: Session) -> None:
        """Says which bound this store asks for, once in each session: its collector may be another process's child."""
        if self._asked_in != session.id:
            self._bounds.put(session.id, session.lease, self.bound, TIMEOUT_S)
            self._asked_in = session.id

    def _is_elected(self, session: Session) -> bool:
        key = self._keys.collecting
        found = self._meta.get(key, TIMEOUT_S)
        if found is not None:
            return found.value == session.id
        return self._meta.txn((Absent(key),), (Put(key, session.id, session.lease),), TIMEOUT_S).succeeded

    def _start(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._child is not None:
            log.warning("collecting.ended exit_code=%s said=%r", self._child.exit_code, "".join(self._said))
            self._child = None
            is_short_lived = now_s - self._began_s < LIVED_S
            self._pause_s = min(2 * self._pause_s, AGAIN_S_MAX) if is_short_lived else AGAIN_S_MIN
            self._again_s = self._began_s + self._pause_s
        if now_s < self._again_s:
            return
        self._began_s = self._seen_s = now_s
        command = gc_command(self._folder, f"--interval={INTERVAL_S}", module="kvstore_gc.host")
        if command is None:
            log.warning("collecting.impossible kvstore-gc cannot be run here: the root stays as full as it is")
            self._again_s = now_s + AGAIN_S_MAX
            return
        if self.bound.max_bytes is not None:
            command.append(f"--max-bytes={self.bound.max_bytes}")
        if self.bound.ttl_s is not None:
            command.append(f"--ttl={self.bound.ttl_s:.3f}")
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT} | _FOR_IT
        self._child = Program("collector", command, environment=environment, speaks=False, hears=self._hear)
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

    def _look(self) -> None:
        """Kills a child that no longer takes part, so that the next tick starts another."""
        assert self._child is not None
        now_s = self._clock.monotonic_s()
        collectors = self._meta.list(self._keys.collectors, TIMEOUT_S).items
        if any(_pid_of(record.value) == self._child.pid for record in collectors):
            self._seen_s = now_s
        elif now_s - self._seen_s >= (limit_s := LOST_S if self._seen_s > self._began_s else HUNG_S):
            log.warning("collecting.hung pid=%s has not been seen for %g s: it is killed", self._child.pid, limit_s)
            self._child.kill()
            self._seen_s = now_s

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop(STOP_S)


def _pid_of(collector: bytes) -> int | None:
    """Returns the process of a collector's record; None if it cannot be read."""
    try:
        return int(parse_json(collector)["pid"])
    except (ValueError, KeyError, TypeError):
        return None
