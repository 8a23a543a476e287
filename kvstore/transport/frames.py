"""Encodes and decodes the frames of the bulk protocol and their short payloads. BULK.md has the rules."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.transport.limits import REQUEST_BYTES_MAX

VERSION = 1
MAGIC = b"KV"
HEAD = struct.Struct("<2sHIQ")
HEAD_BYTES = HEAD.size
CONTROL_BYTES_MAX = 128 << 10
"""Limit of a payload that is neither a request nor bytes of chunks."""
RUN_BYTES = 8 << 20
"""Bytes of several chunks that go together, unless there is reason for more."""
RUN_BYTES_MAX = 32 << 20
"""Limit of what READY allows for several chunks in one CHUNKS frame; one chunk alone may be larger."""
FILES_MAX = 64
"""Limit of files in one FILES frame; the kernel allows 253."""
FILES_AHEAD = 2
"""FILES frames that a worker sends before the client has taken the first of them."""
NOT_LENT = (1 << 64) - 1
"""The offset in SLOTS of a chunk that is not lent."""


class FrameKind(enum.IntEnum):
    """The kinds of frames. Below 64 from client to worker, above from worker to client."""

    HELLO = 1
    ARENA = 2
    GET = 3
    TAKEN = 4
    PUT = 6
    PLACED = 7
    CHUNKS = 8
    MAP = 9
    CALL = 12

    WELCOME = 64
    SLOTS = 65
    FILES = 66
    IMAGES = 67
    END = 68
    READY = 69
    STORED = 70
    REFUSED = 71
    MEMORY = 72
    ANSWER = 77


REQUESTS = (FrameKind.GET, FrameKind.PUT, FrameKind.CALL)
BULKY = (FrameKind.IMAGES, FrameKind.CHUNKS)
SHORT_CALLS = ("MatchBlocks", "Hold", "Release")
"""The calls that a CALL can be, in the order of their numbers: those that an engine waits for before it reads."""


@dataclass(frozen=True, slots=True)
class Head:
    """The 16 bytes before each payload."""

    kind: FrameKind
    request: int
    length: int


class Mode(enum.IntEnum):
    """The most that the client of a GET takes."""

    STREAM = 0
    """Images as bytes."""
    FILES = 1
    """Also open files of chunks that are not in memory."""
    SLOTS = 2
    """Also slots of the memory that it has mapped."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The fields before the message in a request."""

    timeout_s: float
    flag: int
    """A get's mode; of a put whether it is acknowledged when all of it has come; of a call its number."""
    message: bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """A run of ``count`` chunks from index ``first`` on lies in the arena from ``offset`` on."""

    first: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class LentSlots:
    """``found`` chunks are there; the image of each from index ``first`` on is at its offset in the worker's memory."""

    found: int
    first: int
    offsets: Sequence[int]
    """NOT_LENT for a chunk that comes in another frame, if at all."""


_REQUEST = struct.Struct("<dB7x")
_SPAN = struct.Struct("<II")
_PLACED = struct.Struct("<IIQ")
SPAN_BYTES = _SPAN.size
READY = struct.Struct("<III")
"""Payload of READY: the first chunk and the number of those to send, and the bytes that may go together."""
_ARENA = struct.Struct("<Q")


def encode_head(kind: FrameKind, request: int, length: int) -> bytes:
    """Encodes the head of a frame."""
    return HEAD.pack(MAGIC, kind, request, length)


def decode_head(raw: bytes | bytearray | memoryview) -> Head:
    """Decodes a head. Raises InvalidRequest if it is not one, or if its payload is larger than its kind may have."""
    magic, number, request, length = HEAD.unpack(raw)
    if magic != MAGIC or number not in FrameKind._value2member_map_:
        raise InvalidRequest("the peer sent bytes that are not a frame of the bulk protocol: the connection is closed")
    kind = FrameKind(number)
    most = REQUEST_BYTES_MAX if kind in REQUESTS or kind is FrameKind.ANSWER else CONTROL_BYTES_MAX
    if kind not in BULKY and length > most:
        raise InvalidRequest(f"a {kind.name} frame claims {length} bytes: expected at most {most}")
    return Head(kind, request, length)


def encode_request(timeout_s: float, flag: int, message: bytes) -> bytes:
    """Encodes the payload of a request."""
    return _REQUEST.pack(timeout_s, flag) + message


def decode_request(payload: bytes) -> RequestHeader:
    """Decodes the payload of a request. Raises InvalidRequest."""
    if len(payload) < _REQUEST.size:
        raise InvalidRequest(f"a request has {len(payload)} bytes: expected at least {_REQUEST.size}")
    timeout_s, flag = _REQUEST.unpack_from(payload)
    if not timeout_s > 0:
        raise InvalidRequest(f"the timeout of a request is {timeout_s}: expected more than 0 seconds")
    return RequestHeader(timeout_s, flag, payload[_REQUEST.size :])


def encode_span(first: int, count: int) -> bytes:
    """Encodes the payload of FILES, which also begins that of IMAGES and CHUNKS."""
    return _SPAN.pack(first, count)


def decode_span(payload: bytes) -> tuple[int, int]:
    """Decodes the payload of ``encode_span``. Raises InvalidRequest."""
    first, count = unpacked(_SPAN, payload)
    return first, count


def encode_slots(lent: LentSlots) -> bytes:
    """Encodes the payload of SLOTS."""
    return _SPAN.pack(lent.found, lent.first) + struct.pack(f"<{len(lent.offsets)}Q", *lent.offsets)


def decode_slots(payload: bytes) -> LentSlots:
    """Decodes the payload of SLOTS. Raises InvalidRequest."""
    found, first = decode_span(payload[:SPAN_BYTES])
    count, rest = divmod(len(payload) - SPAN_BYTES, 8)
    if rest or first + count > found:
        raise InvalidRequest(f"{count} slots from chunk {first} on came, and {rest} bytes: expected those of {found}")
    return LentSlots(found, first, struct.unpack_from(f"<{count}Q", payload, SPAN_BYTES))


def encode_arena(size_bytes: int) -> bytes:
    """Encodes the payload of ARENA and MEMORY."""
    return _ARENA.pack(size_bytes)


def decode_arena(payload: bytes) -> int:
    """Decodes the payload of ARENA and MEMORY. Raises InvalidRequest."""
    return unpacked(_ARENA, payload)[0]


def encode_placed(placed: Placed) -> bytes:
    """Encodes the payload of PLACED."""
    return _PLACED.pack(placed.first, placed.count, placed.offset)


def decode_placed(payload: bytes) -> Placed:
    """Decodes the payload of PLACED. Raises InvalidRequest."""
    first, count, offset = unpacked(_PLACED, payload)
    return Placed(first, count, offset)


def unpacked(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """Unpacks a payload of exactly this structure. Raises InvalidRequest."""
    if len(payload) != layout.size:
        raise InvalidRequest(f"a frame has {len(payload)} bytes: expected {layout.size}")
    return layout.unpack(payload)
