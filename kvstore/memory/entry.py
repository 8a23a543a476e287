"""An entry: what a bounded tier keeps of one chunk; its place, which says which chunk that is; the queue it is in.

Apart from the inventory, because policies look at entries and the inventory looks at policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.address import Address, Chain
from kvstore.hints import Hints
from kvstore.memory.tree import Chunk
from kvstore.namespace import NamespaceDigest

USES_MAX = 3
"""Uses are counted up to this, as on the root: 3 means at least so many."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which chunk: enough to find it by address and by tokens, and to check an image of it."""

    namespace: NamespaceDigest
    address: Address
    parent: Address
    """``NO_PARENT`` for the first chunk of a prompt and for a block that an engine hashed itself."""
    tokens: bytes
    """Tokens of this chunk as u32; b"" for such a block."""


def place_of(chain: Chain, index: int) -> Place:
    """The place of chunk ``index`` of a prompt."""
    return Place(
        chain.namespace.digest, chain.addresses[index], chain.parent(index), chain.chunk_tokens(index).tobytes()
    )


class Worth(NamedTuple):
    """What a policy goes by, besides the time of the last use."""

    octaves: float = 0.0
    """How many times its age is halved."""
    ttl_s: int | None = None
    is_on_probation: bool = False


class Queue:
    """The entries of one worth."""

    __slots__ = ("held_bytes", "turns", "worth")

    def __init__(self, worth: Worth) -> None:
        self.worth = worth
        self.held_bytes = 0
        """Of all of them, those included that may not be evicted."""
        self.turns: list[tuple[float, int, Entry]] = []
        """A heap: last use, ticket, entry. A turn counts as long as the entry has that ticket."""

    @property
    def oldest_s(self) -> float:
        """When the one whose turn is next was last used."""
        return self.turns[0][0]


class Entry(Chunk):
    """A chunk in a tier: claimed (neither ready nor gone), ready, gone (E1). Changed by its inventory alone."""

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
        """Where its room is, as the ``Room`` said."""
        self.size_bytes = size_bytes
        """Bytes of its image."""
        self.hints = hints
        self.used_s = now_s
        """When it was claimed or last used."""
        self.uses = 0
        """How often it was used since it was claimed, up to ``USES_MAX``."""
        self.references = 1
        self.is_dirty = False
        self.is_replica = False
        self.is_gone = False
        self.is_retired = False
        """Said not to be needed soon: it goes before all others, until it is used again."""
        self.queue: Queue
        """Set when it has room."""
        self.ticket = 0
        """Its turn in that queue; 0 where it has none."""

    @property
    def place(self) -> Place:
        """Which chunk it is; also when it is gone. Its tokens lie in a run that others split and join: to be asked for
        only while the inventory stands still."""
        run = self.run
        return Place(run.space.namespace, self.address, self.parent, run.tokens_of(self))

    @property
    def namespace(self) -> NamespaceDigest:
        """The digest of its namespace."""
        digest: NamespaceDigest = self.run.space.namespace
        return digest

    @property
    def priority(self) -> int:
        """0 to 100, as its writers hinted."""
        return self.hints.priority
