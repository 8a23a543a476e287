"""History: the growth of counters, in rings of fixed size."""

from __future__ import annotations

import pytest

from kvstore.dashboard.workers import COARSE_S, FINE_MAX, Growth, History


def test_a_worker_that_did_not_answer_makes_no_spike_when_it_does_again() -> None:
    growth = Growth()
    growth.since_last({"a": {"requests_get": 100}})
    growth.since_last({})
    assert growth.since_last({"a": {"requests_get": 5_000}}) == {}


def test_rates_are_over_the_time_that_passed_and_over_all_workers() -> None:
    history = History()
    history.add(10.0, 2.0, [{"requests_get": 6}, {"requests_get": 4}], [{"calls_in_flight": 1}, {"calls_in_flight": 2}])
    history.add(14.0, 4.0, [{"requests_get": 2}], [{"calls_in_flight": 1}])
    assert history.rates(60.0)["gets"] == pytest.approx(2.0)
    assert history.rates(4.0)["gets"] == pytest.approx(0.5)
    columns = history.columns(False, 0.0)["columns"]
    assert columns["gets"] == [5.0, 0.5] and columns["calls"] == [3.0, 1.0]


def test_the_rings_are_bounded_and_the_coarse_one_has_minutes() -> None:
    history = History()
    for step in range(FINE_MAX + 200):
        history.add(2.0 * step, 2.0, [{"requests_put": 2}], [])
    fine, coarse = history.columns(False, -1.0)["columns"], history.columns(True, -1.0)["columns"]
    assert len(fine["at_s"]) == FINE_MAX
    assert len(coarse["at_s"]) == (FINE_MAX + 200) * 2 // COARSE_S
    assert set(coarse["puts"]) == {1.0}
