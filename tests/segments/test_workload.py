"""A workload of retrieval: documents in any order behind a system prompt, before a question.

Five of 200 documents a prompt, popular ones more often; nothing is computed. The figures are those of issue 22.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.segments import Match, finding
from kvstore.segments.finding import Search
from kvstore.tokens import TokenArray
from tests.kit.cases import for_each
from tests.segments.stored import Stored

SIZE = 64
WARM, NOVEL, PART = 300, 500, 100
FOUND = {"given": 0.95, "anywhere": 0.93}
"""Least share of the documents' tokens that is found."""
STORED_MAX = 1.5
"""Most tokens stored, as a multiple of the distinct ones."""


class Workload:
    """Seeded prompts."""

    def __init__(self) -> None:
        self._rng = rng = np.random.default_rng(0)
        self.documents = [rng.integers(0, 128_000, int(size)).astype(np.uint32) for size in rng.uniform(300, 1700, 200)]
        self.system = rng.integers(0, 128_000, 300).astype(np.uint32)
        weights = 1.0 / np.arange(1, 201) ** 0.7
        self._shares: npt.NDArray[np.float64] = weights / weights.sum()

    def prompt(self) -> tuple[TokenArray, list[int], list[int]]:
        """Tokens, where its parts begin, and where its documents begin and end."""
        chosen = self._rng.choice(200, 5, replace=False, p=self._shares)
        question = self._rng.integers(0, 128_000, int(self._rng.integers(30, 90))).astype(np.uint32)
        parts = [self.system, *(self.documents[each] for each in chosen), question]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        return np.concatenate(parts), [0, *ends[:-1]], ends[:-1]


Method = Callable[[Stored, TokenArray, list[int]], tuple[Sequence[Match], list[range]]]


def given(stored: Stored, tokens: TokenArray, starts: list[int]) -> tuple[Sequence[Match], list[range]]:
    """With boundaries; the question is not stored."""
    matches = stored.find(tokens, starts)
    return matches, finding.missing_given(Search.of(tokens, starts).given[:-1], matches, SIZE)


def anywhere(stored: Stored, tokens: TokenArray, _: list[int]) -> tuple[Sequence[Match], list[range]]:
    """At any offset, with everything stored that is new."""
    matches = stored.anywhere(tokens)
    return matches, finding.missing_anywhere(len(tokens), matches, 0, SIZE)


@for_each("search", (given, anywhere))
def test_documents_are_found_and_stored_once_and_nothing_decays(search: Method) -> None:
    workload, stored = Workload(), Stored(SIZE)
    distinct = len(workload.system) + sum(map(len, workload.documents))
    questions, shares = 0, list[float]()
    for number in range(WARM + NOVEL):
        tokens, starts, ends = workload.prompt()
        matches, missing = search(stored, tokens, starts)
        first, last = ends[0], ends[-1]
        found = sum(max(0, min(match.end, last) - max(match.start, first)) for match in matches)
        shares.append(found / (last - first))
        for piece in missing:
            stored.put(tokens[piece.start : piece.stop])
        if number == WARM + 200:  # as many prompts as the threshold is about, questions left out
            assert stored.tokens_written <= STORED_MAX * distinct
        questions += len(tokens) - last
    novel = shares[WARM:]
    parts = [float(np.mean(novel[start : start + PART])) for start in range(0, NOVEL, PART)]
    times = stored.tokens_written / (distinct + questions)
    print(f"{search.__name__}: found {parts}, stored {times:.2f} times the distinct tokens")
    assert times <= STORED_MAX
    assert np.mean(novel) >= FOUND[search.__name__]
    assert min(parts[1:]) >= parts[0] - 0.01
