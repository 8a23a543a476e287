"""Extents against a plain list of pages (A1): nothing overlaps, the bound is kept, and nothing gets lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.tiers.arena import PAGE_BYTES, Extents

PAGES = 24


def free_runs(pages: list[int | None]) -> list[int]:
    """Lengths of the runs of pages that nobody owns."""
    text = "".join("." if owner is None else "x" for owner in pages)
    return [len(run) for run in text.split("x") if run]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=80))
def test_a1_what_is_taken_never_overlaps_and_all_comes_back(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(PAGES * PAGE_BYTES + 17)
    pages: list[int | None] = [None] * PAGES
    taken: list[int] = []
    for takes, number in steps:
        if takes:
            size = number + 1
            count = -(-size // PAGE_BYTES)
            fitting = [run for run in free_runs(pages) if run >= count]
            offset = extents.take(size)
            assert (offset is None) == (not fitting)
            if offset is not None:
                first = offset // PAGE_BYTES
                assert offset % PAGE_BYTES == 0
                assert pages[first : first + count] == [None] * count
                around = pages[:first][::-1], pages[first:]
                run = sum(next((i for i, owner in enumerate(side) if owner is not None), len(side)) for side in around)
                assert run == min(fitting), "best fit"
                pages[first : first + count] = [offset] * count
                taken.append(offset)
        elif taken:
            offset = taken.pop(number % len(taken))
            extents.give(offset)
            pages = [None if owner == offset else owner for owner in pages]
        assert extents.free_bytes == pages.count(None) * PAGE_BYTES
        assert extents.largest_bytes == max(free_runs(pages), default=0) * PAGE_BYTES
    for offset in taken:
        extents.give(offset)
    assert extents.largest_bytes == extents.free_bytes == extents.size_bytes == PAGES * PAGE_BYTES
    assert extents.take(extents.size_bytes) == 0


def test_a1_only_what_was_taken_is_given_back() -> None:
    for offset in (PAGE_BYTES, 2 * PAGE_BYTES, 1, -PAGE_BYTES, PAGES * PAGE_BYTES):
        extents = Extents(PAGES * PAGE_BYTES)
        assert extents.take(2 * PAGE_BYTES) == 0
        with pytest.raises(InvalidRequest, match=f"nothing is taken at offset {offset}"):
            extents.give(offset)
        assert extents.free_bytes == (PAGES - 2) * PAGE_BYTES


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one page"):
        Extents(PAGE_BYTES - 1)
    with pytest.raises(InvalidRequest, match="expected at least 1"):
        Extents(PAGE_BYTES).take(0)
