"""The heartbeat tells a call that holds the GIL from one that does not."""

from __future__ import annotations

import ctypes

from tests.kit.heartbeat import ATTEMPTS_MAX, others_run_during

SLEEP_US = 400_000


def test_a_call_that_holds_the_gil_is_told_from_one_that_does_not() -> None:
    def held() -> None:
        ctypes.PyDLL(None).usleep(SLEEP_US)

    # A busy machine may leave this thread out for long before the call begins, so this also gets some attempts.
    assert not all(others_run_during(held, attempts_max=1) for _ in range(ATTEMPTS_MAX))
    assert others_run_during(lambda: ctypes.CDLL(None).usleep(SLEEP_US))
