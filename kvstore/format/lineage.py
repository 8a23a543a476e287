"""Lineage: what an incarnation says of who published a chunk and when, and the record that says who that was.

Apart from headers, which carry the 16 bytes and do not look into them.  ``FORMAT.md`` is the normative description.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NewType

from kvstore.errors import InvalidRequest
from kvstore.format.header import Incarnation

LineageId = NewType("LineageId", bytes)

LINEAGE_BYTES = 8
SESSION_BYTES = 16
RECORD_BYTES_MAX = 4096
LABEL_BYTES_MAX = 256
"""So that a record never gets over ``RECORD_BYTES_MAX``, beyond which nobody reads it."""
_PARTS = struct.Struct(f"<{LINEAGE_BYTES}sII")
_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Written:
    """What an incarnation says. Of a writer without a record it means nothing: such may be 16 random bytes."""

    lineage: LineageId
    written_s: int
    """Seconds since the epoch, by the writer's clock."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote under a lineage: one session of one node."""

    session: str
    """32 hexadecimal digits."""
    node: str
    """The same of the node, which may have several sessions one after another."""
    host: str
    pid: int
    version: str
    """Of kvstore."""
    started_s: float
    """When the session first wrote; seconds since the epoch."""
    python: str = ""
    label: str = ""
    """What its operator calls this roll-out."""
    identity: str = ""

    def to_json(self) -> bytes:
        """As on the root."""
        return json.dumps(asdict(self), sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> Writer:
        """The inverse; fields that this version does not know are ignored. Raises InvalidRequest for anything else."""
        try:
            fields = json.loads(content)
            texts = {name: _text(fields.get(name, "")) for name in ("host", "version", "python", "label", "identity")}
            session, node = str(fields["session"]), _text(fields["node"])
            if len(bytes.fromhex(session)) != SESSION_BYTES or session != session.lower():
                raise ValueError(f"session {session!r}")
            return cls(
                session=session, node=node, pid=int(fields["pid"]), started_s=float(fields["started_s"]), **texts
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as cause:
            raise InvalidRequest(f"not a writer's record: {cause}") from cause

    @property
    def lineage(self) -> LineageId:
        """Under which its chunks are written."""
        return lineage_id(bytes.fromhex(self.session))


Writers = Mapping[LineageId, Writer]


def check_label(label: str) -> None:
    """Raises InvalidRequest where a roll-out cannot be called that: it would never be found again by its name."""
    if not label.isprintable() or len(label.encode()) > LABEL_BYTES_MAX:
        raise InvalidRequest(
            f"label {label[:64]!r}{'...' if len(label) > 64 else ''}: expected printable text, at most "
            f"{LABEL_BYTES_MAX} bytes of it"
        )


def lineage_id(session: bytes) -> LineageId:
    """The lineage of all that a session publishes."""
    return LineageId(hashlib.blake2b(session, digest_size=LINEAGE_BYTES, person=b"kvstore.writer.1").digest())


def incarnation(lineage: LineageId, written_s: float, number: int) -> Incarnation:
    """The incarnation of a publication; ``number`` is counted by the session, from a random one on."""
    return Incarnation(_PARTS.pack(lineage, int(written_s) & _U32, number & _U32))


def written(found: Incarnation) -> Written | None:
    """What an incarnation says; None of one that was cut short."""
    if len(found) != _PARTS.size:
        return None
    lineage, written_s, _ = _PARTS.unpack(found)
    return Written(LineageId(lineage), written_s)


def renewed(found: Incarnation, number: int) -> Incarnation:
    """The incarnation of a chunk that is published once more: written by the same, then; only the number is fresh."""
    lineage, written_s, _ = _PARTS.unpack(found)
    return Incarnation(_PARTS.pack(lineage, written_s, number & _U32))


def _text(value: object) -> str:
    """What a record says, as UTF-8 can say it: half a surrogate pair, which JSON allows, fits into no message."""
    return str(value).encode(errors="replace").decode()
