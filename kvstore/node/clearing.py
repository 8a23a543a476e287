"""Clears what a selection names, everywhere: tell all nodes, sweep the root, tell them again.

Separate from the member, whose pins decide what stays. The order matters. A node that has dropped what is named, and
refuses to take it back, cannot write to the root again what the sweep just deleted. And the barrier goes up before pins
are read: a pin taken too late to be read finds the barrier (gc/PROTOCOL.md, P5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvstore.address import Address
from kvstore.census.selection import ClearOrder, Selection
from kvstore.census.walk import Found, found_in, sampled, with_header
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.meta.barriers import BARRIER_S, Barrier, Barriers
from kvstore.meta.clears import PASSING_S, Clears
from kvstore.meta.keys import SessionId
from kvstore.node.lanes import Deadline, moved_on
from kvstore.node.node import Node
from kvstore.progress import Progress
from kvstore.results import Cleared
from kvstore.root.fences import make_room
from kvstore.root.identity import read_writers

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""Time for the other nodes to answer that they dropped it; a node that hangs, or knows no orders, never answers."""
POLL_S = 0.2
LANES = 2
PROGRESS_S = 0.5
RENEW_S = min(PASSING_S, BARRIER_S) / 8

Pinned = Container[Address]


def resolved(node: Node, selection: Selection) -> ClearOrder:
    """Returns the order for a selection. Raises InvalidRequest if it selects nothing, and the root's errors."""
    writers = node.on_root(lambda: read_writers(node.root))
    return selection.resolve(node.namespaces(), writers, node.clock.now_s())


class Clearing:
    """One clear, run by one node. ``clears`` is None for a node alone, which tells nobody.

    ``pinned`` reads what pins keep. It is called once nothing else can be pinned.
    """

    def __init__(
        self,
        node: Node,
        clears: Clears | None,
        barriers: Barriers,
        pinned: Callable[[], Pinned],
        *,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._node = node
        self._clears = clears
        self._barriers = barriers
        self._pinned = pinned
        self._pause = pause
        self._timeout_s = node.limits.meta_deadline_s

    def count(self, order: ClearOrder, progress: Progress) -> Cleared:
        """Counts what ``clear`` would delete; changes nothing."""
        return _Sweep(self._node, order, self._pinned(), None).run(progress)

    def clear(self, order: ClearOrder, progress: Progress) -> Cleared:
        """Deletes what the order names on the root; before and after, all nodes drop it.

        Raises Unavailable if the other nodes could not be told, and what ``progress`` raises: clear again.
        """
        node, clears = self._node, self._clears

        def waiting() -> None:
            progress(0, 0)

        node.on_root(lambda: make_room(node.root))  # orders and barriers are written before anything is deleted
        if clears is None:
            try:
                self._obey_alone(order, waiting)
                node.sweep_disk([order])
                return self._behind_barrier(node.ids.fresh(), order, progress)
            finally:  # also when cut short: a leftover order would keep the namespace out of memory for good
                node.obey([order], [order] if order.stands else [])
        id, content = node.ids.fresh(), order.to_json()
        lease = clears.tell(id, content, self._timeout_s, stands=order.stands)
        clears.trim(self._timeout_s)  # now, not at the end: a call that is cut short never gets there
        with self._kept(lambda: clears.renew(lease, self._timeout_s)):
            silent = self._wait_for_answers(clears.silent, id, waiting)
            done = self._behind_barrier(id, order, progress)
        if not clears.renew(lease, self._timeout_s):  # a node that forgot it withdrew its answer
            raise Unavailable("etcd forgot the order while the root was swept: clear again")
        clears.done(id, content, self._timeout_s, stands=order.stands)
        silent |= self._wait_for_answers(clears.still_silent, id, lambda: None)
        return replace(done, unconfirmed=tuple(sorted(session.hex() for session in silent)))

    def _obey_alone(self, order: ClearOrder, waiting: Callable[[], None]) -> None:
        """Does what the followers of a cluster do: drops it, and waits for writes in progress.

        A write that is not waited for would publish behind the sweep. Raises Unavailable if the writes do not end.
        """
        deadline = Deadline(self._node.clock, ANSWER_S)
        while not self._node.obey([order], [order]):
            waiting()
            if deadline.passed:
                raise Unavailable("writes to the root that may be of these chunks do not end: clear again")

    def _behind_barrier(self, id: bytes, order: ClearOrder, progress: Progress) -> Cleared:
        """Follows rule P5: barrier, then pins, then deletions; the barrier goes once all deletions have ended.

        If the sweep fails, a lane may still be in the middle of a deletion: then the barrier expires by itself.
        """
        barrier = self._barriers.put_up(id, order.to_json(), self._timeout_s)
        with self._kept(lambda: barrier.renew(self._timeout_s)):
            done = _Sweep(self._node, order, self._pinned(), barrier).run(progress)
            barrier.check()
        barrier.take_down(self._timeout_s)
        return done

    @contextmanager
    def _kept(self, renew: Callable[[], object]) -> Iterator[None]:
        """Renews a lease while the block runs, in a thread of its own: one call of the root may keep the sweep busy for
        long.

        A node that forgets the order in between would take back what the sweep deletes.
        """
        ended = threading.Event()

        def renewing() -> None:
            while not ended.wait(RENEW_S):
                try:
                    renew()
                except KVStoreError as error:
                    log.info("clear.not_renewed %s", error)

        thread = threading.Thread(target=renewing, name="kvstore-clear", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self._timeout_s)

    def _wait_for_answers(
        self, look: Callable[[bytes, float], set[SessionId]], id: bytes, waiting: Callable[[], None]
    ) -> set[SessionId]:
        deadline = Deadline(self._node.clock, ANSWER_S)
        while True:
            silent = look(id, self._timeout_s)
            waiting()
            if not silent or deadline.passed:
                return silent
            self._pause(POLL_S)


class _Sweep:
    """One pass over all shards of the root, several at once. Without a ``barrier`` it only counts."""

    def __init__(self, node: Node, order: ClearOrder, pinned: Pinned, barrier: Barrier | None) -> None:
        self._node = node
        self._order = order
        self._pinned = pinned
        self._barrier = barrier
        self._shards = sampled(node.identity.shard_bits)
        self._left = iter(self._shards)
        self._lock = threading.Lock()
        self._is_ended = False
        self._done = 0
        self._chunks = self._bytes = self._kept = self._failed = 0

    def run(self, progress: Progress) -> Cleared:
        """Does the whole pass. Raises what ``progress`` raises; what was deleted by then stays deleted."""
        # Use a few lanes however many shards there are: the others go on serving.
        batch = self._node.begin_on_root(min(LANES, len(self._shards)), lambda _: self._work())
        try:
            while not batch.join(PROGRESS_S):
                progress(self._done, len(self._shards))
        except BaseException:
            self._is_ended = True
            batch.stop()
            raise
        batch.wait(Deadline(self._node.clock, PROGRESS_S))
        progress(self._done, len(self._shards))
        return Cleared(self._chunks, self._bytes, self._kept, self._failed)

    def _work(self) -> bool:
        while (shard := self._next()) is not None:
            self._shard(places.shard_folder(shard))
        return True

    def _next(self) -> int | None:
        with self._lock:
            return None if self._is_ended else next(self._left, None)

    def _shard(self, folder: Name) -> None:
        try:
            for entry in self._node.root.list(folder):
                moved_on()
                if self._is_ended:
                    return
                found = found_in(folder, entry, self._node.limits.quantum_s)
                if found is not None and self._order.means(found.namespace):
                    self._chunk(found)
        except KVStoreError:
            self._add(failed=1)
        with self._lock:
            self._done += 1

    def _chunk(self, found: Found) -> None:
        try:
            if self._order.needs_headers:
                found = with_header(self._node.root, found)
            if not self._order.takes(found):
                return
            if found.address in self._pinned:
                self._add(kept=1)
                return
            if self._barrier is not None:
                self._barrier.check()
                self._node.known.forget(found.address)
                if not self._node.root.remove(found.name):
                    return
                self._node.gc_view.usage.removed(found.size_bytes)
            self._add(chunks=1, size_bytes=found.size_bytes)
        except KVStoreError:
            self._add(failed=1)

    def _add(self, *, chunks: int = 0, size_bytes: int = 0, kept: int = 0, failed: int = 0) -> None:
        with self._lock:
            self._chunks += chunks
            self._bytes += size_bytes
            self._kept += kept
            self._failed += failed
