"""Choosing victims: a listing gives one ranking for all shards, and each cut-off in it the victims of each shard.

Pure, so that a dry run is a cycle whose plans are not carried out. There is one cut-off for all shards: a chunk and its
ancestors lie in different shards. As long as they are cut at the same rank, no chunk goes while a descendant of it
stays (``kvstore_gc.policy``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from operator import add

import numpy as np

from kvstore.address import Address
from kvstore.format import places
from kvstore.format.places import Name, parse_chunk
from kvstore.meta.sweeps import VICTIMS_MAX
from kvstore.namespace import NamespaceId
from kvstore.root.interface import Entry
from kvstore_gc.goals import QUOTA_SHARE, Goals
from kvstore_gc.histogram import EMPTY, Histogram, Tally
from kvstore_gc.listing import NO_MARKS, Judged, Listed, Marks, judge, listed
from kvstore_gc.policy import Column, Truths, weighted_age_s
from kvstore_gc.survey import Survey


class Reason(Enum):
    """The reason why a chunk is kept or condemned, as a dry run prints it."""

    TTL = "past its time to live"
    QUOTA = "over quota"
    CAPACITY = "over capacity"
    WITHIN = "within capacity"
    PINNED = "pinned"
    FOREIGN = "not a chunk"

    @property
    def condemns(self) -> bool:
        """True for a reason to delete a chunk."""
        return self in (Reason.TTL, Reason.QUOTA, Reason.CAPACITY)


@dataclass(frozen=True, slots=True)
class Victim:
    """A chunk to be condemned."""

    name: Name
    address: Address
    namespace: NamespaceId
    size_bytes: int
    mtime_ns: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The plan for one shard: at most VICTIMS_MAX ``victims``, in the order in which they go."""

    shard: int
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranks below which chunks go, in every shard; 0 if none do."""

    now_s: int
    shard_bits: int
    goals: Goals
    capacity_cutoff: int
    quota_cutoffs: tuple[int, ...]
    """One for each group of namespaces of the goals."""
    expected: Mapping[Reason, Tally]
    """The chunks that go and those that stay, by reason, as the survey saw them."""
    pinned: Marks = field(compare=False, repr=False)
    used_before_s: int | None = None
    """Chunks used from then on stay, because a listing in the same quantum cannot tell whether they were used again."""

    @property
    def condemned(self) -> Tally:
        """All chunks that go."""
        return sum((tally for reason, tally in self.expected.items() if reason.condemns), Tally())


@dataclass(frozen=True, slots=True)
class Explained:
    """The reason why one chunk is kept or condemned. Address and namespace are hexadecimal, as printed."""

    address: str
    namespace: str
    reason: str
    goes: bool
    idle_s: float
    """Since its last use."""
    weighted_s: float
    """``idle_s`` weighted by its uses and hints (``kvstore_gc.policy``), which is compared with the cut-off."""
    cutoff_s: float | None
    """The weighted age from which on chunks go for quota or capacity; None if none do."""


class Ranking:
    """The chunks of a survey in the order in which they are evicted, and how far eviction has come.

    Expired chunks go first, then what exceeds a quota; ``free`` evicts for the capacity, as far as it is needed. Each
    cut-off frees what is needed and at most one bin of a histogram more, which holds about a two-thousandth of all
    bytes (more if surveys were added).
    """

    def __init__(self, survey: Survey, goals: Goals, pinned: Marks = NO_MARKS) -> None:
        self._survey = survey
        self._goals = goals
        self._pinned = pinned
        self._quota_cutoffs = self._cut_quotas()
        self._left = _sum(bins.above(cut) for bins, cut in zip(survey.groups, self._quota_cutoffs, strict=True))
        self._capacity_cutoff = 0

    @property
    def is_spent(self) -> bool:
        """True if nothing is left to evict."""
        return not len(self._left.above(self._capacity_cutoff))

    @property
    def decision(self) -> Decision:
        """The cut-offs so far."""
        survey, cutoffs = self._survey, self._quota_cutoffs
        over_quota = sum(
            (bins.below(cutoff) for bins, cutoff in zip(survey.groups, cutoffs, strict=True) if cutoff), Tally()
        )
        over_capacity = self._left.below(self._capacity_cutoff)
        expected = {
            Reason.TTL: survey.expired,
            Reason.QUOTA: over_quota,
            Reason.CAPACITY: over_capacity,
            Reason.WITHIN: self._left.total - over_capacity,
            Reason.PINNED: sum(survey.pinned, Tally()),
            Reason.FOREIGN: survey.foreign,
        }
        shown = {reason: tally for reason, tally in expected.items() if tally.count}
        frame = survey.now_s, survey.shard_bits, self._goals
        return Decision(*frame, self._capacity_cutoff, tuple(cutoffs), shown, self._pinned)

    def free(self, needed_bytes: float) -> bool:
        """Evicts so many bytes more for the capacity; False if nothing is left or needed."""
        cutoff = self._left.above(self._capacity_cutoff).cut(math.ceil(needed_bytes))
        self._capacity_cutoff = max(self._capacity_cutoff, cutoff)
        return cutoff > 0

    def _cut_quotas(self) -> list[int]:
        survey, goals = self._survey, self._goals
        cutoffs = [0] * len(survey.groups)
        for place, quota in enumerate(goals.quotas):
            those = [group for group, places in enumerate(goals.group_quotas) if place in places]
            bins = _sum(survey.groups[group].above(cutoffs[group]) for group in those)
            used_bytes = bins.total.bytes + sum(survey.pinned[group].bytes for group in those)
            if used_bytes > quota.max_bytes:
                cutoff = bins.cut(used_bytes - int(QUOTA_SHARE * quota.max_bytes))
                for group in those:
                    cutoffs[group] = max(cutoffs[group], cutoff)
        return cutoffs


@dataclass(frozen=True, slots=True)
class Pick:
    """Chosen chunks of one shard, at most as many as one sweep takes, in the order in which they go."""

    shard: int
    places: Column
    """Their places among the candidates."""


class Candidates:
    """Chunks as listed; each is chosen at most once."""

    def __init__(self) -> None:
        self._batches: list[tuple[Listed, Judged]] = []
        self._left: list[Truths] = []
        """Which chunks of each batch were not chosen yet."""

    @classmethod
    def of(cls, entries: Iterable[tuple[int, Entry]], decision: Decision) -> Candidates:
        """Makes them from entries of shards' folders, each with its shard."""
        found = cls()
        for batch, judged in _judged(entries, decision):
            found.add(batch, judged)
        return found

    def add(self, batch: Listed, judged: Judged) -> None:
        """Adds some chunks."""
        self._batches.append((batch, judged))
        self._left.append(~judged.pinned)

    def choose(self, decision: Decision) -> list[Pick]:
        """Chooses all that goes.

        All picks MUST be taken before a lower cut-off counts: the ancestors of some chunks go in others, so that
        readers do not find these chunks any more.
        """
        rows, shards, ranks, start = [], [], [], 0
        for (batch, judged), left in zip(self._batches, self._left, strict=True):
            at = np.flatnonzero(left & (judged.expired | _may_go(judged, decision)))
            left[at] = False
            rows.append(at + start)
            shards.append(batch.shards[at])
            ranks.append(judged.ranks[at])
            start += len(left)
        if not sum(map(len, rows)):
            return []
        row, shard = np.concatenate(rows), np.concatenate(shards)
        order = np.lexsort((np.concatenate(ranks), shard))
        row, shard = row[order], shard[order]
        starts = np.flatnonzero(np.diff(shard, prepend=-1))
        return [
            Pick(int(shard[first]), row[at : min(at + VICTIMS_MAX, stop)])
            for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(row)], strict=True)
            for at in range(first, stop, VICTIMS_MAX)
        ]

    def plan(self, pick: Pick, decision: Decision) -> SweepPlan:
        """Makes the plan of a pick."""
        ends = np.cumsum([len(left) for left in self._left])
        victims = []
        for number, place in zip(np.searchsorted(ends, pick.places, side="right"), pick.places.tolist(), strict=True):
            batch, judged = self._batches[number]
            index = place - (int(ends[number - 1]) if number else 0)
            victims.append(_victim(pick.shard, batch, judged, index, decision))
        return SweepPlan(pick.shard, tuple(victims))


def explain(shard: int, entry: Entry, decision: Decision) -> Explained | None:
    """Explains why one entry of a shard's folder is kept or condemned; None if it is not a chunk."""
    for batch, judged in _judged(((shard, entry),), decision):
        parsed = parse_chunk(batch.names[0]) if batch.names else None
        if parsed is None:
            continue
        cutoff, reason = int(_cutoffs(judged, decision)[0]), _reason(judged, 0, decision)
        return Explained(
            parsed[0].hex(),
            parsed[1].hex(),
            reason.value,
            reason.condemns,
            max(0.0, decision.now_s - int(judged.uses.last_use_s[0])),
            weighted_age_s(int(judged.ranks[0])),
            weighted_age_s(cutoff) if cutoff else None,
        )
    return None


def _judged(entries: Iterable[tuple[int, Entry]], decision: Decision) -> Iterator[tuple[Listed, Judged]]:
    for batch in listed(decision.shard_bits, entries):
        yield batch, judge(batch, decision.now_s, decision.goals, decision.pinned)


def _cutoffs(judged: Judged, decision: Decision) -> Column:
    """The cut-off that applies to each chunk."""
    found: Column = np.maximum(np.array(decision.quota_cutoffs, np.int64)[judged.groups], decision.capacity_cutoff)
    return found


def _may_go(judged: Judged, decision: Decision) -> Truths:
    below = judged.ranks < _cutoffs(judged, decision)
    return below if decision.used_before_s is None else below & (judged.uses.last_use_s < decision.used_before_s)


def _victim(shard: int, batch: Listed, judged: Judged, index: int, decision: Decision) -> Victim:
    name = batch.names[index]
    parsed = parse_chunk(name)
    assert parsed is not None, name
    return Victim(
        Name(f"{places.shard_folder(shard)}/{name}"),
        *parsed,
        int(batch.sizes_bytes[index]),
        int(batch.mtimes_ns[index]),
        _reason(judged, index, decision),
    )


def _reason(judged: Judged, index: int, decision: Decision) -> Reason:
    rank = judged.ranks[index]
    if judged.pinned[index]:
        return Reason.PINNED
    if judged.expired[index]:
        return Reason.TTL
    if rank < decision.quota_cutoffs[judged.groups[index]]:
        return Reason.QUOTA
    return Reason.CAPACITY if rank < decision.capacity_cutoff else Reason.WITHIN


def _sum(histograms: Iterable[Histogram]) -> Histogram:
    return reduce(add, histograms, EMPTY)
