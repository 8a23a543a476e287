"""One put: chunks are staged by several lanes at once and published parents first.

The order matters because a match finds the end of a cached prefix by bisection: a chunk must never be visible before
its parent.  So staging (the bytes) runs in parallel, and whoever completes the next chunk in order publishes it and
all that wait behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvstore import recency
from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.header import Incarnation, expected_chunk
from kvstore.hints import Hints
from kvstore.native import library as native
from kvstore.node.chunks import Chunks, Staged
from kvstore.node.refresh import Refresher
from kvstore.node.runs import Run
from kvstore.node.shared_runs import SharedPut, Sizes
from kvstore.results import PutResult

STEP_BYTES = 1 << 20
"""Taken at once by a lane."""
TURN_BYTES_MAX = 16 << 20
"""Staged by one call. More than for reads, because what follows each call, publishing, runs faster in one go."""
TURN_FILES_MAX = 256
"""The same in files, one of which is open at a time."""
TURN_SYNCED_MAX = 16
"""The same where each is synced: a lane in one call for ``stall_s`` is taken for one that hangs."""
PUBLISHED_MAX = 64
"""Published by one call, for the same reason."""

StillRight = Callable[[int], bool]
"""Whether the bytes of a chunk, by its index, are what they were before they were staged. Staging makes their checksums
anew: what went wrong in memory after it was verified, and before that, would be right ever after.
"""


Ready = Staged | SharedPut | None
"""A chunk that may be published when its parent is: staged alone or in a run, or there already."""


def always(_: int) -> bool:
    """Of bytes that the caller vouches for."""
    return True


def put_sizes(chunk_bytes: int, durable: bool) -> Sizes:
    """Of turns at puts of chunks of about that size."""
    most = max(1, min(TURN_BYTES_MAX // max(1, chunk_bytes), TURN_SYNCED_MAX if durable else TURN_FILES_MAX))
    return Sizes(max(1, min(STEP_BYTES // max(1, chunk_bytes), most)), most)


class Publication:
    """The chunks from ``first`` on of one chain on their way into the store; ``add`` may be called by many threads."""

    def __init__(
        self,
        chunks: Chunks,
        refresher: Refresher,
        chain: Chain,
        first: int,
        durable: bool,
        hints: Hints,
        still_right: StillRight = always,
    ) -> None:
        self._still_right = still_right
        self._chunks = chunks
        self._refresher = refresher
        self._chain = chain
        self._first = first
        self._durable = durable
        self._hints = hints
        self._lacking: set[int] = set()
        self._lock = threading.Lock()
        self._ready: dict[int, Ready] = {}
        self._next = first
        self._publishing = False
        self._abandoned = False
        self._renewed = False
        self._written = 0
        self._bytes_written = 0

    def look(self, index: int) -> bool:
        """Whether chunk ``index`` is in the store; notes one whose hints this put has to raise."""
        stat = self._chunks.look(expected_chunk(self._chain, index))
        if stat is None:
            return False
        if self._chunks.lacks(stat, self._hints):
            self._lacking.add(index)
        return True

    def found(self, indexes: npt.NDArray[np.int64], mtimes_ns: npt.NDArray[np.int64]) -> None:
        """Notes chunks that are in the store, as ``look`` does."""
        lacking = ~recency.cover(mtimes_ns, self._chunks.quantum_s, self._hints)
        self._lacking.update(indexes[lacking].tolist())

    def find(self, index: int) -> bool:
        """Whether chunk ``index`` is in the store already; then it needs no bytes."""
        if self.look(index):
            self._completed({index: None})
            return True
        return False

    def add(self, index: int, sections: Pieces, origin: Incarnation | None = None) -> None:
        """Stages chunk ``index`` and publishes all whose parents are published; ``origin`` as for ``Chunks.stage``."""
        expected = expected_chunk(self._chain, index)
        staged = self._chunks.stage(expected, sections, self._durable, self._hints, origin)
        if self._chunks.root.traits.ordered_publish:
            self._completed({index: staged})
        elif self._abandoned:
            self._chunks.discard(staged)
        else:
            # Publishing is the upload itself here; in order it would be one at a time. A child that is visible
            # before its parent is only unreachable until the parent is there.
            self._publish(staged)
            self._completed({index: None})

    def begin_run(self, run: Run) -> SharedPut:
        """Chunks for lanes to find, stage and publish together, by ``add_turn``."""
        sizes = put_sizes(self._chain.namespace.layout.chunk_bytes, self._durable)
        return self._chunks.runs.shared_put(run, sizes, depths=True, durable=self._durable, hints=self._hints)

    def add_turn(self, put: SharedPut) -> tuple[list[int], bool]:
        """One lane's turn: finds or stages what no other lane took, and publishes what it can.

        Returns those that are to be done one by one, and whether there may be more.
        """
        if self._abandoned:
            put.stop()
        places, more = self._chunks.runs.stage(put)
        left: list[int] = []
        ready: dict[int, Ready] = {}
        for place, status in zip(places.tolist(), put.statuses(places), strict=True):
            index = put.run.first + place
            if status == native.DONE:
                ready[index] = put
            elif status == native.FOUND:
                if self._chunks.lacks(put.stat(place), self._hints):
                    self._lacking.add(index)
                ready[index] = None
            else:
                left.append(index)
        self._completed(ready)
        return left, more

    def make_room(self, index: int) -> bool:
        """On a full root: discards what is staged behind chunk ``index``, which can be published only after it.

        False where there is nothing. What was discarded is lost to this put.
        """
        with self._lock:
            behind = {at: ready for at, ready in self._ready.items() if ready and at > index}
            for at in behind:
                del self._ready[at]
        for staged in self._staged(behind):
            self._chunks.discard(staged)
        return bool(behind)

    def abandon(self) -> list[Staged]:
        """Nothing more is published. Returns what is staged, to be discarded where it may take its time. Idempotent."""
        with self._lock:
            self._abandoned = True
            waiting = {index: ready for index, ready in self._ready.items() if ready}
            self._ready = {index: None for index, ready in self._ready.items() if not ready}
        return self._staged(waiting)

    def discard(self, staged: Staged) -> bool:
        """Removes one staged chunk."""
        self._chunks.discard(staged)
        return True

    def used(self, count: int) -> None:
        """A put is a use of its ``count`` leading chunks, and raises the hints of those that it found."""
        self._refresher.used(
            self._chain.namespace.id,
            self._chain.addresses[:count],
            chained=True,
            hints=self._hints,
            lacking=frozenset(self._lacking),
        )

    def result(self) -> PutResult:
        """What was done so far."""
        with self._lock:
            done = self._next - self._first
            return PutResult(
                tokens_present=self._next * self._chain.namespace.layout.chunk_tokens,
                chunks_written=self._written,
                chunks_found=max(0, done - self._written),
                bytes_written=self._bytes_written,
            )

    def _completed(self, ready: Mapping[int, Ready]) -> None:
        """Decides under the lock who publishes; publishes outside it."""
        if not self._keep(ready):
            return
        with self._lock:
            if self._publishing:
                return  # whoever publishes now takes these too
            self._publishing = True
        self._publish_ready()

    def _keep(self, ready: Mapping[int, Ready]) -> bool:
        """Whether these may still be published. If not, the caller gave up while they were being written: they may have
        changed since, so they never get a name.
        """
        with self._lock:
            if not self._abandoned:
                self._ready.update(ready)
                return True
        for staged in self._staged(ready):
            self._chunks.discard(staged)
        return False

    def _staged(self, ready: Mapping[int, Ready]) -> list[Staged]:
        """Those that have a file."""
        return [
            self._staged_in_run(each, index) if isinstance(each, SharedPut) else each
            for index, each in ready.items()
            if each is not None
        ]

    def _staged_in_run(self, put: SharedPut, index: int) -> Staged:
        expected = expected_chunk(self._chain, index)
        return Staged(put.name(index - put.run.first), expected, expected.file_bytes)

    def _publish_ready(self) -> None:
        try:
            while claimed := self._claim():
                first, count = self._next, len(claimed)
                index = first + self._publish_run(claimed[0], first, first + count)
                self._next = index
                if index < first + count:
                    # The next is for Python: its name is taken, there is no room, or it was staged alone.
                    self._keep(dict(enumerate(claimed[index + 1 - first :], index + 1)))
                    for staged in self._staged({index: claimed[index - first]}):
                        self._publish(staged)
                    self._next = index + 1
        except BaseException:
            with self._lock:
                self._publishing = False
            raise

    def _claim(self) -> list[Ready]:
        """Takes what may be published next: one chunk, or those of a run that follow each other. Empty where the next
        is not ready: then nobody publishes any more.
        """
        with self._lock:
            claimed: list[Ready] = []
            while len(claimed) < PUBLISHED_MAX and (index := self._next + len(claimed)) in self._ready:
                if claimed and (claimed[0] is None or self._ready[index] is not claimed[0]):
                    break
                claimed.append(self._ready.pop(index))
            self._publishing = bool(claimed)
            return claimed

    def _publish_run(self, ready: Ready, first: int, stop: int) -> int:
        """Publishes chunks of a run up to the first that is for Python; how many."""
        if not isinstance(ready, SharedPut):
            return 0
        self._renew_before(first)
        right = stop
        if self._still_right is not always:
            right = next((index for index in range(first, stop) if not self._still_right(index)), stop)
        places = np.arange(first - ready.run.first, right - ready.run.first, dtype=np.int32)
        count, size_bytes = self._chunks.runs.publish(ready, places, ordered=True)
        with self._lock:
            self._written += count
            self._bytes_written += size_bytes
        return count

    def _renew_before(self, depth: int) -> None:
        """Before the first new chunk gets its fresh stamp: a chunk is never staler than its child."""
        if self._renewed:
            return
        self._renewed = True
        lacking = frozenset(index for index in list(self._lacking) if index < depth)
        self._refresher.renew(self._chain.namespace.id, self._chain.addresses[:depth], self._hints, lacking)
        self._lacking -= lacking

    def _publish(self, staged: Staged) -> None:
        self._renew_before(staged.expected.depth)
        if not self._still_right(staged.expected.depth):
            self._chunks.discard(staged)
            raise Unavailable("a chunk in memory went wrong while it was written to the root: put it again")
        try:
            won = self._chunks.publish(staged, self._durable)
        except KVStoreError:
            self._chunks.discard(staged)
            raise
        if won:
            with self._lock:
                self._written += 1
                self._bytes_written += staged.expected.payload_bytes
