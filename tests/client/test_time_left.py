"""What goes over gRPC because a bulk connection gave way has only the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client import failover, remote
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import Bulk, Credentials, Links
from kvstore.core.metrics import ClientCount, Counts
from kvstore.errors import InvalidRequest
from kvstore.format.keyset import BlockKeys
from kvstore.transport.channel import LinkBroken
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.disks import NAMESPACE


class Time:
    """A clock that moves by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    monotonic_s = monotonic

    def passes(self, answer: Any = None) -> Any:
        """Returns ``answer`` four seconds later."""
        self.now_s += 4.0
        return answer


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(remote, "time", time)
    monkeypatch.setattr(failover, "time", time)
    return time


class Broken:
    """``Links`` whose connection breaks."""

    def link(self, _: float) -> Any:
        return nullcontext(SimpleNamespace(is_shared=True))

    def note_broken(self, *_: object) -> None:
        """Nothing is noted."""


def test_a_put(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_s = list[float]()

    def breaks(*_: object) -> None:
        time.passes()
        raise LinkBroken("it broke")

    monkeypatch.setattr(remote, "_send_put", breaks)
    monkeypatch.setattr(remote, "put_over_grpc", lambda *given: ends_s.append(given[-1] - time.now_s))
    endpoint, caller = SimpleNamespace(bulk=Broken()), SimpleNamespace(counters=Counts(ClientCount))
    remote.put_at(*cast(Any, [endpoint, None, None, lambda: None, None, caller, 10.0]))
    assert ends_s == [6.0]


def reading(time: Time, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], Counts[ClientCount]]:
    """Reads a block in 10 s: returns the time that gRPC got for it, and what was counted."""
    given_s, counters = list[float](), Counts(ClientCount)

    def received(_: object, __: bytes, left_s: float) -> Iterator[pb.GetResponse]:
        given_s.append(left_s)
        yield from ()

    monkeypatch.setattr(remote, "received", received)
    monkeypatch.setattr(remote.BlockFetch, "_request", lambda self, chunks: pb.GetRequest())
    caller = SimpleNamespace(
        limits=ClientLimits(), counters=counters, executor=SimpleNamespace(clock=time), stream_s=lambda *_: 10.0
    )
    fetch = remote.BlockFetch(BlockKeys.of(NAMESPACE, [bytes(16)], [1]), [memoryview(bytearray(1))], cast(Any, caller))
    fetch.receive(cast(Any, SimpleNamespace(stub=lambda *_: None, address="", bulk=Broken())))
    return given_s, counters


def test_a_read(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.BlockFetch, "_receive_images", lambda *_: time.passes(False))
    given_s, counters = reading(time, monkeypatch)
    assert given_s == [6.0] and counters.snapshot()["client_bulk_damaged"] == 1


def test_what_nobody_had_time_to_verify_is_not_damaged(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.BlockFetch, "_receive_images", lambda *_: time.passes(time.passes(time.passes(False))))
    given_s, counters = reading(time, monkeypatch)
    assert given_s == [-2.0] and counters.snapshot()["client_bulk_damaged"] == 0


def test_a_short_call(time: Time) -> None:
    given_s = list[float]()
    endpoint = failover.Endpoint("127.0.0.1:1", Bulk.AUTO, ClientLimits())

    def call(_: str, __: pb.MatchRequest, left_s: float) -> bytes:
        given_s.append(left_s)
        return b"said"

    @contextmanager
    def link(_: float) -> Iterator[Any]:
        yield time.passes(SimpleNamespace(call=call))

    endpoint.bulk = cast(Any, SimpleNamespace(link=link, close=lambda: None))
    assert endpoint.call("Match", pb.MatchRequest(), 10.0) == b"said" and given_s == [6.0]
    endpoint.close()


def test_a_connection_is_not_lost_while_the_token_cannot_be_read() -> None:
    class Emptied(Credentials):
        @property
        def version(self) -> int:
            raise InvalidRequest("the token file is empty")

    links = Links("127.0.0.1:1", Bulk.AUTO, ClientLimits(), cast(Any, None), Emptied())
    links._idle.append(cast(Any, SimpleNamespace()))
    with pytest.raises(InvalidRequest), links.link(1.0):
        pass
    assert len(links._idle) == 1
