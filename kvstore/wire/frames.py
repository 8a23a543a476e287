"""Encodes and decodes messages of data by hand: one copy on the way out, none on the way in.

The generated classes copy the payload twice in each direction. This module reads and writes plain protobuf, with the
field numbers of ``PutRequest``, ``GetResponse`` and the messages for blocks, which agree: 1 ``start`` or ``hits``, 2
``checksums``, 3 ``data``; and the seal of field 1. A test compares it with the generated classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.wire.limits import MESSAGE_BYTES_MAX
from kvstore.wire.messages import SEAL_FIELD, seal
from kvstore.wire.statuses import BrokenTransfer

_NOTHING = memoryview(b"")
_START, _CHECKSUMS, _DATA = 1, 2, 3
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT = 0
VARINT_BYTES_MAX = 10


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a stream: views of the bytes it came in; ``start`` is None if it has none."""

    start: bytes | None
    checksums: memoryview
    data: memoryview


def encode_frame(data: Sequence[memoryview] = (), checksums: bytes = b"", start: bytes | None = None) -> bytes:
    """Encodes a message of data; ``start`` is the encoded message, or the bytes, of field 1."""
    pieces: list[bytes | memoryview] = []
    if start is not None:
        pieces += [_head(_START, len(start)), start, seal(start)]
    if checksums:
        pieces += [_head(_CHECKSUMS, len(checksums)), checksums]
    size = sum(map(len, data))
    if size:
        pieces += [_head(_DATA, size), *data]
    return b"".join(pieces)


def decode_frame(message: bytes) -> Frame:
    """Decodes a message of data.

    Raises InvalidRequest if it is not one, or too large; BrokenTransfer if it does not match its seal.
    """
    view = memoryview(message)
    found: dict[int, memoryview] = {}
    at, end, sealed = 0, len(view), b""
    while at < end:
        began = at
        tag, at = _varint(view, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size, at = _varint(view, at)
            if size > end - at:
                raise InvalidRequest("a message of the stream is not protobuf: a field is longer than the message")
            found[number] = view[at : at + size]
            at += size
        elif wire_type == _VARINT:
            _, at = _varint(view, at)
        elif wire_type in _FIXED_BYTES and at + _FIXED_BYTES[wire_type] <= end:
            at += _FIXED_BYTES[wire_type]
            if number == SEAL_FIELD:
                sealed = bytes(view[began:at])
        else:
            raise InvalidRequest(f"a message of the stream is not protobuf: field {number} has wire type {wire_type}")
    start = found.get(_START)
    if sealed and sealed != seal(bytes(start or b"")):
        raise BrokenTransfer("a message of the stream changed on the way: repeat the call")
    frame = Frame(None if start is None else bytes(start), found.get(_CHECKSUMS, _NOTHING), found.get(_DATA, _NOTHING))
    size = len(frame.checksums) + len(frame.data)
    if size > MESSAGE_BYTES_MAX:
        raise InvalidRequest(
            f"a message has {size} bytes of data, over the limit of {MESSAGE_BYTES_MAX}: send smaller ones"
        )
    return frame


def _head(field: int, size: int) -> bytes:
    """Returns tag and length of a length-delimited field."""
    head = bytearray([field << 3 | _LENGTH_DELIMITED])
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for position, byte in enumerate(view[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, at + position + 1
    raise InvalidRequest("a message of the stream is not protobuf: a number has no end")
