"""Chunk images in the messages of ``Put`` and ``Get``, made at one end and verified at the other.

Each message carries bytes of one image, the content of a version 1 file (FORMAT.md, 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvstore.core.buffers import Pieces, byte_length, skip
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damage, Damaged, Expected, Incarnation, checksum, decode_as, encode
from kvstore.transport.limits import DATA_BYTES, MESSAGE_BYTES_MAX
from kvstore.transport.status import BrokenTransfer
from kvstore.v1 import kvstore_pb2 as pb

UNPUBLISHED = Incarnation(bytes(16))
"""The incarnation of an image on its way; the publisher sets its own."""


def image_messages(
    kind: type[pb.PutRequest] | type[pb.GetResponse], index: int, expected: Expected, sections: Pieces
) -> Iterator[bytes]:
    """Yields the encoded messages of one image, each made when it is requested."""
    header = encode(expected, UNPUBLISHED, list(map(checksum, sections)))
    left: Pieces = [memoryview(header), *sections]
    while left:
        yield kind(index=index, data=b"".join(_leading(left, DATA_BYTES))).SerializeToString()
        left = skip(left, DATA_BYTES)


def _leading(pieces: Pieces, count: int) -> Iterator[memoryview]:
    """Yields the first ``count`` bytes of ``pieces``."""
    for piece in pieces:
        yield piece[:count]
        count -= min(count, len(piece))


def receive_images(
    messages: Iterator[pb.PutRequest] | Iterator[pb.GetResponse],
    target: Callable[[int], tuple[Expected, Pieces]],
) -> Iterator[int]:
    """Reads images into the sections that ``target(index)`` returns; yields the index of each, verified.

    Raises BrokenTransfer for a damaged image, InvalidRequest for one of another length, and what ``target`` raises.
    """
    for message in messages:
        if data := _data(message):
            index = message.index
            image = _Image(index, data, messages)
            expected, sections = target(index)
            try:
                fill_verified(image.fill, expected, sections)
            except Damaged as damaged:
                raise BrokenTransfer(f"image {index} changed on the way ({damaged}): repeat the call") from damaged
            if image.left:
                raise InvalidRequest(f"image {index} has {len(image.left)} bytes more than expected")
            yield index


class _Image:
    """The bytes of one image: those of its first message, and of the messages that follow."""

    def __init__(self, index: int, data: memoryview, rest: Iterator[pb.PutRequest] | Iterator[pb.GetResponse]) -> None:
        self._index = index
        self.left = data
        """The bytes of the last message that were not copied."""
        self._rest = rest

    def fill(self, pieces: Pieces) -> int:
        """Copies the next bytes into ``pieces``, as many as one message has; returns how many."""
        while not self.left:
            message = next(self._rest, None)
            if message is None or message.index != self._index:
                raise InvalidRequest(f"the stream ended within image {self._index}")
            self.left = _data(message)
        filled = 0
        for piece in pieces:
            part = self.left[: len(piece)]
            # Assigning to a memoryview would hold the GIL.
            np.copyto(np.frombuffer(piece[: len(part)], np.uint8), np.frombuffer(part, np.uint8))
            self.left = self.left[len(part) :]
            filled += len(part)
            if not self.left:
                break
        return filled


def _data(message: pb.PutRequest | pb.GetResponse) -> memoryview:
    data = memoryview(message.data)  # each access copies
    if len(data) > MESSAGE_BYTES_MAX:
        raise InvalidRequest(
            f"a message has {len(data)} bytes of data, over the limit of {MESSAGE_BYTES_MAX}: send smaller ones"
        )
    return data


def fill_verified(fill: Callable[[Pieces], int], expected: Expected, sections: Pieces) -> None:
    """Reads the file of a chunk into ``sections`` with ``fill``, which writes into pieces and returns how much.

    Raises Damaged, and what ``fill`` raises.
    """
    raw = bytearray(expected.header_bytes)
    header: Pieces = [memoryview(raw)]
    while header:
        header = skip(header, fill(header))
    sums, size = decode_as(raw, expected).checksums, expected.section_bytes
    left, wanted, received, verified = sections, byte_length(sections), 0, 0
    while received < wanted:
        count = fill(left)
        received += count
        left = skip(left, count)
        whole = received // size
        if tuple(map(checksum, sections[verified:whole])) != sums[verified:whole]:
            raise Damaged(Damage.SECTION_CHECKSUM)
        verified = whole
