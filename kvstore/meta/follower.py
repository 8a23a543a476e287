"""Follows keys of etcd while a session lives: reads all of them, and then every change, in a thread of its own.

What was read may be outdated once the session is lost, so the next session begins by reading everything afresh. A lost
watch alone is only a lag.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Protocol

from kvstore.core.executor import Loop
from kvstore.errors import KVStoreError
from kvstore.meta.session import Session
from kvstore.meta.store import Snapshot, Watch, WatchLost

log = logging.getLogger(__name__)

RETRY_S = 1.0


class FollowedKeys(Protocol):
    """The keys that are followed."""

    def snapshot(self, timeout_s: float) -> Snapshot: ...

    def watch(self, from_revision: int) -> Watch: ...


class SessionFollower(ABC):
    """Follows ``keys``, one session after another. A step waits up to ``wait_s`` for changes."""

    def __init__(self, name: str, keys: FollowedKeys, wait_s: float, timeout_s: float) -> None:
        self._name = name
        self._keys = keys
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards session and watch
        self._session: Session | None = None
        self._watch: Watch | None = None
        self._loop = Loop(f"kvstore-{name}", self._changed, lambda: self._turn)
        self._followed: Session | None = None
        """The last session in which the keys were read. Only the thread uses it."""

    def start(self) -> None:
        self._loop.start()

    def begin(self, session: Session) -> None:
        """Follows from now on, as long as ``session`` lives."""
        with self._changed:
            self._session = session
            self._changed.notify_all()

    def end(self, session: Session | None) -> None:
        """Notes that the session is over, and forgets what was known because of it."""
        with self._changed:
            if self._session is session:
                self._session = None
                self._forget()
            watch = self._watch
        if watch is not None:
            watch.close()  # wakes the thread

    def close(self, timeout_s: float) -> None:
        """Ends the watch and the thread. Idempotent."""
        self._loop.stop()
        self.end(self._session)
        self._loop.close(timeout_s)

    def step(self, wait_s: float) -> bool:
        """Takes in new events, waiting up to ``wait_s`` for them; False if it cannot receive any at the moment."""
        session = self._session
        if session is None:
            return False
        try:
            if session is not self._followed or self._watch is None:
                self._read_afresh(session)
            else:
                self._take(self._watch, wait_s)
            self._act(session)
        except WatchLost as lost:
            if not self._loop.closed:
                log.info("%s.watch_lost %s", self._name, lost)
            self._drop_watch()
            return True  # the next step reads afresh; until then the old view is good enough
        except KVStoreError as error:
            log.info("%s.not_followed %s", self._name, error)
            self._drop_watch()
            return False
        return True

    @abstractmethod
    def _read(self, snapshot: Snapshot, before: Session | None) -> None:
        """Takes in all keys. ``before`` is the session in which they were last read."""

    @abstractmethod
    def _take(self, watch: Watch, wait_s: float) -> None:
        """Takes in new events, waiting up to ``wait_s`` for them."""

    @abstractmethod
    def _act(self, session: Session) -> None:
        """Does what follows from what is known now."""

    def _forget(self) -> None:  # noqa: B027 - most remember nothing that ends with a session
        """Forgets what was known because of the session, under the lock."""

    def _read_afresh(self, session: Session) -> None:
        self._drop_watch()
        snapshot = self._keys.snapshot(self._timeout_s)
        watch = self._keys.watch(snapshot.revision + 1)
        with self._changed:
            if self._session is not session:
                watch.close()
                return
            self._watch = watch
        before, self._followed = self._followed, session
        self._read(snapshot, before)

    def _drop_watch(self) -> None:
        with self._changed:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _turn(self) -> None:
        if not self.step(self._wait_s):
            self._wait(self._session)

    def _wait(self, session: Session | None) -> None:
        """Waits until there may be new events: in a new session, or after ``RETRY_S`` in the same one."""
        with self._changed:
            self._changed.wait_for(lambda: self._loop.closed or self._session not in (None, session), timeout=RETRY_S)
