"""A survey of a root in one streaming pass: enough to say where to cut.

Its size depends on limits alone, not on the number of chunks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.namespace import NamespaceId
from kvstore.root.interface import Entry, Root
from kvstore_gc.goals import Goals
from kvstore_gc.histogram import EMPTY, Histogram, Tally
from kvstore_gc.listing import BATCH_COUNT, NO_MARKS, Judged, Listed, Marks, columns_of, id_of, judge, tally_of
from kvstore_gc.policy import Column
from kvstore_gc.threads import Each

log = logging.getLogger(__name__)

NAMESPACES_MAX = 512
"""A survey names the largest namespaces, and counts all others together."""
_FOLD_COUNT = 65_536
"""Chunks to gather before they go into histograms: the cost of folding is per histogram."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The chunks of some shards, as of ``now_s``, for one set of goals. Bytes and counts are exact."""

    now_s: int
    shard_bits: int
    shards_count: int
    """The number of shards that it saw."""
    expired: Tally
    """Chunks past their time to live; in no histogram."""
    foreign: Tally
    """Entries that are not chunks: left alone, and in no other figure."""
    groups: tuple[Histogram, ...]
    """Ranks of the chunks that are neither expired nor pinned, for each group of namespaces of the goals."""
    pinned: tuple[Tally, ...]
    """Pinned chunks of each group."""
    namespaces: Mapping[NamespaceId, Tally]
    """The largest namespaces, with their expired chunks."""
    unnamed: Tally
    """All other namespaces."""

    @property
    def used(self) -> Tally:
        """All chunks, expired ones too."""
        return sum((*(group.total for group in self.groups), *self.pinned), self.expired)

    @property
    def _frame(self) -> tuple[int, int, int]:
        return self.now_s, self.shard_bits, len(self.groups)

    def __add__(self, other: Survey) -> Survey:
        if self._frame != other._frame:
            raise InvalidRequest("surveys of another moment or root, or for other goals, cannot be added: survey again")
        namespaces = dict(self.namespaces)
        for namespace, tally in other.namespaces.items():
            namespaces[namespace] = namespaces.get(namespace, Tally()) + tally
        kept, beyond = _largest(namespaces)
        return Survey(
            self.now_s,
            self.shard_bits,
            self.shards_count + other.shards_count,
            self.expired + other.expired,
            self.foreign + other.foreign,
            tuple(mine + theirs for mine, theirs in zip(self.groups, other.groups, strict=True)),
            tuple(mine + theirs for mine, theirs in zip(self.pinned, other.pinned, strict=True)),
            kept,
            self.unnamed + other.unnamed + beyond,
        )


def survey(
    root: Root,
    shard_bits: int,
    shards: Sequence[int],
    each: Each,
    now_s: float,
    goals: Goals,
    pinned: Marks = NO_MARKS,
    keep: Callable[[Listed, Judged], object] = lambda batch, judged: None,
) -> Survey:
    """Lists these shards once. A shard that cannot be listed is logged and left out.

    Raises the root's errors if no shard can be listed, and what ``each`` raises. ``pinned`` is advice: it keeps chunks
    out of the plan that the sweep would spare, so that others go instead. ``keep`` receives all that was listed.
    """
    idle: deque[_Surveyor] = deque()
    failed: list[KVStoreError] = []

    def look(place: int) -> None:
        shard = shards[place]
        try:
            surveyor = idle.pop()  # atomic: each is used by one thread at a time
        except IndexError:
            surveyor = _Surveyor(shard_bits, int(now_s), goals, pinned, keep)
        try:
            for entry in root.list(places.shard_folder(shard)):
                surveyor.add(shard, entry)
        except (Unavailable, PermissionDenied) as error:
            log.warning("gc.shard_failed shard=%04x %s", shard, error)
            failed.append(error)
        idle.append(surveyor)

    each(len(shards), look)
    if failed and len(failed) == len(shards):
        raise failed[0]
    nothing = _Surveyor(shard_bits, int(now_s), goals, pinned, keep).done(len(shards))
    return reduce(add, (surveyor.done(0) for surveyor in idle), nothing)


def beside(root: Root) -> Tally:
    """Files of ours that take room beside the chunks: staged, in a sweep's trash, set aside. Raises the root's errors.

    Call it before the chunks are listed: a file published or put back meanwhile then counts twice, never not at all.
    """
    found = _files(root, places.QUARANTINE)
    for above in (places.STAGING, places.TRASH):
        for entry in list(root.list(above)):
            if entry.stat is None:
                found += _files(root, Name(f"{above}/{entry.name}"))
            else:
                found += Tally(1, entry.stat.size_bytes)
    return found


def _files(root: Root, folder: Name) -> Tally:
    sizes = [entry.stat.size_bytes for entry in root.list(folder) if entry.stat is not None]
    return Tally(len(sizes), sum(sizes))


class _Surveyor:
    """One thread's survey while it grows."""

    def __init__(
        self,
        shard_bits: int,
        now_s: int,
        goals: Goals,
        pinned: Marks,
        keep: Callable[[Listed, Judged], object],
    ) -> None:
        self._shard_bits = shard_bits
        self._keep = keep
        self._entries: list[tuple[int, Entry]] = []
        """What the next batch will have, perhaps of many small shards."""
        self._now_s = now_s
        self._goals = goals
        self._marks = pinned
        self._expired = self._foreign = self._unnamed = Tally()
        self._groups = [EMPTY] * len(goals.group_quotas)
        self._pinned = [Tally()] * len(goals.group_quotas)
        self._namespaces: dict[NamespaceId, Tally] = {}
        self._gathered: list[tuple[Column, Column, Column]] = []
        self._gathered_count = 0

    def add(self, shard: int, entry: Entry) -> None:
        """Takes in an entry of a shard's folder."""
        self._entries.append((shard, entry))
        if len(self._entries) >= BATCH_COUNT:
            self._see()

    def _see(self) -> None:
        batch = columns_of(self._shard_bits, self._entries)
        self._entries = []
        self._foreign += batch.foreign
        self._count(batch)
        judged = judge(batch, self._now_s, self._goals, self._marks)
        self._expired += tally_of(judged.expired, batch)
        if judged.pinned.any():
            for group in np.unique(judged.groups[judged.pinned]).tolist():
                self._pinned[group] += tally_of(judged.pinned & (judged.groups == group), batch)
        left = ~(judged.expired | judged.pinned)
        self._gathered.append((judged.groups[left], judged.ranks[left], batch.sizes_bytes[left]))
        self._gathered_count += len(left)
        if self._gathered_count >= _FOLD_COUNT:
            self._fold()
        self._keep(batch, judged)

    def done(self, shards_count: int) -> Survey:
        """The survey of all that it saw."""
        if self._entries:
            self._see()
        self._fold()
        kept, beyond = _largest(self._namespaces)
        return Survey(
            self._now_s,
            self._shard_bits,
            shards_count,
            self._expired,
            self._foreign,
            tuple(self._groups),
            tuple(self._pinned),
            kept,
            self._unnamed + beyond,
        )

    def _count(self, batch: Listed) -> None:
        numbers, at, counts = np.unique(batch.namespaces, return_inverse=True, return_counts=True)
        sizes_bytes = np.zeros(len(numbers), np.int64)
        np.add.at(sizes_bytes, at, batch.sizes_bytes)
        for number, count, size_bytes in zip(numbers.tolist(), counts.tolist(), sizes_bytes.tolist(), strict=True):
            namespace = id_of(number)
            self._namespaces[namespace] = self._namespaces.get(namespace, Tally()) + Tally(count, size_bytes)
        if len(self._namespaces) > 8 * NAMESPACES_MAX:
            self._namespaces, beyond = _largest(self._namespaces)
            self._unnamed += beyond

    def _fold(self) -> None:
        if not self._gathered:
            return
        groups, here, sizes_bytes = (np.concatenate(column) for column in zip(*self._gathered, strict=True))
        for group in np.unique(groups).tolist():
            those = groups == group
            self._groups[group] += Histogram.of(here[those], sizes_bytes[those])
        self._gathered.clear()
        self._gathered_count = 0


def _largest(namespaces: Mapping[NamespaceId, Tally]) -> tuple[dict[NamespaceId, Tally], Tally]:
    """The NAMESPACES_MAX largest namespaces, and the tally of all others together."""
    order = sorted(namespaces, key=lambda one: (-namespaces[one].bytes, one))
    beyond = sum((namespaces[one] for one in order[NAMESPACES_MAX:]), Tally())
    return {one: namespaces[one] for one in order[:NAMESPACES_MAX]}, beyond
