"""A put in progress on the root: what a node's callers add chunks to, as they have them.

Apart from puts, which begin it, and from its publication, which decides the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError, Overloaded
from kvstore.format.header import Incarnation
from kvstore.node.deadline import Deadline
from kvstore.node.images import Images
from kvstore.node.lanes import Batch, DeadlinePassed, Lanes, moved_on
from kvstore.node.publish import Publication
from kvstore.results import PutResult
from kvstore.sections import Sections

if TYPE_CHECKING:
    from kvstore.node.puts import Puts

DISCARD_S = 1.0
"""How long a put that failed waits for its staged files to be removed, so that a full disk is not full of them."""


class Putting:
    """A put in progress: ``add`` chunks in any order, then ``finish``."""

    def __init__(
        self,
        puts: Puts,
        chain: Chain,
        first: int,
        present: int,
        publication: Publication,
        lanes: Lanes,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``ended`` is called when nothing of it is in flight any more; it may be more than once."""
        self._ended = ended
        self._puts = puts
        self._chain = chain
        self._first = first
        self._present = present
        self._publication = publication
        self._lanes = lanes
        self._pending: list[Batch] = []
        self.refused = present < first
        """Whether a chunk before the first is missing, so that nothing will be stored."""

    def store(self, index: int, sections: Pieces, origin: Incarnation | None = None) -> bool:
        """Stores one chunk, in the calling thread, unless it is there, or being swept."""
        if index >= len(self._chain):
            return True
        if not self._publication.find(index):
            self._publication.add(index, sections, origin)
        return True

    def store_all(self, source: Sections, deadline: Deadline) -> None:
        """Stores all chunks from the first on, several lanes at once, and waits for it. Raises what the root raised."""
        self._begin(source, self._first, len(self._chain) - self._first).wait(deadline)

    def add_run(self, source: Sections, first: int, count: int, deadline_s: float) -> None:
        """As ``add``, for ``count`` chunks from index ``first`` on: at most two such runs are in flight."""
        count = min(count, len(self._chain) - first)
        if self.refused or count <= 0:
            return
        if len(self._pending) >= 2:
            self._pending.pop(0).wait(Deadline(self._puts.clock, deadline_s))
        self._pending.append(self._begin(source, first, count))

    def _begin(self, source: Sections, first: int, count: int) -> Batch:
        run = self._puts.run_of(self._chain, first, count, source)
        if run is None:
            return self._lanes.start(count, lambda at: self._store_from(source, first + at))
        put = self._publication.begin_run(run)

        def store(_: int) -> bool:
            more = True
            try:
                while more:
                    left, more = self._publication.add_turn(put)
                    self._store_left(source, left)
                    moved_on()
            except BaseException:
                put.stop()
                raise
            return True

        return self._lanes.start(min(count, self._lanes.width), store)

    def _store_left(self, source: Sections, left: Sequence[int]) -> None:
        """Stores one by one what could not be stored at once."""
        full: Overloaded | None = None
        for index in left:
            try:
                self._store_from(source, index)
            except Overloaded as error:
                if not self._publication.make_room(index):
                    raise
                full = error
                self._store_from(source, index)
        if full is not None:
            raise full  # what made room is not stored

    def _store_from(self, source: Sections, index: int) -> bool:
        return self.store(index, source(index), source.origin(index) if isinstance(source, Images) else None)

    def add(self, index: int, sections: Pieces, deadline_s: float) -> None:
        """Begins to store one chunk; its memory must stay as it is until ``finish``.

        At most two are in flight: returns when there is room. Raises what the root raised.
        """
        if self.refused:
            return
        if len(self._pending) >= 2:
            self._pending.pop(0).wait(Deadline(self._puts.clock, deadline_s))
        self._pending.append(self._lanes.start(1, lambda _: self.store(index, sections)))

    def finish(self, deadline_s: float) -> PutResult:
        """Waits for what is in flight, and says what was done. Raises what the root raised, or Unavailable."""
        size = self._chain.namespace.layout.chunk_tokens
        if self.refused:
            return PutResult(self._present * size, 0, 0, 0)
        deadline = Deadline(self._puts.clock, deadline_s)
        try:
            for batch in self._pending:
                batch.wait(deadline)
        except DeadlinePassed:
            self.abandon(wait_s=0.0)
            raise
        except BaseException:
            self.abandon()
            raise
        result = self._publication.result()
        swept = self._puts.view.leading(self._chain.addresses) * size
        if swept < result.tokens_present:
            result = replace(result, tokens_present=swept)  # condemned while it was being put
        self._puts.counters.add(NodeCount.CHUNKS_FOUND, result.chunks_found)
        self._publication.used(result.tokens_present // size)
        self._ended()
        return result

    def abandon(self, wait_s: float = DISCARD_S) -> None:
        """Publishes nothing more, and removes what is staged; waits for that at most ``wait_s``. Idempotent."""
        self._puts.counters.add(NodeCount.PUT_FAILED)
        staged = self._publication.abandon()
        try:
            batch = self._lanes.start(len(staged), lambda index: self._publication.discard(staged[index]))
            if wait_s:
                batch.wait(Deadline(self._puts.clock, wait_s))
        except KVStoreError:
            pass  # the root does not answer: fsck finds what is left
        self._ended()
