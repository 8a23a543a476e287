"""The chunks of some shards as listed, in columns, and how goals judge them: expired, pinned, their ranks.

It works on columns, because a root holds millions of chunks and arithmetic on one at a time would take longer than
listing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.format.places import NAMESPACE_ID_BYTES, parse_names
from kvstore.namespace import NamespaceId
from kvstore.root.interface import Entry
from kvstore_gc.goals import Goals
from kvstore_gc.policy import MTIME_MAX_NS, TIE_BITS, Column, Truths, Uses, expired, ranks

Marks = npt.NDArray[np.uint64]
NO_MARKS: Marks = np.zeros(0, np.uint64)

BATCH_COUNT = 4_096
_TIE_MASK = np.uint64((1 << TIE_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Tally:
    """A count, and the bytes together."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, self.bytes + other.bytes)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.count - other.count, self.bytes - other.bytes)


@dataclass(frozen=True, slots=True)
class Listed:
    """Some chunks: each column has one element for each chunk."""

    shards: Column
    names: list[str]
    """The last part of each chunk's name."""
    sizes_bytes: Column
    mtimes_ns: Column
    namespaces: Marks
    """Namespace ids as numbers, see ``number_of``."""
    marks: Marks
    """The last 8 bytes of each address as a number, which tells it apart; see ``marks_of``."""
    foreign: Tally
    """Entries beside them: folders (which have no bytes), names that are not ours, chunks of other shards."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict of goals on a ``Listed``: each column has one element for each chunk."""

    uses: Uses
    groups: Column
    """The group of namespaces of the goals."""
    ranks: Column
    expired: Truths
    pinned: Truths
    """Never both: a pinned chunk has no time to live."""


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
    """True for each mark that is among those of ``marks_of``."""
    if not len(known):
        return np.zeros(len(marks), np.bool_)
    found: Truths = known[np.minimum(np.searchsorted(known, marks), len(known) - 1)] == marks
    return found


def judge(chunks: Listed, now_s: int, goals: Goals, pinned: Marks) -> Judged:
    """Judges chunks one by one, without comparing them. ``pinned`` are marks in order (``marks_of``)."""
    uses = Uses.of(chunks.mtimes_ns, goals.quantum_s)
    is_pinned = are_among(chunks.marks, pinned)
    ties = (chunks.marks & _TIE_MASK).astype(np.int64)
    return Judged(
        uses,
        _groups(chunks.namespaces, goals),
        ranks(uses, ties, now_s, goals.order),
        expired(uses, now_s, goals.quantum_s, goals.ttl_s) & ~is_pinned,
        is_pinned,
    )


def tally_of(which: Truths, chunks: Listed) -> Tally:
    """Count and bytes of the chunks for which ``which`` is true."""
    return Tally(int(which.sum()), int(chunks.sizes_bytes[which].sum()))


def _groups(namespaces: Marks, goals: Goals) -> Column:
    known = np.array(sorted(number_of(one) for one in goals.groups), np.uint64)
    if not len(known):
        return np.zeros(len(namespaces), np.int64)
    groups = np.array([goals.groups[id_of(number)] for number in known.tolist()], np.int64)
    at = np.minimum(np.searchsorted(known, namespaces), len(known) - 1)
    return np.where(known[at] == namespaces, groups[at], 0)


def columns_of(shard_bits: int, batch: Sequence[tuple[int, Entry]]) -> Listed:
    """The columns of some entries."""
    files = [(shard, entry.name, entry.stat) for shard, entry in batch if entry.stat is not None]
    columns = parse_names([name for _, name, _ in files])
    shards = np.array([shard for shard, _, _ in files], np.int64)
    of_names = ((columns.firsts >> np.uint64(48)) >> np.uint64(16 - shard_bits)).astype(np.int64)
    here = of_names == shards[columns.ours]
    ours = columns.ours.copy()
    ours[ours] = here
    found = [file for file, is_ours in zip(files, ours.tolist(), strict=True) if is_ours]
    sizes_bytes = np.array([stat.size_bytes for _, _, stat in found], np.int64)
    foreign_bytes = 0
    if len(found) < len(batch):
        foreign_bytes = sum(stat.size_bytes for _, _, stat in files) - int(sizes_bytes.sum())
    return Listed(
        shards[ours],
        [name for _, name, _ in found],
        sizes_bytes,
        _mtimes([stat.mtime_ns for _, _, stat in found]),
        columns.namespaces[here],
        columns.lasts[here],
        Tally(len(batch) - len(found), foreign_bytes),
    )


def _mtimes(mtimes_ns: list[int]) -> Column:
    try:
        return np.array(mtimes_ns, np.int64)
    except OverflowError:  # beyond the year 2262: some tool's mistake
        return np.array([min(max(each, 0), MTIME_MAX_NS) for each in mtimes_ns], np.int64)
