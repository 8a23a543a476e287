"""Types for memory that is passed along without being copied, and the rule for how long it may be touched.

A read that a caller gave up must not write into the caller's memory afterwards: the engine may have put other KV there.
System calls cannot be taken back, so every writer goes through ``Borrowed``, which the caller can end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from kvstore.native import library as native

PAGE_BYTES = 4096
WRITERS_WAIT_S = 0.0002
"""Time between two looks at whether native code still writes; it needs longer for one chunk."""

ReadBuffer = bytes | bytearray | memoryview
Pieces = Sequence[memoryview]
"""Contiguous byte views (format ``B``) that together are one run of a file."""


class Withdrawn(Exception):
    """The caller took its memory back before the bytes were there; nobody may write to it any more."""


class Borrowed:
    """Permission to write into the caller's memory, until the caller withdraws it.

    Writers hold the permission only around steps that cannot block on a device or a network, so that withdrawing takes
    no longer than copying what is in flight.
    """

    __slots__ = ("_condition", "_withdrawn", "_writers", "natively")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._writers = 0  # steps in progress
        self._withdrawn = False
        self.natively = native.Borrowed(0, 0)
        """This permission for native code, which does several steps in one call and asks before each."""

    def writing(self) -> Borrowed:
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
