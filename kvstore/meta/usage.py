"""Nodes' reports of the room that they take, and a collector's answer: ``usage/<session>``, ``gc/room``.

Safety does not depend on them. They keep the root below its limit between two surveys. A reader that cannot parse a
record treats it as absent. Section 6 of gc/PROTOCOL.md has the bound that follows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.parsing import parse_json

PACE_S_MAX = 60.0
BYTES_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Usage:
    """The value of ``usage/<session>``: bytes written to the root, and deleted from it, since the session began.

    Both counts only grow, so the larger of two records of one session is the later one. A survey that ran while both
    changed may omit deletions without omitting a write. ``pending_bytes`` are those of puts that have room and have not
    ended; some of them may be written, and counted, already. ``asked_bytes`` are those of puts that wait for room.
    ``is_bound``: a collector's word that counts the reporter allows it what it may write; no other word ends that.
    """

    written_bytes: int = 0
    removed_bytes: int = 0
    pending_bytes: int = 0
    asked_bytes: int = 0
    is_bound: bool = field(default=False, kw_only=True)

    def to_json(self) -> bytes:
        """Returns the stored form."""
        return _packed(
            {
                "written": self.written_bytes,
                "removed": self.removed_bytes,
                "pending": self.pending_bytes,
                "asked": self.asked_bytes,
                "bound": self.is_bound,
            }
        )

    @classmethod
    def from_json(cls, value: bytes) -> Usage:
        """Parses what ``to_json`` returned. Raises InvalidRequest for anything else."""
        fields = _unpacked(value, "usage")
        counts = (_count(fields, name) for name in ("written", "removed", "pending", "asked"))
        return cls(*counts, is_bound=fields.get("bound") is True)

    @property
    def taken_bytes(self) -> int:
        """Bytes written, pending and asked for."""
        return self.written_bytes + self.pending_bytes + self.asked_bytes

    def latest(self, other: Usage) -> Usage:
        """Returns the later of two records of one session. ``other`` was read after this one.

        After etcd was restored it may still be the earlier one.
        """
        written_bytes = max(self.written_bytes, other.written_bytes)
        removed_bytes = max(self.removed_bytes, other.removed_bytes)
        is_older = (other.written_bytes, other.removed_bytes) != (written_bytes, removed_bytes)
        later = self if is_older else other
        return replace(later, written_bytes=written_bytes, removed_bytes=removed_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """The value of ``gc/room``: how much a node may write before a collector has heard of it, and when to report.

    Reports up to ``revision`` are counted. Beyond its own last one among them a node may write ``allowance_bytes``;
    None: no limit yet. It reports when it has written ``step_bytes`` (None: once, when it sees the key) and at most
    every ``pace_s``.

    ``used_bytes`` of ``capacity_bytes`` were taken when it was written. That is for people: nodes ignore it.
    """

    revision: int
    allowance_bytes: int | None
    step_bytes: int | None
    pace_s: float
    used_bytes: int | None = None
    capacity_bytes: int | None = None

    def to_json(self) -> bytes:
        """Returns the stored form."""
        return _packed(
            {
                "revision": self.revision,
                "allowance": self.allowance_bytes,
                "step": self.step_bytes,
                "pace_s": self.pace_s,
                "used": self.used_bytes,
                "capacity": self.capacity_bytes,
            }
        )

    @classmethod
    def from_json(cls, value: bytes) -> Room:
        """Parses what ``to_json`` returned. Raises InvalidRequest for anything else."""
        fields = _unpacked(value, "room")
        try:
            pace_s = min(PACE_S_MAX, max(0.0, float(fields["pace_s"])))
        except (ValueError, KeyError, TypeError, OverflowError) as cause:
            raise InvalidRequest(f"not a record of room: {cause}") from cause
        allowance, step, used, capacity = (
            None if fields.get(name) is None else _count(fields, name)
            for name in ("allowance", "step", "used", "capacity")
        )
        return cls(_count(fields, "revision"), allowance, step, pace_s, used, capacity)


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
