"""What a put stores where, from the call to the file under its final name.

``Writer.begin`` matches what is stored already. ``WriteBatch`` sends each run to memory, to the root, or to both, and
``RootWrite`` reserves space, stages chunks and publishes them in order. ``Writer.publish`` writes to the root later
what memory took. Calls in this process, the bulk protocol and gRPC all feed a ``WriteBatch``. The rules are W1 to W5
of kvstore/tiers/MEMORY.md and those of gc/PROTOCOL.md.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.core import recency
from kvstore.core.buffers import Sections
from kvstore.core.executor import Deadline, DeadlinePassed, IndexedWork, moved_on
from kvstore.core.metrics import NodeCount
from kvstore.core.recency import DEFAULT, Hints
from kvstore.core.results import PutResult, StoredBlocks
from kvstore.core.write_mode import RUNS_MAX, Durability, WriteMode
from kvstore.engine.chunk_store import ChunkStore, Staged, StoredRun
from kvstore.engine.gc_state import GcState
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.format.keyset import KeySet, leading
from kvstore.host.tables import SpaceReservation
from kvstore.native import library as native
from kvstore.root.posix import DiskFull, PosixRoot
from kvstore.tiers.memory import Slots
from kvstore.tiers.stack import FlushJob, MemoryPut, Reservation, TierStack

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

LOOKED_MIN, LOOKED_MAX = 16, 512
"""Chunks that native code looks for in one call. Each look may wait for a server, and a thread that is in one call for
``stall_s`` counts as hung.
"""
STEP_BYTES = 1 << 20
"""Bytes that a thread takes at a time."""
STEP_FILES_MAX = 64
"""Files that a thread takes at a time: a turn that takes too long ends between two steps."""
TURN_BYTES_MAX = 16 << 20
"""Bytes staged by one call. More than for reads, because publishing, which follows each call, runs faster in one go."""
TURN_FILES_MAX = 256
"""Files staged by one call; one of them is open at a time."""
TURN_SYNCED_MAX = 16
"""Files staged by one call if each is synced: a thread that is in one call for ``stall_s`` counts as hung."""
TURN_PUBLISHED_MAX = 512
TURN_PUBLISHED_BYTES_MAX = 64 << 20
"""Files and bytes staged and published by one call: more, because such a call publishes as it goes."""
PUBLISHED_MAX = 64
"""Files published by one call, for the same reason."""
LOOK_S = 5.0
"""How long a put without immediate space looks for chunks that are stored already."""
DISCARD_S = 1.0
"""How long a failed put waits for its staged files to be removed, so that they do not keep a full disk full."""

Mask = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.int64]
Ready = Staged | StoredRun | None
"""A chunk that may be published: staged alone, staged in a run, or already in the store (None)."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a put."""

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
        present = leading(self.there) * chunk_tokens
        return PutResult(present, self.chunks, self.found, self.size_bytes, self.reason)

    def of_blocks(self) -> StoredBlocks:
        return StoredBlocks(self.there.tolist(), self.reason)


def nothing() -> None:
    """Does nothing: the memory of a run is the caller's again when the put returns."""


class Writer:
    """The puts of one node. Thread-safe."""

    def __init__(self, node: Engine) -> None:
        self.tiers = node.tiers
        self.counters = node.counters
        self.chunks = node.store
        self.executor = node.executor
        self.view = node.gc_view
        self.refresher = node.refresher
        self.clock = node.clock
        self.durable = node.durability is Durability.FSYNC
        self._node = node
        self._reads = node.reader

    def put(
        self, wanted: KeySet, first: int, source: Sections, deadline: Deadline, hints: Hints, write: WriteMode | None
    ) -> WriteResult:
        """Stores the chunks from ``first`` on; see ``Engine.put``."""
        writing = self.begin(wanted, first, deadline, hints, write)
        try:
            writing.add(source, writing.first, len(wanted) - writing.first, deadline)
        except BaseException:
            writing.abort()
            raise
        return writing.commit(deadline)

    def begin(
        self,
        wanted: KeySet,
        first: int,
        deadline: Deadline,
        hints: Hints = DEFAULT,
        write: WriteMode | None = None,
        *,
        skips: bool = False,
    ) -> WriteBatch:
        """Begins a put whose chunks arrive run by run. End it with ``commit`` or ``abort``.

        With ``skips`` its ``first`` says from which chunk on the caller has to bring them, for callers that send them
        far. Raises Overloaded while the root is full, and the root's errors.
        """
        self.view.check_room(sum(wanted.payload_sizes()[first:]))
        mode = self.tiers.mode(write) if self.tiers is not None else WriteMode.UNCACHED
        if mode is WriteMode.BEHIND:
            # Or memory would take what the root has no room for.
            self.view.usage.reserve(wait_s=deadline.left_s()).release()
        self.counters.add(NodeCount.REQUESTS_PUT)
        if not wanted.prefix_ordered:
            return self._begin_blocks(wanted, mode, hints, deadline)
        # A chunk that a sweep is taking cannot be put again before the sweep has ended. The rest of the prompt waits
        # for that.
        self.view.settle(wanted)
        chain, found = wanted.leading(self.view.leading(wanted)), 0
        if skips or mode is WriteMode.BEHIND:
            # A root that does not answer must not take the time for copying: what only it may have counts as absent.
            look = Deadline(self.clock, min(deadline.left_s(), self._node.limits.match_deadline_s))
            found = self._reads.matched_count(chain, look)
        if mode is WriteMode.BEHIND:
            there = np.arange(len(chain)) < found
            return WriteBatch(self, chain, first, there, mode, hints, refused=found < min(first, len(chain)))
        begin = max(first, found)
        root, present = self.begin_root(chain, begin, hints, deadline)
        if root is None and found > first:
            # Peers or the local disk have the matched chunks, but neither the root nor memory does: the caller must
            # bring all.
            begin = first
            root, present = self.begin_root(chain, begin, hints, deadline)
        # Those before it are there, or on their way from memory (rule W5).
        there = np.arange(len(chain)) < (present if root is None else begin)
        return WriteBatch(self, chain, first, there, mode, hints, root, refused=root is None)

    def publish(self, job: FlushJob, slots: Slots) -> int:
        """Writes chunks from memory to the root; returns the index after the last leading chunk that is there then."""
        deadline = Deadline(self.clock, self._node.limits.write_deadline_s)
        wanted, stop = job.wanted, job.first + job.count
        if not wanted.prefix_ordered:
            return self._publish_blocks(wanted, stop, slots, job.hints, deadline)
        self.view.check_room(sum(wanted.payload_sizes()[job.first : stop]))
        sweeps = self.view.sweeps
        chain = wanted.leading(min(stop, self.view.leading(wanted)))
        count = max(0, min(slots.leading_count, len(chain) - job.first))  # each is verified once it is staged
        root, present = self.begin_root(chain, job.first, job.hints, deadline, [slots])
        if root is None:
            return present
        there = _store(root, slots.sections(job.first, job.first + count), job.first, count, deadline)
        present = min(leading(there), leading(self.view.stays(chain)))
        if self.view.sweeps != sweeps:
            # One that has ended may have taken some that were found: they are written when this is tried again.
            present = self.present_leading(chain.leading(present))
        return present

    def used(self, wanted: KeySet, found: Mask, hints: Hints) -> None:
        """Notes that a put behind found chunks there: a use of them, which raises their hints.

        New chunks count no use: a put alone does not make a chunk worth a place on the disk.
        """
        part = wanted.found(found)
        count, is_raised = len(part), hints != DEFAULT
        lacking = frozenset(range(count)) if is_raised else frozenset[int]()
        self.refresher.used(part, hints, lacking)
        if self.tiers is not None:
            self.tiers.memory.used(part, count, hints if is_raised else None)

    def write_out(self, wanted: KeySet, timeout_s: float) -> None:
        """Waits until those that were put behind are on the root or lost, or out of time."""
        if self.tiers is not None:
            self.tiers.behind.settle(wanted, 0, len(wanted), timeout_s)

    def present_leading(self, wanted: KeySet) -> int:
        """Looks at each file; returns how many leading ones are there.

        A put or pin must not build on a hole.
        """
        chunks, deadline = self.chunks, Deadline(self.clock, self._node.limits.match_deadline_s)
        if wanted.prefix_ordered:
            return RootWrite(self, wanted, len(wanted), DEFAULT).present_before(deadline)
        missing = [len(wanted)]

        def look(index: int) -> bool:
            if chunks.root.stat(chunks.name(wanted.addresses[index], wanted.namespace.id)) is None:
                missing.append(index)
            return True

        self.executor.each(len(wanted), look, deadline)
        return min(missing)

    def _begin_blocks(self, keyed: KeySet, mode: WriteMode, hints: Hints, deadline: Deadline) -> WriteBatch:
        found = np.zeros(len(keyed), np.bool_)
        if mode is not WriteMode.BEHIND or self.tiers is None:
            return WriteBatch(self, keyed, 0, found, mode, hints, self.begin_root(keyed, 0, hints, deadline)[0])
        unswept = self.view.unswept(keyed)  # first: what is gone is forgotten then
        # Chunks that memory has, or that the root is remembered to have, only count a use.
        known, quantum = self.chunks.known, self.chunks.known.quantum()
        with self.tiers.memory.refer(keyed, 0, len(keyed)) as slots:
            found[:] = [
                entry is not None or known.is_present(address, quantum)
                for address, entry in zip(keyed.addresses, slots.entries, strict=True)
            ]
        return WriteBatch(self, keyed, 0, found & unswept, mode, hints)

    def _publish_blocks(self, wanted: KeySet, stop: int, slots: Slots, hints: Hints, deadline: Deadline) -> int:
        """Writes the blocks that are right; returns how many leading blocks are on the root, or no longer in memory."""
        assert self.tiers is not None
        memory, every = self.tiers.memory, range(slots.first, stop)
        right: list[int] = (np.flatnonzero(memory.all_still_right(slots, every)) + slots.first).tolist()
        if not right:
            return stop
        picked = slots.picked(right)
        root, _ = self.begin_root(picked.wanted, 0, hints, deadline, [picked])
        assert root is not None, "blocks have no parents"
        there = _store(root, picked.sections(0, len(right)), 0, len(right), deadline)
        unswept = self.view.stays(picked.wanted)
        # Another writer's block has the name and another size: ours will never be there. What is swept may be, later.
        memory.drop_entries([entry for entry, lost in zip(picked.referred, ~there & unswept, strict=True) if lost])
        return min((right[at] for at in np.flatnonzero(~unswept).tolist()), default=stop)

    def begin_root(
        self, keys: KeySet, first: int, hints: Hints, deadline: Deadline, sources: Sequence[Slots] = ()
    ) -> tuple[RootWrite | None, int]:
        """Begins a write to the root from chunk ``first`` on; None if a chunk before it is missing. Also returns how
        many leading chunks are there.
        """
        if not keys.prefix_ordered:
            blocks = RootWrite(self, keys, 0, hints, sources)
            blocks.reserve(deadline)
            return blocks, 0
        guard = PutGuard(self.view, self.chunks, keys)
        root: RootWrite | None = None
        try:
            begun = RootWrite(self, keys, first, hints, sources, guard=guard)
            present = begun.present_before(deadline)
            if not guard.is_settled:
                present = min(present, self.view.leading(keys))
            elif present >= first:
                begun.reserve(deadline)
                root = begun
            elif first <= len(keys):
                root = self._begin_with_parents(keys, first, present, hints, deadline, sources, guard)
        finally:
            if root is None:
                guard.release()
        return root, present

    def _begin_with_parents(
        self,
        chain: KeySet,
        first: int,
        present: int,
        hints: Hints,
        deadline: Deadline,
        sources: Sequence[Slots],
        guard: PutGuard,
    ) -> RootWrite | None:
        """Begins a write with chunks that the root lost and memory has (rule W5); None if one of them is wrong."""
        memory, count = self.tiers.memory if self.tiers is not None else None, first - present
        # A node that is cut off from etcd may not know that they were cleared.
        if memory is None or not self.view.protects or memory.leading(chain, present) < count:
            return None
        slots = memory.refer(chain, present, count)
        root: RootWrite | None = None
        try:
            if memory.verified(slots) == count:
                begun = RootWrite(self, chain, present, hints, [slots, *sources], guard=guard, parents=slots)
                begun.reserve(deadline)
                root = begun
        finally:
            if root is None:
                slots.release()
        if root is not None:
            try:
                root.add(slots.sections(present, first), present, count, deadline)
            except BaseException:
                root.abandon()
                raise
        return root


def _store(root: RootWrite, source: Sections, first: int, count: int, deadline: Deadline) -> Mask:
    """Stores chunks that have all arrived; returns which are there."""
    try:
        if count > 0:
            root.add(source, first, count, deadline)
    except BaseException:
        root.abandon()
        raise
    there = root.finish(deadline)
    root.used(there)
    return there


class WriteBatch:
    """A put under way: ``add`` runs of chunks, then ``commit`` or ``abort``. Used by one thread.

    A run's memory belongs to the caller again when its ``release`` is called, which happens in the order of the runs.
    """

    def __init__(
        self,
        writer: Writer,
        wanted: KeySet,
        first: int,
        found: Mask,
        mode: WriteMode,
        hints: Hints,
        root: RootWrite | None = None,
        *,
        refused: bool = False,
    ) -> None:
        """``first`` is the put's first chunk; ``found`` are those in the store already, which need not be added.

        ``root`` takes the chunks that go there without waiting for memory.
        """
        self.mode = mode
        self.refused = refused
        """True if a chunk before the first is missing, so that nothing is stored."""
        self._writer = writer
        self._wanted = wanted
        self._is_chain = wanted.prefix_ordered
        self._sizes = wanted.payload_sizes()
        self._first = first
        self._found = found
        self._there = found.copy()
        self._left_out = ~writer.view.unswept(wanted) | wanted.contradicting()
        self._hints = hints
        self._root = root
        self._is_shed = False
        self._reason = ""
        self._fresh = np.zeros(len(found), np.bool_)
        """Those that memory took, and did not have before."""
        self._absorbed = 0
        self._absorbed_bytes = 0
        self.is_read = False
        """True if ``commit`` has left a thread behind that reads the memory of a run, which is not released."""

    @property
    def first(self) -> int:
        """The first chunk that has to be added."""
        return max(self._first, leading(self._found)) if self._is_chain else self._first

    def add(
        self, source: Sections, first: int, count: int, deadline: Deadline, release: Callable[[], None] = nothing
    ) -> None:
        """Stores ``count`` chunks from index ``first`` on, or begins to. Raises as ``commit`` does."""
        run = slice(first, min(first + count, len(self._wanted)))
        new = first + np.flatnonzero(~(self._there[run] | self._left_out[run]))
        if self.refused:
            new = new[:0]
        elif self.mode is WriteMode.BEHIND:
            new = self._absorb(source, new, deadline)
        root = self._root
        if root is None:
            release()
            return
        if not root.abandoned.value:
            try:
                self._add_to_root(root, source, new, deadline, release)
                return
            except KVStoreError as error:
                if self.mode is not WriteMode.BEHIND:
                    raise
                self._reason = _reason(error)
                # As much as memory took is put, whatever the root does with the rest.
                root.abandon()
        if not root.is_read:
            release()

    def reserve(self, first: int, count: int) -> Reservation | None:
        """Claims slots of memory for a run that is on its way, for ``add_arrived``; None if it is for ``add``."""
        run = slice(first, first + count)
        if self.mode is not WriteMode.BEHIND or self.refused or self._is_shed or self._root is not None:
            return None
        if (self._there | self._left_out)[run].any() or run.stop > len(self._there):
            return None  # what is behind a chunk that a sweep is taking is not put
        return self._tiers.reserve(self._wanted, first, count, self._hints)

    def add_arrived(self, reserved: Reservation, sums: npt.NDArray[np.uint64]) -> None:
        """Stores a run whose sections are in place, and have these checksums."""
        run = slice(reserved.first, reserved.first + reserved.count)
        reserved.publish(sums)
        self._there[run] = self._fresh[run] = True
        self._absorbed += reserved.count
        self._absorbed_bytes += sum(self._sizes[run])

    def commit(self, deadline: Deadline) -> WriteResult:
        """Waits for what is on its way to the root. Raises the root's errors, or Unavailable."""
        if self.refused:
            return WriteResult(self._found, 0, 0, 0, self._fresh)
        there, fresh, root = self._there, self._fresh, self._root
        chunks, size_bytes = self._absorbed, self._absorbed_bytes
        if root is not None:
            try:
                root.finish(deadline)
            except KVStoreError as error:
                if self.mode is not WriteMode.BEHIND:
                    raise
                self._reason = _reason(error)
            self.is_read = root.is_read
            # Parents from memory were only on their way when this began.
            there = root.there() | (there if self.mode is WriteMode.BEHIND else False)
            fresh = fresh | root.fresh
            chunks, size_bytes = chunks + root.written, size_bytes + root.bytes_written
        # A chunk condemned during its put counts as absent.
        there = there & ~self._left_out & self._writer.view.stays(self._wanted)
        if self._is_chain:
            there[leading(there) :] = False
        found = max(0, int(there[self._first :].sum()) - chunks)
        self._writer.counters.add(NodeCount.CHUNKS_FOUND, found)
        if self.mode is WriteMode.BEHIND:
            self._writer.used(self._wanted, self._found, self._hints)
        if root is not None:
            root.used(there)
        return WriteResult(there, chunks, size_bytes, found, fresh & there, self._reason)

    def abort(self) -> None:
        """Puts nothing more on the root. Chunks that memory took stay there. Idempotent."""
        if self._root is not None:
            self._root.abandon()

    @property
    def _tiers(self) -> TierStack:
        tiers = self._writer.tiers
        assert tiers is not None, "without memory nothing is put behind, and nothing kept"
        return tiers

    def _absorb(self, source: Sections, new: Indexes, deadline: Deadline) -> Indexes:
        """Copies chunks into memory, to be written to the root later (rule W1); returns those for the root now."""
        if not new.size or (self._is_chain and self._root is not None):
            return new
        if self._is_shed:
            left, goes_on = new, new[:0]
        else:
            waits = not self._reason  # once for a put: a root that hangs keeps it no longer
            kept = self._tiers.absorb(self._incoming(source, new, deadline), waits=waits)
            self._there[new] = kept.there
            self._fresh[new[kept.fresh]] = True
            self._absorbed += len(kept.fresh)
            self._absorbed_bytes += sum(self._sizes[index] for index in new[kept.fresh].tolist())
            left = new[~self._there[new]]
            goes_on = self._for_root(left, deadline) if left.size else left
        if shed := len(left) - len(goes_on):
            self._is_shed = self._is_chain
            self._reason = Overloaded.reason
            self._writer.counters.add(NodeCount.BEHIND_SHED, shed)
        return goes_on

    def _for_root(self, left: Indexes, deadline: Deadline) -> Indexes:
        """Returns which of the chunks that memory did not take are put on the root instead.

        Those that another put is bringing at this moment, and of a prompt those behind them. The others are shed.
        """
        memory = self._tiers.memory
        if self._is_chain:
            left = left if memory.is_taken(self._wanted, int(left[0])) else left[:0]
        else:
            left = left[[memory.is_taken(self._wanted, index) for index in left.tolist()]]
        if left.size and self._root is None:
            with suppress(KVStoreError):
                self._root, _ = self._writer.begin_root(self._wanted, int(left[0]), self._hints, deadline)
        return left if self._root is not None else left[:0]

    def _add_to_root(
        self, root: RootWrite, source: Sections, new: Indexes, deadline: Deadline, release: Callable[[], None]
    ) -> None:
        """Adds chunks to the root's write, even if there are none: ``release`` waits for the runs before it."""
        *parts, last = np.split(new, np.flatnonzero(np.diff(new) != 1) + 1)
        for part in parts:
            root.add(source, int(part[0]), len(part), deadline)

        def kept() -> None:
            self._copy_to_memory(root, source, new, deadline)
            release()

        done = kept if self.mode is WriteMode.THROUGH else release
        root.add(source, int(last[0]) if last.size else 0, len(last), deadline, done)

    def _copy_to_memory(self, root: RootWrite, source: Sections, new: Indexes, deadline: Deadline) -> None:
        """Copies chunks that are on the root now into memory as well."""
        if root.abandoned.value:
            return
        if not self._is_chain:
            new = new[root.there()[new]]  # another writer's block may have another size
        if new.size:
            self._tiers.keep(self._incoming(source, new, deadline))

    def _incoming(self, source: Sections, indexes: Indexes, deadline: Deadline) -> MemoryPut:
        """Returns the chunks as neighbours, and where their sections are."""
        places: list[int] = indexes.tolist()
        part, first = self._wanted.as_neighbours(places)
        sections = source if part is self._wanted else lambda at: source(places[at])
        return MemoryPut(part, first, len(places), sections, self._hints, deadline)


def _reason(error: KVStoreError) -> str:
    """Returns why a put behind has not stored what memory had no room for, and the root did not take."""
    return error.reason if isinstance(error, Overloaded) else Overloaded.reason


class RootWrite:
    """Chunks from index ``first`` on, on their way to the root. One thread adds and ends; threads stage and publish.

    The order matters because a match finds the end of a cached prefix by bisection: a chunk must never be visible
    before its parent. So staging (the bytes) runs in parallel, and the thread that completes the next chunk of a chain
    publishes it and all that wait behind it. Engine-hashed blocks have no parents: each is published once it is staged.
    """

    def __init__(
        self,
        writer: Writer,
        wanted: KeySet,
        first: int,
        hints: Hints,
        sources: Sequence[Slots] = (),
        *,
        guard: PutGuard | None = None,
        parents: Slots | None = None,
    ) -> None:
        """Chunks in ``sources`` are verified again once they are staged; the caller vouches for the others.

        ``guard`` and ``parents`` end with the write.
        """
        self.wanted = wanted
        self.first = first
        self.written = 0
        """Chunks published so far."""
        self.bytes_written = 0
        """Bytes of their sections."""
        self.fresh = np.zeros(len(wanted), np.bool_)
        """True for each chunk that got its name by this put."""
        self.abandoned = ctypes.c_int32(0)
        """Not 0 once nothing more is published. Native code reads it too."""
        self.is_read = False
        """True once it was abandoned while a thread read the memory of a run: no run is released any more."""
        self._writer = writer
        self._chunks = writer.chunks
        self._hints = hints
        self._sources = sources
        self._guard = guard
        self._parents = parents
        self._is_chain = wanted.prefix_ordered
        self._stamped_s = writer.chunks.known.tick()
        """All chunks of a put have one time, and their ancestors none before it."""
        self._lacking: set[int] = set()
        """Chunks whose hints or time this put has to raise."""
        self._is_renewed = False
        self._room: SpaceReservation | None = None
        """Ends with the write. A thread that hangs has this object, and so the room, until it is done."""
        self._pending: deque[tuple[IndexedWork, Callable[[], None]]] = deque()
        self._changed = threading.Lock()  # guards what follows
        self._ready: dict[int, Ready] = {}
        self._there = np.zeros(len(wanted), np.bool_)
        self._next = first
        self._is_publishing = False

    # The caller's thread

    def reserve(self, deadline: Deadline) -> None:
        """Reserves space for all chunks; waits for it a moment. Raises Overloaded if there is none then."""
        size_bytes = self.wanted.file_bytes(self.first)
        began_s = self._chunks.known.tick()
        missing_bytes = partial(self._missing_bytes, deadline)
        self._room = self._chunks.usage.reserve(size_bytes, missing_bytes, deadline.left_s())
        if (now_s := self._chunks.known.tick()) > began_s:  # with the older time its chunks would soon count as reused
            self._stamped_s = now_s
            self._lacking.update(range(min(self.first, len(self.wanted))))

    def present_before(self, deadline: Deadline) -> int:
        """Looks at each chunk before ``first``; returns how many leading ones are there.

        Native code looks up many in one call.
        """
        chain, executor = self.wanted, self._writer.executor
        count = min(self.first, len(chain))
        run = self._chunks.run(chain, 0, count)
        size = min(max(-(-count // executor.width), LOOKED_MIN), LOOKED_MAX) if run is not None else 1
        missing = [count]

        def look_at(number: int) -> bool:
            start = number * size
            indexes = np.arange(start, min(start + size, count))
            if run is not None:
                there, mtimes_ns = run.look(start, start + len(indexes))
                self._found(indexes[there], mtimes_ns)
                indexes = indexes[~there]
            for index in indexes.tolist():
                if not self._look(index):
                    missing.append(index)
                    return False
            return True

        executor.each(-(-count // size), look_at, deadline)
        return min(missing)

    def _look(self, index: int) -> bool:
        """True if chunk ``index`` is in the store; notes one whose hints this put has to raise."""
        stat = self._chunks.look(self.wanted.expected(index))
        if stat is None:
            return False
        if self._chunks.lacks(stat, self._hints) or not recency.is_fresh(stat.mtime_ns, self._stamped_s):
            self._lacking.add(index)
        return True

    def _found(self, indexes: Indexes, mtimes_ns: npt.NDArray[np.int64]) -> None:
        """Notes chunks that are in the store, as ``_look`` does."""
        lacking = ~recency.cover(mtimes_ns, self._chunks.known.quantum_s, self._hints)
        lacking |= mtimes_ns < recency.ns_of(self._stamped_s)
        self._lacking.update(indexes[lacking].tolist())

    def add(
        self, source: Sections, first: int, count: int, deadline: Deadline, release: Callable[[], None] = nothing
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
        try:
            self._renew_parents(deadline)
        finally:
            self._end()
        return self.there()

    def abandon(self, wait_s: float = DISCARD_S) -> None:
        """Publishes nothing more, and removes what is staged; waits at most ``wait_s`` for that. Idempotent.

        Releases the memory of runs on their way, in order, up to the first that a thread may still read (``is_read``).
        """
        if not self.abandoned.value:
            self._writer.counters.add(NodeCount.PUT_FAILED)
        with self._changed:
            self.abandoned.value = 1
            staged = self._staged(self._ready)
            self._ready = {index: None for index, ready in self._ready.items() if ready is None}
        for run, _ in self._pending:
            run.stop()
        while self._pending:
            run, release = self._pending.popleft()
            self.is_read = self.is_read or not run.join(wait_s)
            if not self.is_read:
                release()
        executor, clock = self._writer.executor, self._writer.clock

        def discard(at: int) -> bool:
            self._chunks.discard(staged[at].name)
            return True

        with suppress(KVStoreError):  # the root does not answer: fsck finds what is left
            batch = executor.start(len(staged), discard)
            if wait_s:
                batch.wait(Deadline(clock, wait_s))
        if wait_s:
            self._renew_parents(Deadline(clock, wait_s))
        self._end()

    def there(self) -> Mask:
        """Returns which chunks are in the store as far as this write knows; those before ``first`` count as there."""
        with self._changed:
            there = self._there.copy()
            there[: self.first] = True
            if self._is_chain:
                there[: self._next] = True
                there[self._next :] = False
        return there

    def used(self, there: Mask) -> None:
        """Notes a use of the chunks that are there, and raises the hints of those that were found."""
        self._writer.refresher.used(self.wanted.needed(int(there.sum())), self._hints, frozenset(self._lacking))

    def _renew_parents(self, deadline: Deadline) -> None:
        """Renews the parents of what was published."""
        guard = self._guard
        parents = guard.unlisted(self.fresh) if guard is not None else []
        if guard is not None and parents:
            with suppress(KVStoreError):  # a collector may take a parent then, and its children count as misses
                self._writer.executor.run(lambda: guard.renew(parents), deadline)

    def _end(self) -> None:
        if self._room is not None and not self.is_read:
            self._room.release()
        if self._guard is not None:
            self._guard.release()
        if self._parents is not None:
            self._parents.release()

    def _missing_bytes(self, deadline: Deadline) -> int:
        """Looks for each chunk; returns the bytes of the files of those that are not there, or were not found in time.

        Only where there is no room for all of them.
        """
        first = self.first
        missing = np.ones(len(self.wanted) - first, np.bool_)

        def look(at: int) -> bool:
            missing[at] = not self._look(first + at)
            return True

        with suppress(KVStoreError):
            look_s = min(LOOK_S, deadline.left_s())
            self._writer.executor.each(len(missing), look, Deadline(self._writer.clock, look_s))
        return sum(self.wanted.image_sizes((first + np.flatnonzero(missing)).tolist()))

    def _wait(self, deadline: Deadline) -> None:
        batch, release = self._pending[0]
        try:
            batch.wait(deadline)
        except DiskFull as full:
            raise self._chunks.usage.refusal(full) from full.__cause__
        self._pending.popleft()
        release()

    # Staging, on threads

    def _begin(self, source: Sections, first: int, count: int) -> IndexedWork:
        chunks, executor = self._chunks, self._writer.executor
        run = chunks.run(self.wanted, first, count, source) if chunks.stages_natively else None
        if run is None:
            return executor.start(count, lambda at: self._store(source, first + at))
        self._begin_turns(run)

        def store(_: int) -> bool:
            more = True
            try:
                while more:
                    left, more = self._add_turn(run)
                    for index in left:
                        self._store(source, index)
                    moved_on()
            except BaseException:
                run.stop()
                raise
            return True

        return executor.start(min(count, executor.width), store)

    def _begin_turns(self, run: StoredRun) -> None:
        """Prepares the turns in which threads find, stage and publish the chunks."""
        durable, chunk_bytes = self._writer.durable, max(1, self.wanted.mean_bytes(run.first, run.count))
        # Blocks that the caller vouches for need no look between staging and publishing.
        at_once = not self._is_chain and not durable and not self._sources
        files_max, bytes_max = (TURN_SYNCED_MAX if durable else TURN_FILES_MAX), TURN_BYTES_MAX
        if at_once:
            files_max, bytes_max = TURN_PUBLISHED_MAX, TURN_PUBLISHED_BYTES_MAX
        most = max(1, min(bytes_max // chunk_bytes, files_max))
        run.begin_put(
            max(1, min(STEP_BYTES // chunk_bytes, STEP_FILES_MAX, most)),
            most,
            np.array(self.wanted.depths()[run.first : run.first + run.count], np.int64),
            stamped_s=self._stamped_s,
            durable=durable,
            hints=self._hints,
            abandoned=self.abandoned if at_once else None,
        )

    def _add_turn(self, put: StoredRun) -> tuple[list[int], bool]:
        """Takes one thread's turn: finds or stages chunks that no other thread took, and publishes what it can.

        Returns the chunks to be added one by one, and whether there may be more.
        """
        if self.abandoned.value:
            put.stop()
        places, more = put.stage_turn()
        if not len(places):  # other threads took all there was
            return [], more
        published = put.items["status"][places] == native.PUBLISHED
        if published.any():
            done, places = places[published], places[~published]
            self._there[put.first + done] = self.fresh[put.first + done] = True
            self._count(*put.count_published(done, put.epoch))
            if not len(places):
                return [], more
        taken, indexes = put.items[places], put.first + places
        staged, found = taken["status"] == native.DONE, taken["status"] == native.FOUND
        ready: dict[int, Ready] = dict.fromkeys(indexes[staged].tolist(), put)
        if found.any():
            self._found(indexes[found], taken["mtime_ns"][found])
            ready |= dict.fromkeys(indexes[found].tolist())
        left: list[int] = indexes[~(staged | found)].tolist()
        self._completed(ready)
        return left, more

    def _store(self, source: Sections, index: int) -> bool:
        """Publishes chunk ``index`` once its parents are, unless it is in the store."""
        if self._look(index):
            self._completed({index: None})
            return True
        expected = self.wanted.expected(index)
        staged = self._chunks.stage(
            expected,
            source(index),
            self._stamped_s,
            self._writer.durable,
            self._hints,
            self.wanted.depths()[index],
        )
        if not self._is_chain or self._chunks.root.traits.ordered_publish:
            self._completed({index: staged})
        elif self.abandoned.value:
            self._chunks.discard(staged.name)
        else:
            # Here publishing is the upload itself; in order, chunks would go one at a time. A child that is visible
            # before its parent only stays unreachable until the parent is there.
            self._publish(index, staged)
            self._completed({index: None})
        return True

    # Publishing, on threads

    def _completed(self, ready: Mapping[int, Ready]) -> None:
        """Decides under the lock who publishes; publishes outside it."""
        if not self._keep(ready):
            return
        if not self._is_chain:
            self._publish_each(ready)
            return
        with self._changed:
            if self._is_publishing:
                return  # the thread that publishes now takes these too
            self._is_publishing = True
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
        for staged in self._staged(ready):
            self._chunks.discard(staged.name)
        return False

    def _staged(self, ready: Mapping[int, Ready]) -> list[Staged]:
        """Returns those that have a staged file."""
        found = list[Staged]()
        for index, each in ready.items():
            if isinstance(each, StoredRun):
                expected = self.wanted.expected(index)
                found.append(Staged(each.staged_name(index - each.first), expected, expected.file_bytes))
            elif each is not None:
                found.append(each)
        return found

    def _publish_each(self, ready: Mapping[int, Ready]) -> None:
        """Publishes blocks in no order. If this raises, ``abandon`` discards those that are left."""
        for put, group in groupby(ready, ready.__getitem__):
            indexes = list(group)
            if isinstance(put, StoredRun):
                indexes = self._publish_unordered(put, indexes)
            for index in indexes:
                with self._changed:
                    claimed = self._ready.pop(index, None)
                if put is None:
                    self._there[index] = True
                for staged in self._staged({index: claimed}):
                    self._publish(index, staged)

    def _publish_unordered(self, put: StoredRun, indexes: list[int]) -> list[int]:
        """Publishes blocks of a run by one call; returns those that are left."""
        if not put.is_right and not self._still_right(indexes).all():
            return indexes
        places = np.asarray(indexes, np.int32) - np.int32(put.first)
        with self._changed:
            if self.abandoned.value:
                return []
            for index in indexes:
                del self._ready[index]
        try:
            self._count(*put.publish(places, ordered=False))
        finally:
            done = put.items[places]["status"] == native.PUBLISHED
            left: list[int] = (places[~done] + put.first).tolist()
            self._there[places[done] + put.first] = self.fresh[places[done] + put.first] = True
            self._keep(dict.fromkeys(left, put))
        return left

    def _publish_ready(self) -> None:
        """Publishes chunks of a chain, in order."""
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
                self._is_publishing = False
            raise

    def _claim(self) -> list[Ready]:
        """Takes what may be published next: one chunk, or consecutive chunks of a run.

        Empty if the next chunk is not ready: then no thread publishes any more.
        """
        with self._changed:
            claimed: list[Ready] = []
            while len(claimed) < PUBLISHED_MAX and (index := self._next + len(claimed)) in self._ready:
                if claimed and (claimed[0] is None or self._ready[index] is not claimed[0]):
                    break
                claimed.append(self._ready.pop(index))
            self._is_publishing = bool(claimed)
            return claimed

    def _publish_run(self, ready: Ready, first: int, stop: int) -> int:
        """Publishes chunks of a run up to the first that Python has to do; returns how many."""
        if not isinstance(ready, StoredRun):
            return 0
        self._renew_before(first)
        if not ready.is_right:
            right = self._still_right(range(first, stop))
            stop = stop if right.all() else first + int(right.argmin())
        places = np.arange(first - ready.first, stop - ready.first, dtype=np.int32)
        count, size_bytes = ready.publish(places, ordered=True)
        self.fresh[first : first + count] = True
        self._count(count, size_bytes)
        return count

    def _publish(self, index: int, staged: Staged) -> None:
        """Publishes a chunk that was staged alone, or that native code left. Raises the root's errors."""
        if self._is_chain:
            self._renew_before(index)
        if not self._still_right([index]).all():
            self._chunks.discard(staged.name)
            if not self._is_chain:
                return
            raise Unavailable("a chunk in memory went wrong while it was written to the root: put it again")
        try:
            won = self._chunks.publish(staged, self._writer.durable)
            if not won:
                self._look(index)  # its stamp may be older than those of its children here: then it is renewed first
            # Another writer's block under this key may have another size: then ours is not in the store.
            self._there[index] = won or self._is_chain or self._chunks.is_present(staged.expected)
        except KVStoreError:
            self._chunks.discard(staged.name)
            raise
        if won:
            self.fresh[index] = True
            self._count(1, staged.expected.payload_bytes)

    def _renew_before(self, depth: int) -> None:
        """Renews the ancestors before the first new chunk gets its stamp: a chunk is never staler than its child."""
        lacking = frozenset(index for index in list(self._lacking) if index < depth)
        if self._is_renewed and not lacking:
            return
        self._is_renewed = True
        self._writer.refresher.renew(self.wanted.leading(depth), self._hints, lacking, self._stamped_s)
        self._lacking -= lacking

    def _still_right(self, indexes: Sequence[int]) -> Mask:
        """Returns which chunks still have the bytes that they had before they were staged.

        Staging makes new checksums, so bytes that changed in memory between their verification and staging would pass
        as right ever after.
        """
        right = np.ones(len(indexes), np.bool_)
        tiers = self._writer.tiers
        for slots in self._sources:
            ours = [at for at, index in enumerate(indexes) if 0 <= index - slots.first < len(slots.entries)]
            if ours and tiers is not None:
                right[ours] = tiers.memory.all_still_right(slots, [indexes[at] for at in ours])
        return right

    def _count(self, chunks: int, size_bytes: int) -> None:
        with self._changed:
            self.written += chunks
            self.bytes_written += size_bytes


class PutGuard:
    """Keeps a prompt from being evicted while a put adds to it (gc/PROTOCOL.md, section 7)."""

    def __init__(self, view: GcState, chunks: ChunkStore, chain: KeySet) -> None:
        self._view = view
        self._chunks = chunks
        self._chain = chain
        self._listings = view.listings
        self._mark = view.protect(chain.packed_addresses)
        self.is_settled = self._mark is None or view.settle(chain)
        """False if some of the prompt is still being deleted, by a process that was stopped in the middle of it."""

    def unlisted(self, fresh: Mask) -> list[int]:
        """Returns the parents of what was published (``fresh``) that a listing may have without their children.

        Those that this put published as well are newer than the last listing, unless another one has begun.
        """
        if self._mark is None:
            return []
        is_listed = self._view.listings != self._listings
        published: list[int] = np.flatnonzero(fresh).tolist()
        return [index - 1 for index in published if index and (is_listed or not fresh[index - 1])]

    def renew(self, parents: Sequence[int]) -> None:
        """Marks parents as used, before the guard ends: or a collector whose listing lacks a child would take it."""
        assert isinstance(self._chunks.root, PosixRoot)
        for index in parents:
            self._chunks.root.mark(self._chunks.name(self._chain.addresses[index], self._chain.namespace.id))

    def release(self) -> None:
        mark, self._mark = self._mark, None
        self._view.unprotect(mark)
