"""The entry that a bounded tier keeps for one chunk, its place (which chunk it is), and its queue.

Separate from the inventory, because policies look at entries and the inventory looks at policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.address import Address, Chain
from kvstore.hints import Hints
from kvstore.memory.tree import Chunk
from kvstore.namespace import NamespaceDigest

USES_MAX = 3
"""Uses are counted up to this, as on the root: 3 means at least 3."""


@dataclass(frozen=True, slots=True)
class Place:
    """The identity of a chunk: enough to find it by address and by tokens, and to verify an image of it."""

    namespace: NamespaceDigest
    address: Address
    parent: Address
    """``NO_PARENT`` for the first chunk of a prompt and for an engine-hashed block."""
    tokens: bytes
    """Tokens of this chunk as u32; b"" for an engine-hashed block."""


def place_of(chain: Chain, index: int) -> Place:
    """Returns the place of chunk ``index`` of a prompt."""
    return Place(
        chain.namespace.digest, chain.addresses[index], chain.parent(index), chain.chunk_tokens(index).tobytes()
    )


class Worth(NamedTuple):
    """The rank that a policy gives an entry, besides the time of its last use."""

    octaves: float = 0.0
    """Number of times that its age is halved."""
    ttl_s: int | None = None
    is_on_probation: bool = False


class Queue:
    """The entries of one worth."""

    __slots__ = ("held_bytes", "turns", "worth")

    def __init__(self, worth: Worth) -> None:
        self.worth = worth
        self.held_bytes = 0
        """Bytes of all of them, including those that may not be evicted."""
        self.turns: list[tuple[float, int, Entry]] = []
        """A heap of last use, ticket, entry. A turn counts as long as the entry has that ticket."""

    @property
    def oldest_s(self) -> float:
        """Time of the last use of the entry whose turn is next."""
        return self.turns[0][0]


class Entry(Chunk):
    """A chunk in a tier: claimed (neither ready nor gone), ready, gone (E1). Only its inventory changes it."""

    __slots__ = (
        "hints",
        "is_dirty",
        "is_gone",
        "is_replica",
        "is_retired",
        "offset",
        "queue",
        "references",
        "size_bytes",
        "ticket",
        "used_s",
        "uses",
    )

    def __init__(self, place: Place, offset: int, size_bytes: int, now_s: float, hints: Hints) -> None:
        super().__init__(place.address, place.parent)
        self.offset = offset
        """Position of its room, as the ``Room`` returned it."""
        self.size_bytes = size_bytes
        """Bytes of its image."""
        self.hints = hints
        self.used_s = now_s
        """Time when it was claimed or last used."""
        self.uses = 0
        """Number of uses since it was claimed, up to ``USES_MAX``."""
        self.references = 1
        self.is_dirty = False
        self.is_replica = False
        self.is_gone = False
        self.is_retired = False
        """True if a caller said that it is not needed soon: it goes before all others, until it is used again."""
        self.queue: Queue
        """Set when it has room."""
        self.ticket = 0
        """Its turn in that queue; 0 if it has none."""

    @property
    def place(self) -> Place:
        """The chunk's identity; also when the entry is gone.

        Its tokens lie in a run that others split and join: read this only while the inventory stands still.
        """
        run = self.run
        return Place(run.space.namespace, self.address, self.parent, run.tokens_of(self))

    @property
    def namespace(self) -> NamespaceDigest:
        """The digest of its namespace."""
        digest: NamespaceDigest = self.run.space.namespace
        return digest

    @property
    def priority(self) -> int:
        """0 to 100, from its writers' hints."""
        return self.hints.priority
