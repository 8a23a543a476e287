"""The chunks of a listing in the order in which they are evicted: on one host, and in a cluster.

First chunks that are *due* whatever space there is (past their time to live, over a quota, without their parent), then
by rank (``kvstore_gc.policy``): the oldest prompts first, and the tail of a prompt before its head. In columns of 51
bytes for each chunk, because a root holds millions. Of more than KEPT_MAX chunks only those that are evicted first are
kept, and as many that a quota counts: when they are deleted the root is listed again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.census.walk import read_fixed
from kvstore.core.address import ADDRESS_BYTES, NO_PARENT, Address
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import NS_PER_S
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.format.places import NAMESPACE_ID_BYTES, parse_names
from kvstore.host.eviction import EvictionVictim
from kvstore.root.interface import FolderEntry, Root
from kvstore_gc.policy import MTIME_MAX_NS, QUOTA_SHARE, TIE_BITS, Column, Goals, Truths, Uses, expired, ranks
from kvstore_gc.site import Site
from kvstore_gc.threads import Each, inline

Marks = npt.NDArray[np.uint64]
NO_MARKS: Marks = np.zeros(0, np.uint64)

BATCH_COUNT = 4_096
_TIE_MASK = np.uint64((1 << TIE_BITS) - 1)


@dataclass(frozen=True, slots=True)
class CountAndBytes:
    """A count, and the bytes together."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: CountAndBytes) -> CountAndBytes:
        return CountAndBytes(self.count + other.count, self.bytes + other.bytes)

    def __sub__(self, other: CountAndBytes) -> CountAndBytes:
        return CountAndBytes(self.count - other.count, self.bytes - other.bytes)


def id_of(number: int) -> NamespaceId:
    """The namespace id that a row holds as a number."""
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


def _groups(namespaces: Marks, goals: Goals) -> Column:
    known = np.array(sorted(int.from_bytes(one, "big") for one in goals.groups), np.uint64)
    if not len(known):
        return np.zeros(len(namespaces), np.int64)
    groups = np.array([goals.groups[id_of(number)] for number in known.tolist()], np.int64)
    at = np.minimum(np.searchsorted(known, namespaces), len(known) - 1)
    return np.where(known[at] == namespaces, groups[at], 0)


def _mtimes(mtimes_ns: list[int]) -> Column:
    try:
        return np.array(mtimes_ns, np.int64)
    except OverflowError:  # beyond the year 2262: some tool's mistake
        return np.array([min(max(each, 0), MTIME_MAX_NS) for each in mtimes_ns], np.int64)


log = logging.getLogger(__name__)

KEPT_MAX = 1 << 21
_DUE = np.iinfo(np.int64).max
"""Subtracted from the rank of a chunk that is due: then it is negative, and the order stays."""

Rows = npt.NDArray[np.void]
"""Chunks of a ranking, in its order."""
_ROW = np.dtype(
    [
        *(("rank", "<i8"), ("address", f"V{ADDRESS_BYTES}"), ("namespace", "<u8"), ("size", "<i8")),
        *(("mtime_ns", "<i8"), ("group", "<i2"), ("reason", "u1")),
    ]
)


def rows_of(shard_bits: int, entries: Sequence[tuple[int, FolderEntry]]) -> tuple[Rows, CountAndBytes]:
    """Returns the chunks among listed entries, and how many others there are: folders (which have no bytes), names that
    are not ours, chunks of other shards.
    """
    files = [(shard, entry.name, entry.stat) for shard, entry in entries if entry.stat is not None]
    names = parse_names([name for _, name, _ in files])
    shards = np.array([shard for shard, _, _ in files], np.int64)
    here = ((names.firsts >> np.uint64(48)) >> np.uint64(16 - shard_bits)).astype(np.int64) == shards[names.ours]
    ours = names.ours.copy()
    ours[ours] = here
    sizes = np.array([stat.size_bytes for _, _, stat in files], np.int64)
    rows = np.zeros(int(here.sum()), _ROW)
    halves = np.stack([names.firsts[here], names.lasts[here]], axis=1).astype(">u8")
    rows["address"] = np.frombuffer(halves.tobytes(), f"V{ADDRESS_BYTES}")
    rows["namespace"], rows["size"] = names.namespaces[here], sizes[ours]
    rows["mtime_ns"] = _mtimes([stat.mtime_ns for _, _, stat in files])[ours]
    return rows, CountAndBytes(len(entries) - len(rows), int(sizes.sum()) - int(rows["size"].sum()))


class VerdictReason(Enum):
    """The reason why a chunk is kept or condemned, as a dry run prints it."""

    TTL = "past its time to live"
    QUOTA = "over quota"
    ORPHAN = "without its parent"
    CAPACITY = "over capacity"
    WITHIN = "within capacity"
    PINNED = "pinned"
    FOREIGN = "not a chunk"

    @property
    def condemns(self) -> bool:
        """True for a reason to delete a chunk."""
        return self in CONDEMNING


CONDEMNING = (VerdictReason.TTL, VerdictReason.QUOTA, VerdictReason.ORPHAN, VerdictReason.CAPACITY)
_TTL, _QUOTA, _ORPHAN, _CAPACITY = range(len(CONDEMNING))


class Ranking:
    """A listing of shards of a root, and the chunks that are left to evict. One thread."""

    def __init__(
        self,
        goals: Goals,
        now_s: float,
        shard_bits: int,
        pinned: Marks = NO_MARKS,
        *,
        kept_max: int = KEPT_MAX,
        batch_count: int = BATCH_COUNT,
    ) -> None:
        """Chunks that are ``pinned`` are counted, and stay. ``kept_max`` chunks are kept in memory (twice as many with
        quotas), and ``kept_max`` more while it lists, ``batch_count`` at a time.
        """
        self._kept_max = kept_max
        self._batch_count = batch_count
        self.total = CountAndBytes()
        """All chunks."""
        self.pinned = CountAndBytes()
        self.foreign = CountAndBytes()
        """Entries that are not chunks: left alone."""
        self.namespaces: dict[NamespaceId, CountAndBytes] = {}
        self.goals = goals
        self.marks = pinned
        self._now_s = math.ceil(now_s)
        self._shard_bits = shard_bits
        self._lock = threading.Lock()
        self._parts: list[Rows] = []
        self._kept_count = 0
        self._fold_count = 2 * kept_max
        self._group_bytes = np.zeros(len(goals.group_quotas), np.int64)
        self._rows: Rows = np.zeros(0, _ROW)
        self._at = 0
        self.is_whole = True
        """False if a shard could not be listed: its chunks are still there."""
        self.has_fresh = False
        """True if chunks were left out because they had just been used: the next listing may rank them."""

    def read(
        self,
        root: Root,
        shards: Sequence[int],
        each: Each = inline,
        listed: Callable[[int], object] = lambda shard: None,
    ) -> None:
        """Lists shards; calls ``listed`` after each. A shard that cannot be listed is logged and left out.

        Raises the root's errors if no shard can be listed, and what ``each`` raises. ``rank`` follows.
        """
        failed: list[KVStoreError] = []
        entries: list[tuple[int, FolderEntry]] = []

        def look(at: int) -> None:
            shard = shards[at]
            try:
                remaining = iter(root.list(places.shard_folder(shard)))
                while batch := list(islice(remaining, self._batch_count)):
                    with self._lock:
                        entries.extend((shard, entry) for entry in batch)
                        if len(entries) >= self._batch_count:
                            self._add(entries)
            except (Unavailable, PermissionDenied) as error:
                log.warning("gc.shard_failed shard=%04x %s", shard, error)
                failed.append(error)
            listed(shard)

        each(len(shards), look)
        self._add(entries)
        self.is_whole = self.is_whole and not failed
        if failed and len(failed) == len(shards):
            raise failed[0]

    def rank(self, used_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """Ranks all that was listed.

        Chunks used between the two times ``used_s`` stay, and make ``has_fresh`` true. Others may be from later: a host
        whose clock is ahead.
        """
        self._fold()
        rows, self._parts = (self._parts or [self._rows])[0], []
        is_first = np.arange(len(rows)) < self._kept_max
        is_fresh = (rows["mtime_ns"] >= used_s[0] * NS_PER_S) & (rows["mtime_ns"] < used_s[1] * NS_PER_S)
        is_left = ~is_fresh | (rows["rank"] < 0)
        self._rows = rows[is_left]
        self.has_fresh = len(self._rows) < len(rows)
        if self.goals.quotas:
            self._rank_quotas()
            # The others are for quotas alone: for the capacity, older ones that are not kept would be due before them.
            self._rows = self._rows[is_first[is_left] | (self._rows["rank"] < 0)]
            self._sort()

    @property
    def due(self) -> CountAndBytes:
        """The chunks that are due, of those that are left."""
        return _tally(self._rows[self._at :][self._rows["rank"][self._at :] < 0])

    @property
    def left_bytes(self) -> int:
        """Bytes of the chunks that were not taken yet."""
        return int(self._rows["size"][self._at :].sum())

    @property
    def is_spent(self) -> bool:
        """True if all were taken."""
        return self._at >= len(self._rows)

    def take(self, size_bytes: float, count_max: int | None = None) -> Rows:
        """Takes the next chunks: those that are due, and more until they have ``size_bytes`` together."""
        rows = self._rows[self._at :][:count_max]
        enough = int(np.searchsorted(np.cumsum(rows["size"]), size_bytes)) + 1 if size_bytes > 0 else 0
        rows = rows[: max(enough, int(np.searchsorted(rows["rank"], 0)))]
        self._at += len(rows)
        return rows

    def front(self, count_max: int) -> Rows:
        """Returns the next chunks that are not due."""
        return self._rows[self._at + int(np.searchsorted(self._rows["rank"][self._at :], 0)) :][:count_max]

    def have(self, addresses: Sequence[Address]) -> Truths:
        """Returns which of these addresses the ranking has."""
        wanted, mine = _marks(b"".join(addresses)), _marks(self._rows["address"].tobytes())
        return are_among(wanted, np.unique(mine[are_among(mine, np.unique(wanted))]))

    def orphaned(self, orphans: Truths) -> None:
        """Makes those of ``front(len(orphans))`` due that have no parent."""
        rows = self.front(len(orphans))
        rows["rank"][orphans] -= _DUE
        rows["reason"][orphans] = _ORPHAN
        self._sort()

    def _add(self, entries: list[tuple[int, FolderEntry]]) -> None:
        """Adds what was listed, and empties ``entries``."""
        rows, foreign = rows_of(self._shard_bits, entries)
        entries.clear()
        goals, marks = self.goals, _marks(rows["address"].tobytes())
        uses, is_pinned = Uses.of(rows["mtime_ns"], goals.quantum_s), are_among(marks, self.marks)
        is_expired = expired(uses, self._now_s, goals.quantum_s, goals.ttl_s)
        rows["rank"] = ranks(uses, (marks & _TIE_MASK).astype(np.int64), self._now_s, goals.order)
        rows["rank"][is_expired] -= _DUE
        rows["reason"] = np.where(is_expired, _TTL, _CAPACITY)
        rows["group"] = _groups(rows["namespace"], goals)
        self.total += _tally(rows)
        self.pinned += _tally(rows[is_pinned])
        self.foreign += foreign
        for number in np.unique(rows["namespace"]).tolist():
            before = self.namespaces.get(id_of(number), CountAndBytes())
            self.namespaces[id_of(number)] = before + _tally(rows[rows["namespace"] == number])
        np.add.at(self._group_bytes, rows["group"], rows["size"])
        self._parts.append(rows[~is_pinned])
        self._kept_count += len(self._parts[-1])
        if self._kept_count > self._fold_count:
            self._fold()

    def _fold(self) -> None:
        """Sorts what was listed, and keeps what is evicted first: of all chunks, and of those that quotas count, which
        may all be newer.
        """
        if self._parts:
            rows = np.concatenate(self._parts)
            self._parts.clear()  # or there would be three copies of all chunks
            order = np.argsort(rows["rank"], kind="stable")
            is_kept = np.arange(len(order)) < self._kept_max
            is_kept[np.flatnonzero(rows["group"][order])[: self._kept_max]] = True
            self._parts.append(rows[order[is_kept]])
            self._kept_count = len(self._parts[0])
            self._fold_count = self._kept_count + self._kept_max

    def _rank_quotas(self) -> None:
        """Makes the first chunks of namespaces over a quota due."""
        rows = self._rows
        for place, quota in enumerate(self.goals.quotas):
            groups = [group for group, over in enumerate(self.goals.group_quotas) if place in over]
            mine = np.flatnonzero(np.isin(rows["group"], groups))
            due = rows["rank"][mine] < 0
            used_bytes = int(self._group_bytes[groups].sum()) - int(rows["size"][mine[due]].sum())
            if used_bytes > quota.max_bytes:
                left = mine[~due]
                over_bytes = used_bytes - QUOTA_SHARE * quota.max_bytes
                over = left[: int(np.searchsorted(np.cumsum(rows["size"][left]), over_bytes)) + 1]
                rows["rank"][over] -= _DUE
                rows["reason"][over] = _QUOTA

    def _sort(self) -> None:
        left = self._rows[self._at :]
        self._rows, self._at = left[np.argsort(left["rank"], kind="stable")], 0


def tallies(rows: Rows) -> Iterator[tuple[NamespaceId, VerdictReason, CountAndBytes]]:
    """Counts rows by namespace and reason."""
    for number in np.unique(rows["namespace"]).tolist():
        those = rows[rows["namespace"] == number]
        for code in np.unique(those["reason"]).tolist():
            yield id_of(number), CONDEMNING[code], _tally(those[those["reason"] == code])


def victims_of(rows: Rows) -> list[EvictionVictim]:
    """Returns the chunks of some rows."""
    columns = (rows[name].tolist() for name in ("address", "namespace", "size", "mtime_ns"))
    return [
        EvictionVictim(Address(address), id_of(number), size_bytes, mtime_ns)
        for address, number, size_bytes, mtime_ns in zip(*columns, strict=True)
    ]


def parts_of(rows: Rows) -> npt.NDArray[Any]:
    """Returns the part of each chunk, as ``part_of`` does."""
    return np.frombuffer(rows["address"].tobytes(), np.uint8)[::ADDRESS_BYTES] >> 6


def _marks(packed: bytes) -> Marks:
    return np.frombuffer(packed, ">u8")[1::2].astype(np.uint64)


def _tally(rows: Rows) -> CountAndBytes:
    return CountAndBytes(len(rows), int(rows["size"].sum()))


# Chunks without their parent, which a collector that was killed between two sweeps may leave.
#
# No reader finds them, because a prompt ends at the first missing chunk. A listing does not name parents, headers do:
# so only the chunks that would be evicted next are read. What such a collector left is among them, because everything
# below their rank was deleted.


CHECKED_MAX = 4_096
"""Chunks checked in one listing. Their parents are remembered until the next one, so each header is read once."""


class _Chunk(NamedTuple):
    at: int
    """Its place among those that are checked."""
    address: Address
    namespace: NamespaceId


class Parents:
    """The parents of the chunks of one root that are evicted next. One thread."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._parents: dict[Address, Address] = {}

    def check(self, ranking: Ranking) -> None:
        """Makes the chunks due that have no parent, among those that are evicted next, and the chunks behind them."""
        rows = ranking.front(CHECKED_MAX)
        behind, traits = np.ones(len(rows), np.bool_), self._site.root.traits
        if traits.touch:  # else times do not tell the depth
            behind = Uses.of(rows["mtime_ns"], ranking.goals.quantum_s).depth > 0
        if not traits.ordered_publish:  # a put may be about to publish the parent
            behind &= rows["mtime_ns"] < (self._site.clock.now_s() - self._site.timings.staging_age_s) * NS_PER_S
        columns = np.flatnonzero(behind).tolist(), *(rows[name][behind].tolist() for name in ("address", "namespace"))
        chunks = [_Chunk(at, Address(address), id_of(number)) for at, address, number in zip(*columns, strict=True)]
        self._read(chunks)
        chunks = [chunk for chunk in chunks if self._parents.get(chunk.address, NO_PARENT) != NO_PARENT]
        if not chunks:
            return
        listed = ranking.have([self._parents[chunk.address] for chunk in chunks])
        unlisted = [chunks[at] for at in np.flatnonzero(~listed)]
        lost: list[_Chunk] = []
        self._site.each(len(unlisted), lambda at: lost.append(unlisted[at]) if self._is_lost(unlisted[at]) else None)
        children: dict[Address, list[_Chunk]] = {}
        for chunk in chunks:
            children.setdefault(self._parents[chunk.address], []).append(chunk)
        orphans = np.zeros(len(rows), np.bool_)
        while lost:
            orphans[lost[-1].at] = True
            lost += children.get(lost.pop().address, ())
        if orphans.any():
            ranking.orphaned(orphans)

    def _read(self, chunks: list[_Chunk]) -> None:
        """Reads the headers of chunks that were not read before, as far as they can be read."""
        self._parents = {one.address: self._parents[one.address] for one in chunks if one.address in self._parents}
        new = [chunk for chunk in chunks if chunk.address not in self._parents]

        def look(number: int) -> None:
            with suppress(KVStoreError):
                seen = self._site.root.look(self._name(new[number].address, new[number].namespace), FIXED_BYTES)
                header = read_fixed(seen.prefix) if seen is not None else None
                if header is not None:
                    self._parents[new[number].address] = header.parent

        self._site.each(len(new), look)

    def _is_lost(self, chunk: _Chunk) -> bool:
        """True if its parent does not exist now: the ranking lacks those that are pinned, or were just used."""
        try:
            return self._site.root.stat(self._name(self._parents[chunk.address], chunk.namespace)) is None
        except KVStoreError:
            return False

    def _name(self, address: Address, namespace: NamespaceId) -> places.Name:
        return places.chunk(address, namespace, self._site.identity.shard_bits)
