"""Results of calls: plain values shared by node, worker and client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PutResult:
    """The outcome of a put. ``tokens_present`` counts leading tokens now in the store, written now or found."""

    tokens_present: int
    chunks_written: int
    chunks_found: int
    bytes_written: int
    reason: str = ""
    """Why the store refused chunks; empty if it refused none.

    "full": all of it is held or pinned, the disk is full, or the put is larger than the store. "overload": a queue,
    memory, or a tenant's quota has no room, or eviction has not caught up.
    """


class StoredBlocks(list[bool]):
    """The outcome of a put of blocks: for each block, True if it is in the store now."""

    def __init__(self, stored: Iterable[bool], reason: str = "") -> None:
        super().__init__(stored)
        self.reason = reason
        """As ``PutResult.reason``."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """The chunks and bytes that a clear deleted, or would delete. Pinned chunks stay unless asked for."""

    chunks: int
    """Chunks on the root: those put behind a moment ago, which only memory has, go too, and are not counted."""
    bytes: int
    pinned: int = 0
    """Chunks that stayed because they are pinned."""
    failed: int = 0
    """Chunks that stayed in use, and chunks or whole shards that the root refused to delete or list: clear again."""
    unconfirmed: tuple[str, ...] = ()
    """Live sessions that did not confirm in time that their memory has dropped the chunks."""


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A live pin: its owner, the leading tokens it protects, and its end (seconds since the epoch)."""

    id: str
    owner: str
    namespace: str
    tokens: int
    expires_s: float
    tenant: str = "*"
    """The namespace's tenant; ``*`` if it is no longer known. Not sent to clients."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory for one layer: K and V of all tokens read, each contiguous bytes."""

    k: memoryview
    v: memoryview
