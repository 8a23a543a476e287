"""Presence: a node's standing in the cluster, one session after another.

A session never comes back (rule V2); presence begins the next one. Separate from ``session.py`` because a session only
lives and dies, while presence does everything else that a node must do when one begins and ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.meta.deadline import TIMEOUT_S, Deadline
from kvstore.meta.interface import LeaseGone, Meta, WatchLost
from kvstore.meta.keys import Keys
from kvstore.meta.session import TTL_S, Session, check_session_ttl
from kvstore.sources import Clock, Ids, RandomIds, SystemClock

log = logging.getLogger(__name__)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 2.0
BACKOFF_S_MAX_UNREADY = 30.0
"""The longest pause between sessions that cannot be used, such as while the root does not answer."""

SessionCall = Callable[[Session], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Hook:
    on_new: SessionCall
    on_lost: SessionCall | None


class Presence:
    """Always one session, as far as the store allows: after a lost one the next begins as soon as the store answers.

    Attach whatever depends on the session. ``on_new`` runs for every new session before ``current`` hands it out (rule
    V1: first the session, then the view, only then answers). If it raises one of ``kvstore.errors`` it leaves nothing
    behind, and the session ends; the next one begins after a while. ``on_lost`` runs once for every session that
    ``on_new`` returned for and that died, before the lease is revoked and the next session begins; it must not raise.
    One thread runs them all.
    """

    def __init__(
        self, meta: Meta, keys: Keys, *, clock: Clock | None = None, ids: Ids | None = None, ttl_s: int = TTL_S
    ) -> None:
        check_session_ttl(ttl_s)
        self._meta = meta
        self._keys = keys
        self._clock = clock or SystemClock()
        self._ids = ids or RandomIds()
        self._ttl_s = ttl_s
        self._changed = threading.Condition()
        self._hooks: list[_Hook] = []
        self._told: list[_Hook] = []
        self._session: Session | None = None
        self._heard_s = self._clock.monotonic_s()
        """The last time that the store acknowledged something of the sessions before this one."""
        self._ready = False
        self._why_none: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def attach(self, on_new: SessionCall, on_lost: SessionCall | None = None) -> None:
        """Adds hooks for what depends on the session, before or after ``start``."""
        with self._changed:
            self._hooks.append(_Hook(on_new, on_lost))
            self._changed.notify_all()

    def start(self, wait_s: float | None = None, *, must_begin: bool = True) -> None:
        """Starts the thread; with ``wait_s`` also waits for the first session.

        Only if asked to wait, raises Unavailable if none began in that time, PermissionDenied if the store refused.
        Unless it ``must_begin``, the first failure ends the wait, and the session begins when it can.
        """
        assert self._thread is None, "presence is started once"
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()
        if wait_s is None:
            return
        with self._changed:
            ends = PermissionDenied if must_begin else Exception
            self._changed.wait_for(lambda: self._ready or isinstance(self._why_none, ends), timeout=wait_s)
            if self._ready or not must_begin:
                return
            error = self._none()
        self.close(timeout_s=0.1)  # the caller has waited long enough; the thread ends with the request it is in
        raise error

    def current(self) -> Session:
        """Returns the live session. Raises Unavailable while there is none."""
        with self._changed:
            if self._ready and self._session is not None and self._session.alive:
                return self._session
            raise self._none()

    @property
    def silent_s(self) -> float:
        """Seconds since the store last acknowledged a keepalive, or the opening of a session; since the start at most.

        It grows while the store does not answer, and while this node may not have a session.
        """
        with self._changed:
            session, heard_s = self._session, self._heard_s
        return session.silent_s if session is not None else max(0.0, self._clock.monotonic_s() - heard_s)

    @property
    def margin_s(self) -> float:
        """Seconds until the session ends unless a keepalive is acknowledged; 0 while there is none."""
        with self._changed:
            session = self._session if self._ready else None
        return max(0.0, self._ttl_s - session.silent_s) if session is not None and session.alive else 0.0

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the session (without ``on_lost``) and the thread. Idempotent."""
        deadline = Deadline(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_s())

    def _run(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while not self._closed:
            try:
                session = Session.open(
                    self._meta, self._keys, clock=self._clock, ids=self._ids, ttl_s=self._ttl_s, timeout_s=TIMEOUT_S
                )
            except KVStoreError as error:
                self._note(error)
                self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
                continue
            log.debug("session.new %s", session.id.hex())
            with self._changed:
                self._session = session
            session.start(on_lost=self._wake)
            lived = self._live(session)
            self._leave(session)
            backoff_s = BACKOFF_S_MIN if lived else min(2 * backoff_s, BACKOFF_S_MAX_UNREADY)
            if not lived:
                self._pause(backoff_s)

    def _live(self, session: Session) -> bool:
        """Runs the hooks of ``session`` and waits until it ends; False if a hook failed.

        A session that is not ready must not stay: collectors would wait for it, and it announces nothing.
        """
        while session.alive and not self._closed:
            with self._changed:
                untold = [hook for hook in self._hooks if hook not in self._told]
                if not untold:
                    self._ready = True
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: self._closed or not session.alive or len(self._hooks) > len(self._told),
                        timeout=self._ttl_s,
                    )
                    continue
            for hook in untold:
                try:
                    hook.on_new(session)
                except (KVStoreError, WatchLost, LeaseGone) as error:
                    self._note(error)
                    return False
                self._told.append(hook)
        return True

    def _leave(self, session: Session) -> None:
        with self._changed:
            self._heard_s = self._clock.monotonic_s() - session.silent_s
            self._session, self._ready = None, False
            told, self._told = self._told, []
        if not self._closed:
            log.warning("session.lost %s", session.id.hex())
            # Before the lease is revoked: until then nobody else acts on the session's death.
            for hook in reversed(told):
                if hook.on_lost is not None:
                    hook.on_lost(session)
        session.close(TIMEOUT_S / 2)

    def _wake(self, session: Session) -> None:
        with self._changed:
            self._changed.notify_all()

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            session = self._session
            self._changed.wait_for(lambda: self._closed or not (session is None or session.alive), timeout=pause_s)

    def _note(self, error: Exception) -> None:
        with self._changed:
            self._why_none = error
            self._changed.notify_all()

    def _none(self) -> KVStoreError:
        if self._closed:
            return Unavailable("this node has left the cluster: open a new one")
        if isinstance(self._why_none, PermissionDenied):
            return PermissionDenied(str(self._why_none))
        return Unavailable(f"this node has no session at the moment: {self._why_none or 'it is being opened'}")
