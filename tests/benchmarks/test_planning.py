"""The benchmark of plans: its figures on small batches, and its tables."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import planning
from benchmarks.planning import BLOCK, Load, saved, shared_by, steps
from kvstore.planning import Prompts


def small() -> Load:
    chance = np.random.default_rng(0)
    prompts = shared_by(chance, 20, 4, prefix=64, own=16)
    packed = Prompts.of_tokens((prompts[at] for at in chance.permutation(len(prompts))), BLOCK)
    return Load("small", packed, [5] * len(prompts))


def test_the_planned_order_saves_what_can_be_saved() -> None:
    rows = list(saved(small(), [10_000]))
    assert [row[1] for row in rows] == [160, 10_000]
    for row in rows:
        assert row[3] == row[4] == row[5] == pytest.approx(60.0)
    arrival = [row[2] for row in rows]
    assert isinstance(arrival[0], float) and arrival[0] < 10
    assert arrival[1] == pytest.approx(60.0), "memory for all"


def test_steps_are_never_fewer_than_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "STEP_TOKENS", 64)
    _, arrival, ratio, least = steps(small())
    assert isinstance(arrival, int) and isinstance(ratio, int) and isinstance(least, int)
    assert min(arrival, ratio) >= least == -(-(20 * 64 + 80 * 16 + 80 * 5) // 64)
