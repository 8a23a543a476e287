"""The chunks of one namespace as the root has them, and as subscribers were told: columns, 53 bytes a chunk.

Events are the differences between both. A chunk is to be told if its file is there, nobody condemns it, its identity is
known, and the same holds of its parent: what a ``get`` would read, and nothing else (EVENTS.md, section 2).
Pure: no I/O beyond a file for tokens, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.events.table import NO_ROW, U64, Rows, Table
from kvstore.events.tokens import TokenFile

Mask = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.uint32]

PRESENT, CONDEMNED, KNOWN, TOLD, ODD = 1, 2, 4, 8, 16
"""States of a row, as bits. ODD: the file says nothing that fits its name, so it is never told."""
ELIGIBLE = PRESENT | KNOWN
DEAD_MIN = 65_536
KEY_MAX = (1 << 64) - 1
BYTES_PER_CHUNK = 8 + 8 + 4 + 4 + 4 + 1 + 2 * 12
"""Columns and tables; arrays that grow take up to half more. Tokens lie in a file."""


@dataclass(frozen=True, slots=True)
class Identities:
    """What some chunks are for: columns with one element for each. ``parents`` of a first chunk count for nothing."""

    firsts: U64
    lasts: U64
    parent_firsts: U64
    parent_lasts: U64
    depths: npt.NDArray[np.uint32]
    tokens: Tokens
    """One line of ``chunk_tokens`` tokens for each."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows to be told: first what is no longer there, then what is, parents first."""

    removed: Rows
    stored: Rows


class Inventory:
    """One namespace. Used by one thread, or under its owner's lock."""

    def __init__(self, chunk_tokens: int, folder: str | None = None) -> None:
        """``folder`` is where the file for tokens goes, without a name; None: where temporary files go."""
        self.tokens = TokenFile(chunk_tokens, folder)
        self.told_count = 0
        self._count = 0
        self._firsts = np.zeros(0, np.uint64)
        self._lasts = np.zeros(0, np.uint64)
        self._parents = np.zeros(0, np.int32)
        self._depths = np.zeros(0, np.uint32)
        self._children = np.zeros(0, np.uint32)
        """Children of each that are told."""
        self._states = np.zeros(0, np.uint8)
        self._table = Table()
        self._by_hash = Table()
        self._touched: list[Rows] = []
        self._unknown: list[Rows] = []
        self._waiting = np.zeros(0, np.int32)

    def __len__(self) -> int:
        """Number of rows, those that are only remembered included."""
        return self._count

    # What the root has

    def listed(self, first: int, last: int, firsts: U64, lasts: U64) -> None:
        """Notes a whole listing of the addresses whose first 8 bytes are from ``first`` to ``last``."""
        before = self._table.between(first, last)
        before = before[self._states[before] & PRESENT != 0]
        rows = self._arrived(firsts, lasts)
        gone = np.setdiff1d(before, rows)
        self._states[gone] &= ~np.uint8(PRESENT | ODD)
        self._touched.append(gone)

    def arrived(self, firsts: U64, lasts: U64) -> None:
        """Notes chunks that are there."""
        self._arrived(firsts, lasts)

    def left(self, firsts: U64) -> None:
        """Notes chunks that are not there any more."""
        rows = self._table.find(firsts)
        rows = rows[rows != NO_ROW]
        self._states[rows] &= ~np.uint8(PRESENT | ODD)
        self._touched.append(rows)

    def condemn(self, rows: Rows) -> None:
        """Notes that these count as misses from now on (rule H1), until they are spared."""
        self._states[rows] |= CONDEMNED
        self._touched.append(rows)

    def spare(self, first: int, last: int) -> None:
        """Notes that nothing in this part of the addresses is condemned any more."""
        rows = self._table.between(first, last)
        rows = rows[self._states[rows] & CONDEMNED != 0]
        self._states[rows] &= ~np.uint8(CONDEMNED)
        self._touched.append(rows)

    def unknown(self) -> Rows:
        """Returns rows that are there and whose identity has to be learnt; each is returned once."""
        rows = np.unique(np.concatenate([np.zeros(0, np.int32), *self._unknown]))
        self._unknown = []
        found: Rows = rows[self._states[rows] & (PRESENT | KNOWN | ODD) == PRESENT]
        return found

    def learn(self, found: Identities) -> None:
        """Notes identities. They follow from addresses, so they hold for as long as a row is remembered."""
        rows = self._ensure(found.firsts, found.lasts)
        new = self._states[rows] & KNOWN == 0
        rows, depths = rows[new], found.depths[new]
        has_parent = depths > 0
        parents = np.full(len(rows), NO_ROW, np.int32)
        parents[has_parent] = self._ensure(found.parent_firsts[new][has_parent], found.parent_lasts[new][has_parent])
        self._parents[rows], self._depths[rows] = parents, depths
        self.tokens.write(rows, found.tokens[new])
        self._states[rows] |= KNOWN
        self._touched.append(rows)

    def retry(self, rows: Rows) -> None:
        """Has ``unknown`` return these again."""
        self._unknown.append(rows)

    def refuse(self, rows: Rows) -> None:
        """Notes that the files of these rows do not say what they are."""
        self._states[rows] |= ODD

    # What is told

    def settle(self) -> Difference:
        """Returns the difference to what was told before; from now on it counts as told."""
        touched = np.unique(np.concatenate([np.zeros(0, np.int32), *self._touched]))
        self._touched = []
        removed = touched[~self._eligible(touched) & self._has(touched, TOLD)]
        self._untell(removed)
        cut_off = self._cut_off() if len(removed) and self._children[removed].any() else np.zeros(0, np.int32)
        stored, self._waiting = self._tell(np.concatenate([self._waiting, cut_off, touched]))
        self.told_count += len(stored) - len(removed) - len(cut_off)
        return Difference(np.concatenate([removed, cut_off]), stored)

    def told(self, rows: Rows) -> Mask:
        """Returns which rows are told; NO_ROW is not."""
        known: Mask = rows != NO_ROW
        known[known] = self._has(rows[known], TOLD)
        return known

    def find_hashes(self, hashes: U64) -> Rows:
        """Returns the rows of chunks by their names in events; NO_ROW where there is none."""
        return self._by_hash.find(hashes)

    def find(self, firsts: U64) -> Rows:
        """Returns the rows of addresses by their first 8 bytes; NO_ROW where there is none."""
        return self._table.find(firsts)

    def snapshot(self) -> Rows:
        """Returns all rows that are told, parents first."""
        rows = np.flatnonzero(self._states[: self._count] & TOLD).astype(np.int32)
        return rows[np.argsort(self._depths[rows], kind="stable")]

    def between(self, first: int, last: int) -> Rows:
        """Returns the rows that are there, of addresses whose first 8 bytes are from ``first`` to ``last``."""
        rows = self._table.between(first, last)
        return rows[self._has(rows, PRESENT)]

    def hashes(self, rows: Rows) -> list[int]:
        """Returns the names of chunks in events: the low 64 bits of their addresses."""
        found: list[int] = self._lasts[rows].tolist()
        return found

    def parents(self, rows: Rows) -> Rows:
        """Returns the row of each one's parent; NO_ROW for a first chunk."""
        return self._parents[rows]

    def addresses(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Returns the whole addresses, one line of 16 bytes each."""
        both = np.stack([self._firsts[rows], self._lasts[rows]], axis=1)
        return both.astype(">u8").view(np.uint8).reshape(-1, 16)

    def compact(self) -> bool:
        """Forgets rows that nobody needs, if there are many; rows get other numbers then. Call it after ``settle``."""
        states = self._states[: self._count]
        alive = states & (PRESENT | TOLD) != 0
        if self._count - int(alive.sum()) < max(DEAD_MIN, self._count // 2):
            return False
        needed = alive.copy()
        above = self._parents[: self._count][alive]
        needed[above[above != NO_ROW]] = True
        self._keep(np.flatnonzero(needed).astype(np.int32), alive)
        return True

    def close(self) -> None:
        """Gives the file for tokens back."""
        self.tokens.close()

    def _keep(self, kept: Rows, alive: Mask) -> None:
        moved = np.full(self._count + 1, NO_ROW, np.int32)  # the last one is for NO_ROW itself
        moved[kept] = np.arange(len(kept), dtype=np.int32)
        for name in ("_firsts", "_lasts", "_depths", "_children", "_states"):
            setattr(self, name, getattr(self, name)[kept])
        only_remembered = ~alive[kept]
        self._parents = moved[self._parents[kept]]
        self._parents[only_remembered] = NO_ROW
        self._states[only_remembered] = 0
        self.tokens.keep(kept)
        self._waiting = moved[self._waiting]
        self._waiting = self._waiting[self._waiting != NO_ROW]
        self._unknown = [rows[rows != NO_ROW] for rows in (moved[each] for each in self._unknown)]
        self._count = len(kept)
        rows = np.arange(self._count, dtype=np.int32)
        self._table, self._by_hash = Table(self._firsts, rows), Table(self._lasts, rows)

    def _arrived(self, firsts: U64, lasts: U64) -> Rows:
        rows = self._ensure(firsts, lasts)
        new = rows[~self._has(rows, PRESENT)]
        self._states[new] |= PRESENT
        self._touched.append(new)
        self._unknown.append(new[~self._has(new, KNOWN)])
        return rows

    def _ensure(self, firsts: U64, lasts: U64) -> Rows:
        """Returns the row of each address, a new one if it has none."""
        rows = self._table.find(firsts)
        missing = np.flatnonzero(rows == NO_ROW)
        if len(missing):
            keys, at = np.unique(firsts[missing], return_index=True)
            new = np.arange(self._count, self._count + len(keys), dtype=np.int32)
            self._make_room(self._count + len(keys))
            self._firsts[new], self._lasts[new] = keys, lasts[missing][at]
            self._parents[new] = NO_ROW
            self._depths[new] = self._children[new] = self._states[new] = 0
            self._count += len(keys)
            self._table.add(keys, new)
            self._by_hash.add(self._lasts[new], new)
            rows[missing] = self._table.find(firsts[missing])
        return rows

    def _make_room(self, count: int) -> None:
        if count <= len(self._firsts):
            return
        room = max(1024, count + count // 4)
        for name in ("_firsts", "_lasts", "_parents", "_depths", "_children", "_states"):
            before = getattr(self, name)
            after = np.empty(room, before.dtype)
            after[: self._count] = before[: self._count]
            setattr(self, name, after)

    def _has(self, rows: Rows, bit: int) -> Mask:
        found: Mask = self._states[rows] & bit != 0
        return found

    def _eligible(self, rows: Rows) -> Mask:
        found: Mask = self._states[rows] & (ELIGIBLE | CONDEMNED) == ELIGIBLE
        return found

    def _untell(self, rows: Rows) -> None:
        self._states[rows] &= ~np.uint8(TOLD)
        above = self._parents[rows]
        np.subtract.at(self._children, above[above != NO_ROW], 1)

    def _cut_off(self) -> Rows:
        """Takes back all that is told below what is not. Looks at every row; rare: leaves are evicted first."""
        found: list[Rows] = []
        while True:
            rows = np.flatnonzero(self._states[: self._count] & TOLD).astype(np.int32)
            above = self._parents[rows]
            lost = rows[(above != NO_ROW) & ~self._has(above, TOLD)]
            if not len(lost):
                return np.concatenate([np.zeros(0, np.int32), *found])
            self._untell(lost)
            found.append(lost)

    def _tell(self, candidates: Rows) -> tuple[Rows, Rows]:
        """Tells what may be told, depth by depth; returns it, and what still waits for its parent."""
        rows = np.unique(candidates)
        rows = rows[self._eligible(rows) & ~self._has(rows, TOLD)]
        rows = rows[np.argsort(self._depths[rows], kind="stable")]
        stored, waiting = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        for level in self._levels(rows):
            above = self._parents[level]
            reached = (above == NO_ROW) | self._has(above, TOLD)
            told = level[reached]
            self._states[told] |= TOLD
            np.add.at(self._children, above[reached & (above != NO_ROW)], 1)
            stored.append(told)
            waiting.append(level[~reached])
        return np.concatenate(stored), np.concatenate(waiting)

    def _levels(self, rows: Rows) -> Iterator[Rows]:
        cuts = np.flatnonzero(np.diff(self._depths[rows])) + 1
        return iter(np.split(rows, cuts) if len(rows) else ())
