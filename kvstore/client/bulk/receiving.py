"""Whole images that a worker streams, verified while they are in the cache: straight in the caller's memory, or, small
ones, several at a time in a buffer from which they are copied on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.buffers import Borrowed
from kvstore.client.bulk.links import Link
from kvstore.format.header import Damage, Damaged
from kvstore.native import library as native
from kvstore.node.images import ImagesIn, take_images
from kvstore.node.wanted import Items, Wanted, expected_of, image_sizes
from kvstore.sections import Laid, Sections
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import HEAD_BYTES, INDEX_BYTES, Head, Kind, decode_index, file_in
from kvstore.wire.images import fill_verified

GROUP_BYTES = 1 << 20
"""Small images that are received together: so few that they are in the cache when they are copied on."""
_BEFORE_BYTES = HEAD_BYTES + INDEX_BYTES


@dataclass(frozen=True, slots=True)
class Ask:
    """The chunks that one request asks for: those of ``wanted`` from ``first`` up to ``stop``.

    The worker's answer has the indexes of ``wanted``, and so does ``sections``.
    """

    number: int
    """The request's."""
    wanted: Wanted
    first: int
    stop: int
    sections: Sections
    places: Sequence[int]
    """Where the caller counts each of them."""


class ImageReceiver:
    """The images of one request as they come, in whatever order; ``done[place]`` is 1 for those that are in place.

    ``done`` is up to date whatever is raised.
    """

    def __init__(self, link: Link, asked: Ask, done: bytearray) -> None:
        self._link = link
        self._asked = asked
        self._done = done
        self._sizes = image_sizes(asked.wanted, range(asked.stop))
        self._awaited = bytearray(asked.first) + b"\1" * (asked.stop - asked.first)
        self._small_max = GROUP_BYTES // 2 - _BEFORE_BYTES
        """Images of at most this size are received several at a time."""
        self._small_count = sum(size <= self._small_max for size in self._sizes[asked.first :])
        self._buffer = memoryview(b"")
        self._natively: Natively | None = None

    def receive(self) -> bool:
        """Reads up to the end of the stream, which may come before all images have.

        False if one is not right: then the connection has no more use. Raises LinkBroken, LinkLate, BulkRefused.
        """
        link, number = self._link, self._asked.number
        while True:
            is_right = not self._small_count or self._receive_small()
            if is_right:
                head = link.receive_head(Kind.FILE, Kind.END)
                if head.request != number:
                    raise link.channel.break_off(f"a frame of request {head.request} came: expected {number}")
                if head.kind is Kind.END:
                    link.channel.receive(head.length)
                    return True
                is_right = self._receive_large(head)
            if not is_right:
                link.channel.alive = False  # what follows was not read, perhaps from the middle of a frame on
                return False

    def _receive_small(self) -> bool:
        """Reads small images up to the last one, or to another frame, which is left. False if one is not right."""
        if not self._buffer:
            # Without room for a part of an image at the end, if all have one size: it would be moved to the front.
            sizes = self._sizes[self._asked.first :]
            record_bytes = _BEFORE_BYTES + next(size for size in sizes if size <= self._small_max)
            self._buffer = memoryview(bytearray(GROUP_BYTES - GROUP_BYTES % record_bytes))
        is_right, is_other = True, False
        while is_right and self._small_count and not is_other:
            starts: dict[int, int] = {}
            try:
                is_other = self._receive_group(starts)
            finally:
                is_right = self._take(starts)  # also what came before the connection was found to be no good
        return is_right

    def _receive_group(self, starts: dict[int, int]) -> bool:
        """Fills the buffer with small images; sets where each lies. True if another frame came, which is left."""
        channel, buffer, at, filled, is_other = self._link.channel, self._buffer, 0, 0, False
        while self._small_count and filled < len(buffer) and not is_other:
            filled += channel.receive_some([buffer[filled:]])
            # Each head is looked at as soon as it came: behind another frame there may be nothing.
            while filled - at >= HEAD_BYTES:
                index, size_bytes = file_in(buffer[at:filled], self._asked.number)
                is_other = not 0 <= size_bytes <= self._small_max
                if is_other or at + _BEFORE_BYTES + size_bytes > filled:
                    break
                self._accept(index, size_bytes)
                self._small_count -= 1
                starts[index] = at + _BEFORE_BYTES
                at += _BEFORE_BYTES + size_bytes
        if at < filled:
            channel.give_back(memoryview(bytes(buffer[at:filled])))
        return is_other

    def _take(self, starts: dict[int, int]) -> bool:
        """Copies small images on, out of the buffer; True if all are right."""
        if not starts:
            return True
        asked, came = self._asked, list(starts)
        run = range(came[0], came[0] + len(came))
        indexes = run if came == list(run) else came  # a run is faster
        images = ImagesIn(self._buffer, list(starts.values()), [self._sizes[index] for index in came])
        right = take_images(asked.wanted, indexes, images, asked.sections, Borrowed()).tolist()
        for index, is_right in zip(came, right, strict=True):
            self._done[asked.places[index]] |= is_right
        return all(right)

    def _receive_large(self, head: Head) -> bool:
        """Reads one image straight into its sections; True if it is right."""
        channel, asked = self._link.channel, self._asked
        index = decode_index(channel.receive(INDEX_BYTES)) if head.length > INDEX_BYTES else -1
        self._accept(index, head.length - INDEX_BYTES)
        try:
            if channel.moves_natively and isinstance(asked.sections, Laid):
                self._natively = self._natively or Natively(asked.wanted, asked.first, asked.stop, asked.sections)
                self._natively.receive(channel, index)
            else:
                fill_verified(channel.receive_some, expected_of(asked.wanted, index), asked.sections(index))
        except Damaged:
            return False
        self._done[asked.places[index]] = 1
        return True

    def _accept(self, index: int, came_bytes: int) -> None:
        """Raises LinkBroken unless image ``index`` was asked for, comes for the first time, and has its size."""
        channel = self._link.channel
        if not 0 <= index < len(self._awaited) or not self._awaited[index]:
            raise channel.break_off(f"an image of chunk {index} came, which was not asked for, or twice")
        self._awaited[index] = 0
        if came_bytes != self._sizes[index]:
            raise channel.break_off(f"an image of {came_bytes} bytes came for chunk {index}")


class Natively(Items):
    """Images of a stream that native code receives into their sections, piece by piece, verifying each in the cache."""

    def __init__(self, wanted: Wanted, first: int, stop: int, sections: Laid) -> None:
        super().__init__(wanted, range(first, stop))
        self.lay(sections, fills=True)
        self._first = first
        self._header = np.empty(int(self.items["header_bytes"].max()), np.uint8)

    def receive(self, channel: Channel, index: int) -> None:
        """Receives the image of one chunk. Raises Damaged, LinkBroken, LinkLate."""
        header: int = self._header.__array_interface__["data"][0]
        came = ctypes.create_string_buffer(native.MOVED_BYTES)
        at = self.at(index - self._first)
        if channel.receive_by(partial(native.library.kv_receive, self.common, at, header, came)) != native.DONE:
            raise Damaged(Damage.SECTION_CHECKSUM)
