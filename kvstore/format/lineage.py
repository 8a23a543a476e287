"""Lineage: an incarnation says who published a chunk and when, and a record says who that writer was.

Separate from headers, which carry the 16 bytes and do not look into them. ``FORMAT.md`` is the normative description.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NewType

from kvstore.brief import brief
from kvstore.errors import InvalidRequest
from kvstore.format.header import Incarnation
from kvstore.parsing import parse_json

LineageId = NewType("LineageId", bytes)

LINEAGE_BYTES = 8
SESSION_BYTES = 16
RECORD_BYTES_MAX = 4096
LABEL_BYTES_MAX = 256
"""Keeps a record under ``RECORD_BYTES_MAX``, above which nobody reads it."""
_PARTS = struct.Struct(f"<{LINEAGE_BYTES}sII")
_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Written:
    """The content of an incarnation. It means nothing if the writer has no record: then it may be 16 random bytes."""

    lineage: LineageId
    written_s: int
    """Seconds since the epoch, by the writer's clock."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a lineage: one session of one node."""

    session: str
    """32 hexadecimal digits."""
    node: str
    """Id of the node, which may have several sessions one after another; 32 hexadecimal digits."""
    host: str
    pid: int
    version: str
    """Version of kvstore."""
    started_s: float
    """Time of the session's first write, in seconds since the epoch."""
    python: str = ""
    label: str = ""
    """The operator's name for this roll-out."""
    identity: str = ""

    def to_json(self) -> bytes:
        """Returns the record's content on the root."""
        return json.dumps(asdict(self), sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> Writer:
        """Parses what ``to_json`` returned; ignores newer fields. Raises InvalidRequest for anything else."""
        try:
            fields = parse_json(content)
            texts = {name: _text(fields.get(name, "")) for name in ("host", "version", "python", "label", "identity")}
            session, node = str(fields["session"]), _text(fields["node"])
            if len(bytes.fromhex(session)) != SESSION_BYTES or session != session.lower():
                raise ValueError(f"session {session!r}")
            return cls(
                session=session, node=node, pid=int(fields["pid"]), started_s=float(fields["started_s"]), **texts
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as cause:
            raise InvalidRequest(f"not a writer's record: {cause}") from cause

    @property
    def lineage(self) -> LineageId:
        """The lineage under which its chunks are written."""
        return lineage_id(bytes.fromhex(self.session))


Writers = Mapping[LineageId, Writer]


def check_label(label: str) -> None:
    """Raises InvalidRequest for a label under which nobody could find a roll-out again."""
    if not isinstance(label, str) or not label.isprintable() or len(label.encode()) > LABEL_BYTES_MAX:
        raise InvalidRequest(f"label {brief(label)}: expected printable text, at most {LABEL_BYTES_MAX} bytes of it")


def lineage_id(session: bytes) -> LineageId:
    """Returns the lineage of everything that a session publishes."""
    return LineageId(hashlib.blake2b(session, digest_size=LINEAGE_BYTES, person=b"kvstore.writer.1").digest())


def incarnation(lineage: LineageId, written_s: float, number: int) -> Incarnation:
    """Returns the incarnation of a publication; the session counts ``number`` up from a random start."""
    return Incarnation(_PARTS.pack(lineage, int(written_s) & _U32, number & _U32))


def written(found: Incarnation) -> Written | None:
    """Decodes an incarnation; None for one that was cut short."""
    if len(found) != _PARTS.size:
        return None
    lineage, written_s, _ = _PARTS.unpack(found)
    return Written(LineageId(lineage), written_s)


def renewed(found: Incarnation, number: int) -> Incarnation:
    """Returns the incarnation of a chunk that is published again: same writer and time, a fresh number."""
    lineage, written_s, _ = _PARTS.unpack(found)
    return Incarnation(_PARTS.pack(lineage, written_s, number & _U32))


def _text(value: object) -> str:
    """Returns a record's text as valid UTF-8: half a surrogate pair, which JSON allows, fits into no message."""
    return str(value).encode(errors="replace").decode()
