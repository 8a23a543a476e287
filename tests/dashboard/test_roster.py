"""Workers that were killed stay on the page, those that ended themselves do not, and restarts are counted."""

from __future__ import annotations

from kvstore.counts import STARTED
from kvstore.dashboard.workers import SILENT_S, Roster
from tests.kit.cases import for_each

BUSY = {"requests_get": 9, "calls_in_flight": 3, STARTED: 5.0}
FRESH = {"requests_get": 1, "calls_in_flight": 3, STARTED: 65.25}


def test_a_worker_that_was_killed_is_missing_until_it_is_back() -> None:
    roster = Roster()
    assert roster.call({"a": BUSY, "b": BUSY}, 0) == {}
    assert roster.call({"a": BUSY, "b": None}, 2) == {}
    assert roster.call({"a": BUSY, "b": None}, 2 + 2 * SILENT_S) == {}
    for now_s in (20, 60):
        assert roster.call({"a": BUSY}, now_s) == {"b": 2}
    assert roster.call({"a": BUSY, "b": FRESH}, 70) == {}
    assert (roster.restarts("a"), roster.restarts("b")) == (0, 1)


def test_a_worker_that_ended_itself_is_not_missing() -> None:
    roster = Roster()
    roster.call({"a": BUSY}, 0)
    roster.call({"a": None}, 2)  # asked once more, before its end was heard of
    assert roster.call({}, 2 + SILENT_S / 2) == {}
    assert roster.call({"a": FRESH}, 30) == {}
    assert roster.restarts("a") == 0, "another worker at this address"


@for_each("counted", [0, 9, 10])
def test_a_restart_is_counted_once_whatever_the_counters_say(counted: int) -> None:
    roster = Roster()
    for now_s in (0, 2):
        roster.call({"a": BUSY | {"requests_get": min(counted, 9)}}, now_s)
    assert roster.restarts("a") == 0
    for now_s in (4, 6, 8):
        roster.call({"a": FRESH | {"requests_get": counted}}, now_s)
        assert roster.restarts("a") == 1
    roster.call({"a": None}, 10)
    roster.call({"a": FRESH | {"requests_get": counted}}, 12)
    assert roster.restarts("a") == 1, "silent for a while, and the same run"
    roster.call({"a": FRESH | {STARTED: 99.0}}, 14)
    assert roster.restarts("a") == 2
