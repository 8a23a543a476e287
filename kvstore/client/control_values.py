"""Messages of the control service as values, and selections as messages.

Separate from the calls, which decide whom to ask.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from kvstore.address import Address
from kvstore.census.selection import Selection, checked_selection
from kvstore.format.header import Encoding
from kvstore.node.looking import ChunkPlace, Lineage, MemoryCopy, RootCopy
from kvstore.results import LimitValue
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.messages import hints_of


def plain(message: Message) -> dict[str, Any]:
    """Returns a message as a dict of its fields: bytes in hex, absent messages as None."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            found[field.name] = plain(value) if message.HasField(field.name) else None
        elif isinstance(value, bytes):
            found[field.name] = value.hex()
        else:
            found[field.name] = value if isinstance(value, bool | int | float | str) else list(value)
    return found


def selection_message(selection: Selection) -> pb.Selection:
    """Returns the message for a selection. Raises InvalidRequest for anything else."""
    checked_selection(selection)
    return pb.Selection(
        namespace=selection.namespace or b"",
        tenant=selection.tenant,
        fingerprint=selection.fingerprint,
        older_than_s=selection.older_than_s,
        written_by=selection.written_by,
        since_s=selection.since_s,
        until_s=selection.until_s,
    )


def limits_of(raw: bytes) -> list[LimitValue]:
    """Returns the limits in an encoded ``LimitsResponse``."""
    return [
        LimitValue(each.name, each.value, each.meaning, each.started, each.before)
        for each in pb.LimitsResponse.FromString(raw).limits
    ]


def place_of(message: pb.ChunkPlace) -> ChunkPlace:
    """Returns the place of one chunk."""
    memory = message.memory
    return ChunkPlace(
        message.index,
        Address(message.address),
        _root_copy(message.root) if message.HasField("root") else None,
        MemoryCopy(memory.bytes, memory.dirty, memory.users) if message.HasField("memory") else None,
        message.disk,
        tuple(message.peers),
        message.pins if message.HasField("pins") else None,
    )


def _root_copy(message: pb.RootCopy) -> RootCopy:
    by = message.lineage
    encoding = Encoding.COMPRESSED if message.compressed else Encoding.PLAIN
    encoding |= Encoding.ENCRYPTED if message.encrypted else Encoding.PLAIN
    lineage = Lineage(by.written_s, by.session, by.node, by.host, by.version, by.label)
    return RootCopy(
        message.bytes,
        message.last_use_s,
        message.uses,
        hints_of(message.hints),
        encoding,
        message.key_id,
        lineage if message.HasField("lineage") else None,
        message.condemned,
    )
