"""A call over several workers: how often it is sent, and within which time."""

from __future__ import annotations

import pytest

from tests.kit.failover import FAILURES, Attempts

TIMEOUT_S = 5.0


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("may_repeat", [True, False])
@pytest.mark.parametrize("failure", FAILURES)
def test_call_failing_is_sent_again_only_where_harmless(failure: str, may_repeat: bool, workers: int) -> None:
    """A call that must not run twice is sent again only if it was not sent; a refusal is final."""
    attempts = Attempts(workers, failure, 0.25)
    attempts.run(TIMEOUT_S, may_repeat=may_repeat)
    is_sent_again = failure == "not sent" or (failure == "reply lost" and may_repeat)
    assert attempts.workers == [f"worker {at}" for at in range(workers if is_sent_again else 1)]


@pytest.mark.parametrize("seconds", [0.25, 1.0, 2.0, 3.0, 4.75, 5.0, 9.0])
@pytest.mark.parametrize("failure", ["not sent", "reply lost"])
def test_tries_share_time_of_their_call(failure: str, seconds: float) -> None:
    """Whatever each try takes, all of them end within the timeout of the call."""
    attempts = Attempts(4, failure, seconds)
    began_s = attempts.clock.monotonic_s()
    attempts.run(TIMEOUT_S, may_repeat=True)
    assert attempts.clock.monotonic_s() - began_s <= TIMEOUT_S
    assert attempts.left_s == [pytest.approx(TIMEOUT_S - at * seconds) for at in range(len(attempts.left_s))]
