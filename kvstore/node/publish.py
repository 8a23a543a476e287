"""One write on its way to the root: several lanes stage its chunks at once, and publish them in the right order.

The order matters because a match finds the end of a cached prefix by bisection: a chunk must never be visible before
its parent. So staging (the bytes) runs in parallel, and the lane that completes the next chunk of a chain publishes it
and all that wait behind it. Engine-hashed blocks have no parents: each is published as soon as it is staged.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvstore import recency
from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.header import Incarnation
from kvstore.hints import Hints
from kvstore.native import library as native
from kvstore.node.chunk_runs import Run, SharedPut, Sizes
from kvstore.node.chunks import Chunks, Staged
from kvstore.node.refresh import Refresher
from kvstore.node.wanted import Wanted, expected_of, mean_bytes

STEP_BYTES = 1 << 20
"""Bytes that a lane takes at once."""
STEP_FILES_MAX = 64
"""Files that a lane takes at once: a turn that takes too long ends between two steps."""
TURN_BYTES_MAX = 16 << 20
"""Bytes staged by one call. More than for reads, because publishing, which follows each call, runs faster in one go."""
TURN_FILES_MAX = 256
"""Files staged by one call; one of them is open at a time."""
TURN_SYNCED_MAX = 16
"""Files staged by one call if each is synced: a lane that is in one call for ``stall_s`` counts as hung."""
TURN_PUBLISHED_MAX = 512
TURN_PUBLISHED_BYTES_MAX = 64 << 20
"""Files and bytes staged and published by one call: more, because such a call publishes as it goes."""
ROOM_S = 1.0
"""How long a lane that finds the root full waits for the turns of the others to end."""
PUBLISHED_MAX = 64
"""Files published by one call, for the same reason."""

Mask = npt.NDArray[np.bool_]
StillRight = Callable[[Sequence[int]], Mask]
"""Returns which chunks, by their indexes, still have the bytes that they had before they were staged. Staging makes new
checksums, so bytes that changed in memory between their verification and staging would pass as right ever after.
"""

Ready = Staged | SharedPut | None
"""A chunk that may be published: staged alone, staged in a run, or already in the store (None)."""


def vouched(indexes: Sequence[int]) -> Mask:
    """All are right: the caller vouches for its own memory."""
    return np.ones(len(indexes), np.bool_)


def put_sizes(chunk_bytes: int, files_max: int, bytes_max: int = TURN_BYTES_MAX) -> Sizes:
    """Returns how many chunks of about that size a lane takes, and does in one call."""
    most = max(1, min(bytes_max // max(1, chunk_bytes), files_max))
    return Sizes(max(1, min(STEP_BYTES // max(1, chunk_bytes), STEP_FILES_MAX, most)), most)


class Publication:
    """Chunks from index ``first`` on, on their way to the root. Thread-safe: lanes add to it."""

    def __init__(
        self,
        chunks: Chunks,
        refresher: Refresher,
        durable: bool,
        wanted: Wanted,
        first: int,
        hints: Hints,
        still_right: StillRight = vouched,
    ) -> None:
        self.wanted = wanted
        self.first = first
        self.written = 0
        """Chunks published so far."""
        self.bytes_written = 0
        """Bytes of their sections."""
        self.fresh = np.zeros(len(wanted), np.bool_)
        """The same for each chunk: True if this put gave it its name."""
        self._still_right = still_right
        self._chunks = chunks
        self._refresher = refresher
        self._is_chain = isinstance(wanted, Chain)
        self._durable = durable
        self._hints = hints
        self._stamped_s = chunks.known.tick()
        """All chunks of a put have one time, and their ancestors none before it."""
        self._lacking: set[int] = set()
        self._changed = threading.Condition()
        self._turns = 0
        self._ready: dict[int, Ready] = {}
        self._there = np.zeros(len(wanted), np.bool_)
        self._next = first
        self._publishing = False
        self.abandoned = ctypes.c_int32(0)
        """Not 0 once nothing more is published. Native code reads it too."""
        self._renewed = False

    def look(self, index: int) -> bool:
        """True if chunk ``index`` is in the store; notes one whose hints this put has to raise."""
        stat = self._chunks.look(expected_of(self.wanted, index))
        if stat is None:
            return False
        if self._chunks.lacks(stat, self._hints) or not recency.is_fresh(stat.mtime_ns, self._stamped_s):
            self._lacking.add(index)
        return True

    def found(self, indexes: npt.NDArray[np.int64], mtimes_ns: npt.NDArray[np.int64]) -> None:
        """Notes chunks that are in the store, as ``look`` does."""
        lacking = ~recency.cover(mtimes_ns, self._chunks.known.quantum_s, self._hints)
        lacking |= mtimes_ns < recency.ns_of(self._stamped_s)
        self._lacking.update(indexes[lacking].tolist())

    def add(self, index: int, sections: Pieces, origin: Incarnation | None = None) -> None:
        """Publishes chunk ``index`` once its parents are, unless it is in the store; ``origin`` as for ``stage``."""
        if self.look(index):
            self._completed({index: None})
            return
        expected, depths = expected_of(self.wanted, index), self.wanted.depths
        depth = depths[index] if depths else index
        staged = self._chunks.stage(expected, sections, self._stamped_s, self._durable, self._hints, depth, origin)
        if not self._is_chain or self._chunks.root.traits.ordered_publish:
            self._completed({index: staged})
        elif self.abandoned.value:
            self._chunks.discard(staged)
        else:
            # Here publishing is the upload itself; in order, chunks would go one at a time. A child that is visible
            # before its parent only stays unreachable until the parent is there.
            self._publish(index, staged)
            self._completed({index: None})

    def begin_run(self, run: Run) -> SharedPut:
        """Returns chunks that lanes find, stage and publish together, by ``add_turn``."""
        # Blocks from memory that the caller vouches for need no look between staging and publishing.
        at_once = not self._is_chain and not self._durable and self._still_right is vouched
        most = (TURN_SYNCED_MAX if self._durable else TURN_FILES_MAX, TURN_BYTES_MAX)
        if at_once:
            most = TURN_PUBLISHED_MAX, TURN_PUBLISHED_BYTES_MAX
        sizes = put_sizes(mean_bytes(self.wanted, run.first, run.count), *most)
        first, stop, depths = run.first, run.first + run.count, self.wanted.depths
        indexes = np.array(depths[first:stop], np.int64) if depths else np.arange(first, stop)
        abandoned = self.abandoned if at_once else None
        return self._chunks.runs.shared_put(
            run,
            sizes,
            indexes,
            stamped_s=self._stamped_s,
            durable=self._durable,
            hints=self._hints,
            abandoned=abandoned,
        )

    def add_turn(self, put: SharedPut) -> tuple[list[int], bool]:
        """Takes one lane's turn: finds or stages chunks that no other lane took, and publishes what it can.

        Returns the chunks to be added one by one, and whether there may be more.
        """
        if self.abandoned.value:
            put.stop()
        with self._changed:
            self._turns += 1
        try:
            places, more = self._chunks.runs.stage(put)
            if not len(places):  # other lanes took all there was
                return [], more
            published = put.run.items["status"][places] == native.PUBLISHED
            if published.any():
                done, places = places[published], places[~published]
                self._there[put.run.first + done] = self.fresh[put.run.first + done] = True
                self._count(*self._chunks.runs.publish(put, done, ordered=False, epoch=put.epoch))
                if not len(places):
                    return [], more
            taken, indexes = put.taken(places), put.run.first + places
            staged, found = taken["status"] == native.DONE, taken["status"] == native.FOUND
            ready: dict[int, Ready] = dict.fromkeys(indexes[staged].tolist(), put)
            if found.any():
                self.found(indexes[found], taken["mtime_ns"][found])
                ready |= dict.fromkeys(indexes[found].tolist())
            left: list[int] = indexes[~(staged | found)].tolist()
            self._completed(ready)
            return left, more
        finally:
            with self._changed:
                self._turns -= 1
                self._changed.notify_all()

    def make_room(self, index: int) -> bool:
        """Discards, on a full root, what is staged behind chunk ``index`` and can be published only after it.

        First waits for turns of other lanes to end, since what they stage is not known before. False if there is
        nothing to discard. What was discarded is lost to this put.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._turns, ROOM_S)
            behind = {at: ready for at, ready in self._ready.items() if ready and at > index}
            for at in behind:
                del self._ready[at]
        self._discard(behind)
        return bool(behind)

    def abandon(self) -> list[Staged]:
        """Publishes nothing more. Returns what is staged, for the caller to discard without hurry. Idempotent."""
        with self._changed:
            self.abandoned.value = 1
            waiting = {index: ready for index, ready in self._ready.items() if ready}
            self._ready = {index: None for index, ready in self._ready.items() if not ready}
        return self._staged(waiting)

    def discard(self, staged: Staged) -> bool:
        """Removes one staged chunk."""
        self._chunks.discard(staged)
        return True

    def used(self, there: Mask) -> None:
        """Notes a use of the chunks that are there, and raises the hints of those that were found."""
        used = self.wanted.leading(int(there.sum())) if isinstance(self.wanted, Chain) else self.wanted
        self._refresher.used(used, self._hints, frozenset(self._lacking))

    def there(self) -> Mask:
        """Returns which chunks are in the store as far as this write knows; those before ``first`` count as there."""
        with self._changed:
            there = self._there.copy()
            there[: self.first] = True
            if self._is_chain:
                there[: self._next] = True
                there[self._next :] = False
        return there

    def _completed(self, ready: Mapping[int, Ready]) -> None:
        """Decides under the lock who publishes; publishes outside it."""
        if not self._keep(ready):
            return
        if not self._is_chain:
            self._publish_each(ready)
            return
        with self._changed:
            if self._publishing:
                return  # the lane that publishes now takes these too
            self._publishing = True
        self._publish_ready()

    def _keep(self, ready: Mapping[int, Ready]) -> bool:
        """Adds chunks to those that may be published; discards them and returns False if the put was abandoned.

        The caller gave up while they were being written and may have changed its memory since, so they never get a
        name.
        """
        with self._changed:
            if not self.abandoned.value:
                self._ready.update(ready)
                return True
        self._discard(ready)
        return False

    def _discard(self, ready: Mapping[int, Ready]) -> None:
        for staged in self._staged(ready):
            self._chunks.discard(staged)

    def _staged(self, ready: Mapping[int, Ready]) -> list[Staged]:
        """Returns those that have a staged file."""
        return [
            self._staged_in_run(each, index) if isinstance(each, SharedPut) else each
            for index, each in ready.items()
            if each is not None
        ]

    def _staged_in_run(self, put: SharedPut, index: int) -> Staged:
        expected = expected_of(self.wanted, index)
        return Staged(put.name(index - put.run.first), expected, expected.file_bytes)

    # Blocks: each by itself

    def _publish_each(self, ready: Mapping[int, Ready]) -> None:
        """Publishes blocks in no order. If this raises, ``abandon`` discards those that are left."""
        for put, group in groupby(ready, ready.__getitem__):
            indexes = list(group)
            if isinstance(put, SharedPut):
                indexes = self._publish_unordered(put, indexes)
            for index in indexes:
                with self._changed:
                    claimed = self._ready.pop(index, None)
                if put is None:
                    self._there[index] = True
                for staged in self._staged({index: claimed}):
                    self._publish(index, staged)

    def _publish_unordered(self, put: SharedPut, indexes: list[int]) -> list[int]:
        """Publishes blocks of a run by one call; returns those that are left."""
        if not put.is_right and not self._still_right(indexes).all():
            return indexes
        places = np.asarray(indexes, np.int32) - np.int32(put.run.first)
        with self._changed:
            if self.abandoned.value:
                return []
            for index in indexes:
                del self._ready[index]
        try:
            self._count(*self._chunks.runs.publish(put, places, ordered=False))
        finally:
            done = put.taken(places)["status"] == native.PUBLISHED
            left: list[int] = (places[~done] + put.run.first).tolist()
            self._there[places[done] + put.run.first] = self.fresh[places[done] + put.run.first] = True
            self._keep(dict.fromkeys(left, put))
        return left

    # Chunks of a chain: in order

    def _publish_ready(self) -> None:
        try:
            while claimed := self._claim():
                first, count = self._next, len(claimed)
                index = first + self._publish_run(claimed[0], first, first + count)
                self._next = index
                if index < first + count:
                    # Python does the next one: its name is taken, there is no room, or it was staged alone.
                    self._keep(dict(enumerate(claimed[index + 1 - first :], index + 1)))
                    for staged in self._staged({index: claimed[index - first]}):
                        self._publish(index, staged)
                    self._next = index + 1
        except BaseException:
            with self._changed:
                self._publishing = False
            raise

    def _claim(self) -> list[Ready]:
        """Takes what may be published next: one chunk, or consecutive chunks of a run.

        Empty if the next chunk is not ready: then no lane publishes any more.
        """
        with self._changed:
            claimed: list[Ready] = []
            while len(claimed) < PUBLISHED_MAX and (index := self._next + len(claimed)) in self._ready:
                if claimed and (claimed[0] is None or self._ready[index] is not claimed[0]):
                    break
                claimed.append(self._ready.pop(index))
            self._publishing = bool(claimed)
            return claimed

    def _publish_run(self, ready: Ready, first: int, stop: int) -> int:
        """Publishes chunks of a run up to the first that Python has to do; returns how many."""
        if not isinstance(ready, SharedPut):
            return 0
        self._renew_before(first)
        if not ready.is_right:
            right = self._still_right(range(first, stop))
            stop = stop if right.all() else first + int(right.argmin())
        places = np.arange(first - ready.run.first, stop - ready.run.first, dtype=np.int32)
        count, size_bytes = self._chunks.runs.publish(ready, places, ordered=True)
        self.fresh[first : first + count] = True
        self._count(count, size_bytes)
        return count

    def _renew_before(self, depth: int) -> None:
        """Renews the ancestors before the first new chunk gets its stamp: a chunk is never staler than its child."""
        if self._renewed and not any(index < depth for index in list(self._lacking)):
            return
        self._renewed = True
        lacking = frozenset(index for index in list(self._lacking) if index < depth)
        self._refresher.renew(self.wanted.leading(depth), self._hints, lacking, self._stamped_s)
        self._lacking -= lacking

    # Either

    def _publish(self, index: int, staged: Staged) -> None:
        """Publishes a chunk that was staged alone, or that native code left. Raises the root's errors."""
        if self._is_chain:
            self._renew_before(index)
        if not self._still_right([index]).all():
            self._chunks.discard(staged)
            if not self._is_chain:
                return
            raise Unavailable("a chunk in memory went wrong while it was written to the root: put it again")
        try:
            won = self._chunks.publish(staged, self._durable)
            if not won:
                self.look(index)  # its stamp may be older than those of its children here: then it is renewed first
            # Another writer's block under this key may have another size: then ours is not in the store.
            self._there[index] = won or self._is_chain or self._chunks.is_present(staged.expected)
        except KVStoreError:
            self._chunks.discard(staged)
            raise
        if won:
            self.fresh[index] = True
            self._count(1, staged.expected.payload_bytes)

    def _count(self, chunks: int, size_bytes: int) -> None:
        with self._changed:
            self.written += chunks
            self.bytes_written += size_bytes
