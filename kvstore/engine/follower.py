"""Follows garbage collection for one node: the watch that feeds its view, the start fence, the announcements.

All of it depends on a session, and no request waits for it. Every step is a method without a thread, so that a
simulation can run the steps in any order; ``run`` is the loop of the node's thread.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass

from kvstore.core.metrics import NodeCount
from kvstore.engine.engine import Engine
from kvstore.engine.gc_state import ChainBroken, ClusterGcState
from kvstore.errors import KVStoreError, PermissionDenied, RootMismatch, Unavailable
from kvstore.host.tables import publish_first
from kvstore.meta.cluster import Agreed, Foreign, Standing, join_generation
from kvstore.meta.keys import Keys
from kvstore.meta.session import ANNOUNCED_MAX, Session
from kvstore.meta.store import LeaseGone, MetadataStore, Watch, WatchLost
from kvstore.meta.sweeps import named_sweeps
from kvstore.root.fences import lift_unnamed
from kvstore.root.identity import read_newest

# What a node of a cluster does before a session of it protects anything: it compares generations, and fences.


class StartFence:
    """The root of one node, before a session protects anything."""

    def __init__(self, node: Engine, meta: MetadataStore, keys: Keys) -> None:
        self._node = node
        self._meta = meta
        self._keys = keys

    def standing(self) -> Standing:
        """Compares the generations of root and etcd (rule C6). Raises Unavailable, and what the root raises."""
        node, root = self._node, self._node.root
        return node.on_root(
            lambda: join_generation(
                self._meta,
                self._keys,
                node.ids,
                read_root=lambda: read_newest(root),
                publish_root=lambda mine: publish_first(root, mine, ids=node.ids, clock=node.clock),
                timeout_s=node.limits.meta_deadline_s,
            )
        )

    def lift_unnamed(self) -> None:
        """Follows rule C4: a trash folder that no condemned key names belongs to a sweep that etcd has forgotten.

        Raises PermissionDenied where this node may not fence, Unavailable, what the root raises.
        """
        node = self._node
        if node.root.traits.fenced:
            node.on_root(lambda: lift_unnamed(node.root, node.identity.shard_bits, self._named))

    def _named(self) -> set[bytes]:
        """Returns the sweeps in flight. Raises Unavailable if one cannot be read: it may name any folder."""
        try:
            return named_sweeps(self._meta, self._keys, self._node.limits.meta_deadline_s)
        except RootMismatch as error:
            raise Unavailable(f"the keys of garbage collection in etcd cannot be read: {error}") from error


log = logging.getLogger(__name__)

ANNOUNCE_S_MIN = 0.02
"""While a hold's look delays an announcement, the follower tries again after this."""


@dataclass(slots=True)
class _Following:
    """One session being followed."""

    session: Session
    watch: Watch
    announced_s: float
    heard_s: float
    owed: dict[int, float]
    """The stamps that it has not announced, each with the time since when collectors may wait for it."""
    suspects_gap: bool = False
    names: bool = False
    """Its record names chunks that are held."""


class GcFollower:
    """Keeps one view in step with etcd, and etcd in step with the holds. One thread at a time calls ``step``.

    ``fence`` is None for a node alone, whose root no collector of this metadata sweeps.
    """

    def __init__(
        self, node: Engine, view: ClusterGcState, meta: MetadataStore, keys: Keys, fence: StartFence | None
    ) -> None:
        """``view`` is the node's."""
        self._meta = meta
        self._keys = keys
        self._view = view
        self._holds = node.holds
        self._fence = fence
        self._counters = node.counters
        self._limits = node.limits
        self._clock = node.clock
        self._following: _Following | None = None
        self._aside: Session | None = None
        """The session that protects nothing because the generations differ, or because this node could not fence."""
        self._ended = threading.Event()
        self._stepped_s = node.clock.monotonic_s()

    def begin(self, session: Session) -> None:
        """Follows rule V1: once the session's key exists, reads ``gc/``, watches from there on, fences (C4), then
        protects.

        If it raises, it leaves nothing behind. Raises Unavailable, WatchLost, and the root's errors.
        """
        if self._fence is not None:
            standing = self._fence.standing()
            if isinstance(standing, Foreign):
                self._stand_aside(session, f"generation.foreign {standing.why}")
                return
        snapshot = self._meta.list(self._keys.gc, self._limits.meta_deadline_s)
        watch = self._meta.watch(self._keys.gc, snapshot.revision + 1)
        try:
            if self._fence is not None:
                self._fence.lift_unnamed()
            now_s = self._clock.monotonic_s()
            self._holds.drop_all()  # taken while there was no session: they protect nothing
            following = _Following(session, watch, now_s, now_s, {})
            try:
                with self._view.lock:
                    self._following = following
                    self._view.begin(snapshot, session)
            except ChainBroken as broken:
                self.end(session)
                raise Unavailable(f"the keys of garbage collection in etcd cannot be read: {broken}") from broken
        except PermissionDenied as refused:
            watch.close()
            self._stand_aside(session, f"fence.refused this node cannot fence old sweeps: {refused}")
            return
        except BaseException:
            watch.close()
            raise
        self._stepped_s = now_s
        self._ended.clear()
        # Sweeps in flight may have waited for this session ever since its key was put.
        following.owed = dict.fromkeys(self._view.stamps(after=session.announced), session.opened_s)
        session.only_while(self.keeps_up)

    def end(self, session: Session) -> None:
        """Follows rule V2: drops everything that this node believed because of the session. Idempotent."""
        with self._view.lock:
            following, self._following = self._following, None
            self._view.end()
        self._aside = None
        self._holds.drop_protecting()
        self._ended.set()
        if following is not None:
            following.watch.close()

    def run(self, session: Session) -> None:
        if self._aside is session:
            self._await_protection(session)
        following = self._following
        while following is not None and self._following is following and session.alive:
            try:
                self._step(following, min(self._limits.follow_s, self._view.usage.owes_s, self._announces_s(following)))
            except KVStoreError as error:
                log.debug("follower.failed %s", error)
                self._ended.wait(self._limits.follow_s)

    def _await_protection(self, session: Session) -> None:
        """Ends a session that stood aside once its node can agree (rule C6) and fence (C4): the next one protects.

        By the generations themselves: an adoption may not have seen this session, or may have ended before it began.
        """
        assert self._fence is not None
        looked_s = self._clock.monotonic_s()
        while session.alive:
            self._ended.wait(self._limits.follow_s)
            if self._clock.monotonic_s() - looked_s < session.ttl_s / 3:
                continue
            looked_s = self._clock.monotonic_s()
            try:
                if isinstance(self._fence.standing(), Agreed):
                    self._fence.lift_unnamed()
                    if session.alive:
                        session.give_up("it protects nothing, and the next session can")
            except KVStoreError as error:
                log.debug("follower.failed %s", error)

    def step(self, wait_s: float) -> None:
        """Applies new events of the watch, waiting up to ``wait_s`` for them, and announces what is due.

        Raises Unavailable if etcd did not answer, SessionLost if the session's chain is broken.
        """
        if self._following is not None:
            self._step(self._following, wait_s)

    def _step(self, following: _Following, wait_s: float) -> None:
        """Steps for one session; does nothing once another session is followed."""
        try:
            events = following.watch.next(wait_s)
        except WatchLost as lost:
            if self._following is not following or not following.session.alive:
                return  # closed by ``end``, or with the metadata
            self._reread(following, str(lost))
            events = None
        self._holds.expire()
        now_s = self._clock.monotonic_s()
        if events:
            # Only the chain proves that the watch has no gap: on a restored store the other keys go on changing.
            if any(event.key == self._keys.gc_seq for event in events):
                following.heard_s, following.suspects_gap = now_s, False
            try:
                with self._view.lock:
                    if self._following is not following:
                        return
                    self._view.apply(events)
            except ChainBroken as broken:
                following.session.give_up(str(broken))
                return
        if now_s - following.heard_s >= self._limits.gap_check_s:
            self._look_for_gap(following)
        self._announce(following)
        self._stepped_s = self._clock.monotonic_s()
        self._report(following)

    def keeps_up(self) -> bool:
        """True unless this node delays collectors for longer than it may (rule H4)."""
        following, now_s = self._following, self._clock.monotonic_s()
        if following is None:
            return True
        since_s = min((self._stepped_s, *following.owed.values()))
        return now_s - since_s <= self._limits.announce_lag_max_s

    @property
    def _pace_s(self) -> float:
        """The shortest time between two announcements."""
        return max(self._limits.announce_s, self._view.pace_s)

    def _announces_s(self, following: _Following) -> float:
        """Seconds until an announcement that is owed may be made."""
        if not following.owed:
            return math.inf
        return max(ANNOUNCE_S_MIN, following.announced_s + self._pace_s - self._clock.monotonic_s())

    def _announce(self, following: _Following) -> None:
        """Follows rules A1 to A3. Announces only if a sweep waits for it: an early announcement unblocks no collector.
        Its names are withdrawn once no sweep is in flight: every pin writes them again.
        """
        session, now_s = following.session, self._clock.monotonic_s()
        owed = self._view.stamps(after=session.announced)
        following.owed = {stamp: following.owed.get(stamp, now_s) for stamp in owed}
        is_over = following.names and self._view.is_calm
        if not (owed or is_over) or now_s - following.announced_s < self._pace_s:
            return
        compare = self._view.seq_is_seen
        due = self._holds.announcement(self._view)
        if owed and min(owed) > due.revision:
            return
        timeout_s = self._limits.meta_deadline_s
        result = session.txn((compare,), announced=due.revision, held=due.held, timeout_s=timeout_s)
        # On failure the chain of sweeps has gone on. The watch will bring the new end, and the next step tries again.
        if result.succeeded:
            following.announced_s, following.names = self._clock.monotonic_s(), bool(due.held)
            self._counters.add(NodeCount.ANNOUNCEMENTS)
            following.owed = {stamp: since_s for stamp, since_s in following.owed.items() if stamp > due.revision}
            self._holds.announced(due)

    def _report(self, following: _Following) -> None:
        """Reports what this node wrote and deleted, while a collector counts (gc/PROTOCOL.md, section 6)."""
        usage, answered = self._view.usage, self._view.usage.answers
        # Half the pace of announcements: N / 100 s for N nodes.
        due = usage.due(self._clock.monotonic_s(), self._view.pace_s / 2)
        if due is None:
            return
        session = following.session
        try:
            revision = self._meta.put(
                self._keys.usage_of(session.id), due.to_json(), session.lease, self._limits.meta_deadline_s
            )
        except LeaseGone:
            return  # the session is over, and its thread is about to hear of it
        with self._view.lock:
            if self._following is following:
                usage.reported(due, revision, answered, self._clock.monotonic_s())
                self._counters.add(NodeCount.USAGE_REPORTS)

    def _look_for_gap(self, following: _Following) -> None:
        """Checks the chain of sweeps, because a watch on a store that was restored to an older revision stays silent.

        A gap must show twice in a row: a fresh write may still be on its way to us.
        """
        following.heard_s = self._clock.monotonic_s()
        found = self._meta.get(self._keys.gc_seq, self._limits.meta_deadline_s)
        if self._view.is_last(None if found is None else found.value):
            following.suspects_gap = False
        elif following.suspects_gap:
            following.session.give_up("the store's chain of sweeps is not the one that was watched")
        else:
            following.suspects_gap = True

    def _reread(self, following: _Following, why: str) -> None:
        """Follows rule V3: holds stay, but which sweeps they are older than is no longer known.

        If it fails, the old view stays in use, which is no worse than a lag, and the next step tries again.
        """
        following.watch.close()
        snapshot = self._meta.list(self._keys.gc, self._limits.meta_deadline_s)
        # Check after that read, never before: a restored store has then either lost our last write, or lost none of
        # ours.
        following.session.check_chain(self._limits.meta_deadline_s)
        watch = self._meta.watch(self._keys.gc, snapshot.revision + 1)
        try:
            with self._view.lock:
                if self._following is not following:
                    watch.close()
                    return
                following.watch = watch
                self._holds.age_all()
                self._view.reread(snapshot)
        except ChainBroken as broken:
            following.session.give_up(str(broken))
        log.warning("view.reread %s", why)
        self._counters.add(NodeCount.WATCHES_LOST)

    def _stand_aside(self, session: Session, why: str) -> None:
        """Makes this session protect nothing: chunks are still served, pins are refused, no collector waits for it."""
        log.error("%s: this node protects nothing", why)
        session.txn((), announced=ANNOUNCED_MAX, timeout_s=self._limits.meta_deadline_s)
        self._ended.clear()
        self._aside = session
