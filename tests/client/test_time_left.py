"""What goes over gRPC because a bulk connection gave way has only the time that is left of the call's 10 s."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from kvstore.client import failover, pool, remote
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import Bulk, Links
from kvstore.core.metrics import ClientCount, Counts
from kvstore.format.keyset import BlockKeys
from kvstore.transport.channel import LinkBroken, dial_tcp, listen_tcp
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.cases import for_each
from tests.kit.disks import NAMESPACE
from tests.kit.fake_meta import FakeClock


class Breaking:
    """A worker's bulk connections, each made in a second and broken in four; its gRPC notes the time it is given."""

    is_shared = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.left_s = FakeClock(), list[float]()
        self.endpoint: Any = SimpleNamespace(bulk=self, address="", stub=lambda *_: self.over_grpc)
        for module in (remote, failover):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock.monotonic_s))

    @contextmanager
    def link(self, _: float) -> Iterator[Any]:
        self.clock.advance(1.0)
        yield self

    def call(self, *given: Any) -> None:
        self.left_s.append(given[-1])
        self.clock.advance(4.0)
        raise LinkBroken("it broke")

    def note_broken(self, *_: object) -> None:
        """Nothing is noted."""

    def over_grpc(self, _: bytes, timeout: float) -> Any:
        self.left_s.append(timeout)
        return MagicMock()


def test_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, caller = Breaking(monkeypatch), SimpleNamespace(counters=Counts(ClientCount))
    monkeypatch.setattr(remote, "_send_put", worker.call)
    monkeypatch.setattr(remote, "put_over_grpc", lambda *given: worker.left_s.append(given[-1]))
    began_s = worker.clock.monotonic_s()
    remote.put_at(*cast(Any, [worker.endpoint, None, None, lambda: None, None, caller, 10.0]))
    assert worker.left_s == [began_s + 10.0] * 2, "both get the moment at which it ends"


@for_each("passed_s, left_s, damaged", [(4.0, [5.0], 1), (12.0, [], 0)])
def test_a_read_and_what_there_was_no_time_to_verify_is_not_damaged(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, left_s: list[float], damaged: int
) -> None:
    worker, counters = Breaking(monkeypatch), Counts(ClientCount)
    monkeypatch.setattr(remote.BlockFetch, "_receive_images", lambda *_: worker.clock.advance(passed_s))
    monkeypatch.setattr(remote.BlockFetch, "_request", lambda self, chunks: pb.GetRequest())
    caller: Any = SimpleNamespace(limits=ClientLimits(), counters=counters, stream_s=lambda *_: 10.0)
    blocks = BlockKeys.of(NAMESPACE, [bytes(16)], [1])
    remote.BlockFetch(blocks, [memoryview(bytearray(1))], caller).receive(worker.endpoint)
    assert worker.left_s == left_s and counters.snapshot()["client_bulk_damaged"] == damaged


def test_a_short_call(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Breaking(monkeypatch)
    failover.Endpoint.call(worker.endpoint, "Match", pb.MatchRequest(), 10.0)
    assert worker.left_s == [9.0, 5.0]


def test_a_silent_name_server_and_a_silent_address(monkeypatch: pytest.MonkeyPatch) -> None:
    known, said = socket.getaddrinfo, threading.Event()

    def asked(host: str, *given: Any) -> list[Any]:
        if host == "worker" and (given[-1] or not said.wait(0.2)):
            raise socket.gaierror
        return [known(each, *given)[0] for each in (("192.0.2.1", "127.0.0.1") if host == "worker" else (host,))]

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    with pytest.raises(OSError, match="no address of worker"):
        dial_tcp("worker", 1, 0.01)
    said.set()
    with listen_tcp("127.0.0.1", 0) as listener:
        dial_tcp("worker", listener.getsockname()[1], 4.0).close()


def test_a_port_that_cannot_be_reached_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ask = FakeClock(), MagicMock(return_value=b"")
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=clock.monotonic_s))
    links = Links("127.0.0.1:1", Bulk.TCP, ClientLimits(), ask)
    for _ in range(400):
        with links.link(1.0):
            clock.advance(1.0)
    assert ask.call_count == 8, "after 0, 5, 15, 35, 75, 155, 275 and 395 s"
