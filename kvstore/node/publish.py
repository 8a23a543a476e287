"""One put: chunks are staged by several lanes at once and published parents first.

The order matters because a match finds the end of a cached prefix by bisection: a chunk must never be visible before
its parent.  So staging (the bytes) runs in parallel, and whoever completes the next chunk in order publishes it and
all that wait behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.errors import KVStoreError, Unavailable
from kvstore.format.header import Incarnation, expected_chunk
from kvstore.hints import Hints
from kvstore.node.chunks import Chunks, Staged
from kvstore.node.refresh import Refresher
from kvstore.node.runs import Run
from kvstore.results import PutResult
from kvstore.root.interface import Stat

GROUP_BYTES_MAX = 16 << 20
"""Staged by one call. More than for reads, because what follows each call, publishing, runs faster in one go."""
GROUP_FILES_MAX = 256
"""The same in files, one of which is open at a time."""
GROUP_SYNCED_MAX = 16
"""The same where each is synced: a lane in one call for ``stall_s`` is taken for one that hangs."""

Source = Callable[[int], Pieces]
"""The sections of a chunk, by its index in the chain: views of the caller's memory."""


StillRight = Callable[[int], bool]
"""Whether the bytes of a chunk, by its index, are what they were before they were staged. Staging makes their checksums
anew: what went wrong in memory after it was verified, and before that, would be right ever after.
"""


def always(_: int) -> bool:
    """Of bytes that the caller vouches for."""
    return True


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
        self._ready: dict[int, Staged | None] = {}
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

    def find(self, index: int) -> bool:
        """Whether chunk ``index`` is in the store already; then it needs no bytes."""
        if self.look(index):
            self._completed(index, None)
            return True
        return False

    def add(self, index: int, sections: Pieces, origin: Incarnation | None = None) -> None:
        """Stages chunk ``index`` and publishes all whose parents are published; ``origin`` as for ``Chunks.stage``."""
        expected = expected_chunk(self._chain, index)
        staged = self._chunks.stage(expected, sections, self._durable, self._hints, origin)
        if self._chunks.root.traits.ordered_publish:
            self._completed(index, staged)
        elif self._abandoned:
            self._chunks.discard(staged)
        else:
            # Publishing is the upload itself here; in order it would be one at a time. A child that is visible
            # before its parent is only unreachable until the parent is there.
            self._publish(staged)
            self._completed(index, None)

    def add_run(self, run: Run, start: int, stop: int) -> list[int]:
        """Finds or stages part of a run, and publishes what it can; returns those that are to be done one by one."""
        chunks, chain = self._chunks, self._chain
        outcome = chunks.runs.stage(run, start, stop, chain.addresses, True, self._durable, self._hints)
        left: list[int] = []
        try:
            for index in range(start, stop):
                found, outcome[index - start] = outcome[index - start], None
                if found is None:
                    left.append(index)
                elif isinstance(found, Stat):
                    if chunks.lacks(found, self._hints):
                        self._lacking.add(index)
                    self._completed(index, None)
                else:
                    self._completed(index, Staged(found, expected_chunk(chain, index)))
        except BaseException:
            for index, name in enumerate(outcome, start):
                if isinstance(name, str):
                    chunks.discard(Staged(name, expected_chunk(chain, index)))
            raise
        return left

    def make_room(self, index: int) -> bool:
        """On a full root: discards what is staged behind chunk ``index``, which can be published only after it.

        False where there is nothing. What was discarded is lost to this put.
        """
        with self._lock:
            behind = {at: staged for at, staged in self._ready.items() if staged and at > index}
            for at in behind:
                del self._ready[at]
        for staged in behind.values():
            if staged is not None:
                self._chunks.discard(staged)
        return bool(behind)

    def abandon(self) -> list[Staged]:
        """Nothing more is published. Returns what is staged, to be discarded where it may take its time. Idempotent."""
        with self._lock:
            self._abandoned = True
            waiting = [staged for staged in self._ready.values() if staged]
            self._ready = {index: None for index, staged in self._ready.items() if not staged}
        return waiting

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

    def _completed(self, index: int, staged: Staged | None) -> None:
        """Decides under the lock who publishes; publishes outside it."""
        with self._lock:
            abandoned = self._abandoned
            if not abandoned:
                self._ready[index] = staged
                if self._publishing:
                    return  # whoever publishes now takes this one too
                self._publishing = True
        if not abandoned:
            self._publish_ready()
        elif staged:
            # The caller gave up while these bytes were being written: they may have changed since, so they must
            # never get a name.
            self._chunks.discard(staged)

    def _publish_ready(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._next not in self._ready:
                        self._publishing = False
                        return
                    staged = self._ready.pop(self._next)
                if staged:
                    self._publish(staged)
                with self._lock:
                    self._next += 1
        except BaseException:
            with self._lock:
                self._publishing = False
            raise

    def _publish(self, staged: Staged) -> None:
        if not self._renewed:
            # Before the first new chunk gets its fresh stamp: a chunk is never staler than its child.
            self._renewed = True
            chain, depth = self._chain, staged.expected.depth
            lacking = frozenset(index for index in list(self._lacking) if index < depth)
            self._refresher.renew(chain.namespace.id, chain.addresses[:depth], self._hints, lacking)
            self._lacking -= lacking
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
