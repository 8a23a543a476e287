"""Translates requests into the node's terms: namespaces by digest, chains, holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import HoldBroken, InvalidRequest, Overloaded
from kvstore.format.header import Ancestry
from kvstore.keyset import BlockKeys, ChunkKeys, KeySet
from kvstore.namespace import DIGEST_BYTES, Namespace, NamespaceDigest
from kvstore.node.holds import Hold
from kvstore.node.member import Member
from kvstore.node.reader import Asked
from kvstore.sources import Clock
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import unpack_descents, unpack_keys, unpack_sizes, unpack_tokens
from kvstore.wire.statuses import UnknownNamespace
from kvstore.worker.calls import Call, seconds_left

# Holds of clients by id. Bounded more tightly than a node's own: each keeps a prompt in memory.
#
# Each hold is leased: a client that was killed renews nothing, so its holds end (gc/PROTOCOL.md, H4).


class ClientHolds:
    """The live holds of all clients; thread-safe. ``release`` ends a hold in the node, ``renew`` its lease there.

    With ``tells_tenants`` one tenant has at most half of them: others need some too.
    """

    def __init__(
        self,
        holds_max: int,
        tokens_max: int,
        release: Callable[[Hold], None],
        renew: Callable[[Hold], bool],
        clock: Clock,
        *,
        tells_tenants: bool = False,
    ) -> None:
        self.holds_max = holds_max
        """May change at any time, like ``tokens_max``: live holds stay."""
        self.tokens_max = tokens_max
        self._release = release
        self._renew = renew
        self._clock = clock
        self._lock = threading.Lock()
        self._tells_tenants = tells_tenants
        self._live: dict[bytes, Hold] = {}
        self._tokens = 0
        self._holds_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, hold: Hold) -> None:
        """Leases a hold: keeps it until it is released, expires, or is not renewed.

        Raises Overloaded if there are too many, and releases it.
        """
        size = len(hold.chain.tokens)
        with self._lock:
            fits = len(self._live) < self.holds_max and self._tokens + size <= self.tokens_max
            fits = fits and not (self._tells_tenants and self._is_over_half(_tenant_of(hold), size))
            if fits:
                self._renew(hold)
                self._live[hold.id] = hold
                self._note(hold, 1)
        if not fits:
            self._release(hold)
            raise Overloaded(
                f"clients may hold at most {self.holds_max} prompts and {self.tokens_max} tokens here: "
                "release some, or back off"
            )

    def find(self, hold_id: bytes) -> Hold:
        """Returns the live hold with this id, renewed. Raises HoldBroken if it has ended."""
        hold = self._live.get(hold_id)
        if hold is None or not self._renew(hold):
            raise HoldBroken(
                "the hold has ended (released, past its time, not renewed, or the worker was restarted): match again"
            )
        return hold

    def renew(self, hold_id: bytes) -> bool:
        """Renews the lease of a hold; False if it has ended."""
        hold = self._live.get(hold_id)
        return hold is not None and self._renew(hold)

    def peek(self, hold_id: bytes) -> Hold | None:
        """Returns the hold with this id, even if it has expired; None if it was released."""
        return self._live.get(hold_id)

    def release(self, hold_id: bytes) -> bool:
        """Ends a hold; False if it had already ended."""
        with self._lock:
            hold = self._live.pop(hold_id, None)
            if hold is not None:
                self._note(hold, -1)
        if hold is not None:
            self._release(hold)
        return hold is not None

    def expire(self) -> None:
        """Ends expired holds."""
        now_s = self._clock.monotonic_s()
        for hold_id in [hold.id for hold in list(self._live.values()) if hold.ends_s <= now_s]:
            self.release(hold_id)

    def _note(self, hold: Hold, count: int) -> None:
        tenant, tokens = _tenant_of(hold), count * len(hold.chain.tokens)
        self._tokens += tokens
        self._holds_of[tenant] += count
        self._tokens_of[tenant] += tokens
        if not self._holds_of[tenant]:
            del self._holds_of[tenant], self._tokens_of[tenant]

    def _is_over_half(self, tenant: str, tokens: int) -> bool:
        """True if one more hold is too much for a tenant; its only one never is."""
        held = self._holds_of[tenant]
        is_over = held >= self.holds_max // 2 or self._tokens_of[tenant] + tokens > self.tokens_max // 2
        return held > 0 and is_over


def _tenant_of(hold: Hold) -> str:
    return hold.chain.namespace.tenant


class Prompts:
    """Looks up the namespace, chain or hold of a request."""

    def __init__(self, member: Member, holds: ClientHolds) -> None:
        self._member = member
        self._holds = holds

    def namespace(self, digest: bytes, call: Call) -> Namespace:
        """Returns the namespace with this digest, authorised for ``call``: there is no other way to one.

        Raises UnknownNamespace, InvalidRequest, PermissionDenied, Overloaded, or what the root raised.
        """
        if len(digest) != DIGEST_BYTES:
            raise InvalidRequest(
                f"namespace has {len(digest)} bytes: expected the {DIGEST_BYTES} that OpenNamespace gave"
            )
        namespace = self._member.find_namespace(NamespaceDigest(digest))
        if namespace is None:
            raise UnknownNamespace(
                f"namespace {digest.hex()} was never opened on this root: call OpenNamespace, then repeat"
            )
        call.allow(namespace.tenant, namespace.name)
        return namespace

    def chain(self, digest: bytes, packed_tokens: bytes, call: Call, chunks_max: int = 0) -> ChunkKeys:
        """Returns the full chunks of a prompt, at most ``chunks_max`` unless that is 0."""
        namespace = self.namespace(digest, call)
        tokens = unpack_tokens(packed_tokens)
        if chunks_max:
            tokens = tokens[: chunks_max * namespace.layout.chunk_tokens]
        return self._member.node.chains.of(namespace, tokens)

    def to_put(self, start: pb.PutStart, call: Call) -> tuple[KeySet, int]:
        """Returns the full chunks of a prompt, or blocks, and the first one that is put. Raises as ``chain`` does."""
        if start.keys:
            if start.tokens:
                raise InvalidRequest("a Put has both keys of blocks and tokens: expected one of them")
            namespace, keys = self.namespace(start.namespace, call), unpack_keys(start.keys)
            ancestry = Ancestry(start.first, unpack_descents(start.descents, len(keys)) if start.descents else ())
            return BlockKeys.of(namespace, keys, unpack_sizes(start.sizes, len(keys)), ancestry), 0
        chain = self.chain(start.namespace, start.tokens, call)
        if start.first > len(chain):
            raise InvalidRequest(
                f"first is {start.first}: expected at most {len(chain)}, the full chunks of the prompt"
            )
        return chain, start.first

    def blocks(self, digest: bytes, packed_keys: bytes, packed_sizes: bytes, call: Call) -> BlockKeys:
        """Returns the blocks of a request. Raises as ``namespace`` does."""
        namespace, keys = self.namespace(digest, call), unpack_keys(packed_keys)
        return BlockKeys.of(namespace, keys, unpack_sizes(packed_sizes, len(keys)))

    def block_hold(self, hold_id: bytes, namespace: Namespace) -> Hold | None:
        """Returns the hold to read blocks of ``namespace`` under; None if the request names none.

        Raises HoldBroken if it has ended, InvalidRequest if it belongs to another namespace.
        """
        if not hold_id:
            return None
        hold = self._holds.find(hold_id)
        if hold.chain.namespace.digest != namespace.digest:
            raise InvalidRequest("the hold is of another namespace: expected one that Hold gave for this namespace")
        self._member.node.holds.check(hold)
        return hold

    def known_chain(self, request: pb.GetRequest, call: Call) -> ChunkKeys:
        """Returns the full chunks of a prompt that another worker asks for, from what this node knows.

        It reads no namespace from the root (rule P2). Raises UnknownNamespace, InvalidRequest.
        """
        if request.hold:
            raise InvalidRequest("memory_only with a hold: expected a prompt")
        namespace = self._member.known_namespace(request.namespace)
        if namespace is None:
            raise UnknownNamespace(f"namespace {request.namespace.hex()} is not known here: a miss")
        # The tenant pays at the worker that its client asked; a peer only brings what is already paid for.
        call.allow(namespace.tenant, namespace.name, metered=not call.sees_every)
        tokens = unpack_tokens(request.tokens)
        if request.chunks_max:
            tokens = tokens[: request.chunks_max * namespace.layout.chunk_tokens]
        return self._member.node.chains.of(namespace, tokens)

    @contextmanager
    def asked(self, request: pb.GetRequest, call: Call) -> Iterator[tuple[Asked, int]]:
        """Yields the chunks or blocks of a read, and how many of them it may send: of a prompt those that are there."""
        if request.keys:
            if request.tokens:
                raise InvalidRequest("a Get has both keys of blocks and tokens: expected one of them")
            wanted = self.blocks(request.namespace, request.keys, request.sizes, call)
            yield Asked(wanted, self.block_hold(request.hold, wanted.namespace)), len(wanted)
            return
        with self.held(request, call) as (hold, count):
            yield Asked(hold.chain, hold), count

    @contextmanager
    def held(self, request: pb.GetRequest, call: Call) -> Iterator[tuple[Hold, int]]:
        """Yields the hold to read under, and its number of leading chunks: the client's own, or one for this call."""
        if request.hold:
            if request.namespace or request.tokens:
                raise InvalidRequest("a Get has both a hold and a prompt: expected one of them")
            hold = self._holds.find(request.hold)
            call.allow(hold.chain.namespace.tenant, hold.chain.namespace.name)
            self._member.node.holds.check(hold)  # on every path: even memory is not read under a lost session
            yield hold, min(hold.count, request.chunks_max or hold.count)
            return
        node = self._member.node
        chain = self.chain(request.namespace, request.tokens, call, request.chunks_max)
        left_s = seconds_left(call, node.limits.match_deadline_s)
        hold = node.hold(chain, deadline_s=left_s, counts=not request.uncounted)
        try:
            yield hold, hold.count
        finally:
            node.holds.release(hold)
