"""Results of calls: plain values shared by node, worker and client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.core.address import Address
from kvstore.core.recency import Hints

if TYPE_CHECKING:
    from kvstore.format.header import Encoding


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

    def __init__(self, stored: Iterable[bool], fresh: Iterable[bool], reason: str = "") -> None:
        super().__init__(stored)
        self.fresh = list(fresh)
        """For each block, True if this put wrote it. Through a worker, True for all that are in the store."""
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
    """Chunks, or whole shards, that the root refused to list or delete: clear again."""
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


# The places of a chunk, for people who ask.


@dataclass(frozen=True, slots=True)
class RootCopy:
    """The file of a chunk."""

    size_bytes: int
    last_use_s: int
    """Start of the quantum of its last use."""
    uses: int
    """Number of quanta after that of its publication in which it was used, up to 3, which means at least 3."""
    hints: Hints
    encoding: Encoding
    key_id: bytes
    """Id of the key that it is encrypted with; empty if it is not encrypted."""
    is_condemned: bool
    """True if a sweep is taking it: then it counts as absent."""


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """The image of a chunk in memory."""

    size_bytes: int
    is_dirty: bool
    """True if the root does not have it yet."""
    users_count: int
    """Reads, holds and leases of it at the moment."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The places of one chunk."""

    index: int
    address: Address
    root: RootCopy | None
    memory: MemoryCopy | None
    on_disk: bool
    peers: tuple[str, ...]
    """Workers whose memory is said to have it."""
    pins: int | None = None
    """Live pins that cover it; None if not requested, or if etcd did not respond."""

    @property
    def is_anywhere(self) -> bool:
        """True if it is stored at all."""
        return bool(self.root or self.memory or self.on_disk or self.peers)
