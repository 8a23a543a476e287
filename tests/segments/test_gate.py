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
WRONG_FIGURES: tuple[dict[str, Any], ...] = (
    {"kl": "x"},
    {"answers_lost": None},
    {"work": "0"},
    {"kl": -1.0},
    {"tokens": -5},
    {"agreement": 2.0},
    {"answers_lost": 1.5},
    {"work": float("inf")},
    {"prompts": True},
)
VERDICT = Verdict("weights", "rope", Rule.V, (1, 2, 3), (0.3, 0.22, 0.15), Bounds(), MEASURED)


def test_a_verdict_comes_back_from_its_text() -> None:
    assert Verdict.from_json(VERDICT.to_json()) == VERDICT
    assert Verdict.from_json(VERDICT.to_json() + b"  ") == VERDICT


@for_each("text", (b"", b"[]", b"{}", b"\xff", b"null", VERDICT.to_json()[:-2]))
def test_what_is_no_verdict_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a verdict"):
        Verdict.from_json(text)


def test_a_verdict_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another version"):
        Verdict.from_json(VERDICT.to_json().replace(b'"version":1', b'"version":2'))


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


@for_each("wrong", WRONG_FIGURES)
def test_a_figure_that_nobody_can_have_measured_opens_no_gate(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"verdict has {next(iter(wrong))}="):
        replace(VERDICT, measured=replace(MEASURED, **wrong))


def test_a_divergence_may_be_below_zero_by_rounding() -> None:
    assert replace(VERDICT, measured=replace(MEASURED, kl=-1e-7)).holds
