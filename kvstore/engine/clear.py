"""Clears chunks everywhere: publishes an order to all nodes, sweeps the root, publishes the order as done.

The order matters. A node that has dropped what is named, and refuses to take it back, cannot write to the root again
what the sweep just deleted. And the order is published before pins are read: a pin taken too late to be read finds it
(gc/PROTOCOL.md, P5).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvstore.census.selection import ClearOrder, Selection
from kvstore.census.walk import ChunkFile, found_in, walk
from kvstore.core.address import Address
from kvstore.core.executor import Deadline, moved_on
from kvstore.core.operations import Progress
from kvstore.core.results import Cleared
from kvstore.engine.engine import Engine
from kvstore.engine.host import HostMember
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.host.clears import PASSING_S, HostClears
from kvstore.host.eviction import Evicted, Eviction, EvictionVictim, begin_listing
from kvstore.meta.clears import Clears, PublishedClear, PublishedOrder
from kvstore.meta.follower import SessionFollower
from kvstore.meta.keys import SessionId
from kvstore.meta.session import Session
from kvstore.meta.store import Snapshot, Watch
from kvstore.root.fences import with_reserve
from kvstore.root.posix import PosixRoot, translated

# Follows clears: one thread reads the orders, has them obeyed, and answers.
#
# Every node of a cluster follows them, with memory or without: a node also forgets which chunks it knows to be
# present. Rule P5 of kvstore/tiers/MEMORY.md.


log = logging.getLogger(__name__)

WAIT_S = 0.5


class ClearsFollower(SessionFollower):
    """Follows orders while a session lives, and has the node obey them, in a thread of its own."""

    def __init__(self, node: Engine, clears: Clears, timeout_s: float) -> None:
        super().__init__("clears", clears, WAIT_S, timeout_s)
        self._node = node
        self._clears = clears
        # Only the thread uses the fields below.
        self._orders: dict[bytes, tuple[ClearOrder, bool, float]] = {}
        """The orders that are kept, whether each is done, and until when (monotonic) it forbids."""
        self._obeyed: dict[bytes, bool] = {}
        """For each order that was obeyed, whether it was done then."""
        self._answered: set[bytes] = set()
        """Orders that this session has answered: each answer is a key in etcd, and must go with its order."""
        self._forbidding: set[bytes] = set()
        """Orders whose chunks may not be stored again."""

    def begin(self, session: Session) -> None:
        self.start()
        super().begin(session)

    def _read(self, snapshot: Snapshot, before: Session | None) -> None:
        if before is not self._followed:
            self._answered.clear()  # its answers went with the session
        orders = [self._clears.read(each.key, each) for each in snapshot.items]
        for id in self._orders.keys() - {each.id for each in orders if each is not None}:
            del self._orders[id]
        for each in orders:
            self._apply(each, 0 if before is None else self._clears.passing_s)
        if before is None:
            # This process began after these, or while they were swept: what was put here since must stay.
            self._obeyed = {id: True for id, (_, is_done, _) in self._orders.items() if is_done}
            self._node.refill([order for order, _, _ in self._orders.values()])

    def _take(self, watch: Watch, wait_s: float) -> None:
        for event in watch.next(wait_s) or ():
            self._apply(self._clears.read(event.key, event.kv), self._clears.passing_s)

    def _apply(self, order: PublishedOrder | None, passing_s: float) -> None:
        if order is None:
            return
        if order.content is None:
            if order.id in self._orders and self._orders[order.id][1] is order.is_done:
                del self._orders[order.id]
            return
        try:
            content = ClearOrder.from_json(order.content)
        except InvalidRequest as error:  # from a later version: its issuer sees no answer from this node
            log.warning("clears.not_understood %s %s", order.id.hex(), error)
            return
        _, was_done, ends_s = self._orders.get(order.id, (content, False, math.inf))
        if order.is_done and not was_done:
            ends_s = time.monotonic() + passing_s
        self._orders[order.id] = content, order.is_done, ends_s

    def _act(self, session: Session) -> None:
        """Obeys new orders, and answers those whose issuers wait. The next step retries what is not done yet.

        When an order is done the node forgets once more which chunks it knows to be present: reads may have remembered
        some during the root's sweep.
        """
        now_s = time.monotonic()
        found = {id: is_done for id, (_, is_done, _) in self._orders.items()}
        forbidding = {id for id, (_, _, ends_s) in self._orders.items() if ends_s > now_s}
        if found != self._obeyed or forbidding != self._forbidding:
            new = [self._orders[id][0] for id in found if id not in self._obeyed]
            if self._node.obey(new, [self._orders[id][0] for id in forbidding]):
                self._obeyed, self._forbidding = found, forbidding
        waiting = {id for id, is_done in self._obeyed.items() if not is_done}
        for id in waiting - self._answered:
            self._clears.answer(session, id, self._timeout_s)
            self._answered.add(id)
        for id in self._answered - waiting:
            self._clears.withdraw(session, id, self._timeout_s)
            self._answered.discard(id)


POLL_S = 0.2
THREADS = 2
PROGRESS_S = 0.5

Pinned = Container[Address]


def resolved(node: Engine, selection: Selection) -> ClearOrder:
    """Returns the order for a selection. Raises InvalidRequest if it selects nothing, and the root's errors."""
    return selection.resolve(node.namespaces(), node.clock.now_s())


class NamespaceClear:
    """One clear, run by one node; ``is_alone`` if no other node shares the root.

    ``pinned`` reads what pins keep. It is called once nothing else can be pinned.
    """

    def __init__(self, node: Engine, clears: Clears, pinned: Callable[[], Pinned], *, is_alone: bool = False) -> None:
        self._node = node
        self._clears = clears
        self._pinned = pinned
        self._is_alone = is_alone
        self._timeout_s = node.limits.meta_deadline_s

    def count(self, order: ClearOrder, progress: Progress) -> Cleared:
        """Counts what ``clear`` would delete; changes nothing."""
        return _Sweep(self._node, order, self._pinned(), None).run(progress)

    def clear(self, order: ClearOrder, progress: Progress) -> Cleared:
        """Deletes what the order names on the root; before and after, all nodes drop it.

        Raises Unavailable if the order could not be published, and what ``progress`` raises: clear again.
        """
        node, clears = self._node, self._clears

        def waiting() -> None:
            progress(0, 0)

        silent = set[SessionId]()
        published = clears.publish(node.ids.fresh(), order.to_json(), self._timeout_s)
        with self._kept(published):
            if not self._is_alone:
                silent = self._wait_for_answers(published.id, waiting)
                done = self._sweep(order, published, progress)
            else:
                try:
                    self._obey_alone(order, waiting)
                    done = self._sweep(order, published, progress)
                finally:  # also when cut short: a leftover order would keep the namespace out of memory permanently
                    node.obey([order], [])
        node.forget()  # a look during the sweep may have remembered a chunk; other nodes forget when they read ``done``
        published.done(self._timeout_s)
        clears.trim(self._timeout_s)
        return replace(done, unconfirmed=tuple(sorted(session.hex() for session in silent)))

    def _sweep(self, order: ClearOrder, published: PublishedClear, progress: Progress) -> Cleared:
        """Follows rule P5: the order, then pins, then deletions.

        If the sweep fails, a thread may still be in the middle of a deletion: then the order ends by itself.
        """
        done = _Sweep(self._node, order, self._pinned(), published).run(progress)
        published.check()
        return done

    def _obey_alone(self, order: ClearOrder, waiting: Callable[[], None]) -> None:
        """Does what the followers of a cluster do: drops it, and waits for writes in progress.

        A write that is not waited for would publish behind the sweep. Raises Unavailable if the writes do not end.
        """
        deadline = Deadline(self._node.clock, self._node.limits.clear_answer_s)
        while not self._node.obey([order], [order]):
            waiting()
            if deadline.passed:
                raise Unavailable("writes to the root that may be of these chunks do not end: clear again")

    @contextmanager
    def _kept(self, published: PublishedClear) -> Iterator[None]:
        """Renews an order while the block runs, in a thread of its own: a call of the root may last.

        A node that forgets the order in between would take back what the sweep deletes.
        """
        ended = threading.Event()

        def renewing() -> None:
            while not ended.wait(self._clears.passing_s / 8):
                try:
                    published.renew(self._timeout_s)
                except KVStoreError as error:
                    log.info("clear.not_renewed %s", error)

        thread = threading.Thread(target=renewing, name="kvstore-clear", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self._timeout_s)

    def _wait_for_answers(self, id: bytes, waiting: Callable[[], None]) -> set[SessionId]:
        deadline = Deadline(self._node.clock, self._node.limits.clear_answer_s)
        while True:
            silent = self._clears.silent(id, self._timeout_s)
            waiting()
            if not silent or deadline.passed:
                return silent
            time.sleep(POLL_S)


class _Sweep:
    """One pass over all shards of the root, several in parallel. Without an order ``published`` it only counts."""

    def __init__(self, node: Engine, order: ClearOrder, pinned: Pinned, published: PublishedClear | None) -> None:
        self._node = node
        self._order = order
        self._pinned = pinned
        self._published = published
        self._shards = range(1 << node.identity.shard_bits)
        self._left = iter(self._shards)
        self._lock = threading.Lock()
        self._is_ended = False
        self._done = 0
        self._chunks = self._bytes = self._kept = self._failed = 0

    def run(self, progress: Progress) -> Cleared:
        """Does the whole pass. Raises what ``progress`` raises; what was deleted by then stays deleted."""
        # Use a few threads however many shards there are: the others go on serving.
        batch = self._node.executor.start(min(THREADS, len(self._shards)), lambda _: self._work())
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

    def _chunk(self, found: ChunkFile) -> None:
        try:
            if found.address in self._pinned:
                self._add(kept=1)
                return
            if self._published is not None:
                self._published.check()
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


# Clears what a selection names on a root that the processes of one host share: an eviction with a selection.


AT_ONCE = 4096
HELD_S = 5.0
"""What is held is deleted if its hold ends within this time."""
HOST_POLL_S = 0.1


class HostClearing:
    """The clears of one process."""

    def __init__(self, node: Engine, host: HostMember, pinned: Callable[[], Container[Address]]) -> None:
        assert isinstance(node.root, PosixRoot)
        self._node = node
        self._host = host
        self._root = node.root
        self._pinned = pinned
        obey = node.obey if node.tiers is not None else None
        self.clears = HostClears(host.folder, host.shared, host.table, obey)

    def count(self, order: ClearOrder, progress: Progress, *, pinned: bool = False) -> Cleared:
        """Counts what ``clear`` would delete; changes nothing."""
        kept = () if pinned else self._pinned()
        found, failed = self._found(order, progress)
        free = [one for one in found if one.address not in kept]
        return Cleared(len(free), sum(one.size_bytes for one in free), len(found) - len(free), failed)

    def clear(self, order: ClearOrder, progress: Progress, *, pinned: bool = False) -> Cleared:
        """Deletes what the order names, from the memory of all processes first. ``pinned``: what is pinned too.

        Raises Unavailable, the root's errors, and what ``progress`` raises: clear again.
        """
        progress(0, 0)
        silent = with_reserve(self._root, lambda: self._publish(order))  # it is written before anything is deleted
        count = size_bytes = 0
        began_s, ends_s = time.monotonic(), 0.0
        while True:
            # What is put or used during the walk is for the next one: a child that this walk lacks keeps its parent.
            since_ns = begin_listing(self._host.folder, self._host.shared)
            eviction = Eviction(
                self._root, self._node.identity.shard_bits, self._host.shared, self._node.clock, since_ns
            )
            found, failed = self._found(order, progress)
            found.sort(key=_worth)  # children before their parents
            victims = [EvictionVictim(one.address, one.namespace, one.size_bytes) for one in found]
            left = Evicted()
            for start in range(0, len(victims), AT_ONCE):
                left += eviction.evict(victims[start : start + AT_ONCE], even_pinned=pinned)
                progress(count + left.count, count + len(victims))
            count, size_bytes = count + left.count, size_bytes + left.size_bytes
            stay_count = len(left.held) + left.used_count
            ends_s = ends_s or time.monotonic() + HELD_S  # a walk takes minutes on a large root
            if not stay_count or time.monotonic() > ends_s:
                break
            time.sleep(HOST_POLL_S)
        if time.monotonic() > began_s + PASSING_S / 2:
            # The order has passed, or nearly: memory may have read a chunk again before it was deleted.
            silent = (*silent, *self._publish(replace(order, issued_s=self._node.clock.now_s())))
        return Cleared(count, size_bytes, left.pinned_count, failed + stay_count + left.failed_count, silent)

    def _publish(self, order: ClearOrder) -> tuple[str, ...]:
        with translated("write", f"{self._host.folder}/host"):
            return self.clears.publish(order)

    def _found(self, order: ClearOrder, progress: Progress) -> tuple[list[ChunkFile], int]:
        """Returns the chunks that the order names, and how many shards or files could not be read."""
        failures: list[KVStoreError] = []
        chunks = walk(
            self._root,
            self._node.identity.shard_bits,
            quantum_s=self._node.limits.quantum_s,
            trouble=failures.append,
            shard_done=progress,
        )
        return [one for one in chunks if order.means(one.namespace)], len(failures)


def _worth(found: ChunkFile) -> tuple[float, int]:
    return found.recency.last_use_s, -found.recency.depth
