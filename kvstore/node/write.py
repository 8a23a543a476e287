"""A write: one put from its first chunk to its result, whichever way the chunks come.

Calls in this process, gRPC and the bulk protocol all feed it. It knows the write mode; MEMORY.md, "Writing", has the
table that it follows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Sections
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError, Overloaded
from kvstore.hints import Hints
from kvstore.node.counters import Counters
from kvstore.node.gc_state import GcState
from kvstore.node.lanes import Deadline
from kvstore.node.memory_puts import Room
from kvstore.node.publish import Mask
from kvstore.node.root_write import RootWrite
from kvstore.node.tier_stack import TierStack
from kvstore.node.wanted import Keyed, Wanted, leading, sizes_of
from kvstore.results import PutResult, StoredBlocks
from kvstore.writes import WriteMode

Indexes = npt.NDArray[np.int64]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write."""

    there: Mask
    """For each wanted chunk, True if it is in the store, or in memory and on its way there."""
    chunks: int
    """Number of chunks written by this put."""
    size_bytes: int
    """Bytes of their sections."""
    found: int
    """Number of chunks, from the put's first chunk on, that were there already."""
    fresh: Mask
    """For each wanted chunk, True if it is there because this put wrote it."""
    reason: str = ""
    """As ``PutResult.reason``."""

    def of_prompt(self, chunk_tokens: int) -> PutResult:
        """Returns the result for the put of a prompt."""
        present = leading(self.there) * chunk_tokens
        return PutResult(present, self.chunks, self.found, self.size_bytes, self.reason)

    def of_blocks(self) -> StoredBlocks:
        """Returns the result for the put of blocks."""
        return StoredBlocks(self.there.tolist(), self.fresh.tolist(), self.reason)


class WriteOwner(Protocol):
    """The node's puts, as far as a write needs them."""

    tiers: TierStack | None
    counters: Counters
    view: GcState

    def used(self, wanted: Wanted, found: Mask, hints: Hints) -> None:
        """Notes a use of the chunks that a put behind found."""
        ...

    def begin_rest(self, wanted: Wanted, first: int, hints: Hints, deadline: Deadline) -> RootWrite | None:
        """Begins to put on the root what memory did not take; None if its parents are not there."""
        ...


class Write:
    """A put under way: ``add`` runs of chunks, then ``finish`` or ``abandon``. Used by one thread.

    A run's memory belongs to the caller again when its ``release`` is called, which happens in the order of the runs.
    """

    def __init__(
        self,
        owner: WriteOwner,
        wanted: Wanted,
        first: int,
        found: Mask,
        mode: WriteMode,
        hints: Hints,
        root: RootWrite | None = None,
        *,
        refused: bool = False,
        sheds: bool = True,
    ) -> None:
        """``first`` is the put's first chunk; ``found`` are those in the store already, which need not be added.

        ``root`` takes the chunks that go there without waiting for memory. Chunks that memory has no room for are shed,
        or, without ``sheds``, put on the root.
        """
        self.mode = mode
        self.refused = refused
        """True if a chunk before the first is missing, so that nothing is stored."""
        self._owner = owner
        self._wanted = wanted
        self._is_chain = isinstance(wanted, Chain)
        self._sizes = sizes_of(wanted)
        self._first = first
        self._found = found
        self._there = found.copy()
        self._left_out = ~owner.view.unswept(wanted)
        if isinstance(wanted, Keyed):
            self._left_out |= wanted.contradicting()
        self._hints = hints
        self._root = root
        self._sheds = sheds
        self._is_shed = False
        self._reason = ""
        self._fresh = np.zeros(len(found), np.bool_)
        """Those that memory took, and did not have before."""
        self._absorbed = 0
        self._absorbed_bytes = 0
        tiers = owner.tiers if mode is WriteMode.BEHIND else None
        self.run_bytes = 0 if tiers is None else tiers.run_bytes
        """Size of a run for which ``room`` should be asked; 0 if none is given."""

    @property
    def first(self) -> int:
        """The first chunk that has to be added."""
        return max(self._first, leading(self._found)) if self._is_chain else self._first

    def add(
        self,
        source: Sections,
        first: int,
        count: int,
        deadline: Deadline,
        release: Callable[[], None] = _nothing,
    ) -> None:
        """Stores ``count`` chunks from index ``first`` on, or begins to. Raises as ``finish`` does."""
        run = slice(first, min(first + count, len(self._wanted)))
        new = first + np.flatnonzero(~(self._there[run] | self._left_out[run]))
        if self.refused:
            new = new[:0]
        elif self.mode is WriteMode.BEHIND:
            new = self._absorb(source, new, deadline)
        if self._root is None:
            release()
            return
        try:
            self._add_to_root(self._root, source, new, deadline, release)
        except KVStoreError as error:
            if self.mode is not WriteMode.BEHIND:
                raise
            self._reason = _reason(error)
            # As much as memory took is put, whatever the root does with the rest.
            if self._root.abandon():
                release()

    def room(self, first: int, count: int) -> Room | None:
        """Claims room in memory for a whole run that is on its way, for ``fill`` or ``give_up``.

        None if it must be brought to ``add``, which may leave out a part of it.
        """
        run = slice(first, first + count)
        # What lies behind a chunk that a sweep is taking is not put.
        if self.refused or self._is_shed or self._root is not None or run.stop > len(self._there):
            return None
        if (self._there | self._left_out)[run].any():
            return None
        return self._tiers.room(self._wanted, first, count, self._hints)

    def fill(self, room: Room) -> None:
        """Stores the run of a room, whose sections are in place."""
        run = slice(room.first, room.first + len(room.slots))
        self._tiers.fill(room)
        self._there[run] = self._fresh[run] = True
        self._absorbed += run.stop - run.start
        self._absorbed_bytes += sum(self._sizes[run])

    def give_up(self, room: Room) -> None:
        """Gives back room that was not filled, if any. Nobody may be writing into it."""
        self._tiers.give_up(room)

    def finish(self, deadline: Deadline) -> Written:
        """Waits for what is on its way to the root. Raises the root's errors, or Unavailable."""
        if self.refused:
            return Written(self._found, 0, 0, 0, self._fresh)
        there, fresh = self._there, self._fresh
        chunks, size_bytes = self._absorbed, self._absorbed_bytes
        if self._root is not None:
            try:
                self._root.finish(deadline)
            except KVStoreError as error:
                if self.mode is not WriteMode.BEHIND:
                    raise
                self._reason = _reason(error)
            publication = self._root.publication
            # Parents from memory were only on their way when this began.
            there = publication.there() | (there if self.mode is WriteMode.BEHIND else False)
            fresh = fresh | publication.fresh
            chunks, size_bytes = chunks + publication.written, size_bytes + publication.bytes_written
        # A chunk condemned during its put counts as absent.
        there = there & ~self._left_out & self._owner.view.stays(self._wanted)
        if self._is_chain:
            there[leading(there) :] = False
        found = max(0, int(there[self._first :].sum()) - chunks)
        self._owner.counters.add(NodeCount.CHUNKS_FOUND, found)
        if self.mode is WriteMode.BEHIND:
            self._owner.used(self._wanted, self._found, self._hints)
        if self._root is not None:
            self._root.publication.used(there)
        return Written(there, chunks, size_bytes, found, fresh & there, self._reason)

    def abandon(self) -> None:
        """Puts nothing more on the root. Chunks that memory took stay there. Idempotent."""
        if self._root is not None:
            self._root.abandon()

    @property
    def _tiers(self) -> TierStack:
        tiers = self._owner.tiers
        assert tiers is not None, "without tiers every write goes around"
        return tiers

    def _absorb(self, source: Sections, new: Indexes, deadline: Deadline) -> Indexes:
        """Copies chunks into memory, to be written to the root later (rule W1); returns those for the root now."""
        if not new.size or (self._is_chain and self._root is not None):
            return new
        if self._is_shed:
            left, goes_on = new, new[:0]
        else:
            waits = self._sheds and not self._reason  # once for a put: a root that hangs keeps it no longer
            kept = self._tiers.absorb(*self._part(source, new), self._hints, deadline, waits=waits)
            self._there[new] = kept.there
            self._fresh[new[kept.fresh]] = True
            self._absorbed += kept.written
            self._absorbed_bytes += sum(self._sizes[index] for index in new[kept.fresh].tolist())
            left = new[~self._there[new]]
            goes_on = self._for_root(left, deadline)
        if shed := len(left) - len(goes_on):
            self._is_shed = self._is_chain
            self._reason = Overloaded.reason
            self._owner.counters.add(NodeCount.BEHIND_SHED, shed)
        return goes_on

    def _for_root(self, left: Indexes, deadline: Deadline) -> Indexes:
        """Returns which of the chunks that memory did not take are put on the root instead."""
        if left.size and self._sheds:
            # Shed only for want of room. Memory also refuses a chunk that another put is bringing at this moment; then
            # the chunks behind it are not shed.
            memory = self._tiers.memory
            if self._is_chain:
                left = left if memory.is_taken(self._wanted, int(left[0])) else left[:0]
            else:
                left = left[[memory.is_taken(self._wanted, index) for index in left.tolist()]]
        if left.size and self._root is None:
            with suppress(KVStoreError):
                self._root = self._owner.begin_rest(self._wanted, int(left[0]), self._hints, deadline)
        return left if self._root is not None else left[:0]

    def _add_to_root(
        self, root: RootWrite, source: Sections, new: Indexes, deadline: Deadline, release: Callable[[], None]
    ) -> None:
        """Adds chunks to the root's write, even if there are none: ``release`` waits for the runs before it."""
        *parts, last = np.split(new, np.flatnonzero(np.diff(new) != 1) + 1)
        for part in parts:
            root.add(source, int(part[0]), len(part), deadline)

        def kept() -> None:
            self._keep(root, source, new, deadline)
            release()

        done = kept if self.mode is WriteMode.THROUGH else release
        root.add(source, int(last[0]) if last.size else 0, len(last), deadline, done)

    def _keep(self, root: RootWrite, source: Sections, new: Indexes, deadline: Deadline) -> None:
        """Copies chunks that are on the root now into memory as well."""
        if root.publication.abandoned.value:
            return
        if not self._is_chain:
            new = new[root.publication.there()[new]]  # another writer's block may have another size
        if new.size:
            self._tiers.keep(*self._part(source, new), self._hints, deadline)

    def _part(self, source: Sections, indexes: Indexes) -> tuple[Wanted, int, int, Sections]:
        """Returns the chunks as neighbours, and where their sections are."""
        first, count = int(indexes[0]), len(indexes)
        if isinstance(self._wanted, Chain) or indexes[-1] - first == count - 1:
            return self._wanted, first, count, source
        places = indexes.tolist()
        return self._wanted.picked(places), 0, count, lambda at: source(places[at])


def _reason(error: KVStoreError) -> str:
    """Returns why a put behind has not stored what memory had no room for, and the root did not take."""
    return error.reason if isinstance(error, Overloaded) else Overloaded.reason
