"""The part of a client that tries one worker after the other, over workers that exist only here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

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
    """Runs one call over ``workers`` workers, all of which fail; ``seconds`` pass in each try."""

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
