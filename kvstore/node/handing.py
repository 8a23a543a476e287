"""Chunks for clients that verify them: in memory, as open files, or as the bytes of whole files.

Separate from reading because only the header is verified here. The client finds a damaged section, and reads that chunk
again through the node, which sets it aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.buffers import Borrowed
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format.header import Damaged
from kvstore.keyset import KeySet
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.gc_state import GcState
from kvstore.node.holds import Hold, Holds
from kvstore.node.lanes import Deadline, DeadlinePassed, Lanes
from kvstore.node.memory_tier import Slots
from kvstore.node.reader import Reading, TieredReads
from kvstore.node.tier_stack import TierStack
from kvstore.root.posix import PosixReader


@dataclass(frozen=True, slots=True)
class Asked:
    """The wanted chunks or engine-hashed blocks, and the hold to read them under, if any."""

    wanted: KeySet
    hold: Hold | None = None
    memory_only: bool = False
    """The client is a peer: give only what memory has (rule P2)."""

    def allowed(self, holds: Holds, view: GcState, indexes: Sequence[int]) -> Sequence[int]:
        """Return the indexes that may be given: all under a hold or of a prompt, else those not condemned.

        Raises HoldBroken.
        """
        if self.hold is not None:
            holds.check(self.hold)
        elif not self.wanted.prefix_ordered:
            allowed = view.allowed([self.wanted.addresses[index] for index in indexes])
            if len(allowed) < len(indexes):
                return [indexes[at] for at in allowed]
        return indexes


class Handing:
    """Hands chunks and blocks over, by their indexes in a request. Thread-safe.

    Nobody verifies their sections here, and nobody notes their use: see ``TieredReads.used``.
    """

    def __init__(
        self,
        chunks: Chunks,
        lanes: Lanes,
        counters: Counters,
        reads: TieredReads,
        tiers: TierStack | None,
    ) -> None:
        self._chunks = chunks
        self._lanes = lanes
        self._counters = counters
        self._reads = reads
        self._tiers = tiers

    def in_memory(
        self, wanted: KeySet, indexes: Sequence[int], deadline: Deadline, *, brings: bool = True
    ) -> Slots | None:
        """Refer to those chunks that are in memory, one entry for each index. None if this node has no memory.

        With ``brings``, chunks that are worth it are brought to memory first.
        """
        if self._tiers is None:
            return None
        memory, reads = self._tiers.memory, self._reads
        part, first = wanted.run(indexes)
        slots = memory.refer(part, first, len(indexes))
        if not brings or None not in slots.entries:
            return slots
        slots.release()
        with suppress(KVStoreError):
            self._lanes.run(
                lambda: reads.bring(part, first, first + len(indexes), deadline, even_once=False, even_root=True),
                deadline,
            )
        return memory.refer(part, first, len(indexes))

    def open_files(self, wanted: KeySet, indexes: Sequence[int], deadline: Deadline) -> dict[int, PosixReader]:
        """Open the files of chunks, and verify their headers. The caller closes them.

        Chunks that the root does not have, or has encoded, are left out. A prompt ends at the first of them.
        """
        stop_at_miss = wanted.prefix_ordered
        opened = self._opened(wanted, indexes, deadline, stop_at_miss=stop_at_miss)
        places = range(len(indexes))
        if stop_at_miss:
            end = next((at for at in places if at not in opened), len(indexes))
            for at in places[end:]:
                if at in opened:
                    opened.pop(at).close()
        return {indexes[at]: opened[at] for at in sorted(opened)}

    def begin_copy(self, wanted: KeySet, indexes: Sequence[int], into: Callable[[int], memoryview]) -> Reading:
        """Begin to read whole files into ``into(index)``, which has the size of the file.

        A prompt ends at its first miss.
        """

        def read(at: int, borrowed: Borrowed) -> bool:
            expected = wanted.expected(indexes[at])
            opened = self._chunks.open(expected)
            if opened is None:
                return False
            reader, _ = opened
            with self._chunks.noted(expected), reader, self._counters.timed("root", "read") as timed:
                memory = into(indexes[at])
                timed.size_bytes = len(memory)
                try:
                    if reader.read([memory], 0, borrowed) != len(memory):
                        self._counters.add(NodeCount.MISS_UNREADABLE)
                        return False
                except Damaged as damaged:  # of an encoded file, which is verified as it is decoded
                    borrowed.check()
                    self._chunks.set_aside(expected, damaged.damage)
                    return False
            self._counters.add_read(expected.payload_bytes)
            return True

        return Reading(self._lanes, self._counters, len(indexes), read, wanted.prefix_ordered)

    def _opened(
        self, wanted: KeySet, indexes: Sequence[int], deadline: Deadline, *, stop_at_miss: bool
    ) -> dict[int, PosixReader]:
        """Open files by their place among ``indexes``."""
        lock = threading.Lock()
        opened: dict[int, PosixReader] = {}
        given_up = False

        def work(at: int) -> bool:
            try:
                found = self._chunks.open_file(wanted.expected(indexes[at]))
            except KVStoreError:
                self._counters.add(NodeCount.MISS_UNREADABLE)
                return not stop_at_miss
            if found is None:
                return not stop_at_miss
            with lock:
                # Opened after the caller gave up: nobody else would close it.
                keep = not given_up
                if keep:
                    opened[at] = found
            if not keep:
                found.close()
            return keep

        try:
            self._lanes.each(len(indexes), work, deadline)
        except DeadlinePassed:
            self._counters.add(NodeCount.MISS_DEADLINE)
        except KVStoreError:
            self._counters.add(NodeCount.MISS_SHED)
        finally:
            with lock:
                given_up = True
        return opened
