"""The sections of consecutive chunks within one array of the caller, without a Python object for each.

Separate because both sides need it: clients make it of arrays, and a node that reads runs of chunks in native code
takes the addresses from it instead of thousands of views.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Planes:
    """An array whose first two axes number its planes; within each plane the sections of the chunks lie one after
    another. Called with a chunk's index it gives the chunk's sections, in file order.

    ``first`` is the index of the chunk that the array begins with.
    """

    __slots__ = ("_array", "_first", "_views", "section_bytes")

    def __init__(self, array: npt.NDArray[Any], section_bytes: int, first: int = 0) -> None:
        self.section_bytes = section_bytes
        self._array = array
        self._first = first
        self._views: list[memoryview] | None = None

    def __call__(self, index: int) -> list[memoryview]:
        """The sections of chunk ``index``."""
        if self._views is None:
            self._views = [plane.reshape(-1).view(np.uint8).data for row in self._array for plane in row]
        start = (index - self._first) * self.section_bytes
        end = start + self.section_bytes
        return [view[start:end] for view in self._views]

    @property
    def is_writable(self) -> bool:
        """Whether chunks may be read into it."""
        return bool(self._array.flags.writeable)

    @property
    def is_contiguous(self) -> bool:
        """Whether each plane is one run of memory; nothing else may be called where it is not."""
        return bool(self._array[0, 0].flags.c_contiguous)

    def starting_at(self, first: int) -> Planes:
        """The same memory, its first chunk being number ``first``."""
        return Planes(self._array, self.section_bytes, first)

    def strided(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """The bytes of ``count`` chunks from index ``first`` on, shape ``(rows, columns, count * section_bytes)``."""
        rows, columns = self._array.shape[:2]
        start = self.offset(first)
        flat = self._array.view(np.uint8).reshape(rows, columns, -1)
        return flat[:, :, start : start + count * self.section_bytes]

    def addresses(self) -> npt.NDArray[np.uint64]:
        """The address of each plane, where section ``s`` of chunk ``first`` lies; valid as long as this object is."""
        rows, columns = self._array.shape[:2]
        start: int = self._array.__array_interface__["data"][0]
        offsets = np.arange(rows)[:, None] * self._array.strides[0] + np.arange(columns) * self._array.strides[1]
        return (start + offsets).ravel().astype(np.uint64)

    def offset(self, index: int) -> int:
        """Bytes from the beginning of a plane to the section of chunk ``index``."""
        return (index - self._first) * self.section_bytes

    def covers(self, first: int, count: int) -> bool:
        """Whether the array has room for these chunks: addresses are trusted by those who get them."""
        plane_bytes = self._array[0, 0].nbytes
        return first >= self._first and (first - self._first + count) * self.section_bytes <= plane_bytes
