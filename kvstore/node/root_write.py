"""The part of a write that goes to the root: runs of chunks on lanes, a bounded number of them at once.

Separate from the write, which decides what goes where, and from the publication, which decides the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from kvstore.buffers import Sections
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError, Overloaded
from kvstore.node.chunk_runs import SharedPut
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.guard import Guard
from kvstore.node.images import Images
from kvstore.node.lanes import Batch, Deadline, DeadlinePassed, Lanes, moved_on
from kvstore.node.publish import Mask, Publication
from kvstore.node.usage import WAIT_S
from kvstore.node.wanted import file_bytes, image_sizes
from kvstore.root.posix_errors import DiskFull
from kvstore.sources import Clock
from kvstore.writes import RUNS_MAX

LOOK_S = 5.0
"""How long a write that has no room at once looks for chunks that are stored already."""
DISCARD_S = 1.0
"""How long a failed write waits for its staged files to be removed, so that they do not keep a full disk full."""


class RootWrite:
    """Chunks of a publication on their way to the root. Used by one thread."""

    def __init__(
        self,
        chunks: Chunks,
        lanes: Lanes,
        clock: Clock,
        publication: Publication,
        counters: Counters,
        guard: Guard | None = None,
        ended: Callable[[], None] | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """Ends ``guard``, and calls ``ended`` when nothing of it is on its way any more, perhaps more than once.

        Waits up to ``wait_s`` for space; raises Overloaded if there is none then.
        """
        self.publication = publication
        self._chunks = chunks
        self._lanes = lanes
        self._clock = clock
        self._counters = counters
        self._guard = guard
        self._ended = ended
        size_bytes = file_bytes(publication.wanted, publication.first)
        self._room = chunks.usage.reserve(size_bytes, self._missing_bytes, wait_s)
        """Ends with the write. A lane that hangs has this object, and so the room, until it is done."""
        self._pending: deque[tuple[Batch, Callable[[], None]]] = deque()

    def add(
        self, source: Sections, first: int, count: int, deadline: Deadline, release: Callable[[], None] = lambda: None
    ) -> None:
        """Begins to store ``count`` chunks from index ``first`` on; calls ``release`` when their memory is free.

        Waits until fewer than RUNS_MAX runs are on their way, and releases them in order. Raises the root's errors.
        """
        while len(self._pending) >= RUNS_MAX:
            self._wait(deadline)
        self._pending.append((self._begin(source, first, count), release))

    def finish(self, deadline: Deadline) -> Mask:
        """Waits for what is on its way; returns which chunks are stored. Raises Unavailable and the root's errors."""
        try:
            while self._pending:
                self._wait(deadline)
        except DeadlinePassed:
            self.abandon(wait_s=0.0)
            raise
        except BaseException:
            self.abandon()
            raise
        self._renew(deadline)
        self._end()
        return self.publication.there()

    def abandon(self, wait_s: float = DISCARD_S) -> bool:
        """Publishes nothing more, and removes what is staged; waits at most ``wait_s`` for that. Idempotent.

        Releases the memory of runs on their way. False if a lane may still read some of it, which is not released.
        """
        is_read = False
        if not self.publication.abandoned.value:
            self._counters.add(NodeCount.PUT_FAILED)
        staged = self.publication.abandon()
        while self._pending:
            run, release = self._pending.popleft()
            run.stop()
            if not run.join(wait_s):
                self._pending.clear()  # in order: those behind it are not released either
                is_read = True
                break
            release()
        try:
            batch = self._lanes.start(len(staged), lambda at: self.publication.discard(staged[at]))
            if wait_s:
                batch.wait(Deadline(self._clock, wait_s))
        except KVStoreError:
            pass  # the root does not answer: fsck finds what is left
        if wait_s:
            self._renew(Deadline(self._clock, wait_s))
        self._end(releases=not is_read)
        return not is_read

    def _renew(self, deadline: Deadline) -> None:
        """Renews the parents of what was published."""
        parents = self._guard.unlisted(self.publication.fresh) if self._guard is not None else []
        if self._guard is not None and parents:
            renew = self._guard.renew
            with suppress(KVStoreError):  # a collector may take a parent then, and its children count as misses
                self._lanes.run(lambda: [renew(index) for index in parents], deadline)

    def _end(self, *, releases: bool = True) -> None:
        if releases:
            self._room.release()
        if self._guard is not None:
            self._guard.release()
        if self._ended is not None:
            self._ended()

    def _missing_bytes(self) -> int:
        """Looks for each chunk; returns the bytes of the files of those that are not there, or were not found in time.

        Only where there is no room for all of them.
        """
        publication, first = self.publication, self.publication.first
        missing = np.ones(len(publication.wanted) - first, np.bool_)

        def look(at: int) -> bool:
            missing[at] = not publication.look(first + at)
            return True

        with suppress(KVStoreError):
            self._lanes.each(len(missing), look, Deadline(self._clock, LOOK_S))
        return sum(image_sizes(publication.wanted, (first + np.flatnonzero(missing)).tolist()))

    def _wait(self, deadline: Deadline) -> None:
        """Waits for the oldest run."""
        batch, release = self._pending[0]
        try:
            batch.wait(deadline)
        except DiskFull as full:
            raise self._chunks.usage.refusal(full) from full.__cause__
        self._pending.popleft()
        release()

    def _begin(self, source: Sections, first: int, count: int) -> Batch:
        publication, runs = self.publication, self._chunks.runs
        run = runs.of(publication.wanted, first, count, source) if runs.stages else None
        if run is None:
            return self._lanes.start(count, lambda at: self._store(source, first + at))
        put = publication.begin_run(run)

        def store(_: int) -> bool:
            more = True
            try:
                while more:
                    left, more = publication.add_turn(put)
                    self._store_left(source, left, put)
                    moved_on()
            except BaseException:
                put.stop()
                raise
            return True

        return self._lanes.start(min(count, self._lanes.width), store)

    def _store_left(self, source: Sections, left: Sequence[int], put: SharedPut) -> None:
        """Stores one by one the chunks of a lane's turn that could not be stored at once.

        On a full root the chunks in front win over those behind, so that as many as fit are published.
        """
        full: Overloaded | None = None
        for index in left:
            while True:
                try:
                    self._store(source, index)
                    break
                except Overloaded as error:
                    put.stop()
                    if not self.publication.make_room(index):
                        raise
                    full = error
        if full is not None:
            raise full  # chunks discarded to make room are not stored

    def _store(self, source: Sections, index: int) -> bool:
        self.publication.add(index, source(index), source.origin(index) if isinstance(source, Images) else None)
        return True
