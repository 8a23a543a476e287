"""Work that its caller shares: it ends at the deadline, and raises what the work raises."""

from __future__ import annotations

import pytest

from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline, DeadlinePassed, Executor


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
