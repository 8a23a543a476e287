"""Recency stamps: the properties that eviction order relies on, and the hints that they carry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.recency import (
    DEFAULT,
    DEPTH_MAX,
    DEPTH_STEP_NS,
    LEAST,
    NS_PER_S,
    PRESETS,
    TICK_S,
    TOP_NS,
    TTL_CLASSES_S,
    USES_MAX,
    Hints,
    Recency,
    cover,
    decode,
    is_fresh,
    ns_of,
    quantum_of,
    renewed_ns,
    stamp_ns,
)
from kvstore.errors import InvalidRequest

times = st.floats(0, 4e9, allow_nan=False)
quanta = st.integers(1, 3600)
depths = st.integers(0, 2 * DEPTH_MAX)
hints = st.builds(Hints, st.integers(0, 100), st.sampled_from((*TTL_CLASSES_S, None)))
uses = st.integers(0, USES_MAX)
mtimes = st.integers(-(2**62), 2**62)


def components(recency: Recency) -> tuple[int, int, float]:
    """Uses, priority and ttl, each the more the better."""
    return recency.uses, recency.priority, math.inf if recency.ttl_s is None else recency.ttl_s


@given(times, quanta, st.integers(0, DEPTH_MAX - 1), hints, uses, hints, uses)
def test_child_is_staler_than_its_parent(
    now_s: float, quantum_s: int, depth: int, parents: Hints, parent_uses: int, childs: Hints, child_uses: int
) -> None:
    start = quantum_of(now_s, quantum_s)
    assert stamp_ns(start, depth + 1, childs, child_uses) < stamp_ns(start, depth, parents, parent_uses)


@given(times, st.integers(2, 3600), depths, hints, depths, hints)
def test_chunk_of_a_later_quantum_is_younger(
    now_s: float, quantum_s: int, earlier: int, before: Hints, later: int, after: Hints
) -> None:
    start = quantum_of(now_s, quantum_s)
    assert stamp_ns(start, earlier, before, USES_MAX) < stamp_ns(start + quantum_s, later, after)


@given(times, quanta, depths, hints, uses)
def test_stamp_is_read_back(now_s: float, quantum_s: int, depth: int, said: Hints, used: int) -> None:
    start = quantum_of(now_s, quantum_s)
    was = decode(stamp_ns(start, depth, said, used), quantum_s)
    assert was == Recency(start, min(depth, DEPTH_MAX), used, said.priority, said.ttl_s)
    assert was.hints == said
    assert start % quantum_s == 0 and start <= now_s < start + quantum_s
    stamp = stamp_ns(start, depth, said, used)
    assert is_fresh(stamp, start) and not is_fresh(stamp, start + max(quantum_s, 2))
    assert stamp_ns(start, depth) == ns_of(start) + TOP_NS - 4000 * min(depth, DEPTH_MAX)


def test_stamps_grow_with_each_component() -> None:
    ttls = (*TTL_CLASSES_S, None)
    stamps = [
        stamp_ns(0, 7, Hints(priority, ttl_s), used) for priority in range(101) for used in range(4) for ttl_s in ttls
    ]
    assert stamps == sorted(set(stamps)) and len(stamps) == 101 * 4 * 7
    assert stamps[-1] - stamps[0] < DEPTH_STEP_NS


@given(mtimes, quanta)
def test_any_mtime_is_fresh_in_its_quantum(mtime_ns: int, quantum_s: int) -> None:
    was = decode(mtime_ns, quantum_s)
    assert is_fresh(mtime_ns, was.last_use_s)
    assert mtime_ns < (was.last_use_s + quantum_s) * NS_PER_S + DEPTH_STEP_NS
    assert 0 <= was.depth <= DEPTH_MAX and 0 <= was.uses <= USES_MAX
    assert Hints.of(was.priority, was.ttl_s) == was.hints


stamps = st.builds(stamp_ns, st.builds(quantum_of, times, st.just(60)), depths, hints, uses)


@given(st.lists(st.one_of(stamps, stamps.map(lambda stamp: stamp + 1), mtimes), max_size=20), hints)
def test_many_mtimes_cover_hints_as_each_does(mtimes_ns: list[int], wanted: Hints) -> None:
    found = cover(np.array(mtimes_ns, np.int64), 60, wanted)
    assert found.tolist() == [decode(mtime_ns, 60).covers(wanted) for mtime_ns in mtimes_ns]


@pytest.mark.parametrize("grain_ns", [100, 1_000, 1_000_000, 10_000_000, NS_PER_S])
@given(now_s=times, quantum_s=st.integers(2, 3600), depth=depths, said=hints, used=uses, up=st.booleans())
def test_rounded_times_keep_the_quantum(
    grain_ns: int, now_s: float, quantum_s: int, depth: int, said: Hints, used: int, up: bool
) -> None:
    start = quantum_of(now_s, quantum_s)
    stamp = stamp_ns(start, depth, said, used)
    rounded = (stamp + (grain_ns // 2 if up else 0)) // grain_ns * grain_ns
    was = decode(rounded, quantum_s)
    assert (was.uses, was.hints) == (0, DEFAULT)
    assert abs(was.last_use_s - start) <= TICK_S
    assert is_fresh(rounded, start)


@given(mtimes, times, quanta, depths, hints, uses)
def test_renewal_never_lowers_an_mtime(
    mtime_ns: int, now_s: float, quantum_s: int, depth: int, least: Hints, uses_least: int
) -> None:
    start = quantum_of(now_s, quantum_s)
    stamp = renewed_ns(mtime_ns, start, quantum_s, depth, least, uses_least)
    if stamp is None:
        assert is_fresh(mtime_ns, start)
        return
    was, now = decode(mtime_ns, quantum_s), decode(stamp, quantum_s)
    assert stamp > mtime_ns
    assert now.last_use_s >= max(start, was.last_use_s) - TICK_S
    assert all(after >= before for after, before in zip(components(now), components(was), strict=True))
    assert now.hints.covers(least) and now.uses >= uses_least
    assert renewed_ns(stamp, start, quantum_s, depth, least, uses_least) is None, "once is enough"


@given(times, quanta, depths, hints, uses, hints)
def test_renewal_in_a_later_quantum_is_a_use(
    now_s: float, quantum_s: int, depth: int, said: Hints, used: int, least: Hints
) -> None:
    start = quantum_of(now_s, quantum_s)
    stamp = stamp_ns(start, depth, said, used)
    raised = renewed_ns(stamp, start, quantum_s, depth, least)
    assert raised == (None if said.covers(least) else stamp_ns(start, depth, said.raised_to(least), used))
    later = start + 2 * max(quantum_s, 2) // quantum_s * quantum_s
    renewed = renewed_ns(stamp, later, quantum_s, depth)
    assert renewed == stamp_ns(later, depth, said, min(used + 1, USES_MAX))


# Hints


@given(hints, hints)
def test_raising_hints_joins_them(left: Hints, right: Hints) -> None:
    both = left.raised_to(right)
    assert both == right.raised_to(left)
    assert both.covers(left) and both.covers(right) and both.covers(LEAST)
    assert left.raised_to(LEAST) == left.raised_to(left) == left
    assert left.covers(right) == (both == left)


@given(st.floats(min_value=0, exclude_min=True, allow_nan=False))
def test_ttl_is_never_shortened(ttl_s: float) -> None:
    kept = Hints.of(ttl_s=ttl_s).ttl_s
    assert (ttl_s > TTL_CLASSES_S[-1]) if kept is None else kept >= ttl_s
    assert all(ttl_s > shorter for shorter in TTL_CLASSES_S if kept is None or shorter < kept)


def test_explicit_values_win_over_a_preset() -> None:
    assert Hints.of() == DEFAULT == Hints(35, None)
    assert set(PRESETS) == {"chat", "analytics", "rag", "batch"}
    for name, preset in PRESETS.items():
        assert Hints.of(preset=name) == preset
        assert Hints.of(priority=1, preset=name) == Hints(1, preset.ttl_s)
        assert Hints.of(ttl_s=61, preset=name) == Hints(preset.priority, 300)
        assert Hints.of(ttl_s=math.inf, preset=name) == Hints(preset.priority, None)
        assert preset.ttl_s in TTL_CLASSES_S
    assert PRESETS["batch"].priority < DEFAULT.priority < PRESETS["chat"].priority


WRONG: list[tuple[str, tuple[object, ...]]] = [
    ("priority", (-1, 101, 35.0, "high", True)),
    ("ttl_s", (0, -1, math.nan, "1h", True)),
    ("preset", ("Chat", "", 7, ["chat"])),
]


@pytest.mark.parametrize(("name", "values"), WRONG)
def test_wrong_hint_is_refused(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match="expected"):
            Hints.of(**{name: value})  # type: ignore[arg-type]
