"""The places of chunks' sections in the caller's memory: the planes of an array, or one buffer for each block.

Separate because both ends need it, for reading into (a sink) and for writing from (a source).  Native code takes whole
runs of chunks from it, without a Python object for each section.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Pieces, address_of, cut_evenly
from kvstore.layout import Layout

Sections = Callable[[int], Pieces]
"""The sections of a chunk by its index, in file order: ``Laid``, or views made for each chunk as they are asked for."""


class Laid(ABC):
    """Sections whose addresses are known without asking for each chunk, so that native code can take them."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, index: int) -> Sequence[memoryview]:
        """The sections of chunk ``index``, in file order."""

    @property
    @abstractmethod
    def is_writable(self) -> bool:
        """True if chunks may be read into it."""

    @abstractmethod
    def covers(self, first: int, count: int) -> bool:
        """True if it has memory for these chunks: native code trusts the addresses."""

    @abstractmethod
    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        """Writes the addresses of these chunks into native structures; returns what must live while they are used."""


class Planes(Laid):
    """An array whose first two axes number its planes; within a plane the sections of the chunks follow each other.

    ``first`` is the index of the chunk that the array begins with.
    """

    __slots__ = ("_array", "_first", "_views", "section_bytes")

    def __init__(self, array: npt.NDArray[Any], section_bytes: int, first: int = 0) -> None:
        self.section_bytes = section_bytes
        self._array = array
        self._first = first
        self._views: list[memoryview] | None = None

    def __call__(self, index: int) -> list[memoryview]:
        if self._views is None:
            self._views = [plane.reshape(-1).view(np.uint8).data for row in self._array for plane in row]
        start = (index - self._first) * self.section_bytes
        end = start + self.section_bytes
        return [view[start:end] for view in self._views]

    @property
    def is_writable(self) -> bool:
        return bool(self._array.flags.writeable)

    @property
    def is_contiguous(self) -> bool:
        """True if each plane is one run of memory; required by every other method."""
        return bool(self._array[0, 0].flags.c_contiguous)

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
        plane_bytes = self._array[0, 0].nbytes
        return first >= self._first and (first - self._first + count) * self.section_bytes <= plane_bytes

    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        first, last = min(indexes), max(indexes)
        bases = self.addresses()
        assert self.covers(first, last - first + 1) and self.is_contiguous
        assert (items["section_count"] == len(bases)).all() and (items["section_bytes"] == self.section_bytes).all()
        items["bases"] = bases.__array_interface__["data"][0]
        items["offset"] = self.offset(0) + np.asarray(indexes, np.int64) * self.section_bytes
        return [self, bases]


class Buffers(Laid):
    """One buffer for each chunk from index ``first`` on, with its sections of ``section_bytes`` one after another.

    Without ``section_bytes`` each has one section, as blocks do.
    """

    __slots__ = ("_buffers", "_first", "_is_writable", "_section_bytes")

    def __init__(self, buffers: Sequence[memoryview], first: int = 0, section_bytes: int | None = None) -> None:
        self._buffers = buffers
        self._first = first
        self._section_bytes = section_bytes
        self._is_writable: bool | None = None

    def __call__(self, index: int) -> list[memoryview]:
        buffer = self._buffers[index - self._first]
        return [buffer] if self._section_bytes is None else cut_evenly(buffer, self._section_bytes)

    @property
    def is_writable(self) -> bool:
        if self._is_writable is None:  # each run of many asks
            self._is_writable = not any(buffer.readonly for buffer in self._buffers)
        return self._is_writable

    def covers(self, first: int, count: int) -> bool:
        start = first - self._first
        return 0 <= start <= len(self._buffers) - count and all(map(len, self._buffers[start : start + count]))

    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        buffers = [self._buffers[index - self._first] for index in indexes]
        assert (items["section_count"] * items["section_bytes"] == list(map(len, buffers))).all()
        items["offset"] = list(map(address_of, buffers))
        return [buffers]


def planes_of(array: npt.NDArray[Any], layout: Layout, first: int = 0) -> Planes:
    """The sections of an array of shape ``(layers, 2, tokens, kv_heads, head_dim)`` whose planes are contiguous."""
    return Planes(array, layout.section_bytes, first)
