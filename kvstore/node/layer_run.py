"""The chunks of a layer-by-layer read for native code: their files stay open and their images stay in memory.

Native code verifies each header once and reads two sections for each layer. Separate from ``layers.py``, which makes
the decisions and redoes chunk by chunk whatever fails here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Withdrawn, address_of
from kvstore.native import library as native
from kvstore.node.items import Items
from kvstore.results import LayerMemory
from kvstore.root.interface import LocalFiles

Mask = npt.NDArray[np.bool_]


class LayerRun(Items):
    """The first chunks of a chain, read one layer at a time, in groups of ``size``: one lane reads each group.

    ``images`` has the address of each chunk's image, valid until ``close``, or 0; ``files`` is None if the chunks have
    no files that native code reads. At most ``files_max`` files are open between two layers.
    """

    def __init__(
        self,
        chain: Chain,
        images: npt.NDArray[np.uint64],
        files: LocalFiles | None,
        shard_bits: int,
        size: int,
        files_max: int,
    ) -> None:
        self._count = count = len(images)
        super().__init__(chain, range(count))
        items, layout = self.items, chain.namespace.layout
        items["fd"] = -1
        items["offset"] = np.arange(count, dtype=np.uint64) * layout.section_bytes
        self.layer_bytes = 2 * layout.section_bytes
        """Bytes of one layer of one chunk."""
        self._tables = np.zeros((count, layout.section_count), np.uint64)
        self._images = images
        self._images_start: int = images.__array_interface__["data"][0]
        self._tables_start: int = self._tables.__array_interface__["data"][0]
        self.has_files = files is not None
        if files is not None:
            self.common.root = os.fsencode(files.path)
            self.common.shard_bits = shard_bits
            self.common.may_wait = files.never_blocks
        self._size = size
        self._group_files_max = files_max // -(-count // size)
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._closed = False
        if images.any():
            native.library.kv_images_tables(self.common, self.at(0), count, self._images_start, self._tables_start)
            images[items["status"] != native.DONE] = 0
        self.from_files: Mask = images == 0
        """The chunks that are not in memory."""
        self._bases = np.zeros(2, np.uint64)

    def give(self, places: Sequence[int], files: Sequence[int]) -> None:
        """Takes over open files of chunks, which ``close`` closes; their headers are verified with the first layer."""
        self.items["fd"][places] = files
        self.items["status"][places] = native.FOUND

    def begin(self, memory: LayerMemory) -> None:
        """Sets where the next layer goes; nobody reads the one before any more."""
        self._bases = np.array([address_of(memory.k), address_of(memory.v)], np.uint64)
        self.items["bases"] = self._bases.__array_interface__["data"][0]

    def read(self, start: int, stop: int, layer: int, borrowed: Borrowed) -> tuple[Mask, Mask]:
        """Reads a layer of the chunks of one group. Raises Withdrawn.

        Returns which chunks are right in their place, and which of these came from files opened by this call.
        """
        at, count, items = self.at(start), stop - start, self.items[start:stop]
        columns = (self._images_start + start * 8, self._tables_start + start * self._tables.strides[0])
        library = native.library
        with self.using(start):
            was_open = items["fd"] >= 0
            if self.has_files:
                library.kv_open_parts(self.common, at, count, *columns)
            else:
                items["status"] = np.where(self._images[start:stop] > 0, native.DONE, native.OTHER)
            opened: Mask = (items["fd"] >= 0) & ~was_open
            with borrowed.writing():
                library.kv_read_parts(self.common, at, count, *columns, 2 * layer, 2)
            for place in np.flatnonzero(opened)[max(0, self._group_files_max - int(was_open.sum())) :].tolist():
                library.kv_close(self.at(start + place), 1)
        done: Mask = items["status"] == native.DONE
        return done, done & opened

    def close(self) -> None:
        """Closes all files; a lane that still reads some closes those. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [start for start in range(0, self._count, self._size) if start not in self._busy]
        for start in idle:
            self._close(start)

    def _close(self, start: int) -> None:
        native.library.kv_close(self.at(start), min(self._size, self._count - start))

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        """Keeps the files of that chunk's group open. Raises Withdrawn."""
        start = index - index % self._size
        with self._lock:
            if self._closed:
                raise Withdrawn
            self._busy.add(start)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(start)
                closes = self._closed
            if closes:
                self._close(start)
