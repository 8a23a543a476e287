"""Puts of a node: how each begins, whether its chunks go to the root, to memory, or to both.

Separate from the node, because this is everything between a caller's bytes and their destinations. The rules are W1 to
W5 of kvstore/memory/MEMORY.md and those of gc/PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.counts import NodeCount
from kvstore.format.header import expected_chunk
from kvstore.hints import DEFAULT, Hints
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.gc_state import GcState
from kvstore.node.guard import Guard
from kvstore.node.images import Images
from kvstore.node.lanes import Deadline, Lanes
from kvstore.node.limits import CurrentLimits
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.publish import Mask, Publication, StillRight, vouched
from kvstore.node.refresh import Refresher
from kvstore.node.root_write import RootWrite
from kvstore.node.slots import Slots
from kvstore.node.tier_stack import TierStack
from kvstore.node.tiered_reads import TieredReads
from kvstore.node.wanted import Keyed, Wanted, leading, sizes_of
from kvstore.node.write import Write, Written
from kvstore.node.write_behind import Job
from kvstore.sections import Sections
from kvstore.sources import Clock
from kvstore.writes import WriteMode

LOOKED_MIN, LOOKED_MAX = 16, 512
"""Chunks that native code looks for in one call. Each look may wait for a server, and a lane that is in one call for
``stall_s`` counts as hung.
"""

Found = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], None]
"""Takes the indexes and mtimes of chunks that are there."""


def _only_there(indexes: npt.NDArray[np.int64], mtimes_ns: npt.NDArray[np.int64]) -> None:
    """Ignores them: the caller only asks how many are there."""


class Puts:
    """The puts of one node. Thread-safe."""

    def __init__(
        self,
        chunks: Chunks,
        lanes: Lanes,
        view: GcState,
        refresher: Refresher,
        reads: TieredReads,
        tiers: TierStack | None,
        counters: Counters,
        limits: CurrentLimits,
        clock: Clock,
        *,
        durable: bool,
    ) -> None:
        self.tiers = tiers
        self.counters = counters
        self._limits = limits
        self._chunks = chunks
        self._lanes = lanes
        self.view = view
        self._refresher = refresher
        self._reads = reads
        self._clock = clock
        self._publication = partial(Publication, chunks, refresher, durable)

    def put(
        self, wanted: Wanted, first: int, source: Sections, deadline: Deadline, hints: Hints, write: WriteMode | None
    ) -> Written:
        """Stores the chunks from ``first`` on; see ``Node.put``."""
        writing = self.begin(wanted, first, deadline, hints, write)
        try:
            writing.add(source, writing.first, len(wanted) - writing.first, deadline)
        except BaseException:
            writing.abandon()
            raise
        return writing.finish(deadline)

    def begin(
        self,
        wanted: Wanted,
        first: int,
        deadline: Deadline,
        hints: Hints = DEFAULT,
        write: WriteMode | None = None,
        *,
        skips: bool = False,
        sheds: bool = True,
    ) -> Write:
        """Begins a put whose chunks arrive run by run. End it with ``finish`` or ``abandon``.

        With ``skips`` its ``first`` says from which chunk on the caller has to bring them, for callers that send them
        far. Chunks that memory has no room for are shed, or, without ``sheds``, put on the root. Raises Overloaded
        while the root is full, and the root's errors.
        """
        self.view.check_room(sum(sizes_of(wanted)[first:]))
        mode = self.mode(write)
        if mode is WriteMode.BEHIND:
            self.view.usage.reserve().release()  # or memory would take what the root has no room for
        self.counters.add(NodeCount.REQUESTS_PUT)
        if isinstance(wanted, Keyed):
            return self._begin_blocks(wanted, mode, hints, sheds=sheds)
        # A chunk that a sweep is taking cannot be put again before the sweep has ended. The rest of the prompt waits
        # for that.
        self.view.settle(wanted)
        chain, found = wanted.leading(self.view.leading(wanted)), 0
        if skips or mode is WriteMode.BEHIND:
            # A root that does not answer must not take the time for copying: what only it may have counts as absent.
            look = Deadline(self._clock, min(deadline.left_s(), self._limits.now.match_deadline_s))
            found = self._reads.matched_count(chain, look)
        if mode is WriteMode.BEHIND:
            there = np.arange(len(chain)) < found
            return Write(self, chain, first, there, mode, hints, refused=found < min(first, len(chain)), sheds=sheds)
        begin = max(first, found)
        root, present = self._begin_root(chain, begin, hints, deadline, vouched)
        if root is None and found > first:
            # Peers or the local disk have the matched chunks, but neither the root nor memory does: the caller must
            # bring all.
            begin = first
            root, present = self._begin_root(chain, begin, hints, deadline, vouched)
        # Those before it are there, or on their way from memory (rule W5).
        there = np.arange(len(chain)) < (present if root is None else begin)
        return Write(self, chain, first, there, mode, hints, root, refused=root is None)

    def mode(self, asked: WriteMode | None) -> WriteMode:
        """Returns how a put is acknowledged here."""
        return self.tiers.mode(asked) if self.tiers is not None else WriteMode.UNCACHED

    def begin_rest(self, wanted: Wanted, first: int, hints: Hints, deadline: Deadline) -> RootWrite | None:
        """Begins to put on the root what memory did not take; None if its parents are not there."""
        if isinstance(wanted, Keyed):
            return self._root_write(wanted, 0, hints, vouched)
        return self._begin_root(wanted, first, hints, deadline, vouched)[0]

    def publish(self, job: Job, slots: Slots) -> int:
        """Writes chunks from memory to the root; returns the index after the last leading chunk that is there then."""
        assert self.tiers is not None
        memory, deadline = self.tiers.memory, self._deadline(None)
        wanted, stop = job.wanted, job.first + job.count
        size_bytes = sum(sizes_of(wanted)[job.first : stop])
        if isinstance(wanted, Keyed):
            right = np.flatnonzero(memory.all_still_right(slots, range(job.first, stop))) + job.first
            return self._publish_blocks(wanted, right.tolist(), stop, slots, job.hints, deadline)
        self.view.check_room(size_bytes)
        sweeps = self.view.sweeps
        chain = wanted.leading(min(stop, self.view.leading(wanted)))
        count = min(slots.leading_count, len(chain) - job.first)  # each is verified once it is staged
        root, present = self._begin_root(
            chain, job.first, job.hints, deadline, lambda indexes: memory.all_still_right(slots, indexes)
        )
        if root is None:
            return present
        there = self._store(root, slots.sections(job.first, job.first + max(0, count)), job.first, count, deadline)
        present = min(leading(there), leading(self.view.stays(chain)))
        if self.view.sweeps != sweeps:
            # One that has ended may have taken some that were found: they are written when this is tried again.
            present = self.present_leading(chain.leading(present))
        return present

    def used(self, wanted: Wanted, found: Mask, hints: Hints) -> None:
        """Notes that a put behind found chunks there: a use of them, which raises their hints.

        New chunks count no use: a put alone does not make a chunk worth a place on the disk.
        """
        if isinstance(wanted, Chain):
            part: Wanted = wanted.leading(leading(found))
        else:
            part = wanted.picked(np.flatnonzero(found).tolist())
        count, is_raised = len(part), hints != DEFAULT
        lacking = frozenset(range(count)) if is_raised else frozenset[int]()
        self._refresher.used(part, hints, lacking)
        if self.tiers is not None:
            self.tiers.memory.used(part, count, hints if is_raised else None)

    def write_out(self, wanted: Wanted, timeout_s: float) -> None:
        """Waits until those that were put behind are on the root or lost, or out of time."""
        if self.tiers is not None:
            self.tiers.behind.settle(wanted, 0, len(wanted), timeout_s)

    def present_leading(self, wanted: Wanted) -> int:
        """Looks at each file; returns how many leading ones are there.

        A put or pin must not build on a hole.
        """
        chunks, deadline = self._chunks, Deadline(self._clock, self._limits.now.match_deadline_s)
        if isinstance(wanted, Chain):
            chain = wanted
            return self._leading(
                chain, len(chain), lambda index: chunks.is_present(expected_chunk(chain, index)), deadline
            )
        missing = [len(wanted)]

        def look(index: int) -> bool:
            if chunks.root.stat(chunks.name(wanted.addresses[index], wanted.namespace.id)) is None:
                missing.append(index)
            return True

        self._lanes.each(len(wanted), look, deadline)
        return min(missing)

    def _begin_blocks(self, keyed: Keyed, mode: WriteMode, hints: Hints, *, sheds: bool) -> Write:
        found = np.zeros(len(keyed), np.bool_)
        if mode is not WriteMode.BEHIND or self.tiers is None:
            return Write(self, keyed, 0, found, mode, hints, self._root_write(keyed, 0, hints, vouched))
        # Chunks that memory has, or that the root is remembered to have, only count a use.
        known, quantum = self._chunks.known, self._chunks.known.quantum()
        with self.tiers.memory.refer(keyed, 0, len(keyed)) as slots:
            found[:] = [
                entry is not None or known.is_present(address, quantum)
                for address, entry in zip(keyed.addresses, slots.entries, strict=True)
            ]
        return Write(self, keyed, 0, found & self.view.unswept(keyed), mode, hints, sheds=sheds)

    def _publish_blocks(
        self, wanted: Keyed, right: list[int], stop: int, slots: Slots, hints: Hints, deadline: Deadline
    ) -> int:
        """Writes the blocks that are right; returns how many leading blocks are on the root, or no longer in memory."""
        assert self.tiers is not None
        memory = self.tiers.memory
        if not right:
            return stop
        part = wanted.picked(right)
        images = Images(part, 0, [slots.image(index) for index in right])
        root = self._root_write(
            part, 0, hints, lambda places: memory.all_still_right(slots, [right[at] for at in places])
        )
        there, unswept = self._store(root, images, 0, len(part), deadline), self.view.stays(part)
        # Another writer's block has the name and another size: ours will never be there. What is swept may be, later.
        hopeless = [right[at] for at in np.flatnonzero(~there & unswept).tolist()]
        entries = [slots.entries[index - slots.first] for index in hopeless]
        memory.drop_entries([entry for entry in entries if entry is not None])
        return min((right[at] for at in np.flatnonzero(~unswept).tolist()), default=stop)

    def _store(self, root: RootWrite, source: Sections, first: int, count: int, deadline: Deadline) -> Mask:
        """Stores chunks that have all arrived; returns which are there."""
        try:
            if count > 0:
                root.add(source, first, count, deadline)
        except BaseException:
            root.abandon()
            raise
        there = root.finish(deadline)
        root.publication.used(there)
        return there

    def _begin_root(
        self, chain: Chain, first: int, hints: Hints, deadline: Deadline, still_right: StillRight
    ) -> tuple[RootWrite | None, int]:
        """Begins a write to the root from chunk ``first`` on; None if a chunk before it is missing. Also returns how
        many leading chunks are there.
        """
        guard = Guard(self.view, self._chunks, chain)
        root: RootWrite | None = None
        try:
            publication = self._publication(chain, first, hints, still_right)
            present = self._leading(chain, min(first, len(chain)), publication.look, deadline, publication.found)
            memory = self.tiers.memory if self.tiers is not None else None
            if not guard.is_settled:
                present = min(present, self.view.leading(chain))
            elif present >= first:
                root = RootWrite(
                    self._chunks, self._lanes, self._clock, publication, self.counters, guard, wait_s=deadline.left_s()
                )
            elif memory is not None and first <= len(chain) and memory.leading(chain, present) >= first - present:
                root = self._begin_with_parents(memory, chain, first, present, hints, deadline, still_right, guard)
        finally:
            if root is None:
                guard.release()
        return root, present

    def _begin_with_parents(
        self,
        memory: MemoryTier,
        chain: Chain,
        first: int,
        present: int,
        hints: Hints,
        deadline: Deadline,
        still_right: StillRight,
        guard: Guard,
    ) -> RootWrite | None:
        """Begins a write with chunks that the root lost and memory has (rule W5); None if one of them is wrong."""
        slots = memory.refer(chain, present, first - present)
        root: RootWrite | None = None
        try:
            count = memory.verified(slots)
            if count < first - present:
                slots.release()
                return None

            def all_right(indexes: Sequence[int]) -> Mask:
                ours = [index for index in indexes if index < first]
                return np.concatenate(
                    (memory.all_still_right(slots, ours), still_right([index for index in indexes if index >= first]))
                )

            publication = self._publication(chain, present, hints, all_right)
            root = RootWrite(
                self._chunks, self._lanes, self._clock, publication, self.counters, guard, ended=slots.release
            )
            root.add(slots.sections(present, present + count), present, count, deadline)
        except BaseException:
            if root is not None:
                root.abandon()
            slots.release()
            raise
        return root

    def _root_write(self, wanted: Wanted, first: int, hints: Hints, still_right: StillRight) -> RootWrite:
        publication = self._publication(wanted, first, hints, still_right)
        return RootWrite(self._chunks, self._lanes, self._clock, publication, self.counters)

    def _leading(
        self, chain: Chain, count: int, look: Callable[[int], bool], deadline: Deadline, found: Found = _only_there
    ) -> int:
        """Looks at each of the first ``count`` chunks; returns how many leading ones are there.

        Native code looks for many at once, and ``found`` takes those that are there; ``look`` is for the others.
        """
        runs = self._chunks.runs
        run = runs.of(chain, 0, count)
        size = min(max(-(-count // self._lanes.width), LOOKED_MIN), LOOKED_MAX) if run is not None else 1
        missing = [count]

        def look_at(number: int) -> bool:
            start = number * size
            indexes = np.arange(start, min(start + size, count))
            if run is not None:
                there, mtimes_ns = runs.look(run, start, start + len(indexes))
                found(indexes[there], mtimes_ns)
                indexes = indexes[~there]
            for index in indexes.tolist():
                if not look(index):
                    missing.append(index)
                    return False
            return True

        self._lanes.each(-(-count // size), look_at, deadline)
        return min(missing)

    def _deadline(self, asked_s: float | None) -> Deadline:
        return Deadline(self._clock, self._limits.now.write_deadline_s if asked_s is None else asked_s)
