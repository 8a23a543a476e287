"""The name of every key in the metadata store, in one place, because several programs must agree on them.

    /kv/roots/<digest of a URL>                  which root is at that URL (notices a wrong mount)
    /kv/<root>/generation                        of the root's metadata (notices a wiped or foreign store)
    /kv/<root>/sessions/<session>                one per node, under its lease
    /kv/<root>/workers/<session>                 one per worker, under its session's lease
    /kv/<root>/refs/<owner>/<pin>                one per pin, under the pin's own lease
    /kv/<root>/namespaces/names/<digest>         one per (tenant, name): its layout
    /kv/<root>/namespaces/digests/<digest>       one per namespace: its record
    /kv/<root>/locks/<name>                      one per lock held
    /kv/<root>/gc/seq                            the chain of sweeps: one nonce, and the one before it (rule C1)
    /kv/<root>/gc/condemned/<shard>              one per sweep in flight
    /kv/<root>/gc/full                           says that the root is full, under the lease of a collector
    /kv/<root>/gc/room                           how much a node may write unheard, under the lease of a collector
    /kv/<root>/usage/<session>                   bytes that a node or collector wrote and deleted, under its lease
    /kv/<root>/collectors/<session>              one per collector, under its session's lease
    /kv/<root>/peers/<session>/address           where others read from a worker's memory, under its session's lease
    /kv/<root>/peers/<session>/<shard>           what its memory holds, 64 of them; see ``digests.py``
    /kv/<root>/peers/cleared/<digest>            one per namespace that was ever cleared: changes each time
    /kv/<root>/clears/<order>                    what was cleared by selection; see ``clears.py``
    /kv/<root>/clearing/<order>                  a clear is deleting, under its lease; see ``barriers.py``
    /kv/<root>/cleared/<order>/<session>         a node has dropped it, under its session's lease

Their number is O(nodes + pins + namespaces + sweeps in flight), never O(chunks).  Nodes watch ``gc/`` as a whole, so
that one watch orders all they must know of garbage collection (rule V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NewType
from urllib.parse import quote, unquote

from kvstore.errors import InvalidRequest
from kvstore.namespace import NamespaceDigest

SessionId = NewType("SessionId", bytes)
PinId = NewType("PinId", bytes)
SweepId = NewType("SweepId", bytes)

ID_BYTES = 16
OWNER_BYTES_MAX = 256
LOCK_NAME_BYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one root; ``root_id`` is the 16-byte id in its FORMAT file."""

    root_id: bytes

    def __post_init__(self) -> None:
        if len(self.root_id) != ID_BYTES:
            raise InvalidRequest(f"root id has {len(self.root_id)} bytes: expected {ID_BYTES}")

    @property
    def prefix(self) -> str:
        """All keys of this root."""
        return f"/kv/{self.root_id.hex()}/"

    @property
    def generation(self) -> str:
        """The generation stamp."""
        return f"{self.prefix}generation"

    @property
    def sessions(self) -> str:
        """Prefix of all sessions."""
        return f"{self.prefix}sessions/"

    def session(self, session: SessionId) -> str:
        """One session's key."""
        return f"{self.sessions}{session.hex()}"

    @property
    def workers(self) -> str:
        """Prefix of all workers."""
        return f"{self.prefix}workers/"

    def worker(self, session: SessionId) -> str:
        """The worker that runs in a session."""
        return f"{self.workers}{session.hex()}"

    @property
    def refs(self) -> str:
        """Prefix of all refs."""
        return f"{self.prefix}refs/"

    def refs_of(self, owner: str) -> str:
        """Prefix of one owner's refs."""
        return f"{self.refs}{_part('pin owner', owner, OWNER_BYTES_MAX)}/"

    def ref(self, owner: str, pin: PinId) -> str:
        """One ref."""
        return f"{self.refs_of(owner)}{pin.hex()}"

    @property
    def namespace_digests(self) -> str:
        """Prefix of all namespace records."""
        return f"{self.prefix}namespaces/digests/"

    def namespace_digest(self, digest: NamespaceDigest) -> str:
        """One namespace's record."""
        return f"{self.namespace_digests}{digest.hex()}"

    def namespace_name(self, tenant: str, name: str) -> str:
        """The layout claimed under a tenant and name, which may hold any text and so are hashed."""
        tenant_bytes = tenant.encode()
        text = len(tenant_bytes).to_bytes(4, "big") + tenant_bytes + name.encode()
        return f"{self.prefix}namespaces/names/{blake2b(text, digest_size=16, person=b'kvstore.name.1').hexdigest()}"

    def lock(self, name: str) -> str:
        """One lock; a slash in its name groups locks, such as ``gc/<shard>``."""
        return f"{self.prefix}locks/{_part('lock name', name, LOCK_NAME_BYTES_MAX, safe='/')}"

    @property
    def gc(self) -> str:
        """Prefix of all that nodes watch of garbage collection."""
        return f"{self.prefix}gc/"

    @property
    def gc_seq(self) -> str:
        """The chain of sweeps."""
        return f"{self.gc}seq"

    @property
    def gc_full(self) -> str:
        """Present while the root is too full to write to."""
        return f"{self.gc}full"

    @property
    def gc_room(self) -> str:
        """How much each node may write before collectors have heard of it; see ``usage.py``."""
        return f"{self.gc}room"

    @property
    def usage(self) -> str:
        """Prefix of what nodes and collectors report of the room that they take."""
        return f"{self.prefix}usage/"

    def usage_of(self, session: SessionId) -> str:
        """The report of one node or collector."""
        return f"{self.usage}{session.hex()}"

    @property
    def condemned(self) -> str:
        """Prefix of all sweeps in flight."""
        return f"{self.gc}condemned/"

    def condemned_in(self, shard: int) -> str:
        """The sweep of one shard."""
        return f"{self.condemned}{shard:04x}"

    def parse_condemned(self, key: str) -> int | None:
        """The shard of a sweep's key; None for another key."""
        shard = key.removeprefix(self.condemned)
        if not key.startswith(self.condemned) or len(shard) != 4:
            return None
        try:
            found = int(shard, 16)
        except ValueError:
            return None
        return found if f"{found:04x}" == shard else None

    @property
    def collectors(self) -> str:
        """Prefix of all live collectors."""
        return f"{self.prefix}collectors/"

    def collector(self, session: SessionId) -> str:
        """The collector that runs in a session."""
        return f"{self.collectors}{session.hex()}"

    @property
    def peers(self) -> str:
        """Prefix of all that nodes with memory tell each other: one watch orders it."""
        return f"{self.prefix}peers/"

    def peer_address(self, session: SessionId) -> str:
        """Where the worker that runs in a session serves its memory."""
        return f"{self.peers}{session.hex()}/address"

    def peer_digest(self, session: SessionId, shard: int) -> str:
        """What the memory of a session's worker holds in one shard of the addresses."""
        return f"{self.peers}{session.hex()}/{shard:02x}"

    def peer_cleared(self, digest: NamespaceDigest) -> str:
        """The mark that a namespace was cleared."""
        return f"{self.peers}cleared/{digest.hex()}"

    @property
    def clears(self) -> str:
        """Prefix of all orders to clear by selection."""
        return f"{self.prefix}clears/"

    def clear_order(self, order: bytes) -> str:
        """One order to clear."""
        return f"{self.clears}{order.hex()}"

    @property
    def barriers(self) -> str:
        """Prefix of the barriers of clears that are deleting."""
        return f"{self.prefix}clearing/"

    def barrier(self, order: bytes) -> str:
        """The barrier of one clear."""
        return f"{self.barriers}{order.hex()}"

    def clear_answers(self, order: bytes) -> str:
        """Prefix of the answers of nodes to one order."""
        return f"{self.prefix}cleared/{order.hex()}/"

    def clear_answer(self, order: bytes, session: SessionId) -> str:
        """One node's answer."""
        return f"{self.clear_answers(order)}{session.hex()}"

    def parse_ref(self, key: str) -> tuple[str, PinId] | None:
        """Owner and pin of a ref's key; None for a key that is no ref."""
        owner, slash, pin = key.removeprefix(self.refs).partition("/")
        session = parse_id(pin)
        if not key.startswith(self.refs) or not slash or session is None:
            return None
        return unquote(owner), PinId(session)

    def parse_session(self, key: str) -> SessionId | None:
        """The session of a session's, worker's, collector's or report's key; None for another key."""
        for prefix in (self.sessions, self.workers, self.collectors, self.usage):
            if key.startswith(prefix):
                found = parse_id(key.removeprefix(prefix))
                return None if found is None else SessionId(found)
        return None


def root_binding(url: str) -> str:
    """Which root was found at ``url``."""
    return f"/kv/roots/{blake2b(url.encode(), digest_size=16, person=b'kvstore.url.1').hexdigest()}"


def parse_id(text: str) -> bytes | None:
    """An id from its 32 hexadecimal digits; None for any other text."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == ID_BYTES and found.hex() == text else None


def _part(what: str, text: str, most: int, safe: str = "") -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as cause:
        raise InvalidRequest(f"{what} is not valid Unicode: {cause}") from cause
    if not 1 <= size <= most:
        raise InvalidRequest(f"{what} has {size} bytes: expected 1 to {most}")
    return quote(text, safe=safe)
