"""Pins: refs under a lease of their own, which protect chunks for longer than the process that asked.

The number of refs that contain an address is its refcount; no integer is ever stored, so a crashed owner cannot leak
one: its refs end with their leases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, RootMismatch, Unavailable
from kvstore.meta.deadline import TRIES_MAX, Deadline
from kvstore.meta.interface import NO_LEASE, Delete, KeyValue, LeaseGone, LeaseId, Meta, ModifiedAt, Put
from kvstore.meta.keys import Keys, PinId
from kvstore.meta.session import Session
from kvstore.namespace import NamespaceDigest
from kvstore.sources import Clock, Ids, RandomIds, SystemClock

ADDRESSES_MAX = 65_536
TTL_S_MIN = 1
TTL_S_MAX = 30 * 86_400

_MAGIC = b"KVREF1\0\0"
_HEADER_SIZE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PinRecord:
    """One pin. ``packed`` is its addresses one after the other, parents first; ``revision`` that of its key.

    ``expires_s`` is when it ends by the wall clock of the node that took it: for people, the lease decides.

    As stored: the magic ``KVREF1``, the size of a JSON header (u32, little-endian), the header, ``packed``.
    """

    id: PinId
    owner: str
    namespace: NamespaceDigest
    tokens_count: int
    ttl_s: int
    expires_s: float
    packed: bytes
    lease: LeaseId = NO_LEASE
    revision: int = 0

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses that it protects."""
        return tuple(Address(self.packed[at : at + ADDRESS_BYTES]) for at in range(0, len(self.packed), ADDRESS_BYTES))

    @property
    def addresses_count(self) -> int:
        """How many addresses it protects."""
        return len(self.packed) // ADDRESS_BYTES

    def contains(self, address: Address) -> bool:
        """Whether it protects ``address``."""
        at = self.packed.find(address)
        while at >= 0 and at % ADDRESS_BYTES:
            at = self.packed.find(address, at + 1)
        return at >= 0

    def to_bytes(self) -> bytes:
        """As stored."""
        fields = {
            "id": self.id.hex(),
            "owner": self.owner,
            "namespace": self.namespace.hex(),
            "tokens": self.tokens_count,
            "ttl_s": self.ttl_s,
            "expires_s": self.expires_s,
        }
        header = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        return _MAGIC + len(header).to_bytes(_HEADER_SIZE_BYTES, "little") + header + self.packed

    @classmethod
    def of(cls, kv: KeyValue) -> PinRecord:
        """A ref as read. Raises RootMismatch where it cannot be understood: then nobody knows what it protects."""
        try:
            if not kv.value.startswith(_MAGIC):
                raise ValueError("no magic")
            start = len(_MAGIC) + _HEADER_SIZE_BYTES
            end = start + int.from_bytes(kv.value[len(_MAGIC) : start], "little")
            fields = json.loads(kv.value[start:end])
            packed = kv.value[end:]
            if end > len(kv.value) or len(packed) % ADDRESS_BYTES:
                raise ValueError("its size is wrong")
            return cls(
                PinId(bytes.fromhex(fields["id"])),
                str(fields["owner"]),
                NamespaceDigest(bytes.fromhex(fields["namespace"])),
                int(fields["tokens"]),
                int(fields["ttl_s"]),
                float(fields["expires_s"]),
                packed,
                kv.lease,
                kv.mod_revision,
            )
        except (ValueError, KeyError, TypeError) as cause:
            raise RootMismatch(f"{kv.key} is not a ref ({cause}): is it of another version, or damaged?") from cause


class Pins:
    """The pins of one root. ``session`` gives this node's live session, such as ``Presence.current``."""

    def __init__(
        self,
        meta: Meta,
        keys: Keys,
        session: Callable[[], Session],
        ids: Ids | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._meta = meta
        self._keys = keys
        self._session = session
        self._ids = ids or RandomIds()
        self._clock = clock or SystemClock()

    def pin(
        self,
        owner: str,
        addresses: Sequence[Address],
        ttl_s: int,
        tokens_count: int,
        namespace: NamespaceDigest,
        timeout_s: float | None = None,
    ) -> PinRecord:
        """A new pin on ``addresses`` (16 bytes each, at most 65,536), alive for ``ttl_s`` (1 s to 30 days).

        Hold them while this runs, verify them afterwards (rule P1). Raises InvalidRequest over a limit, SessionLost
        when this node's session ended (rule P2), Unavailable when the store did not answer: then there is no pin.
        """
        packed = _packed(addresses)
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise InvalidRequest(
                f"pin ttl_s={ttl_s!r}: expected a whole number from {TTL_S_MIN} to {TTL_S_MAX} (30 days)"
            )
        if tokens_count < 0:
            raise InvalidRequest(f"pin tokens_count={tokens_count!r}: expected 0 or more")
        pin = PinId(self._ids.fresh())
        key = self._keys.ref(owner, pin)
        deadline = Deadline(timeout_s)
        session = self._session()
        lease = self._meta.grant(ttl_s, deadline.left_s(0.4))
        expires_s = round(self._clock.now_s() + ttl_s, 3)
        record = PinRecord(pin, owner, namespace, tokens_count, ttl_s, expires_s, packed, lease)
        try:
            result = session.txn((), (Put(key, record.to_bytes(), lease),), timeout_s=deadline.left_s(0.7))
        except LeaseGone as gone:
            raise Unavailable(
                f"the lease of a pin for {ttl_s} s ended while it was being put: ask for longer"
            ) from gone
        except KVStoreError:
            # The put may be on its way still: without its lease it cannot land, and what has landed is gone.
            self._drop(lease, deadline)
            raise
        assert result.succeeded, "only the session's own compare was made, and a broken one raises"
        return replace(record, revision=result.revision)

    def unpin(self, owner: str, pin: PinId, timeout_s: float | None = None) -> bool:
        """Removes a pin; False where it does not exist (any more). Raises Unavailable where that stays unknown."""
        key = self._keys.ref(owner, pin)
        deadline = Deadline(timeout_s)
        removed = False
        tries_left = TRIES_MAX
        while (kv := self._meta.get(key, deadline.left_s(0.5))) is not None:
            # Only what was looked at (rule P3): a removal that arrives late must not meet another ref.
            if PinRecord.of(kv).id != pin:
                return False
            try:
                result = self._meta.txn((ModifiedAt(key, kv.mod_revision),), (Delete(key),), deadline.left_s(0.5))
                removed = removed or result.succeeded
            except Unavailable:
                tries_left -= 1
                if not tries_left or deadline.over:
                    raise
                removed = True  # if it is gone when read back, this call has removed it or its lease has
            if kv.lease:
                self._drop(kv.lease, deadline)
            if deadline.over:
                raise Unavailable(f"pin {pin.hex()} could not be removed in time: the call may be repeated")
        return removed

    def refcount(self, address: Address, timeout_s: float | None = None) -> int:
        """How many live refs contain ``address``. Reads all refs: for people and tests, not for a request."""
        return sum(record.contains(address) for record in self.list(timeout_s=timeout_s))

    def list(self, owner: str | None = None, timeout_s: float | None = None) -> tuple[PinRecord, ...]:
        """All live pins, or one owner's. Raises RootMismatch where one cannot be understood."""
        prefix = self._keys.refs if owner is None else self._keys.refs_of(owner)
        return tuple(PinRecord.of(kv) for kv in self._meta.list(prefix, timeout_s).items)

    def _drop(self, lease: LeaseId, deadline: Deadline) -> None:
        try:
            self._meta.revoke(lease, deadline.left_s())
        except (Unavailable, PermissionDenied):
            pass  # it ends by itself


def _packed(addresses: Sequence[Address]) -> bytes:
    if not 1 <= len(addresses) <= ADDRESSES_MAX:
        raise InvalidRequest(
            f"a pin on {len(addresses)} addresses: expected 1 to {ADDRESSES_MAX}: split it into several pins"
        )
    odd = next((at for at, address in enumerate(addresses) if len(address) != ADDRESS_BYTES), None)
    if odd is not None:
        raise InvalidRequest(f"address {odd} of a pin has {len(addresses[odd])} bytes: expected {ADDRESS_BYTES}")
    return b"".join(addresses)
