"""Follows the peers' reports: one watch that feeds the directory, and hears of cleared namespaces.

Depends on this node's session. When the session is lost, what etcd said may be false, so it is forgotten; the next
session begins by reading everything afresh. A lost watch alone is only a lag.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvstore.background import Loop
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.meta.digests import ClearedTold, Digests
from kvstore.meta.interface import KeyValue, Watch, WatchLost
from kvstore.meta.session import Session
from kvstore.namespace import NamespaceDigest
from kvstore.node.counters import Counters
from kvstore.peers.directory import EMPTY, Directory
from kvstore.peers.limits import PeerLimits
from kvstore.peers.told import Told
from kvstore.sources import Clock

log = logging.getLogger(__name__)

RETRY_S = 1.0
BATCHES_MAX = 256
"""Batches of news taken in before the directory is built: a flood must not delay it for ever."""
OWN_MARKS_MAX = 1024
"""Limit on this node's own clears that it may still hear of."""
REST = 4
"""Wait this multiple of the last build time before rebuilding: with many peers there is always news."""


class Follower:
    """``directory`` is always the newest there is. ``own`` is this node's address, whose digests are left out.

    ``on_cleared`` is called for each namespace cleared since its last call, and at the start for all that ever were;
    ``on_turn`` is called regularly. Both run in the follower's thread: they must not raise, and while they run nothing
    else is heard.
    """

    def __init__(
        self,
        digests: Digests,
        own: str | None,
        limits: PeerLimits,
        counters: Counters,
        clock: Clock,
        on_cleared: Callable[[NamespaceDigest], None],
        on_turn: Callable[[Directory], None],
    ) -> None:
        self.directory: Directory = EMPTY
        self._digests = digests
        self._own = own
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._on_cleared = on_cleared
        self._on_turn = on_turn
        self._changed = threading.Condition()  # guards session, watch, directory and marks
        self._session: Session | None = None
        self._loop = Loop("kvstore-peers-follow", self._changed, lambda: self._turn)
        self._watch: Watch | None = None
        self._marks: dict[NamespaceDigest, bytes] = {}
        self._own_marks: deque[bytes] = deque(maxlen=OWN_MARKS_MAX)
        # Only the thread uses the fields below.
        self._followed: Session | None = None
        self._told = Told(own, limits.prints_max)
        self._show_at_s = 0.0

    def start(self) -> None:
        """Starts the thread."""
        self._loop.start()

    def begin(self, session: Session) -> None:
        """Follows from now on, as long as ``session`` lives."""
        with self._changed:
            self._session = session
            self._changed.notify_all()

    def end(self, session: Session) -> None:
        """Notes that the session is over, and forgets what was known because of it."""
        with self._changed:
            if self._session is session:
                self._session, self.directory = None, EMPTY
            watch = self._watch
        if watch is not None:
            watch.close()  # wakes the thread

    def expect_cleared(self, mark: bytes) -> None:
        """Notes that this node is about to report a clear itself, which it need not hear of."""
        with self._changed:
            self._own_marks.append(mark)

    def step(self, wait_s: float) -> bool:
        """Takes in new events, waiting up to ``wait_s`` for them; False if nothing can be heard at the moment."""
        session = self._session
        if session is None:
            self._followed = None
            return False
        try:
            if session is not self._followed or self._watch is None:
                self._read_afresh(session)
            else:
                self._hear_batches(self._watch, min(wait_s, self._rest_s()) if self._told.is_changed else wait_s)
        except WatchLost as lost:
            log.info("peers.watch_lost %s", lost)
            self._drop_watch()
            return True  # the next step reads afresh; until then the old directory is good enough
        except KVStoreError as error:
            log.info("peers.not_followed %s", error)
            self._drop_watch()
            return False
        self._show(session)
        return True

    def close(self, timeout_s: float) -> None:
        """Ends the watch and the thread. Idempotent."""
        with self._changed:
            self._loop.stop()
            self._session, self.directory = None, EMPTY
            watch = self._watch
        if watch is not None:
            watch.close()
        self._loop.close(timeout_s)

    def _read_afresh(self, session: Session) -> None:
        self._drop_watch()
        snapshot = self._digests.snapshot(self._limits.meta_deadline_s)
        watch = self._digests.watch(snapshot.revision + 1)
        with self._changed:
            if self._session is not session:
                watch.close()
                return
            self._watch = watch
        self._followed, self._told = session, Told(self._own, self._limits.prints_max)
        self._hear((each.key, each) for each in snapshot.items)
        self._counters.add(NodeCount.PEERS_READS_AFRESH)

    def _hear_batches(self, watch: Watch, wait_s: float) -> None:
        batch = watch.next(wait_s)
        for _ in range(BATCHES_MAX):
            if not batch:
                break
            self._hear((event.key, event.kv) for event in batch)
            batch = watch.next(0.0)

    def _hear(self, keys: Iterable[tuple[str, KeyValue | None]]) -> None:
        for key, found in keys:
            news = self._digests.read(key, found)
            if isinstance(news, ClearedTold):
                self._hear_cleared(news)
            elif news is not None:
                self._told.hear(news)

    def _hear_cleared(self, news: ClearedTold) -> None:
        with self._changed:
            is_new = self._marks.get(news.namespace) != news.mark and news.mark not in self._own_marks
            self._marks[news.namespace] = news.mark
        if is_new:
            self._on_cleared(news.namespace)

    def _show(self, session: Session) -> None:
        """Replaces the directory as a whole, unless the session has ended meanwhile."""
        if not self._told.is_changed or self._rest_s():
            return
        began_s = self._clock.monotonic_s()
        directory = self._told.directory()
        now_s = self._clock.monotonic_s()
        self._show_at_s = now_s + REST * (now_s - began_s)
        with self._changed:
            if self._session is session:
                self.directory = directory

    def _rest_s(self) -> float:
        return max(0.0, self._show_at_s - self._clock.monotonic_s())

    def _drop_watch(self) -> None:
        with self._changed:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _turn(self) -> None:
        hears = self.step(self._limits.follow_s)
        self._on_turn(self.directory)
        if not hears:
            self._wait(self._session)

    def _wait(self, session: Session | None) -> None:
        """Waits until there may be something to hear: a new session, or after a while the same one."""
        with self._changed:
            self._changed.wait_for(lambda: self._loop.closed or self._session not in (None, session), timeout=RETRY_S)
