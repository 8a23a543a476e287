"""The tiers between a node's memory and the root, in order: the sources of images.

Separate from memory, which every image passes through, and from the root, which is read as on a node without tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.namespace import NamespaceDigest
from kvstore.node.counters import TierName
from kvstore.node.lanes import Deadline
from kvstore.node.wanted import Wanted


class Tier(Protocol):
    """A place that may have chunks and gives whole images (header and payload, as in the chunk file). Thread-safe."""

    @property
    def name(self) -> TierName:
        """Its name in counters and reports."""
        ...

    def leading(self, wanted: Wanted, first: int) -> int:
        """Returns how many consecutive chunks from index ``first`` on it has, or says it has.

        Answers from what is known here at this moment: waits for nobody, does no I/O, may be wrong (rule R4).
        """
        ...

    def holders(self, wanted: Wanted, index: int) -> tuple[str, ...]:
        """Returns who in this tier has one chunk, or is said to have it, for reports; answers as ``leading`` does."""
        ...

    def fetch(
        self, wanted: Wanted, indexes: Sequence[int], images: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """Fills ``images``, each of exactly the size of its chunk's file, with the chunks at ``indexes``.

        True for each that came whole; verifies nothing (rule I1). Never raises KVStoreError, and does not touch the
        memory after it returned. Called on lanes: it may block until ``deadline``.
        """
        ...

    def damaged(self, wanted: Wanted, index: int) -> None:
        """Notes that a chunk it gave was not right: it does not give it again."""
        ...

    def drop_namespace(self, digest: NamespaceDigest) -> None:
        """Forgets all chunks of a namespace, as after ``clear``."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Returns its gauges, whose names begin with the tier's name."""
        ...

    def close(self, timeout_s: float) -> None:
        """Ends its threads. Idempotent."""
        ...
