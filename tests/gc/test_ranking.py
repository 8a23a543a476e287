"""The ranking of a listing: exact counts, the order of eviction, quotas, pins, and chunks without their parent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.core.recency import TICK_S, stamp_ns
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format import places
from kvstore.root.memory import MemoryFile, MemoryFiles, MemoryRoot
from kvstore_gc.policy import EvictionOrder, Goals, NamespaceQuota
from kvstore_gc.rank import CONDEMNING, NO_MARKS, CountAndBytes, Marks, Ranking, VerdictReason, marks_of, tallies
from tests.kit.cases import for_each
from tests.kit.chains import NOW_S, SHARD_BITS, SHARDS, SPACES, Chunk, forests, loose, root_of, stamp
from tests.kit.faulty_root import EIO, FaultyRoot, Rule

QUOTAS = (
    NamespaceQuota("tenant a", frozenset(SPACES[1:3]), 1000),
    NamespaceQuota("namespace b", frozenset(SPACES[2:3]), 500),
)


def ranked(chunks: list[Chunk], goals: Goals, pinned: Marks = NO_MARKS) -> Ranking:
    ranking = Ranking(goals, NOW_S, SHARD_BITS, pinned)
    ranking.read(root_of(chunks), SHARDS)
    ranking.rank()
    return ranking


def taken(
    chunks: list[Chunk], goals: Goals, left_bytes: int | None = None, pinned: Marks = NO_MARKS
) -> dict[Address, VerdictReason]:
    """The chunks that are evicted so that ``left_bytes`` are left, in order, and why."""
    rows = ranked(chunks, goals, pinned).take(0 if left_bytes is None else size_of(chunks) - left_bytes)
    return {Address(row["address"].item()): CONDEMNING[row["reason"]] for row in rows}


def size_of(chunks: list[Chunk]) -> int:
    return sum(chunk.size_bytes for chunk in chunks)


def tally(chunks: list[Chunk]) -> CountAndBytes:
    return CountAndBytes(len(chunks), size_of(chunks))


GOALS = st.builds(
    Goals,
    ttl_s=st.none() | st.sampled_from([60.0, 3600.0]),
    quotas=st.lists(
        st.builds(
            NamespaceQuota, st.just("quota"), st.frozensets(st.sampled_from(SPACES), max_size=3), st.integers(0, 800)
        ),
        max_size=3,
    ).map(tuple),
    order=st.sampled_from(EvictionOrder),
)


# What was listed


@settings(max_examples=30)
@given(forests(), st.none() | st.sampled_from([600.0, 86_400.0]), st.integers(0, len(SHARDS)))
def test_counts_and_bytes_are_exact(chunks: list[Chunk], ttl_s: float | None, split: int) -> None:
    ranking, root = Ranking(Goals(ttl_s=ttl_s, quotas=QUOTAS), NOW_S, SHARD_BITS), root_of(chunks)
    ranking.read(root, SHARDS[:split])
    ranking.read(root, SHARDS[split:])
    ranking.rank()
    assert ranking.total == tally(chunks)
    for space in SPACES:
        assert ranking.namespaces.get(space, CountAndBytes()) == tally(
            [one for one in chunks if one.namespace == space]
        )
    assert ranking.left_bytes == size_of(chunks)


def test_a_shard_that_cannot_be_listed_is_left_out() -> None:
    chunks = loose(100)
    ranking = Ranking(Goals(), NOW_S, SHARD_BITS)
    ranking.read(FaultyRoot(root_of(chunks), [Rule("list", EIO, times=1)]), SHARDS)
    assert ranking.total == tally([chunk for chunk in chunks if chunk.shard])
    with pytest.raises(Unavailable):
        ranking.read(FaultyRoot(root_of(chunks), [Rule("list", EIO)]), SHARDS)


def test_entries_that_are_no_chunks_are_counted_apart() -> None:
    chunk = loose(1)[0]
    elsewhere = Chunk(Address(bytes([chunk.address[0] ^ 0x80]) + chunk.address[1:]), SPACES[0], 30, chunk.mtime_ns)
    folder, name = places.shard_folder(chunk.shard), chunk.entry.name
    foreign = [
        *("README", name.upper().replace("A", "B"), name[:-1], name + "0", name.replace(".", "-"), "ü" * len(name)),
        *(elsewhere.entry.name, ".nfs000000000000000100000002"),
    ]
    files = MemoryFiles()
    files.write(chunk.name, MemoryFile(bytes(100), chunk.mtime_ns))
    for each in foreign:
        files.write(f"{folder}/{each}", MemoryFile(bytes(7), chunk.mtime_ns))
    files.make_folder(f"{folder}/{chunk.entry.name[:-2]}ff")
    ranking = Ranking(Goals(ttl_s=0), NOW_S, SHARD_BITS)
    ranking.read(MemoryRoot(files), SHARDS)
    assert ranking.total == CountAndBytes(1, 100)
    assert ranking.foreign == CountAndBytes(len(foreign) + 1, 7 * len(foreign)), "a folder has no bytes"


# The order


@settings(max_examples=100)
@given(forests(), GOALS, st.none() | st.integers(0, 3000), st.integers(0, 4))
def test_no_chunk_outlives_its_parent(chunks: list[Chunk], goals: Goals, left_bytes: int | None, pins: int) -> None:
    by_address = {chunk.address: chunk for chunk in chunks}
    pinned: set[Address] = set()
    for chunk in chunks[-pins:] if pins else []:
        line: Chunk | None = chunk
        while line is not None:  # a pin holds the whole prefix
            pinned.add(line.address)
            line = by_address[line.parent] if line.parent else None
    order = list(taken(chunks, goals, left_bytes, marks_of(pinned)))
    assert not pinned & {*order}
    for chunk in chunks:
        if chunk.parent in order:
            assert chunk.address in order[: order.index(chunk.parent)]


def test_of_prompts_put_within_seconds_the_oldest_go_whole() -> None:
    prompts = [
        [Chunk(Address(bytes([7 * seed, depth] * 8)), SPACES[0], 100, 0) for depth in range(5)] for seed in range(12)
    ]
    for seed, prompt in enumerate(prompts):
        start_s = NOW_S - 20 + seed * TICK_S
        prompt[:] = [replace(chunk, mtime_ns=stamp_ns(start_s, depth)) for depth, chunk in enumerate(prompt)]
    chunks = [chunk for prompt in prompts for chunk in prompt]
    gone = list(taken(chunks, Goals(), size_of(chunks) - 2300))
    expected = [chunk.address for prompt in prompts[:5] for chunk in reversed(prompt)]
    assert gone == expected[:23]


@settings(max_examples=40)
@given(forests(), st.integers(1, 3000), st.integers(1, 4))
def test_slices_take_the_oldest_until_no_more_is_needed(chunks: list[Chunk], left_bytes: int, slices: int) -> None:
    chunks = [replace(chunk, mtime_ns=stamp(600 + number * 60)) for number, chunk in enumerate(chunks)]
    ranking, needed_bytes, gone = ranked(chunks, Goals()), size_of(chunks) - left_bytes, list[bytes]()
    for _ in range(slices):
        gone += ranking.take(needed_bytes / slices)["address"].tolist()
    assert len(gone) == len(set(gone)), "none is taken twice"
    left = [chunk for chunk in chunks if chunk.address not in gone]
    assert chunks[: len(left)] == left, "the oldest were taken"
    assert size_of(left) <= left_bytes or needed_bytes <= 0
    assert size_of(left) > left_bytes - slices * 50 or needed_bytes <= 0, "one chunk too many in each slice at most"
    assert ranking.is_spent == (not left) and ranking.left_bytes == size_of(left)


def test_of_too_many_chunks_the_first_are_kept() -> None:
    chunks = [replace(chunk, mtime_ns=stamp(60 * number)) for number, chunk in enumerate(loose(100))]
    ranking = Ranking(Goals(), NOW_S, SHARD_BITS, kept_max=10, batch_count=4)
    ranking.read(root_of(chunks), SHARDS)
    ranking.rank()
    assert ranking.total.count == 100 and ranking.left_bytes == 1000
    assert {*ranking.take(10_000)["address"].tolist()} == {chunk.address for chunk in chunks[-10:]}


def test_of_too_many_chunks_those_over_a_quota_are_kept_though_all_others_are_older() -> None:
    chunks = [replace(chunk, mtime_ns=stamp(60 * number)) for number, chunk in enumerate(loose(100))]
    chunks[:20] = [replace(chunk, namespace=SPACES[1]) for chunk in chunks[:20]]
    goals = Goals(quotas=(NamespaceQuota("namespace b", frozenset(SPACES[1:2]), 1_500),))
    ranking = Ranking(goals, NOW_S, SHARD_BITS, kept_max=10, batch_count=4)
    ranking.read(root_of(chunks), SHARDS)
    ranking.rank()
    assert ranking.take(0)["address"].tolist() == [chunk.address for chunk in chunks[19:13:-1]]
    assert {*ranking.take(10_000)["address"].tolist()} == {chunk.address for chunk in chunks[-10:]}, "and no newer ones"


def test_chunks_used_during_the_listing_stay() -> None:
    old, new, ahead = loose(50, age_s=7200), loose(50, seed=1, age_s=0), loose(50, seed=2, age_s=-600)
    ranking = Ranking(Goals(), NOW_S, SHARD_BITS)
    ranking.read(root_of(old + new + ahead), SHARDS)
    ranking.rank(used_s=(NOW_S - 60, NOW_S + 60))
    assert ranking.total.count == 150
    assert {*ranking.take(20_000)["address"].tolist()} == {chunk.address for chunk in old + ahead}


# Time to live, quotas and pins


def test_expired_chunks_are_due_though_no_space_is_needed() -> None:
    old, new = loose(50, age_s=7200), loose(50, seed=1, age_s=0)
    gone = taken(old + new, Goals(ttl_s=3600), 8000)
    assert gone == {chunk.address: VerdictReason.TTL for chunk in old}, "then 5,000 bytes are left"


def test_quotas_apply_to_their_namespaces() -> None:
    chunks = [replace(chunk, namespace=SPACES[number % 4]) for number, chunk in enumerate(loose(400))]
    quotas = (
        NamespaceQuota("tenant a", frozenset(SPACES[:2]), 10_000),
        NamespaceQuota("namespace b", frozenset(SPACES[1:2]), 2_000),
        NamespaceQuota("namespace c", frozenset(SPACES[2:3]), 20_000),
    )
    gone = taken(chunks, Goals(quotas=quotas))
    assert set(gone.values()) == {VerdictReason.QUOTA}
    left = Counter(chunk.namespace for chunk in chunks if chunk.address not in gone)
    assert left[SPACES[0]] + left[SPACES[1]] <= 95 and left[SPACES[1]] <= 19
    assert left[SPACES[2]] == left[SPACES[3]] == 100, "below its quota, and without one"


def test_a_tenants_quota_counts_without_a_namespaces_own_quota() -> None:
    chunks = [replace(chunk, namespace=SPACES[number % 2]) for number, chunk in enumerate(loose(200))]
    own = NamespaceQuota("namespace b", frozenset(SPACES[1:2]), 0)
    for most, left_count in ((12_000, 100), (9_000, 85)):
        gone = taken(chunks, Goals(quotas=(own, NamespaceQuota("tenant a", frozenset(SPACES[:2]), most))))
        left = Counter(chunk.namespace for chunk in chunks if chunk.address not in gone)
        assert left == {SPACES[0]: left_count}


def test_pinned_chunks_count_for_the_quota() -> None:
    chunks = loose(100)
    quota, pinned = (
        NamespaceQuota("namespace a", frozenset(SPACES[:1]), 9_000),
        [chunk.address for chunk in chunks[:50]],
    )
    assert len(taken(chunks, Goals(quotas=(quota,)), pinned=marks_of(pinned))) == 15


def test_the_capacity_takes_only_what_quotas_left_over() -> None:
    chunks = [replace(chunk, namespace=SPACES[number % 2]) for number, chunk in enumerate(loose(200))]
    goals = Goals(quotas=(NamespaceQuota("namespace a", frozenset(SPACES[:1]), 5_000),))
    assert set(taken(chunks, goals, 16_000).values()) == {VerdictReason.QUOTA}
    assert Counter(taken(chunks, goals, 8_000).values()) == {VerdictReason.QUOTA: 53, VerdictReason.CAPACITY: 67}
    counted = {(space, reason): found for space, reason, found in tallies(ranked(chunks, goals).take(12_000))}
    assert counted[SPACES[0], VerdictReason.QUOTA] == CountAndBytes(53, 5300)


# Orphans


def test_orphans_are_due_and_go_first() -> None:
    chunks = [replace(chunk, mtime_ns=stamp(600 + 60 * number)) for number, chunk in enumerate(loose(20))]
    ranking = ranked(chunks, Goals())
    front = ranking.front(8)
    assert front["address"].tolist() == [chunk.address for chunk in chunks[:11:-1]]
    lost = np.arange(8) == 5
    address = front["address"][5].item()
    ranking.orphaned(lost)
    assert ranking.due == CountAndBytes(1, 100) and Address(ranking.take(0)["address"][0].item()) == address
    assert ranking.have([chunks[0].address, chunks[-1].address, Address(bytes(16))]).tolist() == [True, True, False]


@for_each(
    "wrong, said",
    [
        ({"ttl_s": -1}, "ttl_s=-1"),
        ({"ttl_s": float("nan")}, "ttl_s=nan"),
        ({"quantum_s": 0}, "quantum_s=0"),
        ({"quotas": (NamespaceQuota("tenant a", frozenset(), -1),)}, "tenant a"),
    ],
)
def test_goals_that_make_no_sense_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Goals(**wrong)  # type: ignore[arg-type]
