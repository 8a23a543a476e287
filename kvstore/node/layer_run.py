"""The chunks of a layer-by-layer read for native code: their files stay open and their images stay in memory.

Native code verifies each header once and reads two sections for each layer. Separate from ``layers.py``, which makes
the decisions and redoes chunk by chunk whatever fails here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Withdrawn, address_of
from kvstore.native import library as native
from kvstore.node.wanted import Items
from kvstore.results import LayerMemory
from kvstore.root.interface import LocalFiles

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
