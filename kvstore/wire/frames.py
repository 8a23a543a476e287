"""Messages of data, encoded and decoded by hand: one copy on the way out, none on the way in; and streams of them.

The generated classes copy the payload twice in each direction. This module reads and writes plain protobuf, with the
field numbers of ``PutRequest``, ``GetResponse`` and the messages for blocks, which agree: 1 ``start`` or ``hits``, 2
``checksums``, 3 ``data``; and the seal of field 1. A test compares it with the generated classes.

A stream carries parts (sections or blocks), each with its checksum, which is in the frame that has the part's last
byte. A frame may begin and end anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.format.checksum import checksum
from kvstore.wire.limits import FRAME_BYTES, MESSAGE_BYTES_MAX
from kvstore.wire.messages import SEAL_FIELD, seal
from kvstore.wire.statuses import BrokenTransfer

_NOTHING = memoryview(b"")
_START, _CHECKSUMS, _DATA = 1, 2, 3
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT = 0
VARINT_BYTES_MAX = 10
_SUM = struct.Struct("<Q")
_ROOM_BYTES = MESSAGE_BYTES_MAX - 1024  # tags and lengths count as well


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


def encode_parts(
    parts: Iterable[memoryview], start: bytes | None = None, frame_bytes: int = FRAME_BYTES
) -> Iterator[bytes]:
    """Yields the messages that carry ``parts``, the first with ``start``; none for no parts and no start.

    A message is made, and its bytes copied, when it is asked for; no part is looked at later than that.
    """
    pieces: list[memoryview] = []
    sums = bytearray()
    size = len(start or b"")
    for part in parts:
        at = 0
        while at < len(part):
            # Data alone fills a message, so that sections of a power of two are not cut; messages of tiny parts are all
            # checksums.
            room = min(frame_bytes - size, _ROOM_BYTES - size - len(sums) - _SUM.size)
            if room <= 0:
                yield encode_frame(pieces, bytes(sums), start)
                start, size = None, 0
                pieces, sums = [], bytearray()
                continue
            piece = part[at : at + room]
            pieces.append(piece)
            size += len(piece)
            at += len(piece)
        sums += _SUM.pack(checksum(part))
    if pieces or start is not None:
        yield encode_frame(pieces, bytes(sums), start)


class Incoming:
    """Joins the frames of one stream into parts of the given sizes, and verifies their checksums.

    With ``memory`` each part is written into ``memory(index)``, which has its size. Without it, a part is a view of its
    frame, or has memory of its own if it came in several frames.
    """

    __slots__ = ("_filled", "_memory", "_partial", "_sizes", "complete")

    def __init__(self, sizes: Sequence[int], memory: Callable[[int], memoryview] | None = None) -> None:
        self._sizes = sizes
        self._memory = memory
        self._partial: memoryview | None = None
        self._filled = 0
        self.complete = 0
        """Number of leading parts that came and are verified."""

    @property
    def is_done(self) -> bool:
        """True if all parts came."""
        return self.complete == len(self._sizes)

    def feed(self, frame: Frame) -> Iterator[memoryview]:
        """Yields the parts that a frame completes, in order.

        Raises BrokenTransfer if one does not match its checksum, InvalidRequest for bytes behind the last part, or if
        the number of checksums differs from the number of parts that end here.
        """
        data, sums = frame.data, frame.checksums
        at = used = 0
        while at < len(data):
            if self.complete == len(self._sizes):
                raise InvalidRequest(f"the stream has {len(data) - at} bytes more than its {self.complete} parts")
            size = self._sizes[self.complete]
            taken = data[at : at + size - self._filled]
            at += len(taken)
            if self._filled + len(taken) < size:
                self._append(taken, size)
                continue
            if used + _SUM.size > len(sums):
                raise InvalidRequest(f"a message has no checksum for part {self.complete}, whose last byte is in it")
            part = self._completed(taken, size, _SUM.unpack_from(sums, used)[0])
            used += _SUM.size
            yield part
        if used != len(sums):
            raise InvalidRequest(
                f"a message has {len(sums)} bytes of checksums: expected {used}, for parts ending in it"
            )

    def _append(self, piece: memoryview, size: int) -> None:
        if self._partial is None:
            self._partial = self._memory(self.complete) if self._memory else memoryview(bytearray(size))
        copy_bytes(self._partial[self._filled : self._filled + len(piece)], piece)
        self._filled += len(piece)

    def _completed(self, piece: memoryview, size: int, expected: int) -> memoryview:
        if self._partial is None and checksum(piece) == expected:
            part = piece
            if self._memory:
                part = self._memory(self.complete)
                copy_bytes(part, piece)
        elif self._partial is not None:
            self._append(piece, size)
            part, self._partial, self._filled = self._partial, None, 0
            if checksum(part) != expected:
                raise self._mismatch()
        else:
            raise self._mismatch()
        self.complete += 1
        return part

    def _mismatch(self) -> BrokenTransfer:
        return BrokenTransfer(
            f"part {self.complete} of the stream does not match its checksum: bytes changed on the way; repeat the call"
        )


class SameSize(Sequence[int]):
    """A sequence of ``count`` equal sizes, without a list of them."""

    __slots__ = ("_count", "_size")

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> int:  # type: ignore[override]  # slices are not asked for
        return self._size


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies without the interpreter's lock, which assigning to a memoryview would hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


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
