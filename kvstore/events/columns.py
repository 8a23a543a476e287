"""Rows of chunks in columns: address, parent, depth, states, and tables to find rows by address and by hash.

The inventory decides which of them are published.
"""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, BLOCK_KEY_BYTES_MAX, NO_PARENT, Address, chunk_address
from kvstore.core.validate import why
from kvstore.errors import InvalidRequest
from kvstore.format.header import NO_WHOLE

# A map from 64-bit numbers to rows of columns, 12 bytes an entry: sorted arrays instead of a dict's 100 bytes.
#
# New entries come into a small sorted part, which is merged into the large one when it has grown to a sixteenth of
# it. So adding a batch costs little, and a merge is rare.


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


# The tokens of chunks in a file without a name, as many in each line: memory that the kernel may take back.
#
# A snapshot needs them, a difference only those of new chunks. In columns they would be most of the publisher's
# memory.


ROOM_MIN = 1_024


class TokenFile:
    """Lines of ``width`` tokens, by row. Used by one thread, or under its owner's lock."""

    def __init__(self, width: int, folder: str | None) -> None:
        self.width = width
        self._folder = folder
        self._file = _nameless(folder)
        self._lines: npt.NDArray[np.uint32] = np.zeros((0, width), np.uint32)

    def write(self, rows: Rows, tokens: npt.NDArray[np.uint32]) -> None:
        """Sets the lines of ``rows``."""
        if len(rows):
            highest = int(rows.max()) + 1
            if highest > len(self._lines):
                self._lines = self._mapped(self._file, max(ROOM_MIN, highest + highest // 4))
            self._lines[rows] = tokens

    def read(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Returns the lines of ``rows``, which were set."""
        found: npt.NDArray[np.uint32] = self._lines[rows]
        return found

    def keep(self, rows: Rows) -> None:
        """Keeps the lines of ``rows`` alone, in this order."""
        file = _nameless(self._folder)
        lines = self._mapped(file, max(ROOM_MIN, len(rows)))
        set_rows = np.flatnonzero(rows < len(self._lines))
        for start in range(0, len(set_rows), ROOM_MIN):
            part = set_rows[start : start + ROOM_MIN]
            lines[part] = self._lines[rows[part]]
        self.close()
        self._file, self._lines = file, lines

    def close(self) -> None:
        """Gives the file back."""
        self._lines = np.zeros((0, self.width), np.uint32)
        self._file.close()

    def _mapped(self, file: IO[bytes], count: int) -> npt.NDArray[np.uint32]:
        file.truncate(count * self.width * 4)
        return np.memmap(file, np.uint32, "r+", shape=(count, self.width))


def _nameless(folder: str | None) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder, prefix="kvstore-events-")
    except OSError as cause:
        raise InvalidRequest(f"no file can be made in {folder or tempfile.gettempdir()!r}: {why(cause)}") from cause


# Engine-hashed blocks by the tokens that lead to them, for routers that know a prompt and no engine's hashes.
#
# A block is *spelled* as a chunk with the same tokens behind the same prefix would be addressed, so a prompt is
# hashed once for chunks and blocks. Engines mix adapters and extra keys into their hashes: such blocks, and those
# behind them, are not spelled.


Mask = npt.NDArray[np.bool_]

_ADDRESS_WORDS = ADDRESS_BYTES // 4
_NONE = b""
OLD_MAX = 65_536
"""Entries that lead to a row which is spelled otherwise by now: so many, or as many as others, are kept at most."""


class TokenPathIndex:
    """Spellings by row, in a file, and rows by spelling. Used by one thread, or under its owner's lock."""

    def __init__(self, digest: bytes, folder: str | None) -> None:
        """``digest`` is the namespace's."""
        self._digest = digest
        self._lines = TokenFile(_ADDRESS_WORDS, folder)
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
        lines = np.frombuffer(b"".join(spelled), np.uint32).reshape(-1, _ADDRESS_WORDS)
        self._lines.write(rows, lines)
        self._enter(_firsts(lines), rows)

    def forget(self, rows: Rows) -> None:
        """Clears the spellings of unpublished rows: until spelled again, no prompt leads to them or beyond them."""
        self._lines.write(rows, np.zeros((len(rows), _ADDRESS_WORDS), np.uint32))

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
        """Returns which rows were spelled again, or unpublished, after their entries were made."""
        found: Mask = _firsts(self._lines.read(rows)) != firsts
        return found


def _firsts(lines: npt.NDArray[np.uint32]) -> U64:
    both = np.ascontiguousarray(lines).view(">u8").reshape(-1, 2)
    return both[:, 0].astype(np.uint64)


# The names of engine-hashed blocks: the engine's hash of each, and the fields of its events other than tokens.
#
# A chunk's name is its address, so only namespaces with blocks have this. Keys lie in a file, like tokens; what many
# blocks share is kept once.


SHARED_MAX = 65_536
"""Limit on different origins, or extra keys, in one namespace; blocks with further ones are not published."""
WHOLES_MAX = 16
"""Limit on different wholes that the blocks of one namespace are parts of; blocks of further ones are not published.
Each costs a check of every block that changes, and writers can make up any number."""
_HEAD_WORDS = 4
_SIZE_AT = 3
"""The word with the size of the key. Before it are the numbers of origin and extra keys, and the size of the hash."""
_NAME_WORDS = _HEAD_WORDS + BLOCK_KEY_BYTES_MAX // 4
_KEY_AT = 4 * _HEAD_WORDS

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class EventOrigin:
    """The fields that the blocks of one event share."""

    group: int
    lora_name: str | None = None
    parts: int = 1
    """Namespaces that must all have the block for it to be of use."""
    whole: bytes = NO_WHOLE
    """The name that these namespaces share."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """One block as its engine names it."""

    key: bytes
    hash_bytes: int
    """Leading bytes of the key that are the engine's hash."""
    origin: EventOrigin
    extra_keys: tuple[Any, ...] | None = None


class _Shared(Generic[T]):
    """Values by number; each is kept once."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._numbers: dict[T, int] = {}

    def __getitem__(self, number: int) -> T:
        return self._values[number]

    def number(self, value: T) -> int | None:
        """Returns the number of a value; None if it is new and there is no room."""
        found = self._numbers.get(value)
        if found is None and len(self._values) < SHARED_MAX:
            found = self._numbers[value] = len(self._values)
            self._values.append(value)
        return found


class NameColumn:
    """Names by row. Used by one thread, or under its owner's lock."""

    def __init__(self, folder: str | None) -> None:
        self._lines = TokenFile(_NAME_WORDS, folder)
        self.wholes: dict[bytes, int] = {}
        """The wholes that blocks here are parts of, with their number of parts; without blocks that are whole."""
        self._origins = _Shared[EventOrigin]()
        self._extras = _Shared[tuple[Any, ...] | None]()

    def write(self, rows: Rows, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Sets the names of rows; False for each that has no room."""
        lines = np.zeros((len(rows), _NAME_WORDS), np.uint32)
        numbers = [(self._number(each.origin), self._extras.number(each.extra_keys)) for each in names]
        kept = np.array([None not in pair for pair in numbers], np.bool_)
        for line, name, (origin, extra) in zip(lines, names, numbers, strict=True):
            line[:_HEAD_WORDS] = origin or 0, extra or 0, name.hash_bytes, len(name.key)
            line.view(np.uint8)[_KEY_AT : _KEY_AT + len(name.key)] = np.frombuffer(name.key, np.uint8)
        self._lines.write(rows[kept], lines[kept])
        return kept

    def hashes(self, rows: Rows) -> U64:
        """Returns the low 64 bits of each engine's hash, as vLLM makes numbers of them."""
        lines = self._lines.read(rows)
        last = _KEY_AT + lines[:, 2].astype(np.intp)
        places = last[:, None] + np.arange(-8, 0)
        low = np.take_along_axis(np.ascontiguousarray(lines).view(np.uint8), places, 1)
        return np.ascontiguousarray(low).view(">u8").reshape(-1).astype(np.uint64)

    def keys(self, rows: Rows, whole: bytes) -> list[bytes]:
        """Returns the keys of those that are parts of a whole."""
        lines = np.ascontiguousarray(self._lines.read(rows))
        heads = lines[:, [0, _SIZE_AT]].tolist()
        return [
            line[_KEY_AT : _KEY_AT + size].tobytes()
            for line, (origin, size) in zip(lines.view(np.uint8), heads, strict=True)
            if self._origins[origin].whole == whole
        ]

    def origin_numbers(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Returns a number for the origin of each."""
        found: npt.NDArray[np.uint32] = self._lines.read(rows)[:, 0]
        return found

    def origin(self, row: int) -> EventOrigin:
        """Returns the origin of a row."""
        return self._origins[int(self._lines.read(np.array([row], np.int32))[0, 0])]

    def extra_keys(self, rows: Rows) -> list[tuple[Any, ...] | None]:
        """Returns the extra keys of each."""
        return [self._extras[number] for number in self._lines.read(rows)[:, 1].tolist()]

    def plain(self, rows: Rows) -> list[bool]:
        """Returns which of these have neither an adapter nor extra keys: tokens alone lead to them."""
        heads = self._lines.read(rows)[:, :2].tolist()
        return [self._origins[origin].lora_name is None and self._extras[extra] is None for origin, extra in heads]

    def _number(self, origin: EventOrigin) -> int | None:
        """Returns the number of an origin, and notes its whole; None if there is no room for either."""
        if origin.parts == 1:
            return self._origins.number(origin)
        if origin.whole not in self.wholes and len(self.wholes) >= WHOLES_MAX:
            return None
        number = self._origins.number(origin)
        if number is not None:
            self.wholes[origin.whole] = origin.parts
        return number

    def keep(self, rows: Rows) -> None:
        """Keeps the names of ``rows`` alone, in this order."""
        self._lines.keep(rows)

    def close(self) -> None:
        """Gives the file back."""
        self._lines.close()


_NAMES = ("firsts", "lasts", "parents", "depths", "children", "states")
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
        """Published children of each row."""
        self.states = np.zeros(0, np.uint8)
        self.tokens = TokenFile(chunk_tokens, folder)
        self.names: NameColumn | None = None
        """The names of blocks; None until there are some."""
        self.spellings: TokenPathIndex | None = None
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

    def name(self, rows: Rows, names: Sequence[BlockName]) -> Rows:
        """Makes rows blocks with these names; returns those that there was room for."""
        if self.names is None:
            self.names, self.spellings = NameColumn(self._folder), TokenPathIndex(self._digest, self._folder)
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
        """Clears the spellings of the blocks among these unpublished rows."""
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

    def origins(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Returns a number for each row's event fields other than hashes and tokens; -1 for chunks, which have none."""
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
