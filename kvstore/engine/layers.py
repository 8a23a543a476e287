"""Reads a held prefix layer by layer, and reads the next layers while the engine uses this one."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.codec.image import addresses_of, copy_sections
from kvstore.core import recency
from kvstore.core.buffers import BufferLoan, Pieces, Withdrawn, address_of
from kvstore.core.executor import Deadline, files_at_most, group_size
from kvstore.core.metrics import NodeCount
from kvstore.core.results import LayerMemory
from kvstore.engine.reader import Groups, ReadFuture
from kvstore.errors import HoldBroken
from kvstore.format.header import Header
from kvstore.format.keyset import ChunkKeys, NativeBatch
from kvstore.native import library as native
from kvstore.root.interface import FileReader, LocalFiles

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

MemoryOf = Callable[[int], LayerMemory]
"""The memory that a layer is read into."""

LIMIT_PER_READ = 4
"""Share of the process's limit of open files that one read keeps open."""


AHEAD = 2
"""Bands of layers that are read in parallel, ahead of the layer in use: threads go on with the next while one ends."""


class _Group:
    """The chunks that one thread reads at a time."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        """The right to open its files."""
        self.users = 0
        """Bands that are read now."""


class LayerRun:
    """The first chunks of a chain, read some layers at a time, in groups of ``size``: one thread reads each group.

    ``images`` has the address of each chunk's image, valid until ``close``, or 0; ``files`` is None if the chunks have
    no files that native code reads. At most ``files_max`` files are open between two reads. ``at_once`` bands of layers
    may be read in parallel, out of the same files; bands are counted from 0, whatever their sizes.
    """

    def __init__(
        self,
        chain: ChunkKeys,
        images: npt.NDArray[np.uint64],
        files: LocalFiles | None,
        shard_bits: int,
        size: int,
        files_max: int,
        at_once: int = 1,
    ) -> None:
        count = len(images)
        layout = chain.namespace.layout
        self._turns = [NativeBatch(chain, range(count)) for _ in range(at_once)]
        """The structures of each band that is read in parallel."""
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
        self.from_files: npt.NDArray[np.bool_] = images == 0
        """The chunks that are not in memory."""
        self._to_open = self.from_files.copy()
        """Those of them whose files are not open, or whose headers are not verified."""

    def begin(self, band: int, memories: Sequence[LayerMemory]) -> None:
        """Sets where the layers of a band go; the previous band that used its structures MUST be read."""
        at = band % len(self._turns)
        self._bases[at] = np.array([address_of(plane) for each in memories for plane in (each.k, each.v)], np.uint64)
        self._turns[at].items["bases"] = self._bases[at].__array_interface__["data"][0]

    def read(
        self, start: int, stop: int, band: int, layer: int, borrowed: BufferLoan
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
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
                # Not while it may write to the caller's memory: this waits where the device's queue is full.
                for place in np.flatnonzero(items["status"] == native.BLOCKED).tolist():
                    with suppress(OSError):
                        os.posix_fadvise(int(items["fd"][place]), 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                for place in np.flatnonzero(items["fd"] != self.fds[start:stop]).tolist():
                    native.library.kv_close(turn.at(start + place), 1)
        done: npt.NDArray[np.bool_] = items["status"] == native.DONE
        return done, done & opened, items["mtime_ns"][done & opened]

    def _open(self, turn: NativeBatch, start: int, stop: int, columns: tuple[int, int]) -> npt.NDArray[np.bool_]:
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
            opened: npt.NDArray[np.bool_] = (items["fd"] >= 0) & (kept < 0)
            kept[items["fd"] < 0] = -1
            room = max(0, self._group_files_max - int(np.count_nonzero(kept >= 0)))
            keeps = np.flatnonzero(opened)[:room]
            kept[keeps] = items["fd"][keeps]
            left[:] = (kept < 0) & self.from_files[start:stop]
        return opened

    def close(self) -> None:
        """Closes all files; a thread that still reads some closes those. Idempotent."""
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


class LayerReader:
    """The open files of one layer-by-layer read, up to a limit; other files are reopened for each layer."""

    def __init__(self, node: Engine, chain: ChunkKeys, count: int, band: int) -> None:
        """Reads ``band`` layers together: fewer calls, and larger parts of files."""
        layers = chain.namespace.layout.layers
        self._bands = [range(first, min(first + band, layers)) for first in range(0, layers, band)]
        self._chunks = node.store
        self._memory = node.memory
        # Keep them in memory as long as this reads: a chunk that only memory has must not vanish between two layers.
        self._slots = self._memory.refer(chain, 0, count) if self._memory is not None else None
        # If memory has all of it, use threads that work even if every other thread waits for a root that hangs.
        is_near = self._slots is not None and None not in self._slots.entries
        self._executor = node.tiers.copiers if node.tiers is not None and is_near else node.executor
        self._counters = node.counters
        self._chain = chain
        self._count = count
        self._files_max = files_at_most(node.limits.open_files_max, LIMIT_PER_READ)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[FileReader, Header]] = {}
        self._closed = False
        self._size = group_size(AHEAD * count, 2 * band * chain.namespace.layout.section_bytes, self._executor.width)
        images = np.zeros(count, np.uint64)
        if self._slots is not None and self._slots.referred:
            present = [index for index, entry in enumerate(self._slots.entries) if entry is not None]
            images[present] = addresses_of(self._slots.present_images())
        self._run = self._native_run(images)
        """All chunks for native code; None if they must be read one by one."""
        self._readings: deque[ReadFuture] = deque()

    def read(self, memory: MemoryOf, deadline: Callable[[], Deadline]) -> Generator[tuple[int, LayerMemory]]:
        """Yields each layer once it is in ``memory(layer)``, verified; the next ones are read then.

        Raises HoldBroken if a chunk was lost: the layers yielded so far stay valid for the tokens before it.
        """
        filled: deque[list[LayerMemory]] = deque()
        try:
            for number in range(min(AHEAD, len(self._bands))):
                filled.append(self._begin(number, memory))
            for number, layers in enumerate(self._bands):
                self._wait(deadline())
                if number + AHEAD < len(self._bands):
                    filled.append(self._begin(number + AHEAD, memory))
                yield from zip(layers, filled.popleft(), strict=True)
        finally:
            self.close()

    def close(self) -> None:
        """Closes all files; no thread writes into the memory afterwards. Idempotent."""
        for reading in self._readings:
            reading.withdraw()
        with self._lock:
            self._closed = True
            readers = [reader for reader, _ in self._open.values()]
            self._open.clear()
        for reader in readers:
            reader.close()
        if self._run is not None:
            self._run.close()
        if self._slots is not None:
            self._slots.release()

    def _begin(self, number: int, memory: MemoryOf) -> list[LayerMemory]:
        """Begins to read a band into the memory of each of its layers, and returns that."""
        layers, section_bytes, run = self._bands[number], self._chain.namespace.layout.section_bytes, self._run
        memories, groups = [memory(layer) for layer in layers], None

        def read(index: int, borrowed: BufferLoan) -> bool:
            part = slice(index * section_bytes, (index + 1) * section_bytes)
            sections = [plane[part] for each in memories for plane in (each.k, each.v)]
            return self._read_part(index, layers.start, sections, borrowed)

        if run is not None:
            run.begin(number, memories)
            groups = Groups(self._size, self._count, partial(self._read_group, run, number, layers))
        self._readings.append(ReadFuture(self._executor, self._counters, self._count, read, groups=groups))
        return memories

    def _native_run(self, images: npt.NDArray[np.uint64]) -> LayerRun | None:
        found = self._chunks.layer_files(self._chain.namespace.tenant)
        if found is None or (found[0] is None and not images.any()):
            return None
        return LayerRun(self._chain, images, *found, self._size, self._files_max, AHEAD)

    def _read_group(
        self, run: LayerRun, band: int, layers: range, start: int, stop: int, borrowed: BufferLoan
    ) -> npt.NDArray[np.bool_]:
        """Reads a band of layers of one group; True for each chunk whose sections are right in their place."""
        known, counters = self._chunks.known, self._counters
        epoch, from_files = known.epoch, run.from_files[start:stop]
        with counters.timed("root" if from_files.any() else "memory", "read") as timed:
            done, opened, mtimes_ns = run.read(start, stop, band, layers.start, borrowed)
            size_bytes = len(layers) * run.layer_bytes
            timed.size_bytes = int(np.count_nonzero(done)) * size_bytes
        for right, chunks, payload in (
            (done & from_files, NodeCount.CHUNKS_READ, NodeCount.BYTES_READ),
            (done & ~from_files, NodeCount.MEMORY_HITS, NodeCount.MEMORY_BYTES),
        ):
            if count := int(np.count_nonzero(right)):
                counters.add(payload, count * size_bytes)
                if not layers.start:  # a chunk counts once, with its first layer
                    counters.add(chunks, count)
        where = start + np.flatnonzero(opened)
        if where.size:
            quantum = known.quantum()
            renewed = mtimes_ns >= quantum * recency.NS_PER_S
            addresses = [self._chain.addresses[at] for at in where.tolist()]
            known.add_all(addresses, quantum, renewed=renewed, epoch=epoch)
        return done

    def _wait(self, deadline: Deadline) -> None:
        """Waits for the first band in progress. Raises HoldBroken."""
        lost_at = self._readings[0].wait(deadline).find(0)
        self._readings.popleft()
        if lost_at < 0:
            return
        if deadline.passed:
            raise HoldBroken(
                "a layer was not read in time: compute all tokens again; check the mount (kvstore check-root)", 0
            )
        size = self._chain.namespace.layout.chunk_tokens
        raise HoldBroken(
            f"the chunk of tokens {lost_at * size} to {(lost_at + 1) * size} was lost while its layers were read: "
            f"compute from token {lost_at * size} on",
            lost_at * size,
        )

    def _read_part(self, index: int, layer: int, sections: Pieces, borrowed: BufferLoan) -> bool:
        expected = self._chain.expected(index)
        if self._slots is not None and self._slots.entries[index] is not None:
            image = self._slots.image(index)
            if copy_sections(self._chain, index, image, 2 * layer, sections, borrowed):
                self._counters.add(NodeCount.MEMORY_HITS, 0 if layer else 1)
                self._counters.add(NodeCount.MEMORY_BYTES, sum(map(len, sections)))
                return True
            # The tier verifies it once more and drops it if it is wrong (rule I1); the root decides.
            assert self._memory is not None
            with self._memory.refer(self._chain, index, 1) as slots:
                self._memory.verified(slots)
        with self._lock:
            opened = self._open.pop(index, None)  # taken out, so that only one thread at a time uses a reader
        opened = opened or self._chunks.open(expected)
        if opened is None:
            return False
        reader, header = opened
        try:
            return self._chunks.read_range(reader, header, expected, 2 * layer, sections, borrowed)
        finally:
            with self._lock:
                # Two threads may read layers of one chunk concurrently: the other thread's reader may be kept already.
                keep = not self._closed and index not in self._open and len(self._open) < self._files_max
                if keep:
                    self._open[index] = opened
            if not keep:
                reader.close()
