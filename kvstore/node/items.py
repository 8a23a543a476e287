"""Chunks as native code takes them: the identity of each, and where its sections lie in the caller's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import address_of
from kvstore.native import library as native
from kvstore.node.wanted import Wanted, describe, kind_of
from kvstore.sections import Laid, Sections


class Items:
    """The wanted chunks at ``indexes``; ``alive`` owns the memory that the addresses in the structures point into."""

    def __init__(self, wanted: Wanted, indexes: Sequence[int]) -> None:
        self._indexes = indexes
        self.items: npt.NDArray[Any] = np.zeros(len(indexes), native.CHUNK)
        self.alive = describe(wanted, indexes, self.items)
        self.common = native.Run(
            digest=(ctypes.c_ubyte * 32).from_buffer_copy(wanted.namespace.digest), kind=int(kind_of(wanted))
        )
        self._start: int = self.items.ctypes.data  # making the interface of a structured array is slow

    def at(self, place: int) -> int:
        """Returns the address of one structure, counted from 0."""
        assert 0 <= place < max(1, len(self.items))
        return self._start + place * native.CHUNK.itemsize

    def lay(self, sections: Sections, *, fills: bool = False) -> None:
        """Sets where the sections are; ``fills`` says that they will be written to."""
        items, indexes = self.items, self._indexes
        if isinstance(sections, Laid):
            assert not fills or sections.is_writable
            self.alive += sections.lay(indexes, items)
            return
        each = list(map(sections, indexes))
        counts = np.fromiter(map(len, each), np.uint64, len(each))
        pieces = [piece for sections in each for piece in sections]
        assert (counts == items["section_count"]).all()
        sizes = np.fromiter(map(len, pieces), np.uint64, len(pieces))
        assert (sizes == np.repeat(items["section_bytes"], counts.astype(np.intp))).all()
        assert not (fills and any(piece.readonly for piece in pieces))
        bases = np.fromiter(map(address_of, pieces), np.uint64, len(pieces))
        start = bases.__array_interface__["data"][0]
        items["bases"] = start + (np.cumsum(counts) - counts) * np.uint64(bases.itemsize)
        self.alive += (pieces, bases)
