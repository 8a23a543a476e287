"""Space accounting in etcd: reports of nodes under ``usage/<session>``, and the collectors' answer, ``gc/capacity``.

Safety does not depend on them: they keep the root below its capacity between two listings. A reader treats a record
that it cannot parse as absent. Section 6 of gc/PROTOCOL.md has the rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest

BYTES_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The value of ``usage/<session>``: bytes written to the root, and deleted from it, since the session began.

    All counts only grow, so of two records of one session the larger one is the later one.
    """

    written_bytes: int = 0
    removed_bytes: int = 0
    largest_put_bytes: int = 0

    def to_json(self) -> bytes:
        return _packed(
            {"written": self.written_bytes, "removed": self.removed_bytes, "largest_put": self.largest_put_bytes}
        )

    @classmethod
    def from_json(cls, value: bytes) -> UsageReport:
        fields = _unpacked(value, "usage")
        return cls(*(_count(fields, name) for name in ("written", "removed", "largest_put")))

    def latest(self, other: UsageReport) -> UsageReport:
        """Returns the later of two records of one session: after etcd was restored it may hold the earlier one."""
        return UsageReport(
            max(self.written_bytes, other.written_bytes),
            max(self.removed_bytes, other.removed_bytes),
            max(self.largest_put_bytes, other.largest_put_bytes),
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """The value of ``gc/capacity``: the space of the root as a collector counts it, and what each node may write.

    Reports up to ``revision`` are counted. Each node may write ``credit_bytes`` beyond its last report among them;
    None: no limit, because the collector has not listed the root yet. ``is_full``: nothing can be evicted, so puts are
    refused.
    """

    revision: int
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    credit_bytes: int | None = None
    is_full: bool = False

    def to_json(self) -> bytes:
        return _packed(
            {
                "revision": self.revision,
                "used": self.used_bytes,
                "capacity": self.capacity_bytes,
                "credit": self.credit_bytes,
                "full": self.is_full,
            }
        )

    @classmethod
    def from_json(cls, value: bytes) -> Capacity:
        fields = _unpacked(value, "capacity")
        used, capacity, credit = (
            None if fields.get(name) is None else _count(fields, name) for name in ("used", "capacity", "credit")
        )
        is_full = fields.get("full") is True
        return cls(_count(fields, "revision"), used, capacity, credit, is_full)


def _packed(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _unpacked(value: bytes, what: str) -> dict[str, Any]:
    try:
        fields = parse_json(value)
    except ValueError as cause:
        raise InvalidRequest(f"not a record of {what}: {cause}") from cause
    if not isinstance(fields, dict):
        raise InvalidRequest(f"not a record of {what}: expected an object")
    return fields


def _count(fields: dict[str, Any], name: str) -> int:
    found = fields.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= BYTES_MAX:
        raise InvalidRequest(f"{name}={found!r}: expected a whole number from 0 to {BYTES_MAX}")
    return found
