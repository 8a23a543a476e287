"""Encodes and decodes the frames of the bulk protocol and their short payloads. BULK.md has the rules."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.wire.limits import REQUEST_BYTES_MAX

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
"""Limit of chunks in one WANT, and so of files in one FILES frame; the kernel allows 253."""


class Kind(enum.IntEnum):
    """The kinds of frames. Below 64 from client to worker, above from worker to client."""

    HELLO = 1
    ARENA = 2
    GET = 3
    WANT = 4
    READ = 5
    PUT = 6
    PLACED = 7
    CHUNKS = 8
    MAP = 9
    CALL = 12

    WELCOME = 64
    START = 65
    FILES = 66
    FILE = 67
    END = 68
    READY = 69
    STORED = 70
    REFUSED = 71
    MEMORY = 72
    SLOTS = 73
    ABSENT = 74
    ELSEWHERE = 75
    LAYER = 76
    ANSWER = 77


REQUESTS = (Kind.GET, Kind.PUT, Kind.CALL)
BULKY = (Kind.FILE, Kind.CHUNKS, Kind.LAYER)
SHORT_CALLS = ("MatchBlocks", "FindSegments", "Hold", "Release")
"""The calls that a CALL can be, in the order of their numbers: those that an engine waits for before it reads."""


@dataclass(frozen=True, slots=True)
class Head:
    """The 16 bytes before each payload."""

    kind: Kind
    request: int
    length: int


class Mode(enum.IntEnum):
    """The ways to answer a GET."""

    STREAM = 0
    FILES = 1
    SLOTS = 2


@dataclass(frozen=True, slots=True)
class Request:
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
class Given:
    """Consecutive chunks from index ``first`` on lie in the worker's memory, each whole image from its offset on."""

    first: int
    offsets: tuple[int, ...]


_REQUEST = struct.Struct("<dB7x")
_SPAN = struct.Struct("<II")
_PLACED = struct.Struct("<IIQ")
SPAN_BYTES = _SPAN.size
READY = struct.Struct("<III")
"""Payload of READY: the first chunk and the number of those to send, and the bytes that may go together."""
_ARENA = struct.Struct("<Q")
_INDEX = struct.Struct("<I4x")
INDEX_BYTES = _INDEX.size


def encode_head(kind: Kind, request: int, length: int) -> bytes:
    """Encodes the head of a frame."""
    return HEAD.pack(MAGIC, kind, request, length)


def decode_head(raw: bytes | bytearray | memoryview) -> Head:
    """Decodes a head. Raises InvalidRequest if it is not one, or if its payload is larger than its kind may have."""
    magic, number, request, length = HEAD.unpack(raw)
    if magic != MAGIC or number not in Kind._value2member_map_:
        raise InvalidRequest("the peer sent bytes that are not a frame of the bulk protocol: the connection is closed")
    kind = Kind(number)
    most = REQUEST_BYTES_MAX if kind in REQUESTS or kind is Kind.ANSWER else CONTROL_BYTES_MAX
    if kind not in BULKY and length > most:
        raise InvalidRequest(f"a {kind.name} frame claims {length} bytes: expected at most {most}")
    return Head(kind, request, length)


def file_in(raw: memoryview, request: int) -> tuple[int, int]:
    """Returns the index in the request's FILE frame that ``raw`` begins with, and the bytes that follow the index.

    The bytes are negative if another frame begins there; the index is right only if it came.
    """
    magic, kind, number, length = HEAD.unpack_from(raw)
    if (magic, kind, number) != (MAGIC, Kind.FILE, request):
        return -1, -1
    index = _INDEX.unpack_from(raw, HEAD_BYTES)[0] if len(raw) >= HEAD_BYTES + INDEX_BYTES else -1
    return index, length - INDEX_BYTES


def encode_request(timeout_s: float, flag: int, message: bytes) -> bytes:
    """Encodes the payload of a request."""
    return _REQUEST.pack(timeout_s, flag) + message


def decode_request(payload: bytes) -> Request:
    """Decodes the payload of a request. Raises InvalidRequest."""
    if len(payload) < _REQUEST.size:
        raise InvalidRequest(f"a request has {len(payload)} bytes: expected at least {_REQUEST.size}")
    timeout_s, flag = _REQUEST.unpack_from(payload)
    if not timeout_s > 0:
        raise InvalidRequest(f"the timeout of a request is {timeout_s}: expected more than 0 seconds")
    return Request(timeout_s, flag, payload[_REQUEST.size :])


def encode_span(first: int, count: int) -> bytes:
    """Encodes the payload of WANT, READ, FILES, ABSENT and ELSEWHERE, which also begins that of CHUNKS."""
    return _SPAN.pack(first, count)


def decode_span(payload: bytes) -> tuple[int, int]:
    """Decodes the payload of ``encode_span``. Raises InvalidRequest."""
    first, count = unpacked(_SPAN, payload)
    return first, count


def encode_slots(given: Given) -> bytes:
    """Encodes the payload of SLOTS."""
    count = len(given.offsets)
    return _SPAN.pack(given.first, count) + struct.pack(f"<{count}Q", *given.offsets)


def decode_slots(payload: bytes) -> Given:
    """Decodes the payload of SLOTS. Raises InvalidRequest."""
    first, count = decode_span(payload[:SPAN_BYTES])
    if not 1 <= count <= FILES_MAX or len(payload) != SPAN_BYTES + 8 * count:
        raise InvalidRequest(f"{count} slots came in {len(payload)} bytes: expected 1 to {FILES_MAX}, of 8 bytes each")
    return Given(first, struct.unpack_from(f"<{count}Q", payload, SPAN_BYTES))


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


def encode_index(index: int) -> bytes:
    """Encodes the index before the bytes in FILE and LAYER: that of the chunk in the prompt, or of the layer."""
    return _INDEX.pack(index)


def decode_index(payload: bytes | bytearray | memoryview) -> int:
    """Decodes that index. Raises InvalidRequest."""
    return unpacked(_INDEX, bytes(payload))[0]


def unpacked(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """Unpacks a payload of exactly this structure. Raises InvalidRequest."""
    if len(payload) != layout.size:
        raise InvalidRequest(f"a frame has {len(payload)} bytes: expected {layout.size}")
    return layout.unpack(payload)
