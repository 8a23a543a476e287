"""Feeds: a source that fails or hangs is reported, and its last value stays. And their history."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from kvstore.core.clock import SystemClock
from kvstore.dashboard.views import WANTED_S, Feed
from kvstore.dashboard.workers import COARSE_S, FINE_MAX, Growth, History
from kvstore.errors import Unavailable
from tests.kit.etcd import eventually
from tests.kit.patience import PATIENCE_S


class Moved(SystemClock):
    """The real clock with a test's offset."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.added_s


@contextmanager
def running(feed: Feed[int]) -> Iterator[Feed[int]]:
    feed.start()
    try:
        yield feed
    finally:
        feed.close()


def made(read: Callable[[], int], clock: SystemClock | None = None, *, on_demand: bool = False) -> Feed[int]:
    return Feed("test", read, 0.02, clock or SystemClock(), late_s=50.0, on_demand=on_demand)


def test_what_a_source_said_stays_when_it_fails() -> None:
    answers: SimpleQueue[int | Exception] = SimpleQueue()

    def read() -> int:
        found = answers.get()
        if isinstance(found, Exception):
            raise found
        return found

    with running(made(read)) as feed:
        assert feed.look().value is None and feed.look().age_s is None
        answers.put(7)
        eventually(lambda: feed.look().value == 7)
        answers.put(Unavailable("etcd does not answer"))
        eventually(lambda: feed.look().error == "etcd does not answer")
        assert feed.look().value == 7
        answers.put(8)
        eventually(lambda: feed.look().value == 8 and feed.look().error is None)
        answers.put(ValueError("a secret of the code"))
        eventually(lambda: feed.look().error is not None)
        assert feed.look().error == "internal error, please report it: ValueError"
        answers.put(9)
        eventually(lambda: feed.look().value == 9)
        feed._loop.stop()  # it waits in the source; what it gets is its last
        answers.put(9)


def test_a_source_that_hangs_is_said_and_nobody_waits_for_it() -> None:
    began, release, clock = threading.Event(), threading.Event(), Moved()

    def read() -> int:
        began.set()
        release.wait()
        return 1

    with running(made(read, clock)) as feed:
        assert began.wait(PATIENCE_S)
        assert feed.look().error is None
        clock.added_s = 60.0
        error = feed.look().error
        assert error is not None and error.startswith("no answer for 6")
        release.set()
        eventually(lambda: feed.look().value == 1 and feed.look().error is None)


def test_on_demand_is_read_only_while_somebody_looks() -> None:
    reads, clock = [0], Moved()

    def read() -> int:
        reads[0] += 1
        return reads[0]

    with running(made(read, clock, on_demand=True)) as feed:
        assert reads[0] == 0
        feed.look()
        eventually(lambda: reads[0] >= 2)
        clock.added_s += WANTED_S + 1.0
        eventually(lambda: not feed._is_wanted(clock.monotonic_s()))
        seen = reads[0]
        feed.look()
        eventually(lambda: reads[0] > seen)


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
