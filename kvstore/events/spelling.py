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

_WORDS = ADDRESS_BYTES // 4
_NONE = b""


class Spellings:
    """Spellings by row, in a file, and rows by spelling. Used by one thread, or under its owner's lock."""

    def __init__(self, digest: bytes, folder: str | None) -> None:
        """``digest`` is the namespace's."""
        self._digest = digest
        self._lines = TokenFile(_WORDS, folder)
        self._rows = Table()

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

    def find(self, firsts: U64) -> Rows:
        """Returns the rows of spellings by their first 8 bytes; NO_ROW where there is none."""
        rows = self._rows.find(firsts)
        known = np.flatnonzero(rows != NO_ROW)
        # A row that was spelled anew is still found by what it was before.
        old = _firsts(self._lines.read(rows[known])) != firsts[known]
        rows[known[old]] = NO_ROW
        return rows

    def keep(self, rows: Rows) -> None:
        """Keeps the spellings of ``rows`` alone, which get the numbers from 0 on."""
        self._lines.keep(rows)
        self._rows = Table()
        kept = np.arange(len(rows), dtype=np.int32)
        self._enter(_firsts(self._lines.read(kept)), kept)

    def close(self) -> None:
        """Gives the file back."""
        self._lines.close()

    def _of(self, row: int) -> bytes:
        line = self._lines.read(np.array([row], np.int32)).tobytes()
        return line if line != NO_PARENT else _NONE

    def _enter(self, firsts: U64, rows: Rows) -> None:
        spelled = firsts != 0
        self._rows.put(firsts[spelled], rows[spelled])


def _firsts(lines: npt.NDArray[np.uint32]) -> U64:
    both = np.ascontiguousarray(lines).view(">u8").reshape(-1, 2)
    return both[:, 0].astype(np.uint64)
