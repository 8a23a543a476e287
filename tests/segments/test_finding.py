"""Segments are found where they are, by a search that is checked by brute force (SEGMENTS.md, S6 to S10)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.segments import search
from kvstore.segments.search import Index, Search
from tests.segments.stored import Stored

SIZE = 4
"""Tokens of a chunk."""

words = st.integers(0, 1)
texts = st.lists(words, min_size=0, max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=4), st.lists(words, max_size=60), st.integers(0, 8))
def test_s6_every_range_is_a_stored_segment_and_none_is_left_in_a_gap(
    segments: list[list[int]], prompt: list[int], after: int
) -> None:
    stored, tokens = Stored(SIZE, segments), np.asarray(prompt, np.uint32)
    after = min(after, len(tokens))
    matches = stored.anywhere(tokens, after)
    end = after
    for match in matches:
        assert match.start >= end and len(match) and len(match) % SIZE == 0
        assert (
            match.tokens.tobytes() == tokens[match.start : match.end].tobytes()
            and match.tokens.tobytes() in stored.chains
        )
        end = match.end
    assert end <= len(tokens)
    if stored.questions < search.ROUNDS_MAX:
        for low, high in search.gaps(len(tokens), matches, after):
            assert not any(stored.chunks(tokens[at : at + SIZE]) for at in range(low, high - SIZE + 1))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(words, min_size=SIZE, max_size=SIZE), max_size=6), st.lists(words, max_size=60), st.integers(0, 8)
)
def test_s8_of_single_chunks_the_search_is_that_of_brute_force(
    segments: list[list[int]], prompt: list[int], after: int
) -> None:
    stored, tokens = Stored(SIZE, segments), np.asarray(prompt, np.uint32)
    after = min(after, len(tokens))
    assert [(match.start, match.end) for match in stored.anywhere(tokens, after)] == stored.brute(tokens, after)


def test_s8_a_segment_that_the_prompt_leaves_gives_way_to_the_next() -> None:
    long, short = np.arange(20, dtype=np.uint32), np.arange(100, 108, dtype=np.uint32)
    stored = Stored(SIZE, [long.tolist(), short.tolist()])
    prompt = np.concatenate([[7], long[:9], short, [8]]).astype(np.uint32)
    assert [(match.start, match.end) for match in stored.anywhere(prompt)] == [(1, 9), (10, 18)]


@given(st.lists(st.integers(0, 50), unique=True, max_size=8).map(sorted), st.integers(0, 50))
def test_s8_given_boundaries_are_looked_up_as_they_are(starts: list[int], after: int) -> None:
    tokens = np.arange(50, dtype=np.uint32)
    ranges = Search.of(tokens, starts, after).given
    assert ranges == [(start, end) for start, end in zip(starts, [*starts[1:], 50], strict=False) if start >= after]
    stored = Stored(SIZE, [tokens[start:end].tolist() for start, end in ranges])
    matches = search.find_given(
        tokens, ranges, SIZE, lambda asked: [stored.chunks(tokens[start:end]) for start, end in asked]
    )
    assert [(match.start, match.end) for match in matches] == [
        (start, end - (end - start) % SIZE) for start, end in ranges if end - start >= SIZE
    ]


def test_s10_the_index_is_bounded_and_keeps_what_was_used_last() -> None:
    index = Index(0)
    for number in range(1, 6):
        index.add(np.array([number], np.uint64), np.array([1]))
        index.add(np.array([1], np.uint64), np.array([number]))
    assert len(index) == 4
    assert index.lengths(np.arange(7, dtype=np.uint64)).tolist() == [0, 5, 0, 1, 1, 1, 0]
