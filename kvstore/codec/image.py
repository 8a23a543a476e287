"""Images: chunk files, in memory, behind a reader or many in a folder, verified each time they are copied (I1).

Native code does the common good case. Python redoes from scratch whatever it does not finish, so that both agree.
Everything runs in the calling thread: threads call it in groups of some MiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore.codec.encodings import Encodings
from kvstore.core.buffers import PAGE_BYTES, BufferLoan, BufferMap, Pieces, Sections, address_of, cut_evenly
from kvstore.core.clock import Ids
from kvstore.core.executor import Deadline, Executor, group_size, moved_on
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
from kvstore.root.interface import FileReader, LocalFiles

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
    # One expression, because this loop holds the GIL that all threads share.
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
    executor: Executor,
    deadline: Deadline,
) -> bytes:
    """Returns a byte for each image, 1 if it is that of the chunk at its index, whole and right.

    Several threads verify, and the calling one. Past the deadline, what is verified by then is right.
    """
    size = group_size(len(images), len(images[0]) if images else 0, executor.width)
    right = np.zeros(len(images), np.bool_)

    def verify(number: int) -> bool:
        part = slice(number * size, (number + 1) * size)
        right[part] = verify_images(wanted, indexes[part], images[part])
        return True

    with suppress(KVStoreError):
        executor.share(-(-len(images) // size), verify, deadline)
    return right.tobytes()


# Many chunk files in one native call: looked for, read and verified, or mapped.


COLD_BYTES = 4 << 20
"""Bytes of one blocking read of uncached data; a multiple of what devices and O_DIRECT want."""
COLD_POOL_MAX = 4
"""Limit on buffers for such reads that are kept for the next ones."""

_cold_pool: list[npt.NDArray[np.uint8]] = []
_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_TENSOR = b"dltensor"
_ON_CPU = (1, 0)


class ChunkRun(NativeBatch):
    """Chunks ``first`` to ``first + count - 1`` of what is wanted, in files. Indexes are those of the request.

    ``sections`` is where they are read into or written from; None for a run that is only looked at, or mapped.
    """

    def __init__(
        self,
        files: LocalFiles,
        shard_bits: int,
        wanted: KeySet,
        first: int,
        count: int,
        sections: BufferMap | None = None,
    ) -> None:
        indexes = range(first, first + count)
        super().__init__(wanted, indexes)
        self.first = first
        self.count = count
        self.items["fd"] = -1
        self.common.root = os.fsencode(files.path)
        self.common.shard_bits = shard_bits
        self.common.may_wait = files.never_blocks
        self.common.direct = files.direct
        self.alive.append(wanted)
        if sections is not None:
            self.lay(sections)
        if isinstance(sections, Images):
            self.common.from_images = True

    def read(self, start: int, stop: int, borrowed: BufferLoan) -> Mask:
        """Reads chunks into their sections; True for those that are whole, verified and there. Raises Withdrawn."""
        native.library.kv_open(self.common, *self.part(start, stop))
        return self.read_open(start, stop, borrowed)

    def read_open(self, start: int, stop: int, borrowed: BufferLoan) -> Mask:
        """Reads open files, as ``read`` does: their descriptors are in the items, and are closed."""
        at, count = self.part(start, stop)
        library, open_count = native.library, count
        try:
            with borrowed.writing():
                open_count = library.kv_read(self.common, at, count, borrowed.natively)
            if open_count:
                self.read_blocked(np.arange(start - self.first, stop - self.first), borrowed)
        finally:
            if open_count:
                library.kv_close(at, count)
        done: Mask = self.items["status"][start - self.first : stop - self.first] == native.DONE
        return done

    def read_blocked(self, places: npt.NDArray[Any], borrowed: BufferLoan) -> None:
        """Reads chunks, counted from the first, whose files are open and not cached, and closes the files.

        Raises Withdrawn.
        """
        blocked = places[self.items["status"][places] == native.BLOCKED].tolist()
        try:
            if not self.common.direct:  # the device reads all of it in parallel
                for place in blocked:
                    with suppress(OSError):
                        os.posix_fadvise(int(self.items["fd"][place]), 0, 0, os.POSIX_FADV_WILLNEED)
            for place in blocked:
                # An OSError means that there was no memory to read into.
                with suppress(OSError):
                    self._read_cold(self.first + place, borrowed)
        finally:
            for place in blocked:
                native.library.kv_close(*self.part(self.first + place, self.first + place + 1))

    def look(self, start: int, stop: int) -> tuple[Mask, npt.NDArray[np.int64]]:
        """Returns which chunks have a file of the right size, and the mtimes of those."""
        native.library.kv_look(self.common, *self.part(start, stop))
        part = self.items[start - self.first : stop - self.first]
        found: Mask = part["status"] == native.FOUND
        return found, part["mtime_ns"][found]

    def map(self, start: int, stop: int) -> list[memoryview | None]:
        """Verifies chunks and maps their sections, read-only; None for one that is wrong, or cannot be mapped."""
        at, count = self.part(start, stop)
        addresses = np.zeros(count, np.uint64)
        native.library.kv_map_files(self.common, at, count, addresses.ctypes.data)
        return [_mapped(address) if address else None for address in addresses.tolist()]

    def file_bytes(self, index: int) -> int:
        item = self.items[index - self.first]
        return int(item["header_bytes"]) + self.payload_bytes(index - self.first)

    def payload_bytes(self, place: int) -> int:
        item = self.items[place]
        return int(item["section_count"]) * int(item["section_bytes"])

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the address of the structures of some chunks, and how many they are."""
        assert self.first <= start <= stop <= self.first + self.count
        return self._start + (start - self.first) * native.CHUNK.itemsize, stop - start

    def _read_cold(self, index: int, borrowed: BufferLoan) -> None:
        """Reads from a device into memory of ours, and from there into the sections while the bytes are cached."""
        item, (at, _) = self.items[index - self.first], self.part(index, index + 1)
        item["status"] = native.OTHER
        library, fd, size = native.library, int(item["fd"]), self.file_bytes(index)
        header = np.empty(int(item["header_bytes"]), np.uint8)
        verified = ctypes.create_string_buffer(native.VERIFIED_BYTES)
        is_direct = self.common.direct and library.kv_read_direct(fd)
        with _cold_memory() as memory:
            offset = 0
            while offset < size:
                borrowed.check()
                moved_on()
                wanted = min(COLD_BYTES, size - offset)
                if is_direct:
                    wanted = -(-wanted // PAGE_BYTES) * PAGE_BYTES
                got = min(library.kv_read_cold(fd, memory, wanted, offset), size - offset)
                if got <= 0:
                    return
                with borrowed.writing():
                    status = library.kv_take(self.common, at, header.ctypes.data, verified, memory, got, offset)
                if status != native.DONE:
                    return
                offset += got
        item["status"] = native.DONE


class _Mapped:
    """A ``kv_mapping`` by its address, which it hands over to one array by DLPack.

    Such an array keeps no descriptor, and is unmapped without a call of Python.
    """

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def __dlpack__(self, **_: object) -> object:
        return _new_capsule(self._address, _TENSOR, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU


def _mapped(address: int) -> memoryview:
    """Returns the bytes that a ``kv_mapping`` maps, read-only; unmapped when no slice of them lives."""
    return memoryview(np.from_dlpack(_Mapped(address)))  # type: ignore[arg-type]


@contextmanager
def _cold_memory() -> Iterator[int]:
    """Yields the address of COLD_BYTES of memory for blocking reads, aligned to pages as O_DIRECT wants it.

    It comes from a pool, because a thread needs it only for a moment; a thread that hangs in a dead mount keeps it.
    """
    try:
        memory = _cold_pool.pop()
    except IndexError:
        # Private: a forked child has the pool too, and must not read into what its parent reads into.
        memory = np.frombuffer(mmap.mmap(-1, COLD_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    try:
        yield memory.__array_interface__["data"][0]
    finally:
        if len(_cold_pool) < COLD_POOL_MAX:
            _cold_pool.append(memory)
