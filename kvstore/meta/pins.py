"""Pins: refs under a lease of their own, which protect chunks for longer than the process that asked.

The number of refs that contain an address is its refcount. No integer is ever stored, so a crashed owner cannot leak a
count: its refs end with their leases.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.core.namespace import NamespaceDigest
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, PermissionDenied, RootMismatch, Unavailable
from kvstore.format.header import checksum
from kvstore.meta.keys import Keys, PinId
from kvstore.meta.session import Session
from kvstore.meta.store import TRIES_MAX, Delete, EtcdDeadline, LeaseGone, LeaseId, MetadataStore, ModifiedAt, Put

log = logging.getLogger(__name__)

ADDRESSES_MAX = 65_536
TTL_S_MIN = 1
TTL_S_MAX = 30 * 86_400

_MAGIC = b"KVREF1\0\0"
_HEADER_SIZE_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredPin:
    """One pin. ``packed`` is its addresses one after the other, parents first.

    ``expires_s`` is when it ends by the wall clock of the node that took it: for people, the lease decides.

    As stored, in etcd and as the twin on the root: the magic ``KVREF1``, the size of a JSON header (u32,
    little-endian), the header, ``packed``. The header has a checksum of ``packed``: a corrupt address would leave the
    pinned chunk unprotected.
    """

    id: PinId
    owner: str
    namespace: NamespaceDigest
    tokens_count: int
    ttl_s: int
    expires_s: float
    packed: bytes

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(Address(self.packed[at : at + ADDRESS_BYTES]) for at in range(0, len(self.packed), ADDRESS_BYTES))

    @property
    def addresses_count(self) -> int:
        return len(self.packed) // ADDRESS_BYTES

    def contains(self, address: Address) -> bool:
        at = self.packed.find(address)
        while at >= 0 and at % ADDRESS_BYTES:
            at = self.packed.find(address, at + 1)
        return at >= 0

    def to_bytes(self) -> bytes:
        fields = {
            "id": self.id.hex(),
            "owner": self.owner,
            "namespace": self.namespace.hex(),
            "tokens": self.tokens_count,
            "ttl_s": self.ttl_s,
            "expires_s": self.expires_s,
            "checksum": f"{checksum(self.packed):016x}",
        }
        header = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        return _MAGIC + len(header).to_bytes(_HEADER_SIZE_BYTES, "little") + header + self.packed

    @classmethod
    def from_bytes(cls, value: bytes, where: str) -> StoredPin:
        """Parses what ``to_bytes`` returned, of a ref or a twin. Raises RootMismatch, naming ``where``, if it is
        invalid: what it protects is then unknown.
        """
        try:
            if not value.startswith(_MAGIC):
                raise ValueError("no magic")
            start = len(_MAGIC) + _HEADER_SIZE_BYTES
            end = start + int.from_bytes(value[len(_MAGIC) : start], "little")
            fields = parse_json(value[start:end])
            packed = value[end:]
            if end > len(value) or len(packed) % ADDRESS_BYTES:
                raise ValueError("its size is wrong")
            if fields.get("checksum", f"{checksum(packed):016x}") != f"{checksum(packed):016x}":
                raise ValueError("its checksum is wrong")
            return cls(
                PinId(bytes.fromhex(fields["id"])),
                str(fields["owner"]),
                NamespaceDigest(bytes.fromhex(fields["namespace"])),
                int(fields["tokens"]),
                int(fields["ttl_s"]),
                float(fields["expires_s"]),
                packed,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise RootMismatch(f"{where} is not a ref ({cause}): is it of another version, or damaged?") from cause


@dataclass(frozen=True, slots=True)
class PinQuota:
    """The most pins of one owner, and in all. Advisory: pins put at the same moment may pass it by a few."""

    per_owner_max: int = 1_000
    pins_max: int = 10_000

    def check(self, owner: str, of_owner: int, in_all: int) -> None:
        """Raises Overloaded if ``owner``, or the store, has no pin left to take."""
        for whose, count, most in (
            (f"owner {owner!r}", of_owner, self.per_owner_max),
            ("this store", in_all, self.pins_max),
        ):
            if count >= most:
                raise Overloaded(
                    f"{whose} has {count} pins, the limit is {most}: unpin some (kvstore ls --pins), wait until they "
                    "end, or pin longer prefixes instead of many short ones"
                )


class Twins(Protocol):
    """The place for the second copy of each pin's record, which outlives the loss of etcd (rule C5)."""

    def write(self, owner: str, pin: PinId, content: bytes) -> None:
        """Writes and syncs a twin. Raises the root's errors."""
        ...

    def remove(self, owner: str, pin: PinId) -> bool:
        """Removes a twin; False if there is none. Raises the root's errors."""
        ...


class Pins:
    """The pins of one root. ``session`` returns this node's live session, such as ``Presence.current``.

    Without ``twins`` pins live in ``meta`` alone, which is enough if losing it ends the process.
    """

    def __init__(
        self,
        meta: MetadataStore,
        keys: Keys,
        session: Callable[[], Session],
        ids: Ids | None = None,
        clock: Clock | None = None,
        *,
        twins: Twins | None = None,
        quota: PinQuota | None = None,
    ) -> None:
        self._meta = meta
        self._keys = keys
        self._session = session
        self._ids = ids or RandomIds()
        self._clock = clock or SystemClock()
        self._twins = twins
        self.quota = quota or PinQuota()
        """May change at any time: live pins stay."""

    def pin(
        self,
        owner: str,
        addresses: Sequence[Address],
        ttl_s: int,
        tokens_count: int,
        namespace: NamespaceDigest,
        timeout_s: float | None = None,
    ) -> StoredPin:
        """Pins ``addresses`` (16 bytes each, at most 65,536) for ``ttl_s`` (1 s to 30 days).

        Hold them while this runs, verify them afterwards (rule P1). Raises InvalidRequest over a limit, Overloaded over
        a quota, SessionLost if this node's session ended (rule P2), Unavailable if the store did not answer, and the
        root's errors if the twin could not be written: then there is no pin.
        """
        content = packed(addresses)
        check_pin(ttl_s, tokens_count)
        session = self._session()
        deadline = EtcdDeadline(timeout_s)
        of_owner = self._meta.count(self._keys.refs_of(owner), deadline.left_s(0.5))
        self.quota.check(owner, of_owner, self._meta.count(self._keys.refs, deadline.left_s(0.5)))
        expires_s = round(self._clock.now_s() + ttl_s, 3)
        record = StoredPin(PinId(self._ids.fresh()), owner, namespace, tokens_count, ttl_s, expires_s, content)
        try:
            if self._twins is not None:
                # Before the key (rule C5): a collector that does not find the key finds the twin.
                self._twins.write(owner, record.id, record.to_bytes())
            self._put(session, record, deadline)
            return record
        except BaseException:
            self._remove_twin_quietly(record)
            raise

    def unpin(self, owner: str, pin: PinId, timeout_s: float | None = None) -> bool:
        """Removes a pin; False if it does not exist (any more). Raises Unavailable if that stays unknown.

        Also removes a leftover twin, whose owner died or whose key etcd lost; that counts as removed.
        """
        key = self._keys.ref(owner, pin)
        deadline = EtcdDeadline(timeout_s)
        removed = False
        tries_left = TRIES_MAX
        while (kv := self._meta.get(key, deadline.left_s(0.5))) is not None:
            # Delete only the ref that was looked at (rule P3): a removal that arrives late must not delete another one.
            if StoredPin.from_bytes(kv.value, kv.key).id != pin:
                return False
            try:
                result = self._meta.txn((ModifiedAt(key, kv.mod_revision),), (Delete(key),), deadline.left_s(0.5))
                removed = removed or result.succeeded
            except Unavailable:
                tries_left -= 1
                if not tries_left or deadline.over:
                    raise
                removed = True  # if it is gone at the read-back, this call or its lease has removed it
            if kv.lease:
                self._drop(kv.lease, deadline)
            if deadline.over:
                raise Unavailable(f"pin {pin.hex()} could not be removed in time: the call may be repeated")
        # After the key: if this process dies here, the pin protects for longer, and no reply to a caller denied that.
        if self._twins is not None and self._twins.remove(owner, pin):
            removed = True
        return removed

    def refcount(self, address: Address, timeout_s: float | None = None) -> int:
        """Counts the live refs that contain ``address``. Reads all refs: for people and tests, not for a request."""
        return sum(record.contains(address) for record in self.list(timeout_s=timeout_s))

    def list(self, owner: str | None = None, timeout_s: float | None = None) -> tuple[StoredPin, ...]:
        """Returns all live pins, or one owner's. Raises RootMismatch if one cannot be understood."""
        prefix = self._keys.refs if owner is None else self._keys.refs_of(owner)
        return tuple(StoredPin.from_bytes(kv.value, kv.key) for kv in self._meta.list(prefix, timeout_s).items)

    def _put(self, session: Session, record: StoredPin, deadline: EtcdDeadline) -> None:
        """Puts the key of a pin under a lease of its own (rule P2)."""
        lease = self._meta.grant(record.ttl_s, deadline.left_s(0.4))
        put = Put(self._keys.ref(record.owner, record.id), record.to_bytes(), lease)
        try:
            result = session.txn((), (put,), timeout_s=deadline.left_s(0.7))
        except LeaseGone as gone:
            raise Unavailable(
                f"the lease of a pin for {record.ttl_s} s ended while it was being put: ask for longer"
            ) from gone
        except KVStoreError:
            # The put may still be on its way: without its lease it cannot land, and a put that landed is gone.
            self._drop(lease, deadline)
            raise
        assert result.succeeded, "only the session's own compare was made, and a broken one raises"

    def _remove_twin_quietly(self, record: StoredPin) -> None:
        """Removes the twin of a pin that failed. If that fails too, it protects chunks until collectors remove it."""
        if self._twins is None:
            return
        try:
            self._twins.remove(record.owner, record.id)
        except KVStoreError as error:
            log.debug("pin.twin_left %s/%s: %s", record.owner, record.id.hex(), error)

    def _drop(self, lease: LeaseId, deadline: EtcdDeadline) -> None:
        try:
            self._meta.revoke(lease, deadline.left_s())
        except (Unavailable, PermissionDenied):
            pass  # it ends by itself


def check_pin(ttl_s: int, tokens_count: int) -> None:
    """Raises InvalidRequest for a time or a number that no pin may have."""
    if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
        raise InvalidRequest(f"pin ttl_s={ttl_s!r}: expected a whole number from {TTL_S_MIN} to {TTL_S_MAX} (30 days)")
    if tokens_count < 0:
        raise InvalidRequest(f"pin tokens_count={tokens_count!r}: expected 0 or more")


def packed(addresses: Sequence[Address]) -> bytes:
    """Returns addresses one after the other. Raises InvalidRequest for none, for too many, and for what is none."""
    if not 1 <= len(addresses) <= ADDRESSES_MAX:
        raise InvalidRequest(
            f"a pin on {len(addresses)} addresses: expected 1 to {ADDRESSES_MAX}: split it into several pins"
        )
    odd = next((at for at, address in enumerate(addresses) if len(address) != ADDRESS_BYTES), None)
    if odd is not None:
        raise InvalidRequest(f"address {odd} of a pin has {len(addresses[odd])} bytes: expected {ADDRESS_BYTES}")
    return b"".join(addresses)
