"""Segments in a prompt: which ranges to ask the store for, and what its answers make of them. Pure."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.segments.index import Index, windows
from kvstore.segments.match import Match
from kvstore.tokens import TokenArray

ROUNDS_MAX = 8
"""Rounds of questions of one search at any offset: more than one only if a prompt leaves a segment in its middle."""
STARTS_MAX = 65_536

Range = tuple[int, int]
"""Start and end in the prompt, in tokens."""
Ask = Callable[[Sequence[Range]], Sequence[int]]
"""The number of leading chunks that the store has of each range, as of a prompt of its own."""


def given(total: int, starts: Sequence[int], after: int) -> list[Range]:
    """The segments of a prompt of ``total`` tokens that begin at ``starts``; those before ``after`` are left out.

    Raises InvalidRequest for starts that are no integers, or do not ascend within the prompt.
    """
    try:
        places = [operator.index(start) for start in starts]
    except TypeError as cause:
        raise InvalidRequest(f"starts are {starts!r:.60}: expected a sequence of integers") from cause
    if len(places) > STARTS_MAX:
        raise InvalidRequest(f"{len(places)} starts are over the limit of {STARTS_MAX}")
    if any(start >= end for start, end in pairwise(places)) or (places and not 0 <= places[0] <= places[-1] <= total):
        raise InvalidRequest(f"starts are {places[:8]!r}...: expected ascending places from 0 to {total}")
    return [(start, end) for start, end in pairwise([*places, total]) if start >= after]


def find_given(tokens: TokenArray, ranges: Sequence[Range], chunk_tokens: int, ask: Ask) -> list[Match]:
    """Looks up each range as a segment."""
    whole = [(start, end) for start, end in ranges if end - start >= chunk_tokens]
    return [
        _match(tokens, start, min(count, (end - start) // chunk_tokens) * chunk_tokens)
        for (start, end), count in zip(whole, ask(whole) if whole else (), strict=True)
        if count
    ]


def find_anywhere(tokens: TokenArray, after: int, chunk_tokens: int, index: Index, ask: Ask) -> list[Match]:
    """Looks for segments at every offset from ``after`` on: the leftmost first, each as far as the store has it.

    Those that are found count as used in ``index``.
    """
    hashes = windows(tokens[after:], chunk_tokens)
    lengths = index.lengths(hashes)
    at = np.flatnonzero(lengths)
    candidates = dict(zip((at + after).tolist(), lengths[at].tolist(), strict=True))
    matches: list[Match] = []
    for _ in range(ROUNDS_MAX):
        asked = _proposals(candidates, gaps(len(tokens), matches, after), chunk_tokens)
        if not asked:
            break
        for (start, _end), count in zip(asked, ask(asked), strict=True):
            del candidates[start]
            if count:
                matches.append(_match(tokens, start, count * chunk_tokens))
        matches.sort(key=lambda match: match.start)
    places = np.array([match.start - after for match in matches], np.intp)
    index.add(hashes[places], np.array([len(match) // chunk_tokens for match in matches], np.uint32))
    return matches


def _proposals(candidates: dict[int, int], free: Sequence[Range], chunk_tokens: int) -> list[Range]:
    """Chooses disjoint ranges from the left, each as long as its segment is known to be."""
    places = sorted(candidates)
    chosen: list[Range] = []
    for low, high in free:
        at = bisect_left(places, low)
        while at < len(places) and places[at] + chunk_tokens <= high:
            start = places[at]
            end = start + min(candidates[start], (high - start) // chunk_tokens) * chunk_tokens
            chosen.append((start, end))
            at = bisect_left(places, end, at)
    return chosen


def gaps(total: int, matches: Sequence[Match], after: int) -> list[Range]:
    """The ranges between matches, from ``after`` to the end."""
    ends = [after, *(match.end for match in matches)]
    starts = [*(match.start for match in matches), total]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def missing_given(ranges: Sequence[Range], matches: Sequence[Match], chunk_tokens: int) -> list[range]:
    """The segments that were not found whole: a segment is computed from its first token, or not at all."""
    ends = {match.start: match.end for match in matches}
    whole = [(start, end - (end - start) % chunk_tokens) for start, end in ranges]
    return [range(start, end) for start, end in whole if end > ends.get(start, start)]


def missing_anywhere(total: int, matches: Sequence[Match], after: int, chunk_tokens: int) -> list[range]:
    """The gaps in pieces of one chunk, from where the last match ended."""
    return [
        range(start, start + chunk_tokens)
        for low, high in gaps(total, matches, after)
        for start in range(low, high - chunk_tokens + 1, chunk_tokens)
    ]


def _match(tokens: TokenArray, start: int, count: int) -> Match:
    # A copy: engines reuse their token buffers while a match is alive.
    return Match(start, start + count, tokens[start : start + count].copy())
