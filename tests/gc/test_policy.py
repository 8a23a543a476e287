"""The rank of a chunk: what goes first, what never goes before its children, and the meaning of a ttl."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.recency import DEPTH_MAX, QUANTUM_S, TTL_CLASSES_S, Hints, stamp_ns
from kvstore_gc.policy import TIE_BITS, Column, EvictionOrder, Uses, expired, ranks
from tests.kit.cases import for_each
from tests.kit.chains import NOW_S, Chunk, forests, stamp

HOUR_S = 3600
ANY_HINTS = st.builds(Hints, st.integers(0, 100), st.sampled_from((*TTL_CLASSES_S, None)))
ANY_DEPTH = st.integers(0, 200) | st.integers(DEPTH_MAX - 2, DEPTH_MAX + 2)
STAMPS = st.builds(
    lambda quantum, depth, hints, uses: stamp_ns(quantum * QUANTUM_S, depth, hints, uses),
    st.integers(1, NOW_S // QUANTUM_S + 10),
    ANY_DEPTH,
    ANY_HINTS,
    st.integers(0, 3),
)


def column(*values: int) -> Column:
    return np.array(values, np.int64)


def rank_of(mtime_ns: int, *, tie: int = 0, order: EvictionOrder = EvictionOrder.USES, now_s: float = NOW_S) -> int:
    return int(ranks(Uses.of(column(mtime_ns), QUANTUM_S), column(tie), now_s, order)[0])


def is_expired(mtime_ns: int, most_s: float | None, now_s: float = NOW_S) -> bool:
    return bool(expired(Uses.of(column(mtime_ns), QUANTUM_S), now_s, QUANTUM_S, most_s)[0])


@given(forests(), st.sampled_from(EvictionOrder), st.none() | st.sampled_from([0, 60, 1000, 86_400]))
def test_a_parent_ranks_above_its_child_and_expires_no_earlier(
    chunks: list[Chunk], order: EvictionOrder, most_s: float | None
) -> None:
    uses = Uses.of(column(*(chunk.mtime_ns for chunk in chunks)), QUANTUM_S)
    ties = column(*(int.from_bytes(chunk.address[-8:], "big") % (1 << TIE_BITS) for chunk in chunks))
    rank = dict(zip((chunk.address for chunk in chunks), ranks(uses, ties, NOW_S, order), strict=True))
    old = dict(zip((chunk.address for chunk in chunks), expired(uses, NOW_S, QUANTUM_S, most_s), strict=True))
    for chunk in chunks:
        if chunk.parent is not None:
            assert rank[chunk.parent] > rank[chunk.address]
            assert old[chunk.address] or not old[chunk.parent]


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_lru_takes_the_least_recently_used_however_often_it_was_used(quanta: int, more: int) -> None:
    newer, older = stamp(quanta * QUANTUM_S), stamp((quanta + more) * QUANTUM_S, uses=3)
    assert rank_of(newer, order=EvictionOrder.LRU) > rank_of(older, order=EvictionOrder.LRU)


@for_each("age_s", [600, HOUR_S, 30 * 24 * HOUR_S])
def test_two_more_uses_outlast_half_the_age_at_any_scale(age_s: int) -> None:
    once = rank_of(stamp(age_s))
    assert rank_of(stamp(int(1.8 * age_s), uses=2)) > once > rank_of(stamp(int(2.2 * age_s), uses=2))


def test_priority_100_is_nearly_last_to_go_and_0_nearly_first() -> None:
    first, last = Hints(priority=0), Hints(priority=100)
    assert rank_of(stamp(80 * HOUR_S, hints=last)) > rank_of(stamp(HOUR_S)) > rank_of(stamp(100 * HOUR_S, hints=last))
    assert rank_of(stamp(HOUR_S, hints=first)) < rank_of(stamp(10 * HOUR_S))
    steps = [rank_of(stamp(HOUR_S, hints=Hints(priority))) for priority in range(101)]
    assert steps == sorted(steps) and len(set(steps)) == 101


def test_a_last_use_in_the_future_counts_as_now() -> None:
    now, ahead = stamp(0), stamp(-10 * HOUR_S)
    assert rank_of(now) == rank_of(ahead)
    assert not is_expired(ahead, 3600)


def test_mtimes_of_no_clock_are_the_oldest_and_not_an_error() -> None:
    assert rank_of(-(1 << 62)) == rank_of(0) < rank_of(stamp(30 * 24 * HOUR_S, hints=Hints(priority=0)))


def test_nothing_goes_before_its_ttl_has_passed_since_its_last_use() -> None:
    mtime_ns = stamp_ns(NOW_S, 0, Hints(ttl_s=300))
    last_use_s = NOW_S + QUANTUM_S - 1  # as late as that stamp allows
    assert not is_expired(mtime_ns, None, now_s=last_use_s + 300)
    assert is_expired(mtime_ns, None, now_s=last_use_s + 301)
    assert not is_expired(stamp_ns(NOW_S, 0), None, now_s=NOW_S * 2)


def test_the_operators_ttl_is_the_longest_that_a_hint_can_ask_for() -> None:
    month, minutes = Hints(ttl_s=2_592_000), Hints(ttl_s=300)
    assert is_expired(stamp(2 * HOUR_S, hints=month), HOUR_S)
    assert is_expired(stamp(HOUR_S // 2, hints=minutes), HOUR_S), "a shorter hint counts"
    assert is_expired(stamp(2 * HOUR_S, hints=Hints(priority=100)), HOUR_S), "priority is not time"
