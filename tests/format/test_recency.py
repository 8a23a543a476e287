"""Recency stamps: the three properties that eviction order relies on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.recency import DEPTH_MAX, NS_PER_S, is_fresh, quantum_of, stamp_ns

times = st.floats(0, 4e9, allow_nan=False)
quanta = st.integers(1, 3600)
depths = st.integers(0, 2 * DEPTH_MAX)


@given(times, quanta)
def test_a_quantum_holds_the_time_it_is_of(now_s: float, quantum_s: int) -> None:
    start = quantum_of(now_s, quantum_s)
    assert start % quantum_s == 0
    assert start <= now_s < start + quantum_s


@given(times, quanta, depths)
def test_a_chunk_renewed_in_a_quantum_is_fresh_in_it_and_not_in_the_one_after_next(
    now_s: float, quantum_s: int, depth: int
) -> None:
    start = quantum_of(now_s, quantum_s)
    stamp = stamp_ns(start, depth)
    assert is_fresh(stamp, start)
    assert not is_fresh(stamp, start + max(quantum_s, 2))


@given(times, quanta, st.integers(0, DEPTH_MAX - 1))
def test_within_a_quantum_a_child_is_staler_than_its_parent(now_s: float, quantum_s: int, depth: int) -> None:
    start = quantum_of(now_s, quantum_s)
    assert stamp_ns(start, depth + 1) < stamp_ns(start, depth)


@given(times, st.integers(2, 3600), depths, depths)
def test_a_chunk_of_a_later_quantum_is_younger_at_any_depth(
    now_s: float, quantum_s: int, earlier: int, later: int
) -> None:
    start = quantum_of(now_s, quantum_s)
    assert stamp_ns(start, earlier) < stamp_ns(start + quantum_s, later)


@given(times, quanta, depths)
def test_whole_seconds_keep_the_quantum(now_s: float, quantum_s: int, depth: int) -> None:
    start = quantum_of(now_s, quantum_s)
    assert is_fresh(stamp_ns(start, depth) // NS_PER_S * NS_PER_S, start)
