"""Names of chunk files in columns: the same as ``places.parse_chunk`` for many names at once.

Separate from ``places`` because a root holds millions of chunks, and parsing one name at a time takes longer than
listing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES
from kvstore.format.places import NAMESPACE_ID_BYTES

U64 = npt.NDArray[np.uint64]

NAME_CHARS = 2 * ADDRESS_BYTES + 1 + 2 * NAMESPACE_ID_BYTES
_DOT = 2 * ADDRESS_BYTES
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_PLACES = np.arange(NAME_CHARS) != _DOT


@dataclass(frozen=True, slots=True)
class NameColumns:
    """Parsed names. ``ours`` has one element for each name given; the other columns one for each that is ours."""

    ours: npt.NDArray[np.bool_]
    firsts: U64
    """The first 8 bytes of each address as a big-endian number, so that their order is that of addresses."""
    lasts: U64
    """The last 8 bytes of each address as a big-endian number."""
    namespaces: U64
    """Namespace ids as big-endian numbers."""


def parse_names(names: Sequence[str]) -> NameColumns:
    """Parses the last parts of names of files; anything but a chunk's name is not ours."""
    ours = np.fromiter((len(name) == NAME_CHARS for name in names), np.bool_, len(names))
    text = "".join(name for name in names if len(name) == NAME_CHARS).encode("ascii", "replace")
    chars = np.frombuffer(text, np.uint8).reshape(-1, NAME_CHARS)
    digits = _DIGITS[chars]
    good = (digits[:, _PLACES] != _NO_DIGIT).all(axis=1) & (chars[:, _DOT] == ord("."))
    ours[ours] = good
    digits = digits[good]
    return NameColumns(ours, _numbers(digits[:, :16]), _numbers(digits[:, 16:_DOT]), _numbers(digits[:, _DOT + 1 :]))


def _numbers(digits: npt.NDArray[np.uint8]) -> U64:
    """Returns numbers from 16 hexadecimal digits each."""
    return ((digits[:, 0::2] << 4) | digits[:, 1::2]).view(">u8").astype(np.uint64).reshape(-1)
