"""Rows of chunks in columns: address, parent, depth, states, and tables to find rows by address and by hash.

Separate from the inventory, which decides what is told; here is only how rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.events.names import Name, Names
from kvstore.events.spelling import Spellings
from kvstore.events.table import NO_ROW, U64, Rows, Table
from kvstore.events.tokens import TokenFile

Mask = npt.NDArray[np.bool_]

_NAMES = ("firsts", "lasts", "parents", "depths", "children", "states")
ROOM_MIN = 1_024
BLOCK = 32
"""A state of a row: it is an engine-hashed block and has a name."""


class Columns:
    """Rows of one namespace; 53 bytes each, tokens and names in files. Used by one thread, or under its owner's lock.

    The columns have room for more rows than there are.
    """

    def __init__(self, chunk_tokens: int, folder: str | None, digest: bytes) -> None:
        """``digest`` is the namespace's."""
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
        self.names: Names | None = None
        """The names of blocks; None until there are some."""
        self.spellings: Spellings | None = None
        """Their spellings."""
        self._digest = digest
        self._folder = folder
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

    def name(self, rows: Rows, names: Sequence[Name]) -> Rows:
        """Makes rows blocks with these names; returns those that there was room for."""
        if self.names is None:
            self.names, self.spellings = Names(self._folder), Spellings(self._digest, self._folder)
        named: Rows = rows[self.names.write(rows, names)]
        self.mark(named, BLOCK)
        self._add_hashes(self.names.hashes(named), named)
        return named

    def spell(self, rows: Rows) -> None:
        """Spells the blocks among these rows, which have parents before their children."""
        if self.names is not None and self.spellings is not None:
            blocks = rows[self.has(rows, BLOCK)]
            self.spellings.spell(blocks, self.parents[blocks], self.tokens.read(blocks), self.names.plain(blocks))

    def forget_spelled(self, rows: Rows) -> None:
        """Notes that the blocks among these rows are not told."""
        if self.spellings is not None:
            self.spellings.forget(rows[self.has(rows, BLOCK)])

    def find_spelled(self, firsts: U64) -> Rows:
        """Returns the rows of blocks by the first 8 bytes of their spellings; NO_ROW where there is none."""
        if self.spellings is None:
            return np.full(len(firsts), NO_ROW, np.int32)
        return self.spellings.find(firsts)

    def is_block(self, row: int) -> bool:
        """True for an engine-hashed block with a name."""
        return bool(self.states[row] & BLOCK)

    def hashes(self, rows: Rows) -> list[int]:
        """Returns the low 64 bits of what events call these rows: a chunk's address, an engine's hash of a block."""
        numbers = self.lasts[rows]
        if self.names is not None:
            blocks = self.has(rows, BLOCK)
            numbers[blocks] = self.names.hashes(rows[blocks])
        found: list[int] = numbers.tolist()
        return found

    def whole_hashes(self, rows: Rows) -> list[bytes]:
        """Returns all bytes of the same."""
        found = [line.tobytes() for line in self.addresses(rows)]
        if self.names is not None:
            blocks = np.flatnonzero(self.has(rows, BLOCK))
            for at, whole in zip(blocks.tolist(), self.names.whole_hashes(rows[blocks]), strict=True):
                found[at] = whole
        return found

    def origins(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Returns a number for what an event says of each beside hashes and tokens; -1 for chunks, which have none."""
        found = np.full(len(rows), -1, np.int64)
        if self.names is not None:
            blocks = self.has(rows, BLOCK)
            found[blocks] = self.names.origin_numbers(rows[blocks])
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
        if self.names is not None and self.spellings is not None:
            self.names.keep(kept)
            self.spellings.keep(kept)
            blocks = self.having(BLOCK)
            self._add_hashes(self.names.hashes(blocks), blocks)
        return moved

    def close(self) -> None:
        """Gives the files back."""
        self.tokens.close()
        if self.names is not None and self.spellings is not None:
            self.names.close()
            self.spellings.close()

    def _add_hashes(self, hashes: U64, rows: Rows) -> None:
        """Has ``find_hashes`` find rows by these; of several rows with one hash it finds the first."""
        keys, at = np.unique(hashes, return_index=True)
        new = self._by_hash.find(keys) == NO_ROW
        self._by_hash.add(keys[new], rows[at[new]])

    def _make_room(self, count: int) -> None:
        if count <= len(self.firsts):
            return
        room = max(ROOM_MIN, count + count // 4)
        for name in _NAMES:
            before = getattr(self, name)
            after = np.empty(room, before.dtype)
            after[: self.count] = before[: self.count]
            setattr(self, name, after)
