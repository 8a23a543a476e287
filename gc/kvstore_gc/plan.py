"""Choosing victims: from a survey one decision for all shards, and from that the victims of each shard.

Pure, so that a dry run is a run whose plans are not carried out. There is one cut-off for all shards: a chunk and its
ancestors lie in different shards. As long as they are cut at the same rank, no chunk goes while a descendant of it
stays (``kvstore_gc.policy``).
"""

from __future__ import annotations

from collections import defaultdict
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
from kvstore_gc.goals import Goals
from kvstore_gc.histogram import EMPTY, Histogram, Tally
from kvstore_gc.listing import NO_MARKS, Judged, Listed, Marks, judge, listed, tally_of
from kvstore_gc.policy import Column, weighted_age_s
from kvstore_gc.survey import Survey


class Reason(Enum):
    """The reason why a chunk is kept or condemned, as a dry run prints it."""

    TTL = "past its time to live"
    QUOTA = "over quota"
    CAPACITY = "over capacity"
    WITHIN = "within capacity"
    PINNED = "pinned"
    LATER = "left to the next sweep"
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
    """The plan for one shard: at most VICTIMS_MAX ``victims``, in the order in which they go; ``kept`` by reason."""

    shard: int
    victims: tuple[Victim, ...]
    kept: Mapping[Reason, Tally] = field(default_factory=dict)


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


def decide(survey: Survey, goals: Goals, pinned: Marks = NO_MARKS, beside_bytes: int = 0) -> Decision:
    """Decides where to cut: first expired chunks, then quotas, then the capacity, each as far as it is still needed.

    Each cut-off frees what is needed and at most one bin of a histogram more, which holds about a two-thousandth of
    all bytes (more if surveys were added). It frees less only if too much is pinned. ``beside_bytes`` is the room
    that files other than chunks take.
    """
    quota_cutoffs = [0] * len(survey.groups)
    for place, quota in enumerate(goals.quotas):
        those = [group for group, places in enumerate(goals.group_quotas) if place in places]
        bins = _sum(survey.groups[group].above(quota_cutoffs[group]) for group in those)
        pinned_bytes = sum(survey.pinned[group].bytes for group in those)
        cutoff = _cut(bins, pinned_bytes, quota.max_bytes, goals)
        for group in those:
            quota_cutoffs[group] = max(quota_cutoffs[group], cutoff)
    left = _sum(bins.above(cutoff) for bins, cutoff in zip(survey.groups, quota_cutoffs, strict=True))
    all_pinned = sum(survey.pinned, Tally())
    capacity_cutoff = 0
    if goals.max_bytes is not None:
        capacity_cutoff = _cut(left, all_pinned.bytes + beside_bytes, goals.max_bytes, goals)
    over_quota = sum(
        (bins.below(cutoff) for bins, cutoff in zip(survey.groups, quota_cutoffs, strict=True) if cutoff), Tally()
    )
    over_capacity = left.below(capacity_cutoff)
    expected = {
        Reason.TTL: survey.expired,
        Reason.QUOTA: over_quota,
        Reason.CAPACITY: over_capacity,
        Reason.WITHIN: left.total - over_capacity,
        Reason.PINNED: all_pinned,
        Reason.FOREIGN: survey.foreign,
    }
    shown = {reason: tally for reason, tally in expected.items() if tally.count}
    return Decision(survey.now_s, survey.shard_bits, goals, capacity_cutoff, tuple(quota_cutoffs), shown, pinned)


def plan_shard(shard: int, entries: Iterable[Entry], decision: Decision) -> SweepPlan:
    """Chooses the victims among the entries of a shard's folder.

    It takes at most VICTIMS_MAX, those that go first. The others MUST be taken by further sweeps of the same round:
    some of their ancestors go in this one, so nobody finds them any more.
    """
    kept: defaultdict[Reason, Tally] = defaultdict(Tally)
    chosen = _Chosen()
    for batch, judged in _judged(shard, entries, decision):
        kept[Reason.FOREIGN] += batch.foreign
        kept[Reason.PINNED] += tally_of(judged.pinned, batch)
        goes = ~judged.pinned & (judged.expired | (judged.ranks < _cutoffs(judged, decision)))
        kept[Reason.WITHIN] += tally_of(~goes & ~judged.pinned, batch)
        at = np.flatnonzero(goes)
        victims = [_victim(shard, batch, judged, index, decision) for index in at.tolist()]
        kept[Reason.LATER] += chosen.add(judged.ranks[at], victims)
    return SweepPlan(shard, chosen.victims, {reason: tally for reason, tally in kept.items() if tally.count})


def explain(shard: int, entry: Entry, decision: Decision) -> Explained | None:
    """Explains why one entry of a shard's folder is kept or condemned; None if it is not a chunk."""
    for batch, judged in _judged(shard, (entry,), decision):
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


class _Chosen:
    """The VICTIMS_MAX victims with the lowest ranks of all that are added."""

    def __init__(self) -> None:
        self._ranks: Column = np.zeros(0, np.int64)
        self.victims: tuple[Victim, ...] = ()

    def add(self, ranks: Column, victims: list[Victim]) -> Tally:
        """Adds victims; returns count and bytes of those that drop out."""
        both, ranks = (*self.victims, *victims), np.concatenate((self._ranks, ranks))
        order = np.argsort(ranks, kind="stable")
        self._ranks = ranks[order[:VICTIMS_MAX]]
        self.victims = tuple(both[index] for index in order[:VICTIMS_MAX].tolist())
        beyond = [both[index].size_bytes for index in order[VICTIMS_MAX:].tolist()]
        return Tally(len(beyond), sum(beyond))


def _judged(shard: int, entries: Iterable[Entry], decision: Decision) -> Iterator[tuple[Listed, Judged]]:
    for batch in listed(shard, decision.shard_bits, entries):
        yield batch, judge(batch, decision.now_s, decision.goals, decision.pinned)


def _cutoffs(judged: Judged, decision: Decision) -> Column:
    """The cut-off that applies to each chunk."""
    found: Column = np.maximum(np.array(decision.quota_cutoffs, np.int64)[judged.groups], decision.capacity_cutoff)
    return found


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


def _cut(bins: Histogram, fixed_bytes: int, max_bytes: int, goals: Goals) -> int:
    """The cut-off that brings some chunks from above the high watermark down to the low one."""
    used_bytes = bins.total.bytes + fixed_bytes
    if used_bytes <= goals.high * max_bytes:
        return 0
    return bins.cut(used_bytes - int(goals.low * max_bytes))
