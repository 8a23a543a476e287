"""The chunks of a listing in the order in which they are evicted: on one host, and in a cluster.

First chunks that are *due* whatever space there is (past their time to live, over a quota, without their parent), then
by rank (``kvstore_gc.policy``): the oldest prompts first, and the tail of a prompt before its head. In columns of 51
bytes for each chunk, because a root holds millions. Of more than KEPT_MAX chunks only those that are evicted first are
kept: when they are deleted the root is listed again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.namespace import NamespaceId
from kvstore.recency import NS_PER_S
from kvstore.root.interface import Entry, Root
from kvstore_gc.goals import QUOTA_SHARE, Goals
from kvstore_gc.listing import (
    BATCH_COUNT,
    NO_MARKS,
    Listed,
    Marks,
    Tally,
    are_among,
    columns_of,
    id_of,
    judge,
    tally_of,
)
from kvstore_gc.policy import Truths
from kvstore_gc.threads import Each, inline

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


class Reason(Enum):
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


CONDEMNING = (Reason.TTL, Reason.QUOTA, Reason.ORPHAN, Reason.CAPACITY)
_TTL, _QUOTA, _ORPHAN, _CAPACITY = range(len(CONDEMNING))


class Ranking:
    """A listing of shards of a root, and the chunks that are left to evict. One thread."""

    def __init__(self, goals: Goals, now_s: float, shard_bits: int, pinned: Marks = NO_MARKS) -> None:
        """Chunks that are ``pinned`` are counted, and stay."""
        self.total = Tally()
        """All chunks."""
        self.pinned = Tally()
        self.foreign = Tally()
        """Entries that are not chunks: left alone."""
        self.namespaces: dict[NamespaceId, Tally] = {}
        self.shards_count = 0
        """The number of shards that were listed."""
        self.goals = goals
        self.marks = pinned
        self._now_s = math.ceil(now_s)
        self._shard_bits = shard_bits
        self._lock = threading.Lock()
        self._parts: list[Rows] = []
        self._kept_count = 0
        self._group_bytes = np.zeros(len(goals.group_quotas), np.int64)
        self._rows: Rows = np.zeros(0, _ROW)
        self._at = 0

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
        entries: list[tuple[int, Entry]] = []

        def look(at: int) -> None:
            shard = shards[at]
            try:
                remaining = iter(root.list(places.shard_folder(shard)))
                while batch := list(islice(remaining, BATCH_COUNT)):
                    with self._lock:
                        entries.extend((shard, entry) for entry in batch)
                        if len(entries) >= BATCH_COUNT:
                            self._add(entries)
            except (Unavailable, PermissionDenied) as error:
                log.warning("gc.shard_failed shard=%04x %s", shard, error)
                failed.append(error)
            listed(shard)

        each(len(shards), look)
        self._add(entries)
        self.shards_count += len(shards)
        if failed and len(failed) == len(shards):
            raise failed[0]

    def rank(self, share: float = 1.0, used_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """Ranks all that was listed: ``share`` of all shards, so of each quota.

        Chunks used between the two times ``used_s`` stay. Others may be from later: a host whose clock is ahead.
        """
        self._fold()
        rows, self._parts = (self._parts or [self._rows])[0], []
        is_fresh = (rows["mtime_ns"] >= used_s[0] * NS_PER_S) & (rows["mtime_ns"] < used_s[1] * NS_PER_S)
        self._rows = rows[~is_fresh | (rows["rank"] < 0)]
        self._rank_quotas(share)

    @property
    def due(self) -> Tally:
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

    def _add(self, entries: list[tuple[int, Entry]]) -> None:
        """Adds what was listed, and empties ``entries``."""
        batch = columns_of(self._shard_bits, entries)
        entries.clear()
        judged = judge(batch, self._now_s, self.goals, self.marks)
        self.total += Tally(len(batch.names), int(batch.sizes_bytes.sum()))
        self.pinned += tally_of(judged.pinned, batch)
        self.foreign += batch.foreign
        self._count(batch)
        np.add.at(self._group_bytes, judged.groups, batch.sizes_bytes)
        goes = ~judged.pinned
        rows = np.zeros(int(goes.sum()), _ROW)
        expired, ranks = judged.expired[goes], judged.ranks[goes]
        rows["rank"] = np.where(expired, ranks - _DUE, ranks)
        rows["reason"] = np.where(expired, _TTL, _CAPACITY)
        packed = bytes.fromhex("".join(name[: 2 * ADDRESS_BYTES] for name in compress(batch.names, goes.tolist())))
        rows["address"] = np.frombuffer(packed, f"V{ADDRESS_BYTES}")
        for column, values in (
            *(("namespace", batch.namespaces), ("size", batch.sizes_bytes)),
            *(("mtime_ns", batch.mtimes_ns), ("group", judged.groups)),
        ):
            rows[column] = values[goes]
        self._parts.append(rows)
        self._kept_count += len(rows)
        if self._kept_count > 2 * KEPT_MAX:
            self._fold()

    def _count(self, batch: Listed) -> None:
        for number in np.unique(batch.namespaces).tolist():
            before = self.namespaces.get(id_of(number), Tally())
            self.namespaces[id_of(number)] = before + tally_of(batch.namespaces == number, batch)

    def _fold(self) -> None:
        """Sorts what was listed, and keeps what is evicted first."""
        if self._parts:
            rows = np.concatenate(self._parts)
            self._parts.clear()  # or there would be three copies of all chunks
            self._parts.append(rows[np.argsort(rows["rank"], kind="stable")[:KEPT_MAX]])
            self._kept_count = len(self._parts[0])

    def _rank_quotas(self, share: float) -> None:
        """Makes the first chunks of namespaces over a quota due."""
        rows = self._rows
        for place, quota in enumerate(self.goals.quotas):
            groups = [group for group, over in enumerate(self.goals.group_quotas) if place in over]
            mine = np.flatnonzero(np.isin(rows["group"], groups))
            due = rows["rank"][mine] < 0
            used_bytes = int(self._group_bytes[groups].sum()) - int(rows["size"][mine[due]].sum())
            if used_bytes > share * quota.max_bytes:
                left = mine[~due]
                over_bytes = used_bytes - QUOTA_SHARE * share * quota.max_bytes
                over = left[: int(np.searchsorted(np.cumsum(rows["size"][left]), over_bytes)) + 1]
                rows["rank"][over] -= _DUE
                rows["reason"][over] = _QUOTA
        if self.goals.quotas:
            self._sort()

    def _sort(self) -> None:
        left = self._rows[self._at :]
        self._rows, self._at = left[np.argsort(left["rank"], kind="stable")], 0


def tallies(rows: Rows) -> Iterator[tuple[NamespaceId, Reason, Tally]]:
    """Counts rows by namespace and reason."""
    for number in np.unique(rows["namespace"]).tolist():
        those = rows[rows["namespace"] == number]
        for code in np.unique(those["reason"]).tolist():
            yield id_of(number), CONDEMNING[code], _tally(those[those["reason"] == code])


def shards_of(rows: Rows, shard_bits: int) -> npt.NDArray[np.int64]:
    """Returns the shard of each chunk."""
    return np.frombuffer(rows["address"].tobytes(), ">u2")[:: ADDRESS_BYTES // 2].astype(np.int64) >> 16 - shard_bits


def _marks(packed: bytes) -> Marks:
    return np.frombuffer(packed, ">u8")[1::2].astype(np.uint64)


def _tally(rows: Rows) -> Tally:
    return Tally(len(rows), int(rows["size"].sum()))
