"""Images: chunk files, in memory or behind a reader, verified each time they are copied (I1).

Native code does the common good case. Python redoes from scratch whatever it does not finish, so that both agree.
Everything runs in the calling thread: lanes call it in groups of some MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore.codec.encodings import Encodings
from kvstore.core.buffers import BufferLoan, BufferMap, Pieces, Sections, address_of, cut_evenly
from kvstore.core.clock import Ids
from kvstore.core.executor import Deadline, Executor, group_size
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.header import (
    Damage,
    Damaged,
    Expected,
    Header,
    Incarnation,
    checksum,
    decode_as,
    encode,
)
from kvstore.format.keyset import KeySet, NativeBatch
from kvstore.native import library as native
from kvstore.root.interface import FileReader

VERIFY_BYTES = 4 << 20
"""Read and verify in runs of about this size: few system calls, and the bytes are still cached for the checksum."""


def plain(reader: FileReader, expected: Expected, encodings: Encodings) -> FileReader | None:
    """Returns the file as one of version 1; None if it has neither version, or another size.

    Raises Damaged and NotDecodable for an encoded file.
    """
    if reader.stat.size_bytes == expected.file_bytes:
        return reader  # of version 1: an encoded one never has that size
    return encodings.reader(reader, expected)


def read_verified(reader: FileReader, expected: Expected, sections: Pieces, borrowed: BufferLoan) -> None:
    """Reads header and payload and verifies both. Raises Damaged."""
    run = max(1, VERIFY_BYTES // max(1, expected.section_bytes))
    raw = bytearray(expected.header_bytes)
    header: Header | None = None
    offset = 0
    for start in range(0, len(sections), run):
        part = sections[start : start + run]
        # Read the header together with the first sections, in one call.
        pieces = part if header else [memoryview(raw), *part]
        offset += fill(reader, pieces, offset, borrowed)
        header = header or decode_as(raw, expected)
        verify(part, header.checksums[start : start + run])


def verify_whole(reader: FileReader, expected: Expected) -> None:
    """Verifies a whole chunk without keeping it, in memory for one run. Raises Damaged."""
    header = read_header(reader, expected)
    run = max(1, VERIFY_BYTES // max(1, expected.section_bytes))
    scratch = memoryview(bytearray(min(run, expected.section_count) * expected.section_bytes))
    offset = expected.header_bytes
    for start in range(0, expected.section_count, run):
        count = min(run, expected.section_count - start)
        part = cut_evenly(scratch[: count * expected.section_bytes], expected.section_bytes)
        offset += fill(reader, part, offset, BufferLoan())
        verify(part, header.checksums[start : start + count])


def read_header(reader: FileReader, expected: Expected) -> Header:
    """Reads and verifies the header. Raises Damaged."""
    raw = bytearray(expected.header_bytes)
    fill(reader, [memoryview(raw)], 0, BufferLoan())
    return decode_as(raw, expected)


def fill(reader: FileReader, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
    """Reads all of ``pieces``. A short read counts as damage; a file that vanished looks the same, and is no worse."""
    wanted = sum(map(len, pieces))
    if reader.read(pieces, offset, borrowed) != wanted:
        raise Damaged(Damage.SIZE)
    return wanted


def verify(sections: Pieces, sums: tuple[int, ...]) -> None:
    """Raises Damaged if a section has another checksum."""
    # One expression, because this loop holds the GIL that all lanes share.
    if tuple(map(checksum, sections)) != sums:
        raise Damaged(Damage.SECTION_CHECKSUM)


Mask = npt.NDArray[np.bool_]


class ImagesIn(Sequence[memoryview]):
    """Images at offsets of one memory, the arena: a sequence that makes each view only when asked."""

    __slots__ = ("_memory", "_offsets", "_sizes")

    def __init__(
        self,
        memory: memoryview,
        offsets: Sequence[int] | npt.NDArray[np.uint64],
        sizes_bytes: Sequence[int] | npt.NDArray[np.uint64],
    ) -> None:
        """Raises InvalidRequest if an image would not lie within ``memory``: native code trusts these addresses."""
        self._memory = memory
        self._offsets = np.asarray(offsets, np.uint64)
        self._sizes = np.asarray(sizes_bytes, np.uint64)
        assert self._offsets.shape == self._sizes.shape
        # In Python's numbers, which never wrap around. The first test alone is enough unless sizes differ.
        if self._offsets.size and int(self._offsets.max()) + int(self._sizes.max()) > len(memory):
            ends = [start + size for start, size in zip(self._offsets.tolist(), self._sizes.tolist(), strict=True)]
            if max(ends) > len(memory):
                raise InvalidRequest(
                    f"an image ends at byte {max(ends)}: expected it within the {len(memory)} bytes of the memory"
                )

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> ImagesIn: ...
    def __getitem__(self, at: int | slice) -> memoryview | ImagesIn:
        if isinstance(at, slice):
            return ImagesIn(self._memory, self._offsets[at], self._sizes[at])
        start = int(self._offsets[at])
        return self._memory[start : start + int(self._sizes[at])]

    def addresses(self) -> npt.NDArray[np.uint64]:
        """Returns where each image begins; valid as long as this object lives."""
        return address_of(self._memory) + self._offsets

    def sizes_are(self, sizes_bytes: npt.NDArray[np.uint64]) -> Mask:
        """Returns which images have the size given for them."""
        right: Mask = sizes_bytes == self._sizes
        return right


class Images(BufferMap):
    """The sections of chunks from ``first`` on in their images, for puts. Nothing is verified."""

    __slots__ = ("_first", "_images", "_wanted")

    def __init__(self, wanted: KeySet, first: int, images: Sequence[memoryview]) -> None:
        self._wanted = wanted
        self._first = first
        self._images = images

    def __call__(self, index: int) -> list[memoryview]:
        payload = self._wanted.payload_of(index, self._images[index - self._first])
        return cut_evenly(payload, self._wanted.section_bytes(index))

    @property
    def is_writable(self) -> bool:
        return False

    def covers(self, first: int, count: int) -> bool:
        return first >= self._first and first - self._first + count <= len(self._images)

    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        images: Sequence[memoryview]
        if isinstance(indexes, range) and indexes.step == 1:
            images = self._images[indexes.start - self._first : indexes.stop - self._first]
        else:
            images = [self._images[index - self._first] for index in indexes]
        items["offset"] = addresses_of(images) + items["header_bytes"]
        return [self]


def make_images(
    wanted: KeySet, indexes: Sequence[int], source: Sections, images: Sequence[memoryview], ids: Ids
) -> None:
    """Makes the images of the chunks at ``indexes`` in ``images``, which are writable and have their images' sizes.

    ``source(index)`` must not change during the call; a read of the image finds a change. ``ids`` gives each image its
    incarnation.
    """
    batch = _Batch(wanted, indexes, images)
    batch.lay(source)
    assert batch.sizes_fit.all() and not any(image.readonly for image in images)
    incarnations = [Incarnation(ids.fresh()) for _ in indexes]
    batch.items["incarnation"] = np.frombuffer(b"".join(incarnations), "V16")
    done = batch.call(native.library.kv_images_make)
    for at in np.flatnonzero(~done).tolist():
        _make_one(wanted, indexes[at], source(indexes[at]), images[at], incarnations[at])


def seal_images(
    wanted: KeySet, first: int, images: Sequence[memoryview], sums: npt.NDArray[np.uint64], ids: Ids
) -> None:
    """Writes the headers of images from chunk ``first`` on, whose sections are there.

    ``sums`` has the checksums of each image in a row.
    """
    for index, (image, row) in enumerate(zip(images, sums.tolist(), strict=True), first):
        expected = wanted.expected(index)
        image[: expected.header_bytes] = encode(expected, Incarnation(ids.fresh()), row)


def take_images(
    wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview], sections: Sections, borrowed: BufferLoan
) -> Mask:
    """Copies the chunks at ``indexes`` out of ``images`` into ``sections(index)``; True for each that is right.

    The sections of the others are undefined. Raises Withdrawn.
    """
    if not isinstance(sections, BufferMap):
        # Ask once and in order: some sources take memory as they are asked.
        sections = {index: sections(index) for index in indexes}.__getitem__
    batch = _Batch(wanted, indexes, images)
    batch.lay(sections, fills=True)
    with borrowed.writing():
        done = batch.call(native.library.kv_images_take)
    for at in np.flatnonzero(~done).tolist():
        done[at] = _take_one(wanted, indexes[at], images[at], sections, borrowed)
    return done


def verify_images(wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview]) -> Mask:
    """Returns which images are the chunks at ``indexes``, whole and right; copies nothing."""
    done = _Batch(wanted, indexes, images).call(native.library.kv_images_verify)
    for at in np.flatnonzero(~done).tolist():
        header = _header_of(wanted, indexes[at], images[at])
        done[at] = header is not None and _sums(_cut(images[at], header)) == header.checksums
    return done


def copy_sections(
    wanted: KeySet, index: int, image: memoryview, first: int, targets: Pieces, borrowed: BufferLoan
) -> bool:
    """Copies sections from ``first`` on of one chunk out of its image into ``targets``.

    False if the header or one of the sections is wrong. Raises Withdrawn.
    """
    header = _header_of(wanted, index, image)
    if header is None:
        return False
    sections = _cut(image, header)[first : first + len(targets)]
    with borrowed.writing():
        _copy(sections, targets)
        return _sums(targets) == header.checksums[first : first + len(targets)]


class _Batch(NativeBatch):
    """Chunks and their images."""

    def __init__(self, wanted: KeySet, indexes: Sequence[int], images: Sequence[memoryview]) -> None:
        assert len(indexes) == len(images)
        super().__init__(wanted, indexes)
        self.alive.append(images)
        items = self.items
        sizes = items["header_bytes"] + items["section_count"] * items["section_bytes"]
        self.sizes_fit = (
            images.sizes_are(sizes) if isinstance(images, ImagesIn) else np.array(list(map(len, images))) == sizes
        )
        # A null address keeps native code away from images that lack their chunk's size.
        self._images = np.where(self.sizes_fit, addresses_of(images), 0).astype(np.uint64)

    def call(self, function: Callable[..., object], *more: int) -> Mask:
        """Calls a native function; True for each chunk that it has done."""
        function(self.common, self.at(0), len(self.items), self._images.__array_interface__["data"][0], *more)
        done: Mask = self.items["status"] == native.DONE
        return done


def _make_one(wanted: KeySet, index: int, sections: Pieces, image: memoryview, incarnation: Incarnation) -> None:
    expected = wanted.expected(index)
    assert len(image) == expected.file_bytes
    sums = []
    at = expected.header_bytes
    for section in sections:
        sums.append(checksum(section))
        image[at : at + len(section)] = section
        at += len(section)
    image[: expected.header_bytes] = encode(expected, incarnation, sums)


def _take_one(wanted: KeySet, index: int, image: memoryview, sections: Sections, borrowed: BufferLoan) -> bool:
    header = _header_of(wanted, index, image)
    if header is None:
        return False
    targets = sections(index)
    with borrowed.writing():
        _copy(_cut(image, header), targets)
        return _sums(targets) == header.checksums


def _header_of(wanted: KeySet, index: int, image: memoryview) -> Header | None:
    """Returns the header of an image, if it is the wanted chunk's and the image has the size that it states."""
    expected = wanted.expected(index)
    if len(image) != expected.file_bytes:
        return None
    try:
        # Decode a copy: see is_right in images.c.
        return decode_as(bytes(image[: expected.header_bytes]), expected)
    except Damaged:
        return None


def _cut(image: memoryview, header: Header) -> list[memoryview]:
    return cut_evenly(image[header.header_bytes :], header.section_bytes)


def _copy(sections: Pieces, targets: Pieces) -> None:
    for section, target in zip(sections, targets, strict=True):
        target[:] = section


def _sums(sections: Pieces) -> tuple[int, ...]:
    return tuple(map(checksum, sections))


def addresses_of(images: Sequence[memoryview]) -> npt.NDArray[np.uint64]:
    """Returns where each image begins; valid as long as the memory of the views."""
    if isinstance(images, ImagesIn):
        return images.addresses()
    return np.fromiter(map(address_of, images), np.uint64, len(images))


def verified(
    wanted: KeySet,
    indexes: Sequence[int],
    images: Sequence[memoryview],
    lanes: Executor,
    deadline: Deadline,
    *,
    helps: bool = True,
) -> bytes:
    """Returns a byte for each image, 1 if it is that of the chunk at its index, whole and right.

    Several lanes verify, and the calling thread if it ``helps``. Past the deadline, what is verified by then is right.
    """
    size = group_size(len(images), len(images[0]) if images else 0, lanes.width)
    right = np.zeros(len(images), np.bool_)

    def verify(number: int) -> bool:
        part = slice(number * size, (number + 1) * size)
        right[part] = verify_images(wanted, indexes[part], images[part])
        return True

    with suppress(KVStoreError):
        (lanes.share if helps else lanes.each)(-(-len(images) // size), verify, deadline)
    return right.tobytes()
