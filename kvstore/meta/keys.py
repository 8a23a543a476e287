"""The name of every key in the metadata store, in one place, because several programs must agree on them.

    /kv/roots/<digest of a URL>                  which root is at that URL (notices a wrong mount)
    /kv/<root>/generation                        of the root's metadata (notices a wiped or foreign store)
    /kv/<root>/sessions/<session>                one per node, under its lease
    /kv/<root>/workers/<session>                 one per worker, under its session's lease
    /kv/<root>/refs/<owner>/<pin>                one per pin, under the pin's own lease
    /kv/<root>/namespaces/names/<digest>         one per (tenant, name): its layout
    /kv/<root>/namespaces/digests/<digest>       one per namespace: its record
    /kv/<root>/gc/seq                            the chain of sweeps: one nonce, and the one before it (rule C1)
    /kv/<root>/gc/condemned/<part>               one per sweep in flight
    /kv/<root>/gc/capacity                       used space, and what a node may write, under the lease of a collector
    /kv/<root>/usage/<session>                   bytes that a node wrote and deleted, under its lease
    /kv/<root>/collectors/<session>              one per collector, under its session's lease
    /kv/<root>/peers/<session>/address           where others read from a worker's memory, under its session's lease
    /kv/<root>/peers/<session>/<shard>           what its memory holds, 64 of them; see ``workers.py``
    /kv/<root>/clears/doing/<order>              a clear in progress, under a lease; see ``clears.py``
    /kv/<root>/clears/done/<order>               what was cleared
    /kv/<root>/events/<name>                     the publisher of events that speaks, under its lease
    /kv/<root>/cleared/<order>/<session>         a node has dropped it, under its session's lease

Their number is O(nodes + pins + namespaces + sweeps in flight), never O(chunks). Nodes watch ``gc/`` as a whole, so
that one watch orders everything that they must know of garbage collection (rule V1).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType
from urllib.parse import quote

from kvstore.core.namespace import NamespaceDigest
from kvstore.errors import InvalidRequest

SessionId = NewType("SessionId", bytes)
PinId = NewType("PinId", bytes)
SweepId = NewType("SweepId", bytes)

ID_BYTES = 16
PARTS = 4
"""Sweeps that can be in flight: one for each part, a quarter of all addresses. More sweeps of fewer chunks each would
cost more, because each one syncs a plan and a folder."""
ROOTS = "/kv/roots/"
"""The prefix of the bindings of URLs to roots."""
OWNER_BYTES_MAX = 256


def part_of(address: bytes) -> int:
    """Returns the part of an address: its first two bits."""
    return address[0] >> 6


class Keys:
    """The keys of one root, and their prefixes. ``root_id`` is the 16-byte id in its FORMAT file."""

    def __init__(self, root_id: bytes) -> None:
        if len(root_id) != ID_BYTES:
            raise InvalidRequest(f"root id has {len(root_id)} bytes: expected {ID_BYTES}")
        self.root_id = root_id
        self.prefix = f"/kv/{root_id.hex()}/"
        self.generation = f"{self.prefix}generation"
        self.sessions = f"{self.prefix}sessions/"
        self.workers = f"{self.prefix}workers/"
        self.refs = f"{self.prefix}refs/"
        self.namespace_digests = f"{self.prefix}namespaces/digests/"
        self.gc = f"{self.prefix}gc/"
        self.gc_seq = f"{self.gc}seq"
        self.gc_capacity = f"{self.gc}capacity"
        self.condemned = f"{self.gc}condemned/"
        self.usage = f"{self.prefix}usage/"
        self.collectors = f"{self.prefix}collectors/"
        self.peers = f"{self.prefix}peers/"
        self.clears = f"{self.prefix}clears/"
        self.clearing = f"{self.clears}doing/"

    def session(self, session: SessionId) -> str:
        return f"{self.sessions}{session.hex()}"

    def worker(self, session: SessionId) -> str:
        return f"{self.workers}{session.hex()}"

    def refs_of(self, owner: str) -> str:
        """Returns the prefix of one owner's refs."""
        try:
            size = len(owner.encode())
        except UnicodeEncodeError as cause:
            raise InvalidRequest(f"pin owner is not valid Unicode: {cause}") from cause
        if not 1 <= size <= OWNER_BYTES_MAX:
            raise InvalidRequest(f"pin owner has {size} bytes: expected 1 to {OWNER_BYTES_MAX}")
        return f"{self.refs}{quote(owner, safe='')}/"

    def ref(self, owner: str, pin: PinId) -> str:
        return f"{self.refs_of(owner)}{pin.hex()}"

    def namespace_digest(self, digest: NamespaceDigest) -> str:
        return f"{self.namespace_digests}{digest.hex()}"

    def namespace_name(self, tenant: str, name: str) -> str:
        """Returns the key of the layout claimed under a tenant and name, which may be any text and so are hashed."""
        tenant_bytes = tenant.encode()
        text = len(tenant_bytes).to_bytes(4, "big") + tenant_bytes + name.encode()
        return f"{self.prefix}namespaces/names/{blake2b(text, digest_size=16, person=b'kvstore.name.1').hexdigest()}"

    def usage_of(self, session: SessionId) -> str:
        return f"{self.usage}{session.hex()}"

    def condemned_in(self, part: int) -> str:
        return f"{self.condemned}{part}"

    def parse_condemned(self, key: str) -> int | None:
        """Returns the part of a sweep's key; None for another key."""
        return next((part for part in range(PARTS) if key == self.condemned_in(part)), None)

    def collector(self, session: SessionId) -> str:
        return f"{self.collectors}{session.hex()}"

    def peer_address(self, session: SessionId) -> str:
        return f"{self.peers}{session.hex()}/address"

    def peer_digest(self, session: SessionId, shard: int) -> str:
        return f"{self.peers}{session.hex()}/{shard:02x}"

    def speaker(self, name: str) -> str:
        """Returns the key of the publisher that speaks under a name, which may be any text and so is hashed."""
        return f"{self.prefix}events/{blake2b(name.encode(), digest_size=16, person=b'kvstore.event.1').hexdigest()}"

    def clear_in_progress(self, order: bytes) -> str:
        return f"{self.clearing}{order.hex()}"

    def clear_done(self, order: bytes) -> str:
        return f"{self.clears}done/{order.hex()}"

    def clear_answers(self, order: bytes) -> str:
        return f"{self.prefix}cleared/{order.hex()}/"

    def clear_answer(self, order: bytes, session: SessionId) -> str:
        return f"{self.clear_answers(order)}{session.hex()}"

    def parse_session(self, key: str) -> SessionId | None:
        """Returns the session of a session's, worker's, collector's or report's key; None for another key."""
        for prefix in (self.sessions, self.workers, self.collectors, self.usage):
            if key.startswith(prefix):
                found = parse_id(key.removeprefix(prefix))
                return None if found is None else SessionId(found)
        return None


def root_binding(url: str) -> str:
    """Returns the key of the id of the root that was found at ``url``."""
    return f"{ROOTS}{blake2b(url.encode(), digest_size=16, person=b'kvstore.url.1').hexdigest()}"


def parse_id(text: str) -> bytes | None:
    """Parses an id from its 32 hexadecimal digits; None for any other text."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == ID_BYTES and found.hex() == text else None
