"""A lane that moves on is not taken for one that hangs, however long all of its work takes."""

from __future__ import annotations

import time

from kvstore.node.deadline import Deadline
from kvstore.node.lanes import Lanes, moved_on
from kvstore.sources import SystemClock


def test_work_that_moves_on_is_not_stalled_and_work_that_does_not_is() -> None:
    clock = SystemClock()
    lanes = Lanes(1, 1, 8, 0.3, clock)
    seen: list[bool] = []

    def work(number: int) -> bool:
        for _ in range(8):
            time.sleep(0.1)
            if number:
                moved_on()
        seen.append(lanes.stalled)
        return True

    try:
        lanes.each(2, work, Deadline(clock, 30))
    finally:
        lanes.close()
    assert seen == [True, False]


def test_off_a_lane_it_says_nothing() -> None:
    moved_on()
