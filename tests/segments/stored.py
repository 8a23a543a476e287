"""A store of segments that is a set of their tokens, for searches without a node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.address import TokenArray
from kvstore.segments import search
from kvstore.segments.search import Index, Match, Range, Search, windows


class Stored:
    """Segments by their tokens, as a store has them, with the index that their puts filled."""

    def __init__(self, size: int, segments: Sequence[Sequence[int]] = ()) -> None:
        """``size`` is the number of tokens of a chunk."""
        self.size = size
        self.chains: set[bytes] = set()
        self.index = Index(12)
        self.tokens_written = 0
        self.questions = 0
        for segment in segments:
            self.put(np.asarray(segment, np.uint32))

    def put(self, tokens: TokenArray) -> None:
        """Stores the whole chunks of a segment."""
        count = len(tokens) // self.size
        chains = {tokens[: chunks * self.size].tobytes() for chunks in range(1, count + 1)}
        self.tokens_written += len(chains - self.chains) * self.size
        self.chains |= chains
        if count:
            self.index.add(windows(tokens[: self.size], self.size), np.array([count]))

    def chunks(self, tokens: TokenArray) -> int:
        """Leading chunks that are stored."""
        count = 0
        while (count + 1) * self.size <= len(tokens) and tokens[: (count + 1) * self.size].tobytes() in self.chains:
            count += 1
        return count

    def anywhere(self, tokens: TokenArray, after: int = 0) -> list[Match]:
        """The search at any offset."""

        return self.find(tokens, None, after)

    def find(self, tokens: TokenArray, starts: Sequence[int] | None = None, after: int = 0) -> list[Match]:
        """The search of a node."""

        def ask(ranges: Sequence[Range]) -> list[int]:
            self.questions += 1
            return self.asked(tokens, ranges)

        return search.find(Search.of(tokens, starts, after), self.size, self.index, ask)

    def asked(self, tokens: TokenArray, ranges: Sequence[Range]) -> list[int]:
        """Leading chunks of each range that are stored."""
        return [self.chunks(tokens[start:end]) for start, end in ranges]

    def brute(self, tokens: TokenArray, after: int) -> list[tuple[int, int]]:
        """The leftmost segment at each place, as far as it goes."""
        found, at = [], after
        while at < len(tokens):
            count = self.chunks(tokens[at:])
            if count:
                found.append((at, at + count * self.size))
            at += max(1, count * self.size)
        return found
