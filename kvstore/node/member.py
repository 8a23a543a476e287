"""A node as a member of a cluster: its session, the namespaces it claims, the pins it takes. Or a node alone.

Everything here may touch etcd, nothing here is on the path of a chunk.  Without etcd the same code runs over the
in-memory metadata, whose pins live as long as this process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.address import Chain
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.meta.interface import Meta
from kvstore.meta.keys import ID_BYTES, Keys, PinId, parse_id
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.pins import PinQuota, Pins
from kvstore.meta.pins import PinRecord as Ref
from kvstore.meta.presence import Presence
from kvstore.meta.session import Session
from kvstore.namespace import Namespace, NamespaceDigest
from kvstore.node.node import Node
from kvstore.node.pinned import PinnedInMemory
from kvstore.node.twins import NodeTwins
from kvstore.results import Cleared, PinRecord

CLEAR_DEADLINE_S = 600.0


class Member:
    """One node and its place in the cluster. Thread-safe; every call has a deadline.

    ``shared`` metadata may be lost while this process lives: then pins have twins on the root (rule C5).
    """

    def __init__(self, node: Node, meta: Meta, presence: Presence, *, shared: bool = False) -> None:
        self.node = node
        self.meta = meta
        self.keys = Keys(node.identity.root)
        self.presence = presence
        self._namespaces = Namespaces(meta, self.keys)
        self._twins = NodeTwins(node) if shared else None
        quota = PinQuota(node.limits.pins_per_owner_max, node.limits.pins_max)
        self._pins = Pins(meta, self.keys, presence.current, node.ids, node.clock, twins=self._twins, quota=quota)
        self._pinned = PinnedInMemory(node.memory, node.clock) if node.memory is not None else None
        self._pid = os.getpid()
        self._listing = threading.Lock()
        self._claimed: dict[NamespaceDigest, Namespace] = {}
        self.on_cleared: list[Callable[[NamespaceDigest], None]] = []
        """Called after a namespace was cleared here, to tell the other nodes."""
        presence.attach(lambda session: None, self._lost)

    def claim_namespace(self, namespace: Namespace) -> None:
        """Claims the name for its layout, in etcd and on the root. Raises LayoutMismatch, Unavailable."""
        if namespace.digest in self._claimed:
            return
        # The root first, without claiming: a name that it refuses must not be taken in etcd.
        self.node.check_namespace(namespace)
        self._namespaces.claim(namespace, self.node.limits.meta_deadline_s)
        self.node.claim_namespace(namespace)
        self._claimed[namespace.digest] = namespace

    def find_namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """The namespace with this digest, if anybody ever claimed it; remembered after the first time."""
        namespace = self._claimed.get(digest) or self.node.find_namespace(digest)
        if namespace:
            self._claimed[digest] = namespace
        return namespace

    def known_namespace(self, digest: bytes) -> Namespace | None:
        """The same, if it was used here: nobody is asked."""
        return self._claimed.get(NamespaceDigest(digest))

    def pin(self, chain: Chain, ttl_s: float, owner: str) -> PinRecord:
        """Pins the leading chunks that are there. Raises Unavailable, SessionLost, Overloaded.

        Rule P1: the hold lives until the ref is acknowledged, and only then is each file looked at, so that there is no
        moment at which a sweep could take a chunk that the caller will be told is pinned.
        """
        node, layout = self.node, chain.namespace.layout
        owner = owner or socket.gethostname()
        hold = node.hold(chain)
        try:
            if hold.born is None:
                raise Unavailable(
                    "this node protects nothing at the moment (no session, or etcd is not this root's: see its log and "
                    "gc/RUNBOOK.md), so it cannot pin: try again later"
                )
            if not hold.count:
                return self._no_pin(owner, chain)
            node.puts.write_out(hold.chain)  # what only memory has is not there for collectors and other nodes
            addresses = chain.addresses[: hold.count]
            seconds = max(1, round(ttl_s))
            ref = self._pins.pin(
                owner, addresses, seconds, hold.tokens, chain.namespace.digest, node.limits.meta_deadline_s
            )
            try:
                # Still held: so the session that put the ref is the one that collectors have waited for all the time.
                node.holds.check(hold)
                present = node.puts.present_leading(chain, hold.count)
            except KVStoreError:
                self.unpin(_pin_id(ref))
                raise
        finally:
            node.release(hold)
        if not present:
            self.unpin(_pin_id(ref))
            return self._no_pin(owner, chain)
        if self._pinned is not None:
            self._pinned.add(_pin_id(ref), chain.addresses[:present], seconds)
        tokens = present * layout.chunk_tokens
        return PinRecord(_pin_id(ref), owner, chain.namespace.name, tokens, node.clock.now_s() + seconds)

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin; False where there is none. Raises InvalidRequest for what is no pin id, Unavailable."""
        owner, _, pin = pin_id.rpartition("/")
        parsed = parse_id(pin)
        if not owner or parsed is None:
            raise InvalidRequest(f"pin id {pin_id!r}: expected OWNER/{2 * ID_BYTES} hex digits, as pin and ls print it")
        found = self._pins.unpin(owner, PinId(parsed), self.node.limits.meta_deadline_s)
        if self._pinned is not None:
            self._pinned.remove(pin_id)
        return found

    def pins(self) -> list[PinRecord]:
        """All live pins of the store."""
        with self._one_listing():
            refs = self._pins.list(timeout_s=self.node.limits.meta_deadline_s)
            return [
                PinRecord(_pin_id(ref), ref.owner, self._name_of(ref.namespace), ref.tokens_count, ref.expires_s)
                for ref in refs
            ]

    def refcount(self, chain: Chain) -> int:
        """Live pins that cover the last full chunk of the chain, and so all of it; 0 for an empty chain."""
        if not chain.addresses:
            return 0
        with self._one_listing():
            return self._pins.refcount(chain.addresses[-1], self.node.limits.meta_deadline_s)

    def clear(self, namespace: Namespace) -> Cleared:
        """Deletes the chunks of a namespace except pinned ones; a pin taken while it runs may find its chunks gone.

        Raises Unavailable also where the others, whose memory may have some, could not be told: clear again.
        """
        with self._one_listing():
            refs = self._pins.list(timeout_s=self.node.limits.meta_deadline_s)
            if self._twins is not None:
                refs = (*refs, *self._twins.unexpired())  # what etcd may have lost is pinned all the same
            pinned = {address for ref in refs for address in ref.addresses}
        cleared = self.node.remove(namespace, pinned.__contains__, CLEAR_DEADLINE_S)
        for tell in self.on_cleared:
            tell(namespace.digest)
        return cleared

    def stats(self) -> dict[str, int | float]:
        """The node's counters, and the state of the session."""
        try:
            self.presence.current()
            alive = 1
        except KVStoreError:
            alive = 0
        protected = int(self.node.gc_view.protects)
        operations = self.meta.operations_count
        return {**self.node.stats(), "session_alive": alive, "protected": protected, "etcd_operations": operations}

    def expire(self) -> None:
        """Ends what is past its time: to be called now and then."""
        self.node.holds.expire()
        if self._pinned is not None:
            self._pinned.expire()

    def close(self) -> None:
        """Ends the node and the session; idempotent. Does nothing in a forked child: the session is its parent's."""
        if self._pid != os.getpid():
            return
        self.node.close()
        self.presence.close()
        self.meta.close()

    @contextmanager
    def _one_listing(self) -> Iterator[None]:
        """One reader of all pins at a time: together they may be gigabytes. Raises Overloaded."""
        if not self._listing.acquire(timeout=self.node.limits.meta_deadline_s):
            raise Overloaded("other calls are reading all pins: back off")
        try:
            yield
        finally:
            self._listing.release()

    def _lost(self, _: Session) -> None:
        self.node.counters.add("sessions_lost")

    def _no_pin(self, owner: str, chain: Chain) -> PinRecord:
        return PinRecord("", owner, chain.namespace.name, 0, self.node.clock.now_s())

    def _name_of(self, digest: NamespaceDigest) -> str:
        try:
            namespace = self.find_namespace(digest)
        except KVStoreError:
            namespace = None
        return namespace.name if namespace else digest.hex()


def _pin_id(ref: Ref) -> str:
    return f"{ref.owner}/{ref.id.hex()}"
