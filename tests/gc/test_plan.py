"""Plans: capacity, quotas, time to live, pins, and children before their parents."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.address import Address
from kvstore.errors import InvalidRequest
from kvstore.meta.sweeps import VICTIMS_MAX
from kvstore.root.interface import Entry
from kvstore_gc.goals import Goals, Quota
from kvstore_gc.listing import NO_MARKS, Marks, marks_of
from kvstore_gc.plan import Candidates, Decision, Ranking, Reason, SweepPlan, explain
from kvstore_gc.policy import Order
from kvstore_gc.survey import survey
from kvstore_gc.threads import inline
from tests.kit.cases import for_each
from tests.kit.chains import NOW_S, SHARD_BITS, SHARDS, SPACES, Chunk, entries, forests, loose, root_of, stamp


def ranked(chunks: list[Chunk], goals: Goals, pinned: Marks = NO_MARKS) -> Ranking:
    return Ranking(survey(root_of(chunks), SHARD_BITS, SHARDS, inline, NOW_S, goals, pinned), goals, pinned)


def decided(chunks: list[Chunk], goals: Goals, left_bytes: int | None = None, pinned: Marks = NO_MARKS) -> Decision:
    """What goes for these goals, and so that no more than ``left_bytes`` are left."""
    ranking = ranked(chunks, goals, pinned)
    if left_bytes is not None:
        ranking.free(size_of(chunks) - ranking.decision.condemned.bytes - left_bytes)
    return ranking.decision


def plans(chunks: list[Chunk], decision: Decision) -> list[SweepPlan]:
    listing = [(shard, entry) for shard in SHARDS for entry in entries(chunks, shard)]
    candidates = Candidates.of(listing, decision)
    return [candidates.plan(pick, decision) for pick in candidates.choose(decision)]


def taken(
    chunks: list[Chunk], goals: Goals, left_bytes: int | None = None, pinned: Marks = NO_MARKS
) -> dict[Address, Reason]:
    """The victims, and why."""
    found = plans(chunks, decided(chunks, goals, left_bytes, pinned))
    return {victim.address: victim.reason for plan in found for victim in plan.victims}


def size_of(chunks: list[Chunk]) -> int:
    return sum(chunk.size_bytes for chunk in chunks)


GOALS = st.builds(
    Goals,
    ttl_s=st.none() | st.sampled_from([60.0, 3600.0]),
    quotas=st.lists(
        st.builds(Quota, st.just("quota"), st.frozensets(st.sampled_from(SPACES), max_size=3), st.integers(0, 800)),
        max_size=3,
    ).map(tuple),
    order=st.sampled_from(Order),
)


@settings(max_examples=100)
@given(forests(), GOALS, st.none() | st.integers(0, 3000), st.integers(0, 4))
def test_no_plan_takes_a_chunk_whose_descendant_stays(
    chunks: list[Chunk], goals: Goals, left_bytes: int | None, pins: int
) -> None:
    by_address = {chunk.address: chunk for chunk in chunks}
    pinned: set[Address] = set()
    for chunk in chunks[-pins:] if pins else []:
        line: Chunk | None = chunk
        while line is not None:  # a pin holds the whole prefix
            pinned.add(line.address)
            line = by_address[line.parent] if line.parent else None
    gone = taken(chunks, goals, left_bytes, marks_of(pinned))
    assert not gone.keys() & pinned
    for chunk in chunks:
        if chunk.parent in gone:
            assert chunk.address in gone


@settings(max_examples=40)
@given(forests(), GOALS, st.none() | st.integers(0, 3000))
def test_plans_take_what_was_decided_and_say_why_of_every_chunk(
    chunks: list[Chunk], goals: Goals, left_bytes: int | None
) -> None:
    decision = decided(chunks, goals, left_bytes)
    counted: Counter[Reason] = Counter()
    cutoffs = {decision.capacity_cutoff, *decision.quota_cutoffs}
    found = plans(chunks, decision)
    for shard in SHARDS:
        here = {chunk.entry.name: chunk for chunk in chunks if chunk.shard == shard}
        taken_here = [victim for plan in found if plan.shard == shard for victim in plan.victims]
        victims = {victim.name.rpartition("/")[2]: victim for victim in taken_here}
        for name, chunk in here.items():
            verdict = explain(shard, chunk.entry, decision)
            assert verdict is not None and verdict.goes == (name in victims)
            reason = Reason(verdict.reason)
            assert verdict.goes == reason.condemns
            counted[reason] += chunk.size_bytes
            assert (verdict.cutoff_s is None) == (cutoffs == {0}) or goals.quotas
            if reason in (Reason.QUOTA, Reason.CAPACITY):
                assert verdict.cutoff_s is not None and verdict.weighted_s >= verdict.cutoff_s
            if name in victims:
                victim = victims[name]
                assert victim.reason is reason and victim.name == chunk.name
                assert (victim.address, victim.namespace) == (chunk.address, chunk.namespace)
                assert (victim.size_bytes, victim.mtime_ns) == (chunk.size_bytes, chunk.mtime_ns)
    assert dict(counted) == {reason: tally.bytes for reason, tally in decision.expected.items()}


@settings(max_examples=40)
@given(forests(), st.integers(1, 3000), st.integers(1, 4))
def test_the_least_worth_goes_in_slices_until_no_more_is_needed(
    chunks: list[Chunk], left_bytes: int, slices: int
) -> None:
    chunks = [replace(chunk, mtime_ns=stamp(600 + number * 60)) for number, chunk in enumerate(chunks)]
    ranking, gone = ranked(chunks, Goals()), list[Address]()
    listing = [(shard, entry) for shard in SHARDS for entry in entries(chunks, shard)]
    candidates = Candidates.of(listing, ranking.decision)
    needed_bytes = size_of(chunks) - left_bytes
    for _ in range(slices):
        ranking.free(needed_bytes / slices)
        for pick in candidates.choose(ranking.decision):
            gone += [victim.address for victim in candidates.plan(pick, ranking.decision).victims]
    left = [chunk for chunk in chunks if chunk.address not in gone]
    assert len(gone) == len(set(gone)) == len(chunks) - len(left), "none goes twice"
    assert chunks[: len(left)] == left, "the oldest went"
    assert size_of(left) <= max(left_bytes, 0) or needed_bytes <= 0
    # So few chunks have a bin each, so that a slice takes one too many at most.
    assert not left or size_of(chunks[: len(left) + slices]) > left_bytes or needed_bytes <= 0
    assert ranking.is_spent == (not left)


def test_expired_chunks_go_though_no_space_is_needed() -> None:
    old, new = loose(50, age_s=7200), loose(50, seed=1, age_s=0)
    gone = taken(old + new, Goals(ttl_s=3600), 8000)
    assert gone == {chunk.address: Reason.TTL for chunk in old}, "then 5,000 bytes are left"


def test_quotas_apply_to_their_namespaces_alone_and_together_to_a_tenants() -> None:
    chunks = [replace(chunk, namespace=SPACES[number % 4]) for number, chunk in enumerate(loose(400))]
    goals = Goals(
        quotas=(
            Quota("tenant a", frozenset(SPACES[:2]), 10_000),
            Quota("namespace b", frozenset(SPACES[1:2]), 2_000),
            Quota("namespace c", frozenset(SPACES[2:3]), 20_000),
        )
    )
    gone = taken(chunks, goals)
    assert set(gone.values()) == {Reason.QUOTA}
    left = Counter(chunk.namespace for chunk in chunks if chunk.address not in gone)
    assert left[SPACES[0]] + left[SPACES[1]] <= 95 and left[SPACES[1]] <= 19
    assert left[SPACES[2]] == left[SPACES[3]] == 100, "below its quota, and without one"


def test_a_tenants_quota_counts_what_a_namespaces_own_quota_left() -> None:
    chunks = [replace(chunk, namespace=SPACES[number % 2]) for number, chunk in enumerate(loose(200))]
    own = Quota("namespace b", frozenset(SPACES[1:2]), 0)
    for most, left_count in ((12_000, 100), (9_000, 85)):
        gone = taken(chunks, Goals(quotas=(own, Quota("tenant a", frozenset(SPACES[:2]), most))))
        left = Counter(chunk.namespace for chunk in chunks if chunk.address not in gone)
        assert left == {SPACES[0]: left_count}


def test_pinned_chunks_count_for_the_quota() -> None:
    chunks = loose(100)
    quota, pinned = Quota("namespace a", frozenset(SPACES[:1]), 9_000), [chunk.address for chunk in chunks[:50]]
    assert len(taken(chunks, Goals(quotas=(quota,)), pinned=marks_of(pinned))) == 15


def test_the_capacity_takes_only_what_quotas_left_over() -> None:
    chunks = [replace(chunk, namespace=SPACES[number % 2]) for number, chunk in enumerate(loose(200))]
    quota = Quota("namespace a", frozenset(SPACES[:1]), 5_000)
    assert set(taken(chunks, Goals(quotas=(quota,)), 16_000).values()) == {Reason.QUOTA}
    both = taken(chunks, Goals(quotas=(quota,)), 8_000)
    assert Counter(both.values()) == {Reason.QUOTA: 53, Reason.CAPACITY: 67}


def test_others_go_instead_of_the_oldest_that_are_pinned() -> None:
    old, new = loose(50, age_s=7200), loose(50, seed=1, age_s=60)
    gone = taken(old + new, Goals(), 8_000, marks_of([chunk.address for chunk in old]))
    assert len(gone) == 20 and gone.keys() <= {chunk.address for chunk in new}
    everything = marks_of([chunk.address for chunk in old + new])
    assert not taken(old + new, Goals(ttl_s=0), 100, everything)


def test_a_chunk_used_since_the_survey_stays() -> None:
    chunks = loose(100, age_s=7200)
    decision = decided(chunks, Goals(ttl_s=86_400), 5_000)
    used = [replace(chunk, mtime_ns=stamp(-60, uses=1)) for chunk in chunks]
    assert not plans(used, decision)


def test_a_stale_listing_takes_no_chunk_of_its_own_quantum() -> None:
    old, new = loose(50, age_s=7200), loose(50, seed=1, age_s=0)
    decision = replace(decided(old + new, Goals(), 0), used_before_s=int(NOW_S) - 60)
    found = {victim.address for plan in plans(old + new, decision) for victim in plan.victims}
    assert found == {chunk.address for chunk in old}


def test_a_plan_begins_with_what_goes_first_and_leaves_the_rest_to_the_next() -> None:
    count = VICTIMS_MAX + 1000
    chunks = loose(count, size_bytes=1)
    goals = Goals()
    decision = Ranking(survey(root_of(chunks[:1]), 0, [0], inline, NOW_S, goals), goals).decision
    decision = replace(decision, capacity_cutoff=1 << 61)
    candidates = Candidates.of([(0, Entry(chunk.entry.name, chunk.entry.stat)) for chunk in chunks], decision)
    first, second = (candidates.plan(pick, decision) for pick in candidates.choose(decision))
    assert (len(first.victims), len(second.victims)) == (VICTIMS_MAX, 1000)
    assert len({victim.name for victim in (*first.victims, *second.victims)}) == count
    ages = [victim.mtime_ns for victim in first.victims if victim.mtime_ns % 60_000_000_000 == 1_000_000_000]
    assert ages == sorted(ages), "of those never used again the oldest come first"


@for_each(
    "wrong, said",
    [
        ({"ttl_s": -1}, "ttl_s=-1"),
        ({"ttl_s": float("nan")}, "ttl_s=nan"),
        ({"quantum_s": 0}, "quantum_s=0"),
        ({"quotas": (Quota("tenant a", frozenset(), -1),)}, "tenant a"),
    ],
)
def test_goals_that_make_no_sense_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Goals(**wrong)  # type: ignore[arg-type]
