"""The keys of garbage collection: the sweeps in flight, and the chain that orders them.

Collectors write them, nodes read them. A sweep's exact list lies on the root (``plans/<sweep>``). Nodes only need to
know whether an address is in it, and a false "yes" costs a miss.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.validate import parse_json
from kvstore.errors import RootMismatch
from kvstore.meta.keys import ID_BYTES, SweepId

EXACT_MAX = 4000
"""A sweep of up to this many victims lists packed addresses; a larger one has a filter."""
FILTER_BITS_PER_VICTIM = 24
FILTER_HASHES = 8
"""With 24 bits each: 0.004 % of false positives. One of them ends the match of a whole prompt, so they must be rare."""
VICTIMS_MAX = 16_384
"""The most victims of one sweep, so that its key stays below 64 KiB; the next sweep takes the others."""
NO_NONCE = bytes(ID_BYTES)
PACE_S_MAX = 60.0

_MAGIC = b"KVSWEEP1"
_FILTER, _FINAL = 1, 2


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
    little-endian), flags (1 byte: bit 0 filter, bit 1 final), then the addresses or the bits of the filter.
    """

    sweep: SweepId
    plan_checksum: bytes
    victims_count: int
    is_filter: bool
    members: bytes
    is_final: bool = False

    @classmethod
    def of_victims(cls, sweep: SweepId, plan_checksum: bytes, victims: Sequence[Address]) -> Condemned:
        """Makes the record of a sweep. ``victims`` are at most VICTIMS_MAX."""
        assert len(victims) <= VICTIMS_MAX
        packed = b"".join(victims)
        if len(victims) <= EXACT_MAX:
            return cls(sweep, plan_checksum, len(victims), False, packed)
        bits = bytearray(-(-len(victims) * FILTER_BITS_PER_VICTIM // 8))
        for victim in victims:
            place, step = _halves(victim)
            for _ in range(FILTER_HASHES):
                at = place % (8 * len(bits))
                bits[at >> 3] |= 1 << (at & 7)
                place = (place + step) & _U64_MAX
        return cls(sweep, plan_checksum, len(victims), True, bytes(bits))

    def to_bytes(self) -> bytes:
        count = self.victims_count.to_bytes(4, "little")
        flags = bytes([self.is_filter * _FILTER | self.is_final * _FINAL])
        return b"".join((_MAGIC, self.sweep, self.plan_checksum, count, flags, self.members))

    @classmethod
    def from_bytes(cls, value: bytes) -> Condemned:
        """Parses what ``to_bytes`` returned. Raises RootMismatch for anything else: what it condemns is unknown."""
        start = len(_MAGIC)
        body = value[start + 2 * ID_BYTES :]
        flags = body[4] if len(body) > 4 else 0xFF
        count = int.from_bytes(body[:4], "little")
        members = value[start + 2 * ID_BYTES + 5 :]
        fits = len(members) > 0 if flags & _FILTER else len(members) == count * ADDRESS_BYTES
        sound = value.startswith(_MAGIC) and flags <= _FILTER | _FINAL and fits
        if not sound:
            raise RootMismatch("not the record of a sweep: is it of another version, or damaged?")
        sweep = SweepId(value[start : start + ID_BYTES])
        checksum = value[start + ID_BYTES : start + 2 * ID_BYTES]
        return cls(sweep, checksum, count, bool(flags & _FILTER), members, bool(flags & _FINAL))


class CondemnedSet:
    """The addresses that a sweep condemns. Asking for one is fast, because every match and hold asks."""

    __slots__ = ("_bits", "_bits_count", "_exact")

    def __init__(self, record: Condemned) -> None:
        packed = record.members
        starts = range(0, 0 if record.is_filter else len(packed), ADDRESS_BYTES)
        self._exact = frozenset(packed[at : at + ADDRESS_BYTES] for at in starts)
        self._bits = packed if record.is_filter else b""
        self._bits_count = 8 * len(self._bits)

    @property
    def exact(self) -> frozenset[bytes] | None:
        """The addresses; None if there is only a filter."""
        return None if self._bits else self._exact

    def __contains__(self, address: bytes) -> bool:
        """True if an address of its part counts as condemned; with a filter, 0.004 % of the others do too."""
        if not self._bits:
            return address in self._exact
        place, step = _halves(address)
        for _ in range(FILTER_HASHES):
            at = place % self._bits_count
            if not self._bits[at >> 3] >> (at & 7) & 1:
                return False
            place = (place + step) & _U64_MAX
        return True


_U64_MAX = (1 << 64) - 1


def _halves(address: bytes) -> tuple[int, int]:
    """Returns the first position of an address in a filter, and the step from each to the next, before they wrap.

    Addresses are keyed hashes, so their halves serve as the two hashes from which all others follow (Kirsch and
    Mitzenmacher, "Less hashing, same performance", 2006), except for the first bits, which a part's addresses share.
    """
    return int.from_bytes(address[8:], "little"), int.from_bytes(address[2:8], "little") | 1
