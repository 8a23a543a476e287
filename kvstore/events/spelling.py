"""Engine-hashed blocks by the tokens that lead to them, for routers that know a prompt and no engine's hashes.

A block is *spelled* as a chunk with the same tokens behind the same prefix would be addressed, so a prompt is hashed
once for chunks and blocks. Engines mix adapters and extra keys into their hashes: such blocks, and those behind them,
are not spelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address, chunk_address
from kvstore.events.table import NO_ROW, U64, Rows, Table
from kvstore.events.tokens import TokenFile

Mask = npt.NDArray[np.bool_]

_WORDS = ADDRESS_BYTES // 4
_NONE = b""
OLD_MAX = 65_536
"""Entries that lead to a row which is spelled otherwise by now: so many, or as many as others, are kept at most."""


class Spellings:
    """Spellings by row, in a file, and rows by spelling. Used by one thread, or under its owner's lock."""

    def __init__(self, digest: bytes, folder: str | None) -> None:
        """``digest`` is the namespace's."""
        self._digest = digest
        self._lines = TokenFile(_WORDS, folder)
        self._rows = Table()
        self._rows_max = OLD_MAX

    def spell(self, rows: Rows, parents: Rows, tokens: npt.NDArray[np.uint32], plain: Sequence[bool]) -> None:
        """Spells rows, parents before their children; those that are not ``plain`` have no spelling.

        Of several rows with one spelling, the one spelled last is found.
        """
        packed = np.ascontiguousarray(tokens, "<u4")
        found: dict[int, bytes] = {NO_ROW: NO_PARENT}
        for row, parent, line, is_plain in zip(rows.tolist(), parents.tolist(), packed, plain, strict=True):
            above = found[parent] if parent in found else self._of(parent)
            found[row] = chunk_address(self._digest, Address(above), line.tobytes()) if is_plain and above else _NONE
        spelled = [found[row].ljust(ADDRESS_BYTES, b"\0") for row in rows.tolist()]
        lines = np.frombuffer(b"".join(spelled), np.uint32).reshape(-1, _WORDS)
        self._lines.write(rows, lines)
        self._enter(_firsts(lines), rows)

    def forget(self, rows: Rows) -> None:
        """Notes that these rows are not told: until they are spelled anew, nothing leads to them or to those behind."""
        self._lines.write(rows, np.zeros((len(rows), _WORDS), np.uint32))

    def find(self, firsts: U64) -> Rows:
        """Returns the rows of spellings by their first 8 bytes; NO_ROW where there is none."""
        rows = self._rows.find(firsts)
        known = np.flatnonzero(rows != NO_ROW)
        rows[known[self._is_old(firsts[known], rows[known])]] = NO_ROW
        return rows

    def keep(self, rows: Rows) -> None:
        """Keeps the spellings of ``rows`` alone, which get the numbers from 0 on."""
        keys, found = self._rows.entries()
        moved = np.full(max(rows.max(initial=-1), found.max(initial=-1)) + 1, NO_ROW, np.int32)
        moved[rows] = np.arange(len(rows), dtype=np.int32)
        self._lines.keep(rows)
        # What a spelling leads to stays: of several rows it is the one spelled last.
        left = moved[found] != NO_ROW
        self._rows = Table(keys[left], moved[found[left]])
        self._drop_old()

    def close(self) -> None:
        """Gives the file back; nothing is found any more."""
        self._rows = Table()
        self._lines.close()

    def _of(self, row: int) -> bytes:
        line = self._lines.read(np.array([row], np.int32)).tobytes()
        return line if line != NO_PARENT else _NONE

    def _enter(self, firsts: U64, rows: Rows) -> None:
        spelled = firsts != 0
        self._rows.put(firsts[spelled], rows[spelled])
        if len(self._rows) > self._rows_max:
            self._drop_old()

    def _drop_old(self) -> None:
        """Drops the entries of what rows were before; looks at all, so it waits until there may be many."""
        keys, rows = self._rows.entries()
        kept = ~self._is_old(keys, rows)
        self._rows = Table(keys[kept], rows[kept])
        self._rows_max = 2 * len(self._rows) + OLD_MAX

    def _is_old(self, firsts: U64, rows: Rows) -> Mask:
        """True for each row that was spelled anew, or is not told, since this led to it."""
        found: Mask = _firsts(self._lines.read(rows)) != firsts
        return found


def _firsts(lines: npt.NDArray[np.uint32]) -> U64:
    both = np.ascontiguousarray(lines).view(">u8").reshape(-1, 2)
    return both[:, 0].astype(np.uint64)
