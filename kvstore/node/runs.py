"""Runs of chunks for the native library: the chunks of one request as the structures that it takes.

Separate from ``chunks.py`` because nothing here decides anything: what is not done after a call is done by
``Chunks``, chunk by chunk, from scratch.  Called on lanes only; each lane has its own part of a run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import Address, Chain
from kvstore.buffers import Borrowed, address_of
from kvstore.format import places
from kvstore.format.header import PAGE_BYTES, Incarnation, Kind
from kvstore.format.places import Name
from kvstore.namespace import Namespace
from kvstore.native import library as native
from kvstore.node.images import Images
from kvstore.node.items import lay_planes
from kvstore.node.lanes import moved_on
from kvstore.node.wanted import Keyed, describe
from kvstore.planes import Planes
from kvstore.root.interface import LocalFiles, Stat

COLD_BYTES = 4 << 20
"""One blocking read of what is not cached; a multiple of what devices and O_DIRECT want."""
COLD_POOL_MAX = 4
"""Memory for such reads that is kept for the next ones."""

Mask = npt.NDArray[np.bool_]

_cold_pool: list[npt.NDArray[np.uint8]] = []


class Run:
    """Chunks ``first`` to ``first + count - 1`` of one request. Indices are those of the request.

    ``alive`` is what the addresses in the structures point into.
    """

    def __init__(self, files: LocalFiles, shard_bits: int, namespace: Namespace, kind: Kind, first: int, count: int):
        self.first = first
        self.count = count
        self.items: npt.NDArray[Any] = np.zeros(count, native.CHUNK)
        self.items["fd"] = -1
        self.common = native.Run(
            root=os.fsencode(files.path),
            digest=(ctypes.c_ubyte * 32).from_buffer_copy(namespace.digest),
            kind=int(kind),
            shard_bits=shard_bits,
            may_wait=files.never_blocks,
            direct=files.direct,
        )
        self.alive: list[object] = []
        self.origins: dict[int, Incarnation] = {}
        """By index, the incarnations of the images that the sections are in; empty where they are the caller's."""
        self._start: int = self.items.ctypes.data  # the interface of a structured array is costly to make

    def read(self, start: int, stop: int, borrowed: Borrowed) -> Mask:
        """Reads chunks into their sections; True for those that are whole, verified and there. Raises Withdrawn."""
        native.library.kv_open(self.common, *self.part(start, stop))
        return self.read_open(start, stop, borrowed)

    def read_open(self, start: int, stop: int, borrowed: Borrowed) -> Mask:
        """The same of files that are open: their descriptors are in the items, and are closed."""
        at, count = self.part(start, stop)
        library, items = native.library, self.items[start - self.first : stop - self.first]
        open_count = count
        try:
            with borrowed.writing():
                open_count = library.kv_read(self.common, at, count, borrowed.stop)
            if open_count:
                self._read_blocked(start, items, borrowed)
        finally:
            if open_count:
                library.kv_close(at, count)
        done: Mask = items["status"] == native.DONE
        return done

    def map(self, start: int, stop: int) -> list[memoryview | None]:
        """Verifies chunks and maps their files, read-only; None for those that are not right, or cannot be mapped."""
        at, count = self.part(start, stop)
        mapped: list[memoryview | None] = [None] * count
        native.library.kv_open(self.common, at, count)
        try:
            native.library.kv_verify_files(self.common, at, count)
            for place in range(count):
                item = self.items[start - self.first + place]
                if item["status"] != native.DONE:
                    continue
                item["status"] = native.OTHER
                with suppress(OSError, ValueError):
                    file = mmap.mmap(int(item["fd"]), self.file_bytes(start + place), mmap.MAP_SHARED, mmap.PROT_READ)
                    mapped[place] = memoryview(file)[int(item["header_bytes"]) :]
                    item["status"] = native.DONE
        finally:
            native.library.kv_close(at, count)
        return mapped

    def look(self, start: int, stop: int) -> None:
        """Looks for the final names: then FOUND, ABSENT or OTHER, and mtimes in the items."""
        native.library.kv_look(self.common, *self.part(start, stop))

    def file_bytes(self, index: int) -> int:
        """Bytes that the file of a chunk must have."""
        item = self.items[index - self.first]
        return int(item["header_bytes"]) + int(item["section_count"]) * int(item["section_bytes"])

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """The address of the structures of some chunks, and how many they are."""
        assert self.first <= start <= stop <= self.first + self.count
        return self._start + (start - self.first) * native.CHUNK.itemsize, stop - start

    def _read_blocked(self, start: int, items: npt.NDArray[Any], borrowed: Borrowed) -> None:
        """Reads what is not cached, from ``start`` on: the device is to begin with all of it at once."""
        blocked = np.flatnonzero(items["status"] == native.BLOCKED)
        if not self.common.direct:
            for fd in items["fd"][blocked].tolist():
                with suppress(OSError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        for place in blocked.tolist():
            # OSError: no memory to read into.
            with suppress(OSError):
                self._read_cold(start + place, borrowed)

    def _read_cold(self, index: int, borrowed: Borrowed) -> None:
        """Reads what has to come from a device: into memory of ours, and on from there while it is in the cache."""
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


class StagedRun:
    """Chunks ``start`` to ``stop - 1`` of a run on their way to the root, one lane's part: those that ``look`` found
    ABSENT are staged under names of a session, and published.

    By its status, each is there already (FOUND), staged (DONE), PUBLISHED, or for Python to do.
    """

    __slots__ = ("_common", "_session", "items", "run", "start", "stop")

    def __init__(self, run: Run, start: int, stop: int, session: bytes, durable: bool) -> None:
        self.run = run
        self._session = session
        self.start = start
        self.stop = stop
        self._common = native.Run.from_buffer_copy(run.common)  # lanes share the run's, and a session may end
        self._common.session = session.hex().encode()
        self._common.durable = durable
        self.items = run.items[start - run.first : stop - run.first]

    def stage(self) -> None:
        """Stages those that are ABSENT: then DONE where that worked, and nothing is left where it did not."""
        native.library.kv_stage(self._common, *self.run.part(self.start, self.stop))

    def publish(self, start: int, stop: int, *, ordered: bool) -> None:
        """Gives those that are staged their final names: then PUBLISHED. The others are for Python, staged still.

        What is ``ordered`` ends with the first of them. Where puts are durable all are, as each waits for the device.
        """
        if not self._common.durable:
            native.library.kv_publish(self._common, *self.run.part(start, stop), ordered)

    def statuses(self) -> list[int]:
        """How it stands with each."""
        found: list[int] = self.items["status"].tolist()
        return found

    def name(self, index: int) -> Name:
        """Under which a chunk is staged."""
        return places.staged(self._session, int(self.items["number"][index - self.start]))

    def stat(self, index: int) -> Stat:
        """Of a chunk that was FOUND."""
        return Stat(self.run.file_bytes(index), int(self.items["mtime_ns"][index - self.start]))


def chain_run(
    files: LocalFiles, shard_bits: int, chain: Chain, first: int, count: int, sections: Planes | Images | None
) -> Run:
    """Chunks of a chain, whose sections are in ``sections``; None for those that are only looked at, or mapped."""
    run = Run(files, shard_bits, chain.namespace, Kind.TOKENS, first, count)
    indexes = range(first, first + count)
    run.alive += (chain, *describe(chain, indexes, run.items))
    if isinstance(sections, Planes):
        run.alive += lay_planes(sections, indexes, run.items)
    elif sections is not None:
        run.items["offset"] = sections.payload_addresses(first, count)
        run.origins = {index: sections.origin(index) for index in indexes}
        run.alive.append(sections)
    return run


def block_run(
    files: LocalFiles,
    shard_bits: int,
    namespace: Namespace,
    keys: Sequence[bytes],
    addresses: Sequence[Address],
    buffers: Sequence[memoryview],
) -> Run:
    """Engine-hashed blocks, each with its key and buffer."""
    run = Run(files, shard_bits, namespace, Kind.BLOCK, 0, len(keys))
    keyed = Keyed(namespace, keys, addresses, list(map(len, buffers)))
    run.alive += (buffers, *describe(keyed, range(len(keys)), run.items))
    run.items["offset"] = list(map(address_of, buffers))
    return run


@contextmanager
def _cold_memory() -> Iterator[int]:
    """The address of COLD_BYTES of memory for blocking reads, aligned to pages as O_DIRECT wants it.

    From a pool, because a lane that needs it keeps it only for a moment; one that hangs in a dead mount keeps it.
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
