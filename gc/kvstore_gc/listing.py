"""What a listing of one shard shows of its chunks, in columns.

Survey and plan both read it, and must agree on what is a chunk.  Columns, because a root holds millions of chunks and
arithmetic on one at a time would take longer than listing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES
from kvstore.format.places import NAMESPACE_ID_BYTES
from kvstore.namespace import NamespaceId
from kvstore.root.interface import Entry
from kvstore_gc.histogram import Tally
from kvstore_gc.policy import MTIME_MAX_NS, Column, Truths

Marks = npt.NDArray[np.uint64]

BATCH_COUNT = 4_096
NAME_CHARS = 2 * ADDRESS_BYTES + 1 + 2 * NAMESPACE_ID_BYTES

_DOT = 2 * ADDRESS_BYTES
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_PLACES = np.arange(NAME_CHARS) != _DOT


@dataclass(frozen=True, slots=True)
class Listed:
    """Some chunks of one shard: one element of each for each chunk."""

    names: list[str]
    """The last part of each chunk's name."""
    sizes_bytes: Column
    mtimes_ns: Column
    namespaces: Marks
    """Namespace ids as numbers, see ``number_of``."""
    marks: Marks
    """The last 8 bytes of each address as a number, by which it is told apart; see ``marks_of``."""
    foreign: Tally
    """What lies beside them: neither files nor names of ours, and chunks of other shards. Folders have no bytes."""


def number_of(namespace: NamespaceId) -> int:
    """A namespace id as the number that columns hold."""
    return int.from_bytes(namespace, "big")


def id_of(number: int) -> NamespaceId:
    """The inverse of ``number_of``."""
    return NamespaceId(int(number).to_bytes(NAMESPACE_ID_BYTES, "big"))


def marks_of(packed: Iterable[bytes]) -> Marks:
    """The marks of packed addresses of 16 bytes each, in order. Two addresses share one by a chance of 2 ** -64."""
    return np.unique(np.frombuffer(b"".join(packed), ">u8")[1::2].astype(np.uint64))


def are_among(marks: Marks, known: Marks) -> Truths:
    """Which marks are among those of ``marks_of``."""
    if not len(known):
        return np.zeros(len(marks), np.bool_)
    found: Truths = known[np.minimum(np.searchsorted(known, marks), len(known) - 1)] == marks
    return found


def listed(shard: int, shard_bits: int, entries: Iterable[Entry]) -> Iterator[Listed]:
    """The entries of a shard's folder, up to BATCH_COUNT at a time."""
    remaining = iter(entries)
    while batch := list(islice(remaining, BATCH_COUNT)):
        yield _columns(shard, shard_bits, batch)


def _columns(shard: int, shard_bits: int, batch: list[Entry]) -> Listed:
    found = [(entry.name, entry.stat) for entry in batch if entry.stat is not None and len(entry.name) == NAME_CHARS]
    names = [name for name, _ in found]
    text = "".join(names).encode("ascii", "replace")
    chars = np.frombuffer(text, np.uint8).reshape(-1, NAME_CHARS)
    digits = _DIGITS[chars]
    ours = (digits[:, _PLACES] != _NO_DIGIT).all(axis=1) & (chars[:, _DOT] == ord("."))
    prefix = digits[:, :4].astype(np.int64) @ np.array([4096, 256, 16, 1])
    ours &= (prefix >> (16 - shard_bits)) == shard
    if not ours.all():
        found = [one for one, is_ours in zip(found, ours.tolist(), strict=True) if is_ours]
        names = [name for name, _ in found]
        digits = digits[ours]
    sizes_bytes = np.array([stat.size_bytes for _, stat in found], np.int64)
    foreign_bytes = 0
    if len(found) < len(batch):
        foreign_bytes = sum(entry.stat.size_bytes for entry in batch if entry.stat) - int(sizes_bytes.sum())
    return Listed(
        names,
        sizes_bytes,
        _mtimes([stat.mtime_ns for _, stat in found]),
        _numbers(digits[:, _DOT + 1 :]),
        _numbers(digits[:, _DOT - 16 : _DOT]),
        Tally(len(batch) - len(found), foreign_bytes),
    )


def _numbers(digits: npt.NDArray[np.uint8]) -> Marks:
    """Numbers from 16 hexadecimal digits each."""
    return ((digits[:, 0::2] << 4) | digits[:, 1::2]).view(">u8").astype(np.uint64).reshape(-1)


def _mtimes(mtimes_ns: list[int]) -> Column:
    try:
        return np.array(mtimes_ns, np.int64)
    except OverflowError:  # beyond the year 2262: some tool's mistake
        return np.array([min(max(each, 0), MTIME_MAX_NS) for each in mtimes_ns], np.int64)
