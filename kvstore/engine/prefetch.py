"""Prefetch: brings the chunks of one prompt into memory or onto the local disk, in steps, so that it can end soon."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

from kvstore.core.executor import Deadline
from kvstore.core.operations import OperationRun
from kvstore.core.validate import TierName
from kvstore.format.keyset import ChunkKeys
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.stack import TierStack

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

STEP_BYTES = 64 << 20
"""Bytes brought, about, before checking whether to go on."""
PAUSE_S = 0.02
"""Pause while another thread is bringing the next chunk."""
LEAD_S = 0.005
"""Delay before the first step, because callers often read something else at the same moment."""
GIVE_WAY_MAX = 20
"""A caller waits for a read, and none for a prefetch: before each step reads go first for so many times LEAD_S."""


class Prefetcher:
    """Does prefetches, each in the calling thread. Thread-safe."""

    def __init__(self, node: Engine, tiers: TierStack) -> None:
        self._node = node
        self._tiers = tiers
        self._reads = node.reader
        self._executor = node.executor
        self._writing = threading.Lock()

    def run(self, chain: ChunkKeys, tier: TierName, operation: OperationRun) -> str:
        """Does a whole prefetch; the work of an operation. Raises the root's errors, and what its steps raise."""
        chain = chain.leading(self._node.gc_view.leading(chain))
        chain = chain.leading(self._reads.matched_count(chain, self._deadline(operation)))
        steps = _Steps(operation, chain)
        disk = self._tiers.disk
        if tier == "memory":
            self._to_memory(steps, chain)
        elif disk is not None:
            self._to_disk(steps, chain, disk)
        left = len(chain) - steps.at
        return f"{left} of {len(chain)} stored chunks found no space, or were lost" if left else ""

    def _to_memory(self, steps: _Steps, chain: ChunkKeys) -> None:
        memory, operation = self._tiers.memory, steps.operation
        operation.pause(LEAD_S)
        try:
            while steps.at < len(chain):
                self._give_way(operation)
                at, stop = steps.at, steps.stop
                found = self._bring(chain, at, stop, self._executor.width, operation)
                if found < stop - at:
                    # If room is scarce, later chunks may have taken it: try once more, one after the other.
                    found += self._bring(chain, at + found, stop, 1, operation)
                if not found and memory.is_taken(chain, at):
                    operation.pause(PAUSE_S)
                elif not found:
                    break  # there is no room for more, or the root lost it
                steps.advance(found)
        finally:
            # Count a use: a prefetched chunk must not go before its request, as one to be evicted first would.
            memory.used(chain, steps.at)

    def _to_disk(self, steps: _Steps, chain: ChunkKeys, disk: DiskTier) -> None:
        while steps.at < len(chain):
            self._copy(chain, steps.at, steps.stop, disk, steps.operation)
            found = min(disk.leading(chain, steps.at), steps.stop - steps.at)
            if not found:
                break
            steps.advance(found)

    def _give_way(self, operation: OperationRun) -> None:
        for _ in range(GIVE_WAY_MAX):
            if not self._reads.is_busy:
                break
            operation.pause(LEAD_S)

    def _bring(self, chain: ChunkKeys, first: int, stop: int, width: int, operation: OperationRun) -> int:
        """Brings chunks into memory, on several threads; returns how many leading ones are there then."""
        deadline = self._deadline(operation)
        size = -(-(stop - first) // width)

        def bring(number: int) -> bool:
            start = first + number * size
            end = min(start + size, stop)
            self._reads.bring(chain, start, end, deadline, even_once=True, even_root=True)
            return True

        # A reference to the chunk before the first keeps all its ancestors: else a chunk that finds no room would take
        # the room of its own parents.
        with self._tiers.memory.refer(chain, first - 1, 1) if first else nullcontext():
            self._executor.each(-(-(stop - first) // size), bring, deadline)
            return min(self._tiers.memory.leading(chain, first), stop - first)

    def _copy(self, chain: ChunkKeys, first: int, stop: int, disk: DiskTier, operation: OperationRun) -> None:
        """Copies chunks to the local disk, up to the first that is nowhere, or that finds no room there."""
        self._tiers.encodings.learn(chain.namespace)  # these chunks do not pass through memory, which would learn it
        for start in range(first, stop, self._executor.width):
            end = min(stop, start + self._executor.width)
            orders_count = self._tiers.orders_count
            images = self._read(chain, start, end, disk, self._deadline(operation))
            for index, image in images.items():
                # One after the other, in this thread: no other prefetch takes the room that one makes, and none waits.
                with self._writing:
                    place = chain.place(index)
                    # Try twice: chunks that memory drops at this moment also go to the disk, and may take the room.
                    for _ in range(2):
                        if self._tiers.orders_count != orders_count:
                            return  # it may have been cleared since it was read
                        if disk.add(place, image) or disk.leading(chain, index):
                            break
                    else:
                        return
            if disk.leading(chain, start) < end - start:
                return

    def _read(
        self, chain: ChunkKeys, first: int, stop: int, disk: DiskTier, deadline: Deadline
    ) -> dict[int, memoryview]:
        """Returns the images of chunks that the disk lacks, by their index, up to the first that is nowhere."""
        images: dict[int, memoryview] = {}

        def read(number: int) -> bool:
            index = first + number
            if disk.leading(chain, index):
                return True
            # Each image has memory of its own: a thread of a root that hangs may still write there after the deadline.
            image = memoryview(bytearray(chain.image_bytes(index)))
            is_right = self._reads.read_image(chain, index, image, deadline)
            if is_right:
                images[index] = image
            return is_right

        self._executor.each(stop - first, read, deadline)
        return dict(sorted(images.items()))

    def _deadline(self, operation: OperationRun) -> Deadline:
        return Deadline(self._node.clock, min(self._node.limits.read_deadline_s, operation.left_s))


class _Steps:
    """The progress of one prefetch along its chain."""

    def __init__(self, operation: OperationRun, chain: ChunkKeys) -> None:
        self.operation = operation
        self.at = 0
        """Leading chunks that are done."""
        self._chain = chain
        self.advance(0)

    @property
    def stop(self) -> int:
        return min(len(self._chain), self.at + max(1, STEP_BYTES // self._chain.image_bytes(0)))

    def advance(self, chunks: int) -> None:
        """Counts chunks as done. Raises what ``OperationRun.check`` raises."""
        self.at += chunks
        size = self._chain.namespace.layout.chunk_tokens
        self.operation.progress(self.at * size, len(self._chain) * size)
