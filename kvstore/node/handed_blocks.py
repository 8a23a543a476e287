"""Engine-hashed blocks for whoever verifies them at the other end: as open files, or as whole images.

Apart from ``blocks.py``, which reads them into the caller's memory and verifies them there.  Each is looked at when it
is handed over: without a hold, what a sweep has condemned counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.address import block_addresses
from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.handing import copying, open_each
from kvstore.node.lanes import Lanes
from kvstore.node.reading import Reading
from kvstore.node.refresh import Refresher
from kvstore.node.slots import Slots
from kvstore.node.stack import TierStack
from kvstore.node.tiered import TieredReads
from kvstore.node.view import View
from kvstore.node.wanted import Keyed
from kvstore.root.posix_reader import PosixReader


def keyed(namespace: Namespace, keys: Sequence[bytes], sizes_bytes: Sequence[int]) -> Keyed:
    """The blocks of a request, with their addresses."""
    return Keyed(namespace, keys, block_addresses(namespace, keys), sizes_bytes)


class HandedBlocks:
    """Blocks of all namespaces, for clients. Indexes are those of the request."""

    def __init__(
        self,
        chunks: Chunks,
        view: View,
        lanes: Lanes,
        refresher: Refresher,
        counters: Counters,
        reads: TieredReads,
        tiers: TierStack | None,
    ) -> None:
        self._chunks = chunks
        self._view = view
        self._lanes = lanes
        self._refresher = refresher
        self._counters = counters
        self._reads = reads
        self._tiers = tiers

    def allowed(self, wanted: Keyed, indexes: Sequence[int]) -> list[int]:
        """Those that no sweep has condemned."""
        if self._view.leading([wanted.addresses[index] for index in indexes]) == len(indexes):
            return list(indexes)
        return [index for index in indexes if not self._view.condemns(wanted.addresses[index])]

    def in_memory(self, wanted: Keyed, indexes: Sequence[int], deadline: Deadline) -> Slots | None:
        """What of them is in memory, after what is worth it was brought there; ``entries`` go by the place among
        ``indexes``, and are referred to until it is released. None where this node has no memory.
        """
        if self._tiers is None:
            return None
        memory, reads, picked = self._tiers.memory, self._reads, wanted.picked(indexes)
        slots = memory.refer(picked, 0, len(picked))
        if None not in slots.entries:
            return slots
        slots.release()
        with suppress(KVStoreError):
            self._lanes.run(
                lambda: reads.bring(picked, 0, len(picked), deadline, even_once=False, even_root=True), deadline
            )
        return memory.refer(picked, 0, len(picked))

    def open_files(self, wanted: Keyed, indexes: Sequence[int], deadline: Deadline) -> list[PosixReader | None]:
        """The open files of blocks, the caller's to close; None for those that the root does not have."""
        return open_each(self._chunks, self._lanes, self._counters, wanted, indexes, deadline)

    def is_elsewhere(self, wanted: Keyed, index: int) -> bool:
        """Whether the root has, or may have, a block that ``open_files`` did not give because it is encoded."""
        if self._chunks.is_private(wanted.namespace):
            return True
        return self._chunks.known.is_present(wanted.addresses[index], self._chunks.quantum())

    def begin_copy(self, wanted: Keyed, indexes: Sequence[int], into: Callable[[int], memoryview]) -> Reading:
        """Begins to read whole files from the root into ``into(index)``; goes on after a miss."""
        return copying(self._chunks, self._lanes, self._counters, wanted, indexes, into, stop_at_miss=False)

    def used(self, wanted: Keyed, indexes: Sequence[int]) -> None:
        """Notes that these were handed over, whose recency is renewed."""
        if indexes:
            picked = wanted.picked(indexes)
            self._reads.used(picked, len(picked))
            self._refresher.used(wanted.namespace.id, tuple(picked.addresses), chained=False)
