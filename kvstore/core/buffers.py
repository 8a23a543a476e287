"""Memory that is passed along without being copied: byte views, the sections of chunks, and the caller's arrays.

A read that a caller gave up must not write into the caller's memory afterwards: the engine may have put other KV there.
System calls cannot be taken back, so every writer goes through ``BufferLoan``, which the caller can end.

A chunk's sections are the planes of an array, or one buffer for each block. An array has shape
``(layers, 2, tokens, kv_heads, head_dim)``. K or V of one layer is a *plane*. Within a plane the tokens of a chunk are
one run of bytes. Planes need not be adjacent, so a slice along tokens of a larger array works. Native code takes whole
runs of chunks from it, without a Python object for each section.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from abc import ABC, abstractmethod
from array import array as packed_array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.address import TOKEN_ID_MAX, TOKENS_MAX, TokenArray, Tokens
from kvstore.core.layout import Layout
from kvstore.core.validate import brief, is_whole, kind_of
from kvstore.errors import InvalidRequest
from kvstore.native import library as native

# Arrays of zeros that take memory where they are written alone.


def untouched_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Returns zeros in pages of their own, which the system gives as they are used.

    ``np.zeros`` does so for a process's first large arrays. Once one was freed, it takes memory from the heap and
    clears all of it: a millisecond for what a store begins with.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype).reshape(shape)


PAGE_BYTES = 4096
WRITERS_WAIT_S = 0.0002
"""Time between two looks at whether native code still writes; it needs longer for one chunk."""

ReadBuffer = bytes | bytearray | memoryview
Pieces = Sequence[memoryview]
"""Contiguous byte views (format ``B``) that together are one run of a file."""


class Withdrawn(Exception):
    """The caller took its memory back before the bytes were there; no thread may write to it any more."""


class BufferLoan:
    """Permission to write into the caller's memory, until the caller withdraws it.

    Writers hold the permission only around steps that cannot block on a device or a network, so that withdrawing takes
    no longer than copying what is in flight.
    """

    __slots__ = ("_condition", "_withdrawn", "_writers", "natively")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._writers = 0  # steps in progress
        self._withdrawn = False
        self.natively = native.WritePermit(0, 0)
        """This permission for native code, which does several steps in one call and asks before each."""

    def writing(self) -> BufferLoan:
        """A context around each step that writes into the memory. Raises Withdrawn once the caller took it back."""
        return self

    def __enter__(self) -> None:
        with self._condition:
            if self._withdrawn:
                raise Withdrawn
            self._writers += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._writers -= 1
            if not self._writers:
                self._condition.notify_all()

    def check(self) -> None:
        """Raises Withdrawn once the caller took its memory back."""
        if self._withdrawn:
            raise Withdrawn

    def withdraw(self) -> None:
        """Takes the memory back; returns once no thread writes into it. Idempotent."""
        with self._condition:
            self._withdrawn = True
        while native.brief.kv_withdraw(self.natively):
            time.sleep(WRITERS_WAIT_S)
        with self._condition:
            while self._writers:
                self._condition.wait()


def byte_length(pieces: Pieces) -> int:
    """Bytes in all pieces together."""
    return sum(map(len, pieces))


def skip(pieces: Pieces, count: int) -> list[memoryview]:
    """The rest of ``pieces`` after the first ``count`` bytes."""
    rest: list[memoryview] = []
    for piece in pieces:
        if count >= len(piece):
            count -= len(piece)
            continue
        rest.append(piece[count:] if count else piece)
        count = 0
    return rest


def cut(memory: memoryview, sizes_bytes: Iterable[int]) -> list[memoryview]:
    """Parts of ``memory`` of these sizes, one after another."""
    ends = [0, *accumulate(sizes_bytes)]
    return [memory[start:end] for start, end in pairwise(ends)]


def cut_evenly(memory: memoryview, size_bytes: int) -> list[memoryview]:
    """All of ``memory`` in parts of one size, such as the sections of a chunk."""
    return [memory[start : start + size_bytes] for start in range(0, len(memory), size_bytes)]


def grouped(sizes_bytes: Sequence[int], bytes_max: int, count_max: int | None = None) -> Iterator[slice]:
    """Neighbours that go together: at most ``count_max``, of ``bytes_max`` in all, or one alone."""
    start = used = 0
    for index, size in enumerate(sizes_bytes):
        if index > start and (used + size > bytes_max or index - start == count_max):
            yield slice(start, index)
            start, used = index, 0
        used += size
    if start < len(sizes_bytes):
        yield slice(start, len(sizes_bytes))


def aligned(size_bytes: int) -> memoryview:
    """New memory, not cleared, that begins at a page: the kernel copies into it much faster."""
    memory = np.empty(size_bytes + PAGE_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % PAGE_BYTES
    return memory[start : start + size_bytes].data


def address_of(buffer: memoryview) -> int:
    """The memory address of a buffer, for native code."""
    # ctypes is 7x faster than numpy, which is needed for read-only buffers.
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return start


Sections = Callable[[int], Pieces]
"""The sections of a chunk by its index, in file order: ``BufferMap``, or views made for each chunk as they are asked
for.
"""


class BufferMap(ABC):
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


class Planes(BufferMap):
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


class BlockBuffers(BufferMap):
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


# The caller's arrays: token ids and KV.


def token_array(tokens: Tokens) -> TokenArray:
    """``tokens`` as an array of u32, copied only where its type or order demands it.

    Accepts any sequence of ints or a one-dimensional integer array; 0 <= id < 2**32, at most 4,194,304 of them.
    Raises InvalidRequest, naming the first item that is no id, otherwise.
    """
    try:
        count = len(tokens) if not isinstance(tokens, (bytes, bytearray, memoryview, str, set, dict)) else -1
    except TypeError:  # no sequence, or an array of no dimension
        count = -1
    if count < 0:
        raise InvalidRequest(f"tokens are {kind_of(tokens)}: expected a sequence of ints or an integer array")
    if count > TOKENS_MAX:
        raise InvalidRequest(f"{count} tokens are over the limit of {TOKENS_MAX}: split the prompt")
    if count == 0:
        return np.empty(0, dtype="<u4")
    if isinstance(tokens, (list, tuple)) and (packed := _packed_ints(tokens)) is not None:
        return packed
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as cause:
        raise _no_ids(tokens) from cause
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _no_ids(tokens)
    if array.dtype != np.dtype("<u4"):
        # One pass for both ends of the range: as unsigned, a negative id is larger than any that the type has room for.
        most = min(TOKEN_ID_MAX, int(np.iinfo(array.dtype).max))
        if int(array.view(array.dtype.str.replace("i", "u")).max()) > most:
            raise _no_ids(tokens)
    return np.ascontiguousarray(array, dtype="<u4")


_BOOLS = {bool, np.bool_}


def _packed_ints(tokens: list[int] | tuple[int, ...]) -> TokenArray | None:
    """A list of valid ids as an array, some times faster than numpy makes one; None where numpy has to judge."""
    if not _BOOLS.isdisjoint(map(type, tokens)):
        return None
    try:
        return np.frombuffer(packed_array("I", tokens), np.uintc).astype("<u4", copy=False)
    except (TypeError, OverflowError):
        return None


def _no_ids(tokens: Tokens) -> InvalidRequest:
    odd = next((f": item {at} is {brief(item)}" for at, item in enumerate(tokens) if not _is_id(item)), "")
    return InvalidRequest(f"tokens are not a flat sequence of ids from 0 to {TOKEN_ID_MAX}{odd}")


def _is_id(item: object) -> bool:
    return is_whole(item) and 0 <= item <= TOKEN_ID_MAX


KvArray = npt.NDArray[Any]


def source_array(kv: Any, layout: Layout, tokens: int) -> KvArray:
    """Returns ``kv`` as an array of exactly ``tokens`` tokens with contiguous planes; copies it only if they are not.

    Raises InvalidRequest for another shape or type.
    """
    array = _checked(kv, layout, "kv")
    if array.shape[2] != tokens:
        raise InvalidRequest(
            f"kv has {array.shape[2]} tokens: expected {tokens}, one for each token after prefix; "
            f"its shape is {array.shape}, expected {layout.shape(tokens)}"
        )
    return array if _has_contiguous_planes(array) else np.ascontiguousarray(array)


def target_array(out: Any, layout: Layout) -> KvArray:
    """Returns ``out`` as an array to read into.

    Raises InvalidRequest for another shape or type, for read-only memory, and for planes that share memory.
    """
    array = _checked(out, layout, "out")
    if not array.flags.writeable:
        raise InvalidRequest("out is read-only: give a writable array")
    if _overlaps(array):
        # Bytes read into one plane would look like damage in another, and the chunk would be quarantined for it.
        raise InvalidRequest(
            "out has layers, or K and V, that share memory: give an array with separate memory for each"
        )
    return array


def layer_arrays(out: Sequence[Any], layout: Layout, tokens: int) -> list[KvArray]:
    """Returns the part for ``tokens`` of each array to read layers into: three or more, or one for each layer.

    Raises InvalidRequest as ``target_array`` does, and for arrays that are too small, or share memory.
    """
    one, arrays = replace(layout, layers=1), list[KvArray]()
    if not isinstance(out, Iterable) or (isinstance(out, np.ndarray) and not out.ndim):
        raise InvalidRequest(f"out is {kind_of(out)}: expected three arrays or more")
    for array in out:
        whole = target_array(np.expand_dims(array, 0) if isinstance(array, np.ndarray) else array, one)
        if whole.shape[2] < tokens or not _has_contiguous_planes(whole):
            raise InvalidRequest(
                f"out has an array of shape {array.shape}: expected contiguous K and V of at least {tokens} tokens"
            )
        arrays.append(whole[0, :, :tokens])
    if len(arrays) < (needed := min(3, layout.layers)):
        raise InvalidRequest(f"out has {len(arrays)} arrays: expected {needed} or more, as two layers are read ahead")
    planes = sorted((plane.__array_interface__["data"][0], plane.nbytes) for array in arrays for plane in array)
    if any(start + size > following for (start, size), (following, _) in pairwise(planes)):
        raise InvalidRequest("out has arrays that share memory: give separate ones")
    return arrays


def fillable(array: KvArray) -> KvArray:
    """Returns the array itself if sections can be read straight into it, else a contiguous one to copy from."""
    return array if _has_contiguous_planes(array) else new_array(array.shape, array.dtype)


def new_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> KvArray:
    """Returns an array that is not cleared. It begins at a page, where the kernel copies faster."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(aligned(size_bytes), np.uint8).view(dtype).reshape(shape)


def _checked(kv: Any, layout: Layout, what: str) -> KvArray:
    if not isinstance(kv, np.ndarray):
        raise InvalidRequest(f"{what} is {kind_of(kv)}: expected a numpy array of {layout.dtype}")
    expected = layout.numpy_dtype
    # Raw bits are accepted as a plain integer type of the same size: frameworks export bfloat16 and float8 that way.
    is_raw = kv.dtype.kind == "u" and kv.dtype.itemsize == expected.itemsize and kv.dtype.isnative
    if kv.dtype != expected and not is_raw:
        raise InvalidRequest(
            f"{what} has dtype {kv.dtype}: expected {layout.dtype} (or uint{8 * expected.itemsize} holding its bits)"
        )
    if kv.ndim != 5 or kv.shape[:2] != (layout.layers, 2) or kv.shape[3:] != (layout.kv_heads, layout.head_dim):
        raise InvalidRequest(
            f"{what} has shape {kv.shape}: expected "
            f"({layout.layers}, 2, tokens, {layout.kv_heads}, {layout.head_dim}): layers, K and V, tokens, heads, dim"
        )
    return kv


def _overlaps(array: KvArray) -> bool:
    """True if contiguous planes share memory."""
    if array.flags.c_contiguous or not _has_contiguous_planes(array):
        return False
    starts = np.sort(Planes(array, 1).addresses())
    return bool((np.diff(starts) < array[0, 0].nbytes).any())


def _has_contiguous_planes(array: KvArray) -> bool:
    """True if K and V of each layer are each one run of memory in token order."""
    return bool(array[0, 0].flags.c_contiguous) and array.dtype.isnative
