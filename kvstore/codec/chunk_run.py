"""Many chunk files in one native call: looked for, read and verified, or mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codec.image import Images
from kvstore.core.buffers import PAGE_BYTES, BufferLoan, BufferMap
from kvstore.core.executor import moved_on
from kvstore.format.keyset import KeySet, Mask, NativeBatch
from kvstore.native import library as native
from kvstore.root.interface import LocalFiles

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
            if not self.common.direct:  # lets the device read all of it in parallel
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

    It comes from a pool, because a lane needs it only for a moment; a lane that hangs in a dead mount keeps it.
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
