"""The answer to one get: images in the memory of a worker on this host, in open files, or as bytes, each verified.

Whatever brings them, the chunks are copied once: straight into the caller's memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Borrowed, Laid, Pieces, Sections, address_of, cut_evenly
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.links import Lease, Leased, Link
from kvstore.format.header import Damage, Damaged
from kvstore.keyset import Items, KeySet
from kvstore.layout import Layout
from kvstore.native import library as native
from kvstore.node.chunk_store import Run
from kvstore.node.counters import Counters
from kvstore.node.images import ImagesIn, read_verified, take_images
from kvstore.node.lanes import GROUP_BYTES_MIN, Deadline, group_size
from kvstore.node.reader import Groups, Reading, verified
from kvstore.root.interface import LocalFiles, Stat
from kvstore.root.posix import PosixReader
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import NOT_LENT, SPAN_BYTES, Head, Kind, LentSlots, decode_slots, decode_span
from kvstore.wire.images import fill_verified

# The chunks of one read as arrays, each in a leased slot of the worker's memory, or in memory of its own.


class _Copies(Laid):
    """Chunks one after another, each as its sections in file order."""

    def __init__(self, array: npt.NDArray[Any], section_bytes: int) -> None:
        self._bytes = array.reshape(len(array), -1).view(np.uint8)
        self._section_bytes = section_bytes

    def __call__(self, index: int) -> list[memoryview]:
        return cut_evenly(self._bytes[index].data, self._section_bytes)

    @property
    def is_writable(self) -> bool:
        return True

    def covers(self, first: int, count: int) -> bool:
        return 0 <= first <= len(self._bytes) - count

    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        items["offset"] = address_of(self._bytes.data) + np.asarray(indexes, np.uint64) * self._bytes.shape[1]
        return [self._bytes]


class Views:
    """The arrays of one read, by chunk index, as they come."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lent: dict[int, npt.NDArray[Any]] = {}
        self._copies = np.empty(layout.shape(0), layout.numpy_dtype)

    def sections(self, count: int) -> Laid:
        """Makes memory for chunks that are copied; the system gives no page of it before one comes."""
        layout = self._layout
        self._copies = np.empty((count, *layout.shape(layout.chunk_tokens)), layout.numpy_dtype)
        return _Copies(self._copies, layout.section_bytes)

    def lend(self, wanted: KeySet, index: int, image: memoryview, lease: Lease) -> None:
        """Adds a verified chunk in place."""
        layout = self._layout
        payload = Leased(wanted.payload_of(index, image), lease).array()
        self._lent[index] = payload.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens))

    def leading(self, count: int) -> list[npt.NDArray[Any]]:
        """Returns the read-only arrays of the first ``count`` chunks."""
        arrays = [self._lent[index] if index in self._lent else self._copies[index] for index in range(count)]
        for array in arrays:
            array.flags.writeable = False
        return arrays


@dataclass(frozen=True, slots=True)
class Ask:
    """The chunks that one request asks for: those of ``wanted`` from ``first`` up to ``stop``.

    The worker's answer has the indexes of ``wanted``, and so does ``sections``.
    """

    number: int
    """The request's."""
    wanted: KeySet
    first: int
    stop: int
    sections: Sections
    places: Sequence[int]
    """Where the caller counts each of them."""


class ImageReceiver:
    """The images of one request as they come, in whatever order; ``done[place]`` is 1 for those that are in place.

    ``done`` is up to date whatever is raised. With ``views``, slots stay where they are, and their lease lives on.
    """

    def __init__(
        self, link: Link, asked: Ask, done: bytearray, lanes: FileLanes, deadline: Deadline, views: Views | None = None
    ) -> None:
        self._link = link
        self._asked = asked
        self._done = done
        self._lanes = lanes
        self._deadline = deadline
        has_lease = link.memory is not None and link.memory.has_lease
        self._views = views if has_lease else None
        self._lease: Lease | None = None
        self._awaited = bytearray(asked.first) + b"\1" * (asked.stop - asked.first)
        self._left = asked.stop - asked.first
        self._natively: Natively | None = None
        self._is_right = True

    def receive(self, lent: LentSlots) -> bool:
        """Reads the answer, which begins with ``lent``, up to its end. False if an image is not right.

        Raises LinkBroken, LinkLate, BulkRefused, InvalidRequest.
        """
        link, number = self._link, self._asked.number
        try:
            self._take_slots(lent)
            while self._left:
                head = link.receive_head(Kind.SLOTS, Kind.FILES, Kind.IMAGES, Kind.END)
                if head.request != number:
                    raise link.channel.break_off(f"a frame of request {head.request} came: expected {number}")
                if head.kind is Kind.IMAGES:
                    if not self._receive_images(head):
                        link.channel.alive = False  # what follows was not read, perhaps from the middle of a frame on
                        return False
                    continue
                payload = link.channel.receive(head.length)
                if head.kind is Kind.END:
                    break
                if head.kind is Kind.SLOTS:
                    self._take_slots(decode_slots(payload))
                else:
                    self._take_files(*decode_span(payload))
        finally:
            if self._lease is not None and self._views is None:
                self._lease.close()
        return self._is_right

    def _accept(self, indexes: Sequence[int]) -> None:
        """Raises LinkBroken unless these images, at least one, were asked for and come for the first time."""
        if not indexes:
            raise self._link.channel.break_off("a frame without a chunk came")
        for index in indexes:
            if not 0 <= index < len(self._awaited) or not self._awaited[index]:
                raise self._link.channel.break_off(f"chunk {index} came, which was not asked for, or twice")
            self._awaited[index] = 0
        self._left -= len(indexes)

    def _note(self, indexes: Sequence[int], right: bytes | bytearray | npt.NDArray[np.bool_]) -> None:
        for index, is_right in zip(indexes, right, strict=True):
            self._done[self._asked.places[index]] = bool(is_right)
            self._is_right &= bool(is_right)

    # Slots

    def _take_slots(self, lent: LentSlots) -> None:
        given = {index: offset for index, offset in enumerate(lent.offsets, lent.first) if offset != NOT_LENT}
        if not given:
            return
        link, wanted = self._link, self._asked.wanted
        if link.memory is None:
            raise link.channel.break_off("slots came on a connection without memory")
        if self._lease is None:
            self._lease = Lease(link.channel.take_files(1)[0], link.memory.leases)
        found = range(lent.first, lent.first + len(lent.offsets))
        indexes: Sequence[int] = found if len(given) == len(found) else list(given)  # a run is faster
        self._accept(indexes)
        images = link.memory.images(list(given.values()), wanted.image_sizes(indexes))
        if self._views is None:
            self._note(indexes, self._copied(indexes, images))
            return
        right = verified(wanted, indexes, images, self._lanes.copiers(), self._deadline)
        for at, index in enumerate(indexes):
            if right[at]:
                self._views.lend(wanted, index, images[at], self._lease)
        self._note(indexes, right)

    def _copied(self, indexes: Sequence[int], images: ImagesIn) -> bytearray | npt.NDArray[np.bool_]:
        wanted, sections, count = self._asked.wanted, self._asked.sections, len(indexes)
        size_bytes = wanted.payload_bytes(indexes)
        if size_bytes <= GROUP_BYTES_MIN:
            return take_images(wanted, indexes, images, sections, Borrowed())
        into = _in_order(sections, indexes)

        def take(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
            return take_images(wanted, indexes[start:stop], images[start:stop], into, borrowed)

        copiers = self._lanes.copiers()
        groups = Groups(group_size(count, max(1, size_bytes // count), copiers.width), count, take)
        # What is not right is not tried again. The caller does a share, because nothing here waits for a device.
        reading = Reading(copiers, Counters(), count, lambda *_: False, wanted.prefix_ordered, groups, helps=True)
        try:
            return reading.wait(self._deadline)
        finally:
            reading.withdraw()  # after an interrupt (Ctrl-C) lanes may still be writing into the caller's memory

    # Open files

    def _take_files(self, first: int, count: int) -> None:
        link, wanted = self._link, self._asked.wanted
        files = link.channel.take_files(count)
        # Each file has one owner that closes it: the lane that takes it out of this dict, or this call at the end.
        left, indexes = dict(enumerate(files)), range(first, first + count)
        memory: Sequence[Pieces] = ()
        reading: Reading | None = None

        def read(at: int, borrowed: Borrowed) -> bool:
            fd = left.pop(at, None)
            if fd is None:
                return False
            with PosixReader(fd, f"of chunk {first + at}, from a worker", Stat(0, 0), never_blocks) as reader:
                try:
                    read_verified(reader, wanted.expected(first + at), memory[at], borrowed)
                except Damaged:
                    return False
            return True

        try:
            self._accept(indexes)
            link.channel.send(Kind.TAKEN, self._asked.number)
            never_blocks = all(map(link.never_blocks, files))
            lanes = self._lanes.get()
            groups = self._groups(first, left, never_blocks, lanes.width)
            if groups is None:
                # In order and by one thread, because some sources allocate memory for each call.
                memory = [self._asked.sections(index) for index in indexes]
            reading = Reading(lanes, Counters(), count, read, wanted.prefix_ordered, groups)
            self._note(indexes, reading.wait(self._deadline))
        finally:
            if reading is not None:
                reading.withdraw()  # after an interrupt (Ctrl-C) lanes may still be writing into the caller's memory
            for fd in [fd for at in range(count) if (fd := left.pop(at, None)) is not None]:
                with suppress(OSError):
                    os.close(fd)

    def _groups(self, first: int, left: dict[int, int], never_blocks: bool, width: int) -> Groups | None:
        """The native reader for groups of files; None if there is no native code or the memory does not suit it."""
        count, wanted, sections = len(left), self._asked.wanted, self._asked.sections
        if native.library is native.PurePython or not isinstance(sections, Laid) or not sections.covers(first, count):
            return None
        run = Run(LocalFiles("", never_blocks, stages=False, direct=False), 0, wanted, first, count, sections)

        def read(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
            run.items["fd"][start:stop] = [left.pop(at, -1) for at in range(start, stop)]
            return run.read_open(run.first + start, run.first + stop, borrowed)

        return Groups(group_size(count, wanted.mean_bytes(first, count), width), count, read)

    # Bytes

    def _receive_images(self, head: Head) -> bool:
        """Reads images straight into their sections; True if all are right."""
        channel, asked = self._link.channel, self._asked
        first, count = decode_span(channel.receive(SPAN_BYTES)) if head.length > SPAN_BYTES else (0, 0)
        indexes = range(first, first + count)
        self._accept(indexes)
        size_bytes = sum(asked.wanted.image_sizes(indexes))
        if head.length != SPAN_BYTES + size_bytes:
            raise channel.break_off(f"{head.length} bytes came for chunks {first} to {first + count - 1}")
        for index in indexes:
            try:
                if channel.moves_natively and isinstance(asked.sections, Laid):
                    self._natively = self._natively or Natively(asked.wanted, asked.first, asked.stop, asked.sections)
                    self._natively.receive(channel, index)
                else:
                    fill_verified(channel.receive_some, asked.wanted.expected(index), asked.sections(index))
            except Damaged:
                return False
            self._done[asked.places[index]] = 1
        return True


class Natively(Items):
    """Images of a stream that native code receives into their sections, piece by piece, verifying each in the cache."""

    def __init__(self, wanted: KeySet, first: int, stop: int, sections: Laid) -> None:
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


def _in_order(sections: Sections, indexes: Sequence[int]) -> Sections:
    """Returns ``sections``, computed in order by one thread, because some sources allocate memory for each call."""
    if isinstance(sections, Laid):
        return sections
    return {index: sections(index) for index in indexes}.__getitem__
