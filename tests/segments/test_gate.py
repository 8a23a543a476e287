"""A verdict is a value that says what was measured (SEGMENTS.md, S11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.segments import Bounds, Measured, Rule, Verdict
from kvstore.segments.gate import check
from tests.kit.cases import for_each

MEASURED = Measured(prompts=60, tokens=6000, agreement=0.99, kl=0.005, answers_lost=0.0, work=0.32)
VERDICT = Verdict("weights", "rope", Rule.V, (1, 2, 3), (0.3, 0.22, 0.15), Bounds(), MEASURED)


@for_each(
    "measured, bounds",
    (
        ({"agreement": 0.97}, {}),
        ({"kl": 0.031}, {}),
        ({"answers_lost": 0.03}, {}),
        ({"prompts": 0}, {}),
        ({}, {"work_max": 0.31}),
    ),
)
def test_s11_each_bound_closes_the_gate(measured: dict[str, Any], bounds: dict[str, Any]) -> None:
    assert VERDICT.holds and check(VERDICT, "weights", "rope") is VERDICT
    closed = replace(VERDICT, measured=replace(MEASURED, **measured), bounds=replace(Bounds(), **bounds))
    assert not closed.holds
    with pytest.raises(InvalidRequest, match="does not hold its bounds"):
        check(closed, "weights", "rope")


@for_each(
    "changed, reason",
    (
        ({"fingerprint": ""}, "digest of the weights"),
        ({"rule": "v"}, "expected a kvstore.segments.Rule"),
        ({"ratios": (0.3, 0.2)}, "one ratio for each"),
        ({"check_layers": (), "ratios": ()}, "one ratio for each"),
        ({"check_layers": (1, 1, 2)}, "ascending layers"),
        ({"check_layers": (-1, 1, 2)}, "ascending layers"),
        ({"ratios": (0.1, 0.2, 0.3)}, "falling shares"),
        ({"ratios": (1.1, 0.2, 0.1)}, "falling shares"),
        ({"measured": replace(MEASURED, kl=float("nan"))}, "finite"),
    ),
)
def test_a_wrong_verdict_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        replace(VERDICT, **changed)
