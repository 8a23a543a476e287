"""A map from 64-bit numbers to rows of columns, 12 bytes an entry: sorted arrays instead of a dict's 100 bytes.

New entries come into a small sorted part, which is merged into the large one when it has grown to a sixteenth of it.
So adding a batch costs little, and a merge is rare.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]

MERGE_MIN = 4_096
NO_ROW = -1


class Table:
    """Entries are added, and dropped only by ``rebuilt``. Used by one thread, or under its owner's lock."""

    def __init__(self, keys: U64 | None = None, rows: Rows | None = None) -> None:
        """``keys`` in any order, each once."""
        given = np.zeros(0, np.uint64) if keys is None else keys
        order = np.argsort(given)
        self._large = (given[order], (np.zeros(0, np.int32) if rows is None else rows)[order])
        self._small = (np.zeros(0, np.uint64), np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self._large[0]) + len(self._small[0])

    def find(self, keys: U64) -> Rows:
        """Returns the row of each key; NO_ROW where there is none."""
        # Sorted look-ups walk through memory once, which is several times as fast for large tables.
        order = np.argsort(keys)
        wanted = keys[order]
        found = np.full(len(keys), NO_ROW, np.int32)
        for part_keys, part_rows in (self._large, self._small):
            if len(part_keys):
                at = np.minimum(np.searchsorted(part_keys, wanted), len(part_keys) - 1)
                hit = part_keys[at] == wanted
                found[order[hit]] = part_rows[at[hit]]
        return found

    def between(self, first: int, last: int) -> Rows:
        """Returns the rows of all keys from ``first`` to ``last``, both included."""
        parts = []
        for part_keys, part_rows in (self._large, self._small):
            start = np.searchsorted(part_keys, np.uint64(first), "left")
            stop = np.searchsorted(part_keys, np.uint64(last), "right")
            parts.append(part_rows[start:stop])
        return np.concatenate(parts)

    def entries(self) -> tuple[U64, Rows]:
        """Returns all keys, each once, and the row of each."""
        (large_keys, large_rows), (small_keys, small_rows) = self._large, self._small
        return np.concatenate([large_keys, small_keys]), np.concatenate([large_rows, small_rows])

    def add(self, keys: U64, rows: Rows) -> None:
        """Adds entries whose keys are not there; each once."""
        self._small = _merged(self._small, keys, rows)
        if len(self._small[0]) > max(MERGE_MIN, len(self._large[0]) // 16):
            self._large = _merged(self._large, *self._small)
            self._small = (np.zeros(0, np.uint64), np.zeros(0, np.int32))

    def put(self, keys: U64, rows: Rows) -> None:
        """Adds entries, or has their keys lead to other rows; of equal keys the last one counts."""
        # ``unique`` names the first of equal elements, so it is asked about the reverse.
        keys, at = np.unique(keys[::-1], return_index=True)
        rows = rows[::-1][at]
        is_new = np.ones(len(keys), np.bool_)
        for part_keys, part_rows in (self._large, self._small):
            if len(part_keys):
                place = np.minimum(np.searchsorted(part_keys, keys), len(part_keys) - 1)
                hit = part_keys[place] == keys
                part_rows[place[hit]] = rows[hit]
                is_new &= ~hit
        self.add(keys[is_new], rows[is_new])


def _merged(part: tuple[U64, Rows], keys: U64, rows: Rows) -> tuple[U64, Rows]:
    order = np.argsort(keys)
    at = np.searchsorted(part[0], keys[order])
    return np.insert(part[0], at, keys[order]), np.insert(part[1], at, rows[order])
