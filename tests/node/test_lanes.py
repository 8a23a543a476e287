"""A lane that makes progress is not taken for one that hangs, however long all its work takes."""

from __future__ import annotations

import threading

import pytest

from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline, DeadlinePassed, Executor, moved_on
from tests.kit.patience import PATIENCE_S


class HandClock(SystemClock):
    """Monotonic time that the work moves on, so that no machine is too slow for it."""

    passed_s = 0.0

    def monotonic_s(self) -> float:
        return self.passed_s


def test_work_that_moves_on_is_not_stalled_and_work_that_does_not_is() -> None:
    clock = HandClock()
    lanes = Executor(1, 1, 8, 0.3, clock)
    seen: list[bool] = []

    def work(number: int) -> bool:
        for _ in range(8):
            clock.passed_s += 0.1
            if number:
                moved_on()
        seen.append(lanes.stalled)
        return True

    try:
        lanes.each(2, work, Deadline(clock, 30))
    finally:
        lanes.close()
    assert seen == [True, False]


def test_whoever_shares_does_all_of_it_where_every_lane_is_busy() -> None:
    clock = SystemClock()
    lanes = Executor(1, 2, 8, 5, clock)
    goes_on = threading.Event()
    try:
        busy = lanes.start(1, lambda _: goes_on.wait(PATIENCE_S))
        done: list[tuple[int, threading.Thread]] = []

        def work(number: int) -> bool:
            done.append((number, threading.current_thread()))
            return True

        lanes.share(5, work, Deadline(clock, 30))
        assert done == [(number, threading.main_thread()) for number in range(5)]
        goes_on.set()
        busy.wait(Deadline(clock, 30))
    finally:
        goes_on.set()
        lanes.close()


def test_whoever_shares_begins_nothing_after_the_deadline_and_raises_what_the_work_raises() -> None:
    clock = SystemClock()
    lanes = Executor(1, 1, 8, 5, clock)
    done: list[int] = []

    def work(number: int) -> bool:
        done.append(number)
        if number == 2:
            raise ValueError("its own")
        return True

    try:
        with pytest.raises(DeadlinePassed):
            lanes.share(9, work, Deadline(clock, 0))
        assert not done
        with pytest.raises(ValueError, match="its own"):
            lanes.share(9, work, Deadline(clock, 30))
        assert done == [0, 1, 2]
    finally:
        lanes.close()
