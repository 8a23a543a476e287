"""Metadata in memory in which a test acts between two calls of somebody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import Compare, Delete, Put, Snapshot, TxnResult


class ActingMeta(MemoryMetadata):
    """Calls ``listed`` with each prefix after it was read, and ``writing`` before each transaction."""

    listed: Callable[[str], object] = staticmethod(lambda prefix: None)
    writing: Callable[[Sequence[Put | Delete]], object] = staticmethod(lambda operations: None)

    def once_before_a_sweep_changes(self, act: Callable[[], object]) -> None:
        """Calls ``act`` before the next transaction that begins or ends a sweep."""

        def writing(operations: Sequence[Put | Delete]) -> None:
            if any("/gc/condemned/" in one.key for one in operations):
                self.writing = lambda operations: None
                act()

        self.writing = writing

    def list(self, prefix: str, timeout_s: float | None = None) -> Snapshot:
        found = super().list(prefix, timeout_s)
        self.listed(prefix)
        return found

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        self.writing(operations)
        return super().txn(compares, operations, timeout_s)
