"""Segments in a prompt: which ranges to ask the store for, and what its answers make of them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.segments.index import Index, windows
from kvstore.segments.match import Match
from kvstore.segments.search import STARTS_MAX, Range, Search
from kvstore.tokens import TokenArray

ROUNDS_MAX = 8
"""Rounds of questions of one search at any offset: more than one only if a prompt leaves a segment in its middle."""
MATCHES_MAX = STARTS_MAX
"""Ranges that one search finds; what is behind them is a miss."""
BLOCK = 65_536
"""Offsets whose hashes are computed at once, about 100 bytes each: a long prompt takes no more memory than that."""

Ask = Callable[[Sequence[Range]], Sequence[int]]
"""The number of leading chunks that the store has of each range, as of a prompt of its own."""
Places = npt.NDArray[np.intp]


def find(search: Search, chunk_tokens: int, index: Index, ask: Ask) -> list[Match]:
    """Returns the ranges of a prompt that are stored segments; ``index`` learns them, and that they were used."""
    tokens = search.tokens
    if search.starts is None:
        matches = find_anywhere(tokens, search.after, chunk_tokens, index, ask)
    else:
        matches = find_given(tokens, search.given, chunk_tokens, ask)
    if matches:
        firsts = np.concatenate([match.tokens[:chunk_tokens] for match in matches])
        chunks = np.array([len(match) // chunk_tokens for match in matches])
        index.add(windows(firsts, chunk_tokens)[::chunk_tokens], chunks)
    return matches


def find_given(tokens: TokenArray, ranges: Sequence[Range], chunk_tokens: int, ask: Ask) -> list[Match]:
    """Looks up each range as a segment."""
    whole = [(start, end) for start, end in ranges if end - start >= chunk_tokens]
    return [
        _match(tokens, start, min(count, (end - start) // chunk_tokens) * chunk_tokens)
        for (start, end), count in zip(whole, ask(whole) if whole else (), strict=True)
        if count
    ]


def find_anywhere(tokens: TokenArray, after: int, chunk_tokens: int, index: Index, ask: Ask) -> list[Match]:
    """Looks for segments at every offset from ``after`` on: the leftmost first, each as far as the store has it."""
    places, lengths = _candidates(tokens, after, chunk_tokens, index)
    matches: list[Match] = []
    for _ in range(ROUNDS_MAX):
        free, room = gaps(len(tokens), matches, after), MATCHES_MAX - len(matches)
        asked = _proposals(places, lengths, free, chunk_tokens)[:room]
        if not asked:
            break
        found = [
            _match(tokens, start, count * chunk_tokens)
            for (start, _end), count in zip(asked, ask(asked), strict=True)
            if count
        ]
        done = places.searchsorted([start for start, _ in asked])
        places, lengths = np.delete(places, done), np.delete(lengths, done)
        matches = sorted([*matches, *found], key=lambda match: match.start)
    return matches


def _candidates(tokens: TokenArray, after: int, chunk_tokens: int, index: Index) -> tuple[Places, npt.NDArray[Any]]:
    """Returns the offsets where ``index`` knows a segment, ascending, and the numbers of its chunks."""
    places, lengths = [np.empty(0, np.intp)], [np.empty(0, np.uint32)]
    for low in range(after, len(tokens) - chunk_tokens + 1, BLOCK):
        known = index.lengths(windows(tokens[low : low + BLOCK + chunk_tokens - 1], chunk_tokens))
        at = np.flatnonzero(known)
        places.append(at + low)
        lengths.append(known[at])
    return np.concatenate(places), np.concatenate(lengths)


def _proposals(places: Places, lengths: npt.NDArray[Any], free: Sequence[Range], chunk_tokens: int) -> list[Range]:
    """Chooses disjoint ranges from the left, each as long as its segment is known to be; no more than MATCHES_MAX."""
    chosen: list[Range] = []
    starts: list[int] = places.tolist()  # which takes a tenth of the time to look at
    for low, high in free:
        at = bisect_left(starts, low)
        while at < len(starts) and starts[at] + chunk_tokens <= high and len(chosen) < MATCHES_MAX:
            start = starts[at]
            end = start + min(int(lengths[at]), (high - start) // chunk_tokens) * chunk_tokens
            chosen.append((start, end))
            at = bisect_left(starts, end, at)
    return chosen


def gaps(total: int, matches: Sequence[Match], after: int) -> list[Range]:
    """The ranges between matches, from ``after`` to the end."""
    ends = [after, *(match.end for match in matches)]
    starts = [*(match.start for match in matches), total]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def missing(search: Search, matches: Sequence[Match], chunk_tokens: int) -> list[range]:
    """The ranges to compute alone, so that the next search finds them."""
    if search.starts is None:
        return missing_anywhere(len(search.tokens), matches, search.after, chunk_tokens)
    return missing_given(search.given, matches, chunk_tokens)


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
