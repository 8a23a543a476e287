"""One contract for all tiers between memory and the root (``kvstore.tiers.stack.Tier``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.tier_sources import KINDS, Source, source

COUNT = 6


@pytest.fixture(params=KINDS)
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    with source(request.param, tmp_path, COUNT) as made:
        yield made


def test_leading_from_any_index_counts_what_it_has(held: Source) -> None:
    for first in range(COUNT + 1):
        assert held.tier.leading(held.chain, first) == COUNT - first
    assert held.tier.leading(held.other, 0) == 0


@pytest.mark.parametrize("indexes", [[0], [5], [0, 1, 2, 3, 4, 5], [2, 3], [1, 4], [3, 4, 5], [0, 2, 3, 5]], ids=str)
def test_fetch_of_any_indexes_returns_their_images(held: Source, indexes: list[int]) -> None:
    assert held.fetch(indexes) == [True] * len(indexes)


def test_fetch_of_missing_chunks_returns_the_others(held: Source) -> None:
    assert held.fetch([4, 5, 6, 7]) == [True, True, False, False]
    assert held.fetch([6]) == [False]
    assert held.fetch([0, 1], held.other) == [False, False]
    assert held.fetch([]) == []


@pytest.mark.parametrize("indexes", [[0, 1], [2, 3], [1, 4], [3, 4, 5]], ids=str)
@pytest.mark.parametrize("at", [0, -1])
def test_chunk_that_proved_wrong_is_not_offered_again(held: Source, indexes: list[int], at: int) -> None:
    """Wherever the fetch began, and whichever of its chunks it was."""
    assert all(held.fetch(indexes))
    held.tier.damaged(held.chain, indexes[at])
    assert held.tier.leading(held.chain, indexes[at]) == 0
    assert held.fetch([indexes[at]]) == [False]


def test_fetch_past_deadline_raises_nothing(held: Source) -> None:
    held.fetch([0, 1], seconds=0.0)


def test_gauges_begin_with_name_of_tier(held: Source) -> None:
    stats = held.tier.stats()
    assert stats and all(name.startswith(f"{held.tier.name}_") for name in stats)


def test_close_is_idempotent_and_ends_fetches_quietly(held: Source) -> None:
    held.tier.close(5.0)
    held.tier.close(5.0)
    held.fetch([0])
