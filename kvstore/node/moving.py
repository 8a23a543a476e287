"""Does prefetches, moves and releases of the chunks of one prompt, step by step, so that each can end soon.

Separate from their tickets and threads, which know nothing of tiers.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

from kvstore.address import Chain
from kvstore.errors import InvalidRequest
from kvstore.format.header import expected_chunk
from kvstore.node.chunks import Chunks
from kvstore.node.disk_tier import DiskTier
from kvstore.node.gc_state import GcState
from kvstore.node.lanes import Deadline, Lanes
from kvstore.node.limits import CurrentLimits
from kvstore.node.moves import Act, Level, Move
from kvstore.node.reader import TieredReads
from kvstore.node.tier_stack import TierStack
from kvstore.node.wanted import image_bytes, place_at
from kvstore.node.write_behind import Job, Publish
from kvstore.sources import Clock

STEP_BYTES = 64 << 20
"""Bytes moved, about, before checking whether to go on."""
PAUSE_S = 0.02
"""Pause between two looks at a chunk that somebody else is bringing."""
LEAD_S = 0.005
"""A prefetch begins so late, because who asks for one often reads something else at the same moment."""
GIVE_WAY_MAX = 20
"""Somebody waits for a read, and nobody for a prefetch: before each step it lets reads go first for so many times
LEAD_S."""
SETTLE_S = 0.5
"""Time between two checks whether to go on, while chunks wait to be written to the root."""


class Moving:
    """Does tickets, each in the calling thread, which nobody waits for. Thread-safe."""

    def __init__(
        self,
        tiers: TierStack,
        reads: TieredReads,
        chunks: Chunks,
        lanes: Lanes,
        view: GcState,
        publish: Publish,
        limits: CurrentLimits,
        clock: Clock,
    ) -> None:
        self._tiers = tiers
        self._reads = reads
        self._chunks = chunks
        self._lanes = lanes
        self._view = view
        self._publish = publish
        self._limits = limits
        self._clock = clock
        self._writing = threading.Lock()

    def check(self, level: Level) -> None:
        """Raises InvalidRequest if this node has no such tier."""
        if level is Level.DISK and self._tiers.disk is None:
            raise InvalidRequest(
                "tier='disk': this node has no local disk; start it with --disk FOLDER:SIZE (disk= of kvstore.open)"
            )

    def do(self, move: Move) -> None:
        """Does a whole ticket, unless it is cancelled. Raises the root's errors, or Unavailable past its deadline."""
        if move.act is Act.RELEASE:
            self._release(move)
            return
        chain = move.chain.leading(self._view.leading(move.chain))
        chain = chain.leading(self._reads.matched_count(chain, self._deadline(move, self._limits.now.read_deadline_s)))
        if move.level is Level.MEMORY:
            self._to_memory(move, chain)
        elif move.level is Level.DISK:
            self._to_disk(move, chain)
        else:
            self._to_root(move, chain)

    def _release(self, move: Move) -> None:
        memory, disk, count = self._tiers.memory, self._tiers.disk, 0
        memory.retire(move.chain, len(move.chain))
        if disk is not None:
            disk.retire(move.chain, len(move.chain))
        while found := memory.leading(move.chain, count) or (disk.leading(move.chain, count) if disk else 0):
            count += found
        move.advance(count)

    def _to_memory(self, move: Move, chain: Chain) -> None:
        memory, at = self._tiers.memory, 0
        move.pause(LEAD_S)
        while at < len(chain) and move.goes_on():
            self._give_way(move)
            stop = min(len(chain), at + _step(chain))
            found = self._bring(chain, at, stop, self._lanes.width, move)
            if found < stop - at:
                # If room is scarce, later chunks may have taken it: try once more, one after the other.
                found += self._bring(chain, at + found, stop, 1, move)
            if not found and memory.is_coming(chain, at):
                move.pause(PAUSE_S)
            elif not found:
                break  # there is no room for more, or the root lost it
            at += found
            move.advance(at)
        # Count a use: a prefetched chunk must not go before its request, as a released chunk would.
        memory.used(chain, at)

    def _to_disk(self, move: Move, chain: Chain) -> None:
        disk, at = self._tiers.disk, 0
        assert disk is not None
        while at < len(chain) and move.goes_on():
            stop = min(len(chain), at + _step(chain))
            self._copy(chain, at, stop, disk, move)
            found = min(disk.leading(chain, at), stop - at)
            if not found:
                break
            at += found
            move.advance(at)
        if move.act is Act.MOVE and self._settle(move, chain, 0, at):
            self._evict(chain, at)

    def _to_root(self, move: Move, chain: Chain) -> None:
        at = 0
        while at < len(chain) and move.goes_on():
            stop = min(len(chain), at + _step(chain))
            if not self._settle(move, chain, at, stop - at):
                break
            found = self._on_root(chain, at, stop, self._deadline(move, self._limits.now.match_deadline_s))
            if at + found < stop:
                written = self._write(move, chain, at + found, stop)
                if not found + written:
                    break
                found += written
            at += found
            move.advance(at)
        if move.goes_on():
            self._evict(chain, at)
            disk = self._tiers.disk
            for address in reversed(chain.addresses[:at] if disk is not None else ()):
                assert disk is not None
                disk.drop(address, only_leaf=True)

    def _give_way(self, move: Move) -> None:
        for _ in range(GIVE_WAY_MAX):
            if not self._reads.is_busy or not move.goes_on():
                break
            move.pause(LEAD_S)

    def _bring(self, chain: Chain, first: int, stop: int, width: int, move: Move) -> int:
        """Brings chunks into memory, on several lanes at once; returns how many leading ones are there then."""
        deadline = self._deadline(move, self._limits.now.read_deadline_s)
        size = -(-(stop - first) // width)

        def bring(number: int) -> bool:
            start = first + number * size
            end = min(start + size, stop)
            self._reads.bring(chain, start, end, deadline, even_once=True, even_root=True)
            return True

        # A reference to the chunk before the first keeps all its ancestors: else a chunk that finds no room would take
        # the room of its own parents.
        with self._tiers.memory.refer(chain, first - 1, 1) if first else nullcontext():
            self._lanes.each(-(-(stop - first) // size), bring, deadline)
            return min(self._tiers.memory.leading(chain, first), stop - first)

    def _copy(self, chain: Chain, first: int, stop: int, disk: DiskTier, move: Move) -> None:
        """Copies chunks to the local disk, up to the first that is nowhere, or that finds no room there."""
        self._tiers.encodings.learn(chain.namespace)  # these chunks do not pass through memory, which would learn it
        for start in range(first, stop, self._lanes.width):
            end = min(stop, start + self._lanes.width)
            images = self._read(chain, start, end, disk, self._deadline(move, self._limits.now.read_deadline_s))
            for index, image in images.items():
                # One after the other, and in this thread: no other ticket takes the room that one makes, and no lane
                # waits.
                with self._writing:
                    place = place_at(chain, index)
                    # Try twice: chunks that memory drops at this moment also go to the disk, and may take the room.
                    if not (disk.add(place, image) or disk.add(place, image) or disk.leading(chain, index)):
                        return
            if disk.leading(chain, start) < end - start:
                return

    def _read(self, chain: Chain, first: int, stop: int, disk: DiskTier, deadline: Deadline) -> dict[int, memoryview]:
        """Returns the images of chunks that the disk lacks, by their index, up to the first that is nowhere."""
        images: dict[int, memoryview] = {}

        def read(number: int) -> bool:
            index = first + number
            if disk.leading(chain, index):
                return True
            # Each image has memory of its own: if the root hangs, its lane still writes there when nobody waits any
            # more.
            image = memoryview(bytearray(image_bytes(chain, index)))
            is_right = self._reads.read_image(chain, index, image, deadline)
            if is_right:
                images[index] = image
            return is_right

        self._lanes.each(stop - first, read, deadline)
        return dict(sorted(images.items()))

    def _settle(self, move: Move, chain: Chain, first: int, count: int) -> bool:
        """Waits until the dirty ones of these chunks are written; False if the ticket was cancelled."""
        while move.goes_on():
            if self._tiers.behind.settle(chain, first, count, min(SETTLE_S, move.deadline.left_s())):
                return True
        return False

    def _on_root(self, chain: Chain, first: int, stop: int, deadline: Deadline) -> int:
        """Looks at each chunk on the root; returns how many leading ones from ``first`` on are there."""
        missing = [stop]

        def look(number: int) -> bool:
            is_there = self._chunks.is_present(expected_chunk(chain, first + number))
            if not is_there:
                missing.append(first + number)
            return is_there

        self._lanes.each(stop - first, look, deadline)
        return min(missing) - first

    def _write(self, move: Move, chain: Chain, first: int, stop: int) -> int:
        """Writes chunks that the root lacks, from memory or a tier above the root; returns how many leading ones are
        there.

        The root lacks chunks that could not be written in time, and those that it lost.
        """
        memory, deadline = self._tiers.memory, self._deadline(move, self._limits.now.read_deadline_s)
        self._lanes.run(
            lambda: self._reads.bring(chain, first, stop, deadline, even_once=True, even_root=False), deadline
        )
        with memory.refer(chain, first, stop - first) as slots:
            if slots.entries[0] is None:
                return 0
            job = Job(chain, first, slots.leading_count, slots.entries[0].hints, 0, 0.0)
            written = max(0, self._publish(job, slots) - first)
            memory.clean(slots.referred[:written])
        return written

    def _evict(self, chain: Chain, count: int) -> None:
        """Takes the first ``count`` chunks out of memory, children before parents, except those that others need."""
        with self._tiers.memory.refer(chain, 0, count) as slots:
            self._tiers.memory.evict([*reversed(slots.referred)])

    def _deadline(self, move: Move, step_s: float) -> Deadline:
        return Deadline(self._clock, min(step_s, move.deadline.left_s()))


def _step(chain: Chain) -> int:
    return max(1, STEP_BYTES // image_bytes(chain, 0))
