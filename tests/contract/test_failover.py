"""A call over several workers: how often it is sent, and within which time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client.failover import Caller, WorkerEndpoints
from kvstore.client.limits import ClientLimits
from kvstore.core.metrics import ClientCount, Counts
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.transport.channel import LinkLate
from tests.kit.fake_meta import FakeClock

FAILURES: dict[str, Callable[[], Exception]] = {
    "not sent": lambda: ValueError("Cannot invoke RPC on closed channel!"),
    "reply lost": lambda: LinkLate("sent, and then nothing came"),
    "refused": lambda: InvalidRequest("no worker takes this"),
}
"""The ways in which one try can fail."""


class Attempts:
    """Runs one call over ``workers`` workers that all fail; each attempt takes ``seconds``."""

    def __init__(self, workers: int, failure: str, seconds: float) -> None:
        self.clock = FakeClock()
        self.left_s: list[float] = []
        """The time that each try was given."""
        self.workers: list[str] = []
        """The workers that were tried."""
        self._fail, self._seconds = FAILURES[failure], seconds
        ends = [SimpleNamespace(address=f"worker {at}", calling=nullcontext) for at in range(workers)]
        endpoints = SimpleNamespace(
            ranked=lambda marking, even_aside: ends,
            owner=SimpleNamespace(check=lambda: None),
            is_closed=False,
            set_aside=lambda *_: None,
        )
        self._caller = Caller(cast(WorkerEndpoints, endpoints), Counts(ClientCount), ClientLimits(), self.clock)

    def run(self, timeout_s: float, *, may_repeat: bool) -> Exception:
        """Returns the error that the call ends with."""

        def send(endpoint: Any, left_s: float) -> bytes:
            self.workers.append(endpoint.address)
            self.left_s.append(left_s)
            self.clock.advance(min(self._seconds, left_s))
            raise self._fail()

        try:
            self._caller.anywhere(send, timeout_s, None, may_repeat=may_repeat)
        except (Unavailable, InvalidRequest) as error:
            return error
        raise AssertionError("the call succeeded")


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
