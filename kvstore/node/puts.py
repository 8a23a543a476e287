"""Puts of a node: on the root, in memory and written behind, or both, as the mode of each says.

Apart from the node, because this is all there is between a caller's bytes and the places they go to; the rules are W1
to W5 of kvstore/memory/MEMORY.md and those of gc/PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format.header import expected_chunk
from kvstore.hints import DEFAULT, Hints
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import DeadlinePassed, Lanes
from kvstore.node.limits import Limits
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.publish import Publication, StillRight, always
from kvstore.node.putting import Putting
from kvstore.node.refresh import Refresher
from kvstore.node.runs import Run
from kvstore.node.slots import Slots
from kvstore.node.stack import TierStack
from kvstore.node.tiered import TieredReads
from kvstore.node.view import View
from kvstore.node.wanted import Keyed
from kvstore.node.write_behind import Job
from kvstore.results import PutResult
from kvstore.sections import Sections
from kvstore.sources import Clock
from kvstore.writes import WriteMode

LOOKED_MIN, LOOKED_MAX = 16, 512
"""Chunks that native code looks for in one call. Each may wait for a server, and a lane that is in one call for
``stall_s`` is taken for one that hangs."""

PublishBlocks = Callable[[Keyed, Slots, Hints, Deadline, bool], int]
Found = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], None]
"""Hears the indexes and mtimes of chunks that are there."""


def _only_there(indexes: npt.NDArray[np.int64], mtimes_ns: npt.NDArray[np.int64]) -> None:
    """Nothing but whether they are there is asked."""


class Puts:
    """The puts of one node. Thread-safe."""

    def __init__(
        self,
        chunks: Chunks,
        lanes: Lanes,
        view: View,
        refresher: Refresher,
        reads: TieredReads,
        tiers: TierStack | None,
        publish_blocks: PublishBlocks,
        counters: Counters,
        limits: Limits,
        clock: Clock,
        *,
        durable: bool,
    ) -> None:
        self._chunks = chunks
        self._lanes = lanes
        self.view = view
        self._refresher = refresher
        self._reads = reads
        self._tiers = tiers
        self._memory = tiers.memory if tiers is not None else None
        self._publish_blocks = publish_blocks
        self.counters = counters
        self.limits = limits
        """Its deadlines may change at any time: those of puts under way stay."""
        self.clock = clock
        self.durable = durable

    def put(
        self,
        chain: Chain,
        first: int,
        source: Sections,
        deadline_s: float | None,
        hints: Hints,
        write: WriteMode | None,
    ) -> PutResult:
        """See ``Node.put``."""
        deadline = self._deadline(deadline_s)
        tiers = self._tiers
        mode = self.mode(write, hints)
        if tiers is not None and mode is WriteMode.BEHIND:
            return self._put_behind(tiers, chain, first, source, deadline, hints)
        result = self._put_on_root(chain, first, source, deadline, hints)
        if tiers is not None and mode is WriteMode.THROUGH:
            count = result.tokens_present // chain.namespace.layout.chunk_tokens - first
            if count > 0:
                tiers.keep(chain, first, count, source, hints, deadline)
        return result

    def _put_on_root(self, chain: Chain, first: int, source: Sections, deadline: Deadline, hints: Hints) -> PutResult:
        putting = self.begin(chain, first, deadline.left_s(), hints)
        try:
            if not putting.refused:
                putting.store_all(source, deadline)
        except DeadlinePassed:
            putting.abandon(wait_s=0.0)
            raise
        except BaseException:
            putting.abandon()
            raise
        return putting.finish(deadline.left_s())

    def _put_behind(
        self, tiers: TierStack, chain: Chain, first: int, source: Sections, deadline: Deadline, hints: Hints
    ) -> PutResult:
        """Into memory, from where it is written later; what is there already is only used."""
        self.counters.add(NodeCount.REQUESTS_PUT)
        self.view.check_room()
        chain = chain.leading(self.view.leading(chain.addresses))
        size = chain.namespace.layout.chunk_tokens
        # A root that does not answer must not take the time for copying: what only it may have counts as absent then.
        look = Deadline(self.clock, min(deadline.left_s(), self.limits.match_deadline_s))
        there = self._reads.matched_count(chain, look)
        if there < min(first, len(chain)):
            return PutResult(there * size, 0, 0, 0)
        start = max(there, min(first, len(chain)))
        kept = tiers.absorb(chain, start, len(chain) - start, source, hints, deadline)
        stop = start + kept.count
        # A sweep may have cut the prompt before its first chunk: a counter never falls.
        found = max(0, stop - first - kept.written)
        self.counters.add(NodeCount.CHUNKS_FOUND, found)
        self.found(chain, start, hints)
        done = PutResult(stop * size, kept.written, found, kept.written * chain.namespace.layout.chunk_bytes)
        if stop < len(chain) and tiers.memory.is_taken(chain, stop) and tiers.reaches_root(hints):
            # Not for want of room: another put of the same prompt is bringing it. So what is behind it is not shed.
            with suppress(KVStoreError):  # as much as memory took is put, whatever the root does
                rest = self._put_on_root(chain, stop, source, deadline, hints)
                done = PutResult(
                    max(done.tokens_present, rest.tokens_present),
                    done.chunks_written + rest.chunks_written,
                    done.chunks_found + rest.chunks_found,
                    done.bytes_written + rest.bytes_written,
                )
        return done

    def found(self, chain: Chain, count: int, hints: Hints) -> None:
        """Notes that a put behind found the first ``count`` chunks there: a use of them, which raises their hints.

        Not of those that are new: a put alone does not make a chunk worth a place on the disk.
        """
        lacking = frozenset(range(count)) if hints != DEFAULT else frozenset[int]()
        self._refresher.used(chain.namespace.id, chain.addresses[:count], chained=True, hints=hints, lacking=lacking)
        if self._memory is not None:
            self._memory.used(chain, count, hints if hints != DEFAULT else None)

    def absorb(self, chain: Chain, first: int, count: int, source: Sections, hints: Hints = DEFAULT) -> int:
        """Copies ``count`` chunks into memory, to be written to the root later, if this node does so; returns how many
        leading ones of them it took. Their parents must be there. The others are the caller's to put.
        """
        tiers = self._tiers
        if tiers is None or tiers.mode(WriteMode.BEHIND, hints) is not WriteMode.BEHIND:
            return 0
        deadline = self._deadline(None)
        return tiers.absorb(chain, first, count, source, hints, deadline).count

    def keep(self, chain: Chain, first: int, count: int, source: Sections, hints: Hints = DEFAULT) -> None:
        """Copies chunks that the root has, or is about to have, into memory as well, as far as there is room."""
        count = min(first + count, self.view.leading(chain.addresses)) - first
        if self._tiers is not None and count > 0:
            deadline = self._deadline(None)
            self._tiers.keep(chain, first, count, source, hints, deadline)

    def mode(self, asked: WriteMode | None, hints: Hints = DEFAULT) -> WriteMode:
        """How a put is acknowledged here."""
        return self._tiers.mode(asked, hints) if self._tiers is not None else WriteMode.AROUND

    def begin(
        self,
        chain: Chain,
        first: int,
        deadline_s: float | None = None,
        hints: Hints = DEFAULT,
        still_right: StillRight = always,
    ) -> Putting:
        """A put whose chunks arrive one by one, as over a network. End it with ``finish`` or ``abandon``."""
        self.counters.add(NodeCount.REQUESTS_PUT)
        self.view.check_room()
        deadline = self._deadline(deadline_s)
        # What a sweep is taking cannot be put again before it has ended: the rest of the prompt waits for that.
        chain = chain.leading(self.view.leading(chain.addresses))
        publication = Publication(self._chunks, self._refresher, chain, first, self.durable, hints, still_right)
        present = self._leading(chain, min(first, len(chain)), publication.look, deadline, publication.found)
        if present < first and self._memory is not None and self._memory.leading(chain, present) >= first - present:
            putting = self._begin_put_with_parents(self._memory, chain, first, present, hints, deadline, still_right)
            if putting is not None:
                return putting
        return Putting(self, chain, first, present, publication, self._lanes)

    def _begin_put_with_parents(
        self,
        memory: MemoryTier,
        chain: Chain,
        first: int,
        present: int,
        hints: Hints,
        deadline: Deadline,
        still_right: StillRight,
    ) -> Putting | None:
        """A put that begins with chunks which the root lost and memory has (rule W5); None where one is wrong."""
        slots = memory.refer(chain, present, first - present)
        try:
            count = memory.verified(slots)
            if count < first - present:
                slots.release()
                return None

            def all_right(index: int) -> bool:
                return memory.still_right(slots, index) if index < first else still_right(index)

            publication = Publication(self._chunks, self._refresher, chain, present, self.durable, hints, all_right)
            putting = Putting(self, chain, first, first, publication, self._lanes, ended=slots.release)
            putting.add_run(slots.sections(present, present + count), present, count, deadline.left_s())
        except BaseException:
            slots.release()
            raise
        return putting

    def publish(self, job: Job, slots: Slots) -> int:
        """Writes chunks from memory to the root; returns up to which index they are there then."""
        memory = self._memory
        assert memory is not None
        wanted, wait_s = job.wanted, self.limits.write_deadline_s
        if isinstance(wanted, Keyed):
            return self._publish_blocks(wanted, slots, job.hints, Deadline(self.clock, wait_s), self.durable)
        count = memory.verified(slots)
        putting = self.begin(wanted, job.first, wait_s, job.hints, lambda index: memory.still_right(slots, index))
        try:
            if not putting.refused:
                putting.add_run(slots.sections(job.first, job.first + count), job.first, count, wait_s)
        except BaseException:
            putting.abandon()
            raise
        return putting.finish(wait_s).tokens_present // wanted.namespace.layout.chunk_tokens

    def write_out(self, chain: Chain, timeout_s: float) -> None:
        """Returns when what was put behind of this prompt is on the root or lost, or not in time."""
        if self._tiers is not None:
            self._tiers.behind.settle(chain, 0, len(chain), timeout_s)

    def present_leading(self, chain: Chain, count: int) -> int:
        """How many of the first ``count`` chunks are there, each looked at: a put or pin must not build on a hole."""
        deadline = Deadline(self.clock, self.limits.match_deadline_s)
        return self._leading(
            chain, count, lambda index: self._chunks.is_present(expected_chunk(chain, index)), deadline
        )

    def run_of(self, chain: Chain, first: int, count: int, source: Sections) -> Run | None:
        """The chunks of a put as a run; None where they are stored one by one."""
        return self._chunks.runs.of(chain, first, count, source) if self._chunks.runs.stages else None

    def _leading(
        self, chain: Chain, count: int, look: Callable[[int], bool], deadline: Deadline, found: Found = _only_there
    ) -> int:
        """How many of the first ``count`` chunks are there, each looked at.

        Native code looks for many at once, and ``found`` hears of those that are there; ``look`` is for the others.
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
        return Deadline(self.clock, self.limits.write_deadline_s if asked_s is None else asked_s)
