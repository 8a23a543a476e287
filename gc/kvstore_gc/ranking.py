"""The chunks of one listing in the order in which they go, children before their parents.

In columns, 40 bytes for each chunk, because a root holds millions. Of more than KEPT_MAX chunks only those that go
first are kept: when they are gone the root is listed again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.host.eviction import Victim
from kvstore.namespace import NamespaceId
from kvstore.root.interface import Entry, Root
from kvstore_gc.goals import Goals
from kvstore_gc.histogram import Tally
from kvstore_gc.listing import BATCH_COUNT, NO_MARKS, Listed, columns_of, id_of, judge, tally_of

KEPT_MAX = 1 << 21
Between = Callable[[], object]
_CHUNK = np.dtype(
    [("rank", "<i8"), ("address", f"V{ADDRESS_BYTES}"), ("namespace", "<u8"), ("size", "<i8"), ("group", "<i2")]
)


class Ranking:
    """A listing of a root, and what is left of it to evict. One thread."""

    def __init__(self, goals: Goals, now_s: float, began_ns: int) -> None:
        """``began_ns`` is a moment before the listing, by the clock of the root's file system."""
        self.began_ns = began_ns
        self.total = Tally()
        """All chunks."""
        self.foreign = Tally()
        """Entries that are not chunks: left alone."""
        self.namespaces: Counter[NamespaceId] = Counter()
        self.bytes_of: Counter[NamespaceId] = Counter()
        self.due_count = 0
        """Chunks that go whatever room there is: past their time to live, or over a quota."""
        self._goals = goals
        self._now_s = math.ceil(now_s)
        self._parts: list[np.ndarray[tuple[int], np.dtype[np.void]]] = []
        self._kept_count = 0
        self._group_bytes = np.zeros(len(goals.group_quotas), np.int64)
        self._chunks: np.ndarray[tuple[int], np.dtype[np.void]] = np.zeros(0, _CHUNK)
        self._at = 0

    def read(self, root: Root, shard_bits: int, between: Between) -> None:
        """Lists all shards; calls ``between`` after each. Raises the root's errors if no shard can be listed."""
        failed: KVStoreError | None = None
        entries = list[tuple[int, Entry]]()
        for shard in range(1 << shard_bits):
            try:
                entries += ((shard, entry) for entry in root.list(places.shard_folder(shard)))
            except (Unavailable, PermissionDenied) as error:
                failed = error
            if len(entries) >= BATCH_COUNT or shard == (1 << shard_bits) - 1:
                self._add(columns_of(shard_bits, entries))
                entries = []
            between()
        if failed is not None and not self.total.count:
            raise failed
        self._fold(KEPT_MAX)
        self._rank_quotas()
        self._chunks = self._parts[0] if self._parts else self._chunks
        self._parts = []
        self.due_count = int((self._chunks["rank"] < 0).sum())

    @property
    def left_bytes(self) -> int:
        """Bytes of the chunks that were not taken yet."""
        return int(self._chunks["size"][self._at :].sum())

    def take(self, size_bytes: int, count_max: int) -> list[Victim]:
        """Takes the chunks that go next: of ``size_bytes`` together or a little more, and all that are due anyway."""
        part = self._chunks[self._at : self._at + count_max]
        enough = int(np.searchsorted(np.cumsum(part["size"]), size_bytes)) + 1 if size_bytes > 0 else 0
        part = part[: max(enough, int((part["rank"] < 0).sum()))]
        self._at += len(part)
        return [
            Victim(Address(address), id_of(namespace), size)
            for address, namespace, size in zip(
                part["address"].tolist(), part["namespace"].tolist(), part["size"].tolist(), strict=True
            )
        ]

    def _add(self, batch: Listed) -> None:
        judged = judge(batch, self._now_s, self._goals, NO_MARKS)
        self.total += Tally(len(batch.names), int(batch.sizes_bytes.sum()))
        self.foreign += batch.foreign
        for number in np.unique(batch.namespaces).tolist():
            those = tally_of(batch.namespaces == number, batch)
            self.namespaces[id_of(number)] += those.count
            self.bytes_of[id_of(number)] += those.bytes
        np.add.at(self._group_bytes, judged.groups, batch.sizes_bytes)
        part = np.zeros(len(batch.names), _CHUNK)
        # Those that are due have negative ranks, in the same order.
        part["rank"] = np.where(judged.expired, judged.ranks - np.iinfo(np.int64).max, judged.ranks)
        packed = bytes.fromhex("".join(name[: 2 * ADDRESS_BYTES] for name in batch.names))
        part["address"] = np.frombuffer(packed, f"V{ADDRESS_BYTES}")
        part["namespace"], part["size"], part["group"] = batch.namespaces, batch.sizes_bytes, judged.groups
        self._parts.append(part)
        self._kept_count += len(part)
        if self._kept_count > 2 * KEPT_MAX:
            self._fold(KEPT_MAX)

    def _fold(self, count_max: int) -> None:
        """Sorts what there is, and keeps what goes first."""
        if self._parts:
            chunks = np.concatenate(self._parts)
            chunks = chunks[np.argsort(chunks["rank"], kind="stable")][:count_max]
            self._parts, self._kept_count = [chunks], len(chunks)

    def _rank_quotas(self) -> None:
        """Makes the first chunks of namespaces over a quota due."""
        if not self._goals.quotas or not self._parts:
            return
        chunks = self._parts[0]
        for place, quota in enumerate(self._goals.quotas):
            groups = [group for group, over in enumerate(self._goals.group_quotas) if place in over]
            mine = np.flatnonzero(np.isin(chunks["group"], groups))
            due = chunks["rank"][mine] < 0
            over_bytes = int(self._group_bytes[groups].sum()) - int(chunks["size"][mine][due].sum()) - quota.max_bytes
            left = mine[~due]
            if over_bytes > 0:
                enough = int(np.searchsorted(np.cumsum(chunks["size"][left]), over_bytes)) + 1
                chunks["rank"][left[:enough]] -= np.iinfo(np.int64).max
        self._parts[0] = chunks[np.argsort(chunks["rank"], kind="stable")]
