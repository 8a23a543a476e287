"""Parts (sections or blocks) as frames of a stream and back, each with its checksum. Both ends use both directions.

A frame may begin and end anywhere; the checksum of a part is in the frame that has its last byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.format.checksum import checksum
from kvstore.wire.frames import Frame, encode_frame
from kvstore.wire.limits import FRAME_BYTES, MESSAGE_BYTES_MAX
from kvstore.wire.statuses import BrokenTransfer

_SUM = struct.Struct("<Q")
_ROOM_BYTES = MESSAGE_BYTES_MAX - 1024  # tags and lengths count as well


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
