"""The keys of garbage collection: the sweeps in flight, and the chain that orders them.

Collectors write them, nodes read them. A sweep's plan, with the publication of each chunk, lies on the root
(``plans/<sweep>``); nodes need only the addresses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.validate import parse_json
from kvstore.errors import RootMismatch
from kvstore.meta.keys import ID_BYTES, Keys, SweepId
from kvstore.meta.store import MetadataStore

VICTIMS_MAX = 4_000
"""The most victims of one sweep, so that its key stays below 64 KiB; the next sweep takes the others."""
NO_NONCE = bytes(ID_BYTES)
PACE_S_MAX = 60.0

_MAGIC = b"KVSWEEP1"


@dataclass(frozen=True, slots=True)
class Seq:
    """One link of the chain of sweeps: a fresh nonce, and the one before it (rule C1).

    ``pace_s`` asks each node to announce no more often than that, so that many of them do not flood etcd.
    """

    nonce: bytes
    prev: bytes
    pace_s: float = 0.0

    def to_json(self) -> bytes:
        fields = {"nonce": self.nonce.hex(), "prev": self.prev.hex(), "pace_s": self.pace_s}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Seq:
        try:
            fields = parse_json(value)
            pace_s = min(PACE_S_MAX, max(0.0, float(fields["pace_s"])))
            found = cls(bytes.fromhex(fields["nonce"]), bytes.fromhex(fields["prev"]), pace_s)
        except (ValueError, KeyError, TypeError) as cause:
            raise RootMismatch(f"not a link of the chain of sweeps: {cause}") from cause
        if len(found.nonce) != ID_BYTES or len(found.prev) != ID_BYTES:
            raise RootMismatch("not a link of the chain of sweeps: a nonce has 16 bytes")
        return found


@dataclass(frozen=True, slots=True)
class Condemned:
    """The value of ``gc/condemned/<part>``: the sweep, the checksum of its plan, and the addresses it condemns.

    ``is_final`` is for roots without a fence: every run deletes from this plan (rule O1).

    As stored: the magic ``KVSWEEP1``, sweep (16 bytes), checksum of the plan file (16), count of victims (u32,
    little-endian), flags (1 byte: bit 0 final), then the addresses.
    """

    sweep: SweepId
    plan_checksum: bytes
    packed: bytes
    is_final: bool = False

    @classmethod
    def of_victims(cls, sweep: SweepId, plan_checksum: bytes, victims: Sequence[Address]) -> Condemned:
        """Makes the record of a sweep. ``victims`` are at most VICTIMS_MAX."""
        assert len(victims) <= VICTIMS_MAX
        return cls(sweep, plan_checksum, b"".join(victims))

    @property
    def victims_count(self) -> int:
        """The number of chunks that it condemns."""
        return len(self.packed) // ADDRESS_BYTES

    @property
    def victims(self) -> frozenset[bytes]:
        """The addresses that it condemns, made anew."""
        starts = range(0, len(self.packed), ADDRESS_BYTES)
        return frozenset(self.packed[at : at + ADDRESS_BYTES] for at in starts)

    def to_bytes(self) -> bytes:
        count = self.victims_count.to_bytes(4, "little")
        flags = bytes([self.is_final])
        return b"".join((_MAGIC, self.sweep, self.plan_checksum, count, flags, self.packed))

    @classmethod
    def from_bytes(cls, value: bytes) -> Condemned:
        """Parses what ``to_bytes`` returned. Raises RootMismatch for anything else: what it condemns is unknown."""
        start = len(_MAGIC)
        body = value[start + 2 * ID_BYTES :]
        flags, packed = body[4] if len(body) > 4 else 0xFF, body[5:]
        sound = (
            value.startswith(_MAGIC)
            and flags <= 1
            and len(packed) == int.from_bytes(body[:4], "little") * ADDRESS_BYTES
        )
        if not sound:
            raise RootMismatch("not the record of a sweep: is it of another version, or damaged?")
        sweep = SweepId(value[start : start + ID_BYTES])
        checksum = value[start + ID_BYTES : start + 2 * ID_BYTES]
        return cls(sweep, checksum, packed, bool(flags))


def named_sweeps(meta: MetadataStore, keys: Keys, timeout_s: float) -> set[bytes]:
    """Returns the sweeps in flight. Raises Unavailable, and RootMismatch if a key cannot be understood."""
    return {Condemned.from_bytes(kv.value).sweep for kv in meta.list(keys.condemned, timeout_s).items}
