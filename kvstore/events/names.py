"""The names of engine-hashed blocks: the engine's hash of each, and what its events say beside tokens.

A chunk's name is its address, so only namespaces with blocks have this. Keys lie in a file, like tokens; what many
blocks share is kept once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.address import BLOCK_KEY_BYTES_MAX
from kvstore.events.table import U64, Rows
from kvstore.events.tokens import TokenFile
from kvstore.format.descent import NO_WHOLE

SHARED_MAX = 65_536
"""Different origins, or extra keys, that one namespace may have; blocks with further ones are not told."""
WHOLES_MAX = 16
"""Different wholes that the blocks of one namespace may be parts of; blocks of further ones are not told. Each costs a
look at every block that changes, and writers can make up any number."""
_HEAD_WORDS = 4
_SIZE_AT = 3
"""The word with the size of the key. Before it are the numbers of origin and extra keys, and the size of the hash."""
_WORDS = _HEAD_WORDS + BLOCK_KEY_BYTES_MAX // 4
_KEY_AT = 4 * _HEAD_WORDS

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Origin:
    """The fields that the blocks of one event share."""

    group: int
    lora_name: str | None = None
    parts: int = 1
    """Namespaces that must all have the block for it to be of use."""
    whole: bytes = NO_WHOLE
    """The name that these namespaces share."""


@dataclass(frozen=True, slots=True)
class Name:
    """One block as its engine names it."""

    key: bytes
    hash_bytes: int
    """Leading bytes of the key that are the engine's hash."""
    origin: Origin
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


class Names:
    """Names by row. Used by one thread, or under its owner's lock."""

    def __init__(self, folder: str | None) -> None:
        self._lines = TokenFile(_WORDS, folder)
        self.wholes: dict[bytes, int] = {}
        """The wholes that blocks here are parts of, with their number of parts; without blocks that are whole."""
        self._origins = _Shared[Origin]()
        self._extras = _Shared[tuple[Any, ...] | None]()

    def write(self, rows: Rows, names: Sequence[Name]) -> npt.NDArray[np.bool_]:
        """Sets the names of rows; False for each that has no room."""
        lines = np.zeros((len(rows), _WORDS), np.uint32)
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

    def whole_hashes(self, rows: Rows) -> list[bytes]:
        """Returns each engine's hash."""
        lines = np.ascontiguousarray(self._lines.read(rows))
        ends = (_KEY_AT + lines[:, 2]).tolist()
        return [line[_KEY_AT:end].tobytes() for line, end in zip(lines.view(np.uint8), ends, strict=True)]

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

    def origin(self, row: int) -> Origin:
        """Returns the origin of a row."""
        return self._origins[int(self._lines.read(np.array([row], np.int32))[0, 0])]

    def extra_keys(self, rows: Rows) -> list[tuple[Any, ...] | None]:
        """Returns the extra keys of each."""
        return [self._extras[number] for number in self._lines.read(rows)[:, 1].tolist()]

    def plain(self, rows: Rows) -> list[bool]:
        """Returns which of these have neither an adapter nor extra keys: tokens alone lead to them."""
        heads = self._lines.read(rows)[:, :2].tolist()
        return [self._origins[origin].lora_name is None and self._extras[extra] is None for origin, extra in heads]

    def _number(self, origin: Origin) -> int | None:
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
