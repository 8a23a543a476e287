"""The heartbeat tells a call that holds the GIL from one that does not."""

from __future__ import annotations

import ctypes

from tests.peers.heartbeat import others_run_during

SLEEP_US = 400_000


def test_a_call_that_holds_the_gil_is_told_from_one_that_does_not() -> None:
    assert not others_run_during(lambda: ctypes.PyDLL(None).usleep(SLEEP_US), attempts_max=3)
    assert others_run_during(lambda: ctypes.CDLL(None).usleep(SLEEP_US))
