"""A survey: exact for any content, small for any number of chunks, and the sum of separate surveys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.address import Address
from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFile, MemoryFiles, MemoryRoot
from kvstore_gc.goals import Goals, Quota
from kvstore_gc.histogram import Tally
from kvstore_gc.listing import marks_of
from kvstore_gc.survey import Survey, survey
from kvstore_gc.threads import inline
from tests.kit.chains import NOW_S, SHARD_BITS, SHARDS, SPACES, Chunk, forests, loose, root_of

TENANT = Quota("tenant a", frozenset(SPACES[1:3]), 1000)
QUOTAS = (TENANT, Quota("namespace b", frozenset(SPACES[2:3]), 500))


def seen(root: Root, goals: Goals, shards: Sequence[int] = SHARDS) -> Survey:
    return survey(root, SHARD_BITS, shards, inline, NOW_S, goals)


def tally(chunks: list[Chunk]) -> Tally:
    return Tally(len(chunks), sum(chunk.size_bytes for chunk in chunks))


@settings(max_examples=30)
@given(forests(), st.none() | st.sampled_from([600.0, 86_400.0]))
def test_counts_and_bytes_are_exact(chunks: list[Chunk], ttl_s: float | None) -> None:
    found = seen(root_of(chunks), Goals(ttl_s=ttl_s, quotas=QUOTAS))
    assert found.used == tally(chunks)
    for space in SPACES:
        assert found.namespaces.get(space, Tally()) == tally([one for one in chunks if one.namespace == space])
    assert sum((group.total for group in found.groups), found.expired) == tally(chunks)


@settings(max_examples=30)
@given(forests(), st.integers(0, len(SHARDS)))
def test_surveys_of_parts_add_up_to_the_whole(chunks: list[Chunk], split: int) -> None:
    root, goals = root_of(chunks), Goals(ttl_s=3600, quotas=QUOTAS)
    whole = seen(root, goals)
    parts = [seen(root, goals, part) for part in (SHARDS[:split], SHARDS[split:])]
    both = parts[0] + parts[1]
    assert (both.used, both.expired, both.foreign) == (whole.used, whole.expired, whole.foreign)
    assert both.namespaces == whole.namespaces and both.shards_count == whole.shards_count
    assert [group.total for group in both.groups] == [group.total for group in whole.groups]


def test_threads_that_share_the_work_find_the_same() -> None:
    chunks = loose(2000)
    root, goals = root_of(chunks), Goals()

    def threads(count: int, work: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(count)))

    assert survey(root, SHARD_BITS, SHARDS, threads, NOW_S, goals).used == tally(chunks)


def test_what_is_no_chunk_of_its_shard_is_counted_apart_and_left_alone() -> None:
    chunk = loose(1)[0]
    stranger = Chunk(Address(bytes([chunk.address[0] ^ 0x80]) + chunk.address[1:]), SPACES[0], 30, chunk.mtime_ns)
    folder = places.shard_folder(chunk.shard)
    name = chunk.entry.name
    foreign = [
        "README",
        name.upper().replace("A", "B"),
        name[:-1],
        name + "0",
        name.replace(".", "-"),
        "ü" * len(name),
        stranger.entry.name,
        ".nfs000000000000000100000002",
    ]
    files = MemoryFiles()
    files.write(chunk.name, MemoryFile(bytes(100), chunk.mtime_ns))
    for each in foreign:
        files.write(f"{folder}/{each}", MemoryFile(bytes(7), chunk.mtime_ns))
    files.make_folder(f"{folder}/{chunk.entry.name[:-2]}ff")
    found = seen(MemoryRoot(files), Goals(ttl_s=0))
    assert found.used == Tally(1, 100)
    assert found.foreign == Tally(len(foreign) + 1, 7 * len(foreign)), "a folder has no bytes"
    assert len(files.entries(folder)) == len(foreign) + 2


def test_pinned_chunks_are_used_but_not_to_be_had() -> None:
    chunks = loose(100, age_s=7200)
    pinned = marks_of([b"".join(chunk.address for chunk in chunks[:30])])
    found = survey(root_of(chunks), SHARD_BITS, SHARDS, inline, NOW_S, Goals(ttl_s=60), pinned)
    assert found.used == tally(chunks) and found.pinned == (tally(chunks[:30]),)
    assert found.expired == tally(chunks[30:]), "what is pinned has no time to live"


def test_surveys_of_another_moment_or_for_other_goals_are_not_added() -> None:
    root = MemoryRoot()
    one = seen(root, Goals())
    for other in (
        survey(root, SHARD_BITS, SHARDS, inline, NOW_S + 1, Goals()),
        survey(root, SHARD_BITS + 1, SHARDS, inline, NOW_S, Goals()),
        seen(root, Goals(quotas=QUOTAS)),
    ):
        with pytest.raises(InvalidRequest, match="survey again"):
            one + other
