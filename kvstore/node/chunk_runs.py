"""Runs of chunk files for native code, which needs no GIL: look, read, map, stage.

Native code does the common good case. Failures are reported; ``Chunks`` redoes those one by one. Called on lanes only:
a lane has its own part of a run, or takes turns at a shared one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import recency
from kvstore.address import Address, Chain
from kvstore.buffers import Borrowed, Laid, Sections, Withdrawn, address_of
from kvstore.counts import NodeCount
from kvstore.format import places
from kvstore.format.header import PAGE_BYTES, Incarnation
from kvstore.format.places import Name
from kvstore.hints import Hints
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.node.counters import Counters
from kvstore.node.encoded import Encodings
from kvstore.node.gc_state import Usage
from kvstore.node.images import Images
from kvstore.node.incarnations import Incarnations
from kvstore.node.known import Known
from kvstore.node.lanes import moved_on
from kvstore.node.unreadable import Unreadable
from kvstore.node.wanted import Items, Wanted
from kvstore.recency import stamps_ns
from kvstore.results import LayerMemory
from kvstore.root.interface import LocalFiles, Root, local_files

# The chunks of a layer-by-layer read for native code: their files stay open and their images stay in memory.
#
# Native code verifies each header once and reads two sections for each layer. Separate from ``layers.py``, which
# makes the decisions and redoes chunk by chunk whatever fails here.


Mask = npt.NDArray[np.bool_]


class _Group:
    """The chunks that one lane reads at a time."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        """The right to open its files."""
        self.users = 0
        """Bands that are read now."""


class LayerRun:
    """The first chunks of a chain, read some layers at a time, in groups of ``size``: one lane reads each group.

    ``images`` has the address of each chunk's image, valid until ``close``, or 0; ``files`` is None if the chunks have
    no files that native code reads. At most ``files_max`` files are open between two reads. ``at_once`` bands of layers
    may be read at once, out of the same files; bands are counted from 0, whatever their sizes.
    """

    def __init__(
        self,
        chain: Chain,
        images: npt.NDArray[np.uint64],
        files: LocalFiles | None,
        shard_bits: int,
        size: int,
        files_max: int,
        at_once: int = 1,
    ) -> None:
        count = len(images)
        layout = chain.namespace.layout
        self._turns = [Items(chain, range(count)) for _ in range(at_once)]
        """The structures of each band that is read at once."""
        self._bases = [np.zeros(0, np.uint64) for _ in range(at_once)]
        self.layer_bytes = 2 * layout.section_bytes
        """Bytes of one layer of one chunk."""
        self._tables = np.zeros((count, layout.section_count), np.uint64)
        self._images = images
        self._images_start: int = images.__array_interface__["data"][0]
        self._tables_start: int = self._tables.__array_interface__["data"][0]
        self.fds = np.full(count, -1, np.int32)
        """The files that stay open between layers, by chunk; -1 for none."""
        self.has_files = files is not None
        for turn in self._turns:
            turn.items["fd"] = -1
            turn.items["offset"] = np.arange(count, dtype=np.uint64) * layout.section_bytes
            if files is not None:
                turn.common.root = os.fsencode(files.path)
                turn.common.shard_bits = shard_bits
                turn.common.may_wait = files.never_blocks
        self._size = size
        self._group_files_max = files_max // -(-count // size)
        self._lock = threading.Lock()
        self._groups = {start: _Group() for start in range(0, count, size)}
        self._closed = False
        if images.any():
            first = self._turns[0]
            native.library.kv_images_tables(first.common, first.at(0), count, self._images_start, self._tables_start)
            images[first.items["status"] != native.DONE] = 0
        self.from_files: Mask = images == 0
        """The chunks that are not in memory."""
        self._to_open = self.from_files.copy()
        """Those of them whose files are not open, or whose headers are not verified."""

    def begin(self, band: int, memories: Sequence[LayerMemory]) -> None:
        """Sets where the layers of a band go; nobody reads the band before in its turn any more."""
        at = band % len(self._turns)
        self._bases[at] = np.array([address_of(plane) for each in memories for plane in (each.k, each.v)], np.uint64)
        self._turns[at].items["bases"] = self._bases[at].__array_interface__["data"][0]

    def read(
        self, start: int, stop: int, band: int, layer: int, borrowed: Borrowed
    ) -> tuple[Mask, Mask, npt.NDArray[np.int64]]:
        """Reads a band, which begins with ``layer``, of the chunks of one group. Raises Withdrawn.

        Returns which chunks are right in their place, which of these came from files opened by this call, and the
        mtimes of those.
        """
        turn, sections = self._turns[band % len(self._turns)], len(self._bases[band % len(self._turns)])
        at, count, items = turn.at(start), stop - start, turn.items[start:stop]
        columns = (self._images_start + start * 8, self._tables_start + start * self._tables.strides[0])
        with self.using(start):
            opened = self._open(turn, start, stop, columns)
            try:
                with borrowed.writing():
                    native.library.kv_read_parts(turn.common, at, count, *columns, 2 * layer, sections)
            finally:
                for place in np.flatnonzero(items["fd"] != self.fds[start:stop]).tolist():
                    native.library.kv_close(turn.at(start + place), 1)
        done: Mask = items["status"] == native.DONE
        return done, done & opened, items["mtime_ns"][done & opened]

    def _open(self, turn: Items, start: int, stop: int, columns: tuple[int, int]) -> Mask:
        """Opens the files of a group that are not open, and keeps as many as there is room for; returns which."""
        items, kept = turn.items[start:stop], self.fds[start:stop]
        with self._groups[start].opening:
            items["fd"] = kept
            left = self._to_open[start:stop]
            if not (self.has_files and left.any()):
                # No native call, after which a thread waits for the GIL: nothing is to be done in most of them.
                items["status"] = np.where(left, native.OTHER, native.DONE)
                return np.zeros(stop - start, np.bool_)
            native.library.kv_open_parts(turn.common, turn.at(start), stop - start, *columns)
            opened: Mask = (items["fd"] >= 0) & (kept < 0)
            kept[items["fd"] < 0] = -1
            room = max(0, self._group_files_max - int(np.count_nonzero(kept >= 0)))
            keeps = np.flatnonzero(opened)[:room]
            kept[keeps] = items["fd"][keeps]
            left[:] = (kept < 0) & self.from_files[start:stop]
        return opened

    def close(self) -> None:
        """Closes all files; a lane that still reads some closes those. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [start for start, group in self._groups.items() if not group.users]
        for start in idle:
            self._close(start)

    def _close(self, start: int) -> None:
        with self._lock:
            kept = self.fds[start : start + self._size]
            files: list[int] = kept[kept >= 0].tolist()
            kept[:] = -1
        for fd in files:
            with suppress(OSError):
                os.close(fd)

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        """Keeps the files of that chunk's group open. Raises Withdrawn."""
        start = index - index % self._size
        group = self._groups[start]
        with self._lock:
            if self._closed:
                raise Withdrawn
            group.users += 1
        try:
            yield
        finally:
            with self._lock:
                group.users -= 1
                closes = self._closed and not group.users
            if closes:
                self._close(start)


COLD_BYTES = 4 << 20
"""Bytes of one blocking read of uncached data; a multiple of what devices and O_DIRECT want."""
COLD_POOL_MAX = 4
"""Limit on buffers for such reads that are kept for the next ones."""

Places = npt.NDArray[np.int32]
"""Offsets of chunks in a run, counted from 0."""

_cold_pool: list[npt.NDArray[np.uint8]] = []
_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_TENSOR = b"dltensor"
_ON_CPU = (1, 0)
TURN_NS = 250_000_000
"""Time after which a turn at a put ends, however little it did: a lane that is in one call for ``stall_s`` counts as
hung.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of turns, in chunks."""

    step: int
    """Chunks taken at a time, so that lanes end together."""
    most: int
    """Chunks that end a turn, at least ``step``."""
    files: int = 1
    """Files that a reading lane may have open at once; a step may need more."""


class Run(Items):
    """Chunks ``first`` to ``first + count - 1`` of what is wanted, in files. Indexes are those of the request.

    ``sections`` is where they are read into or written from; None for a run that is only looked at, or mapped.
    """

    def __init__(
        self, files: LocalFiles, shard_bits: int, wanted: Wanted, first: int, count: int, sections: Laid | None = None
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
        self.origins: dict[int, Incarnation] = {}
        """By index, the incarnations of the images that hold the sections; empty if the sections are the caller's."""
        if sections is not None:
            self.lay(sections)
        if isinstance(sections, Images):
            self.common.from_images = True
            self.origins = {index: sections.origin(index) for index in indexes}

    def read(self, start: int, stop: int, borrowed: Borrowed) -> Mask:
        """Reads chunks into their sections; True for those that are whole, verified and there. Raises Withdrawn."""
        native.library.kv_open(self.common, *self.part(start, stop))
        return self.read_open(start, stop, borrowed)

    def read_open(self, start: int, stop: int, borrowed: Borrowed) -> Mask:
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

    def read_blocked(self, places: npt.NDArray[Any], borrowed: Borrowed) -> None:
        """Reads chunks, counted from the first, whose files are open and not cached, and closes the files.

        Raises Withdrawn.
        """
        blocked = places[self.items["status"][places] == native.BLOCKED].tolist()
        try:
            if not self.common.direct:  # lets the device begin with all of it at once
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
        """Returns how many bytes the file of a chunk must have."""
        item = self.items[index - self.first]
        return int(item["header_bytes"]) + self.payload_bytes(index - self.first)

    def payload_bytes(self, place: int) -> int:
        """Returns the bytes of the sections of a chunk, counted from the first."""
        item = self.items[place]
        return int(item["section_count"]) * int(item["section_bytes"])

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the address of the structures of some chunks, and how many they are."""
        assert self.first <= start <= stop <= self.first + self.count
        return self._start + (start - self.first) * native.CHUNK.itemsize, stop - start

    def _read_cold(self, index: int, borrowed: Borrowed) -> None:
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


class SharedBatch:
    """A run that several lanes do together: each takes the next few chunks again and again, in one call.

    So all lanes end at about the same time, with few calls. That matters because Python's own memory has left the
    processor's cache by the time the next call needs it (benchmarks/NOTES.md). Made on any thread.
    """

    def __init__(self, run: Run, sizes: Sizes) -> None:
        self.run = run
        self._sizes = sizes
        self._next = ctypes.c_int64(0)
        self._header_bytes = int(run.items["header_bytes"].max())
        self._abandoned: ctypes.c_int32 | None = None
        run.items["status"] = native.OTHER

    def stop(self) -> None:
        """Begins no more chunks."""
        self._next.value = self.run.count

    def turn(self) -> tuple[Any, Places]:
        """Returns what native code needs for a turn, and the memory for the offsets of the chunks that it reports."""
        sizes = self._sizes
        told = np.empty(sizes.most + sizes.step, np.int32)
        at = told.__array_interface__["data"][0]
        taken = ctypes.pointer(self._next)
        files = max(sizes.step, sizes.files)
        turn = native.Turn(taken, sizes.step, sizes.most, files, self._header_bytes, at, time_ns=TURN_NS)
        if self._abandoned is not None:
            turn.abandoned = ctypes.pointer(self._abandoned)
        return turn, told


class SharedPut(SharedBatch):
    """A run on its way to the root, staged under names of a session.

    After its turn a chunk's status says that it is already there (FOUND), staged (DONE), PUBLISHED, or left to Python.
    Numbers for the names, incarnations and stamps are in the items before the first turn.
    """

    def __init__(
        self,
        run: Run,
        sizes: Sizes,
        session: bytes,
        durable: bool,
        epoch: int,
        abandoned: ctypes.c_int32 | None = None,
    ) -> None:
        """``epoch`` is the epoch of what the node remembers, read before anybody looks at the root.

        With ``abandoned`` a turn publishes what it staged, unless that is set by then.
        """
        super().__init__(run, sizes)
        self._abandoned = abandoned
        self.epoch = epoch
        self._session = session
        self._common = native.Common.from_buffer_copy(run.common)
        self._common.session = session.hex().encode()
        self._common.durable = durable
        self.is_right = bool(run.common.from_images)
        """True if native code compares what it stages with the images that it comes from."""

    def stage(self) -> tuple[Places, bool, int]:
        """Takes a turn. Of a chunk that could not be staged nothing is left.

        Returns the offsets of the chunks that it looked for and staged if they were missing, whether there may be more,
        and the bytes of those that it staged.
        """
        turn, told = self.turn()
        more = native.library.kv_stage_turn(self._common, self.run.at(0), self.run.count, turn)
        return told[: turn.told_count], bool(more), turn.bytes

    def publish(self, at: Places, *, ordered: bool) -> None:
        """Gives staged chunks their final names: they become PUBLISHED. The others stay staged, for Python.

        An ``ordered`` call ends with the first of the others. Durable puts are all left to Python, because each
        waits for the device.
        """
        if not self._common.durable:
            listed = at.__array_interface__["data"][0]
            native.library.kv_publish(self._common, self.run.at(0), listed, len(at), ordered)

    def taken(self, at: Places) -> npt.NDArray[Any]:
        """Returns the structures of chunks as they are now: their statuses, and the mtimes of those that were FOUND."""
        found: npt.NDArray[Any] = self.run.items[at]
        return found

    def name(self, place: int) -> Name:
        """Returns the name under which a chunk is staged."""
        return places.staged(self._session, int(self.run.items["number"][place]))


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


class SharedRead(SharedBatch):
    """The chunks of one read on their way into the caller's memory."""

    def __init__(self, runs: ChunkRuns, run: Run, sizes: Sizes, counters: Counters, epoch: int) -> None:
        super().__init__(run, sizes)
        self._runs = runs
        self._counters = counters
        self._epoch = epoch

    def read(self, borrowed: Borrowed) -> tuple[list[int], bool]:
        """Takes one lane's turn. Raises Withdrawn.

        Returns the offsets of the chunks that are left to ``Chunks.read``, and whether there may be more to read.
        """
        run, (turn, told) = self.run, self.turn()
        with self._counters.timed("root", "read") as timed:
            outcome = native.library.kv_read_turn(run.common, run.at(0), run.count, turn, borrowed.natively)
            timed.size_bytes, left = turn.bytes, told[: turn.told_count]
            if left.size:
                run.read_blocked(left, borrowed)
                is_read = run.items["status"][left] == native.DONE
                timed.size_bytes += sum(map(run.payload_bytes, left[is_read].tolist()))
                left = left[~is_read]
        if outcome < 0:
            raise Withdrawn
        return left.tolist(), bool(outcome)

    def end(self) -> npt.NDArray[np.bool_]:
        """Returns which chunks were read and verified. Call it once, when nobody writes into the memory any more."""
        run = self.run
        self._runs.note(run, run.first, run.first + run.count, self._epoch)
        done: npt.NDArray[np.bool_] = run.items["status"] == native.DONE
        return done


@dataclass(frozen=True, slots=True)
class ChunkWriter:
    """The parts that give a node's files their names, incarnations and encodings."""

    session: Callable[[], bytes]
    """The session to stage under; another one once the node has joined anew."""
    numbers: Iterator[int]
    """Numbers for the names of staged files; none comes twice."""
    incarnations: Incarnations
    encodings: Encodings
    usage: Usage
    """Counts the bytes that the node writes, for collectors."""


class ChunkRuns:
    """Makes runs of the chunk files of one root; makes none if native code or the root cannot."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        writer: ChunkWriter,
        known: Known,
        counters: Counters,
        unreadable: Unreadable,
    ) -> None:
        self._writer = writer
        self._unreadable = unreadable
        self._files = local_files(root) if is_available() else None
        self._shard_bits = shard_bits
        self._known = known
        self._counters = counters

    def of(
        self, wanted: Wanted, first: int, count: int, sections: Sections | None = None, *, fills: bool = False
    ) -> Run | None:
        """Returns chunks ``first`` to ``first + count - 1`` as a native run; None if they must be done one by one.

        The run is written from ``sections``, or read into them if it ``fills``. Without sections it is looked at or
        mapped.
        """
        if self._files is None or count < 1 or self._writer.encodings.encodes(wanted.namespace.tenant):
            return None
        if sections is None:
            return Run(self._files, self._shard_bits, wanted, first, count)
        if not isinstance(sections, Laid) or not sections.covers(first, count) or (fills and not sections.is_writable):
            return None
        return Run(self._files, self._shard_bits, wanted, first, count, sections)

    @property
    def is_native(self) -> bool:
        """True if native code reads this root's files."""
        return self._files is not None

    @property
    def stages(self) -> bool:
        """True if native code also stages runs."""
        return self._files is not None and self._files.stages

    def look(self, run: Run, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Returns which chunks of part of a run exist, and their mtimes. ``Chunks.look`` decides about the rest."""
        return self._look(run, start, stop, self._known.epoch)

    def _look(self, run: Run, start: int, stop: int, epoch: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        found, mtimes_ns = run.look(start, stop)
        if self._doubt(run, np.arange(start - run.first, stop - run.first, dtype=np.int32)):
            part = run.items[start - run.first : stop - run.first]
            found = part["status"] == native.FOUND
            mtimes_ns = part["mtime_ns"][found]
        at, count = run.part(start, stop)
        self._known.add_run(at, count, native.FOUND, self._known.quantum(), epoch=epoch)
        return found, mtimes_ns

    def present(self, run: Run, start: int, stop: int, epoch: int) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Returns which blocks of part of a run exist, whatever their size, and the indexes of those not known yet.

        ``epoch`` is the epoch of what the node remembers, read before anybody made sure that none is condemned.
        """
        assert self._files is not None
        found, _ = self._look(run, start, stop, epoch)
        statuses = run.items["status"][start - run.first : stop - run.first]
        is_known = statuses == native.FOUND
        if self._files.knows_absence:
            is_known |= statuses == native.ABSENT
        left: list[int] = (start + np.flatnonzero(~is_known)).tolist()
        return found, left

    def read(self, run: Run, start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        """Reads and verifies part of a run; True for each chunk that is right. ``Chunks.read`` does the rest."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            done = run.read(start, stop, borrowed)
            timed.size_bytes = self.note(run, start, stop, epoch)
        return done

    def shared_read(self, run: Run, sizes: Sizes) -> SharedRead:
        """Returns a run that several lanes read together."""
        return SharedRead(self, run, sizes, self._counters, self._known.epoch)

    def of_layers(
        self,
        chain: Chain,
        images: npt.NDArray[np.uint64],
        size: int,
        files_max: int,
        at_once: int,
    ) -> LayerRun | None:
        """Returns the first chunks of a chain, one for each image, for a layer-by-layer read in groups of ``size``.

        None if they must be read one by one.
        """
        files = None if self._files is None or self._files.direct else self._files
        if (
            not is_available()
            or self._writer.encodings.encodes(chain.namespace.tenant)
            or (files is None and not images.any())
        ):
            return None
        return LayerRun(chain, images, files, self._shard_bits, size, files_max, at_once)

    def read_layers(
        self,
        run: LayerRun,
        band: int,
        layers: range,
        addresses: Sequence[Address],
        start: int,
        stop: int,
        borrowed: Borrowed,
    ) -> npt.NDArray[np.bool_]:
        """Reads a band of layers of one group of a run; True for each chunk whose sections are right in their place."""
        epoch, from_files = self._known.epoch, run.from_files[start:stop]
        with self._counters.timed("root" if from_files.any() else "memory", "read") as timed:
            done, opened, mtimes_ns = run.read(start, stop, band, layers.start, borrowed)
            size_bytes = len(layers) * run.layer_bytes
            timed.size_bytes = int(np.count_nonzero(done)) * size_bytes
        for right, chunks, payload in (
            (done & from_files, NodeCount.CHUNKS_READ, NodeCount.BYTES_READ),
            (done & ~from_files, NodeCount.MEMORY_HITS, NodeCount.MEMORY_BYTES),
        ):
            if count := int(np.count_nonzero(right)):
                self._counters.add(payload, count * size_bytes)
                if not layers.start:  # a chunk counts once, with its first layer
                    self._counters.add(chunks, count)
        where = start + np.flatnonzero(opened)
        if where.size:
            quantum = self._known.quantum()
            renewed = mtimes_ns >= quantum * recency.NS_PER_S
            self._known.add_all([addresses[at] for at in where.tolist()], quantum, renewed=renewed, epoch=epoch)
        return done

    def note(self, run: Run, start: int, stop: int, epoch: int) -> int:
        """Remembers the DONE chunks of part of a run as present; returns the bytes of their sections."""
        at, count = run.part(start, stop)
        chunks, size_bytes = self._known.add_run(at, count, native.DONE, self._known.quantum(), epoch=epoch)
        if chunks:
            self._counters.add_read(size_bytes, chunks)
        return size_bytes

    def shared_put(
        self,
        run: Run,
        sizes: Sizes,
        depths: npt.NDArray[np.int64],
        *,
        stamped_s: float,
        durable: bool,
        hints: Hints,
        abandoned: ctypes.c_int32 | None = None,
    ) -> SharedPut:
        """Returns a run that several lanes put together; ``depths`` are the indexes of its chunks in their prompt.

        ``stamped_s`` is the time of their stamps; ``abandoned`` is as in ``SharedPut``.
        """
        put = SharedPut(run, sizes, self._writer.session(), durable, self._known.epoch, abandoned)
        indexes = np.arange(run.first, run.first + run.count)
        run.items["number"] = list(islice(self._writer.numbers, run.count))
        run.items["incarnation"] = np.frombuffer(b"".join(self._incarnations_of(run, indexes)), "V16")
        run.items["mtime_ns"] = stamps_ns(stamped_s, depths, hints)
        return put

    def stage(self, put: SharedPut) -> tuple[Places, bool]:
        """Takes one lane's turn at a put: looks for chunks and stages those that are missing.

        Returns the offsets of the chunks that it took, and whether there may be more. ``Chunks`` does those that are
        then neither found nor staged; ``publish`` counts those that are PUBLISHED.
        """
        self._writer.incarnations.record()
        with self._counters.timed("root", "write") as timed:
            places, more, timed.size_bytes = put.stage()
        if not len(places):
            return places, more
        self._doubt(put.run, places)
        at = put.run.at(0)
        self._known.add_run(at, places, native.FOUND, self._known.quantum(), epoch=put.epoch)
        for status in (native.DONE, native.PUBLISHED):
            self._known.forget_run(at, places, status)
        return places, more

    def publish(self, put: SharedPut, places: Places, *, ordered: bool, epoch: int | None = None) -> tuple[int, int]:
        """Publishes staged chunks, and counts those that are PUBLISHED; returns how many, and the bytes of their
        sections.

        An ``ordered`` call stops at the first chunk that native code cannot publish. ``Chunks.publish`` does those that
        are not PUBLISHED. With ``epoch`` they are PUBLISHED already, and only counted: it is the epoch of what the node
        remembers from before.
        """
        if epoch is None:
            epoch = self._known.epoch
            put.publish(places, ordered=ordered)
        at = put.run.at(0)
        chunks, size_bytes = self._known.add_run(at, places, native.PUBLISHED, self._known.quantum(), epoch=epoch)
        if chunks:
            published = places[put.run.items["status"][places] == native.PUBLISHED]
            self._writer.usage.wrote(size_bytes + int(put.run.items["header_bytes"][published].sum()))
            self._counters.add(NodeCount.CHUNKS_WRITTEN, chunks)
            self._counters.add(NodeCount.BYTES_WRITTEN, size_bytes)
        return chunks, size_bytes

    def _doubt(self, run: Run, places: Places) -> bool:
        """Leaves to ``Chunks`` what was found by size alone and was unreadable before; True if there was any."""
        if not len(self._unreadable):
            return False
        suspects = [
            place
            for place in places.tolist()
            if run.items["status"][place] == native.FOUND and run.items["address"][place].tobytes() in self._unreadable
        ]
        run.items["status"][suspects] = native.OTHER
        return bool(suspects)

    def _incarnations_of(self, run: Run, indexes: npt.NDArray[np.intp]) -> list[Incarnation]:
        """Returns fresh incarnations; those of chunks from images keep writer and time of the image."""
        if not run.origins:
            return self._writer.incarnations.fresh_each(len(indexes))
        return [self._writer.incarnations.renewed(run.origins[index]) for index in indexes.tolist()]

    def map(self, run: Run, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], list[memoryview | None]]:
        """Returns verified payloads of part of a run, mapped read-only. ``Chunks.map`` does the rest."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            mapped = run.map(start, stop)
            timed.size_bytes = self.note(run, start, stop, epoch)
        return np.array([payload is not None for payload in mapped], np.bool_), mapped
