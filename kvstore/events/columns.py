"""Rows of chunks in columns: address, parent, depth, states, and tables to find rows by address and by hash.

Separate from the inventory, which decides what is told; here is only how rows are kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.events.table import NO_ROW, U64, Rows, Table
from kvstore.events.tokens import TokenFile

Mask = npt.NDArray[np.bool_]

_NAMES = ("firsts", "lasts", "parents", "depths", "children", "states")
ROOM_MIN = 1_024


class Columns:
    """Rows of one namespace; 53 bytes each, and tokens in a file. Used by one thread, or under its owner's lock.

    The columns have room for more rows than there are.
    """

    def __init__(self, chunk_tokens: int, folder: str | None) -> None:
        self.count = 0
        self.firsts = np.zeros(0, np.uint64)
        """The first 8 bytes of addresses, as big-endian numbers."""
        self.lasts = np.zeros(0, np.uint64)
        """The last 8 bytes."""
        self.parents = np.zeros(0, np.int32)
        self.depths = np.zeros(0, np.uint32)
        self.children = np.zeros(0, np.uint32)
        """Children of each that are told."""
        self.states = np.zeros(0, np.uint8)
        self.tokens = TokenFile(chunk_tokens, folder)
        self._by_address = Table()
        self._by_hash = Table()

    def find(self, firsts: U64) -> Rows:
        """Returns the rows of addresses by their first 8 bytes; NO_ROW where there is none."""
        return self._by_address.find(firsts)

    def find_hashes(self, hashes: U64) -> Rows:
        """Returns the rows of chunks by their names in events; NO_ROW where there is none."""
        return self._by_hash.find(hashes)

    def between(self, first: int, last: int) -> Rows:
        """Returns the rows of addresses whose first 8 bytes are from ``first`` to ``last``."""
        return self._by_address.between(first, last)

    def ensure(self, firsts: U64, lasts: U64) -> Rows:
        """Returns the row of each address, a new one if it has none."""
        rows = self.find(firsts)
        missing = np.flatnonzero(rows == NO_ROW)
        if len(missing):
            keys, at = np.unique(firsts[missing], return_index=True)
            new = np.arange(self.count, self.count + len(keys), dtype=np.int32)
            self._make_room(self.count + len(keys))
            self.firsts[new], self.lasts[new] = keys, lasts[missing][at]
            self.parents[new] = NO_ROW
            self.depths[new] = self.children[new] = self.states[new] = 0
            self.count += len(keys)
            self._by_address.add(keys, new)
            self._by_hash.add(self.lasts[new], new)
            rows[missing] = self.find(firsts[missing])
        return rows

    def having(self, bits: int) -> Rows:
        """Returns all rows with one of these states."""
        return np.flatnonzero(self.states[: self.count] & bits).astype(np.int32)

    def has(self, rows: Rows, bits: int) -> Mask:
        """Returns which rows have one of these states."""
        found: Mask = self.states[rows] & bits != 0
        return found

    def mark(self, rows: Rows, bits: int) -> None:
        """Adds states."""
        self.states[rows] |= bits

    def unmark(self, rows: Rows, bits: int) -> None:
        """Takes states away."""
        self.states[rows] &= ~np.uint8(bits)

    def hashes(self, rows: Rows) -> list[int]:
        """Returns the names of chunks in events: the low 64 bits of their addresses."""
        found: list[int] = self.lasts[rows].tolist()
        return found

    def addresses(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Returns the whole addresses, one line of 16 bytes each."""
        both = np.stack([self.firsts[rows], self.lasts[rows]], axis=1)
        return both.astype(">u8").view(np.uint8).reshape(-1, 16)

    def keep(self, kept: Rows) -> Rows:
        """Drops all other rows; returns the new number of each old row, NO_ROW for one that was dropped."""
        moved = np.full(self.count + 1, NO_ROW, np.int32)  # the last one is for NO_ROW itself
        moved[kept] = np.arange(len(kept), dtype=np.int32)
        for name in _NAMES:
            setattr(self, name, getattr(self, name)[kept])
        self.parents = moved[self.parents]
        self.tokens.keep(kept)
        self.count = len(kept)
        rows = np.arange(self.count, dtype=np.int32)
        self._by_address, self._by_hash = Table(self.firsts, rows), Table(self.lasts, rows)
        return moved

    def _make_room(self, count: int) -> None:
        if count <= len(self.firsts):
            return
        room = max(ROOM_MIN, count + count // 4)
        for name in _NAMES:
            before = getattr(self, name)
            after = np.empty(room, before.dtype)
            after[: self.count] = before[: self.count]
            setattr(self, name, after)
