"""The tiers between a node's memory and the root, in order: where an image is fetched from.

Apart from memory, which every image passes through on its way, and from the root, which is read as without tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.namespace import NamespaceDigest
from kvstore.node.deadline import Deadline
from kvstore.node.timings import TierName
from kvstore.node.wanted import Wanted


class Tier(Protocol):
    """Somewhere that may have chunks and gives whole images (header and payload, as in the chunk file). Thread-safe."""

    @property
    def name(self) -> TierName:
        """What counters and reports call it."""
        ...

    def leading(self, wanted: Wanted, first: int) -> int:
        """How many consecutive chunks from index ``first`` on it has, or says it has.

        From what is known here at this moment: waits for nobody, does no I/O, may be wrong (rule R4).
        """
        ...

    def holders(self, wanted: Wanted, index: int) -> tuple[str, ...]:
        """Who of this tier has one chunk, or is said to have it, for people who ask where it lies; as ``leading``."""
        ...

    def fetch(
        self, wanted: Wanted, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """Fills ``images``, each of exactly the size of its chunk's file, with the chunks at ``indexes``.

        True for each that came whole; nothing of it is verified (rule I1). Never raises KVStoreError, and touches the
        memory no more after it returned.  Called on lanes: it may block until ``deadline``.
        """
        ...

    def damaged(self, wanted: Wanted, index: int) -> None:
        """What it gave for a chunk was not right: it does not give it again."""
        ...

    def drop_namespace(self, digest: NamespaceDigest) -> None:
        """Forgets all chunks of a namespace, as after ``clear``."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Gauges, named with the tier's name in front."""
        ...

    def close(self, timeout_s: float) -> None:
        """Ends its threads. Idempotent."""
        ...
