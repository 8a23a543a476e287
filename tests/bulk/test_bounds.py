"""The resources of a connection stay within their limits, and are freed even if a rarely failing step fails."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.limits import ClientLimits
from kvstore.client.pool import UploadArena
from kvstore.errors import Unavailable
from kvstore.transport.channel import ARENA, SILENCE_S, FrameKind, encode_request, encode_span
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.data_server import BulkListener
from kvstore.worker.limits import WorkerLimits
from tests.kit.patience import NEVER_S, returns, slowness
from tests.kit.transports import MEDIUM, greeted, is_cut_off, same, send_head, tokens_and_kv
from tests.kit.wire import opened, packed, raw_stub
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving, worker_process

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("way", ["shared", "tcp"])
TOKENS, KV = tokens_and_kv(4)


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root, worker_limits=WorkerLimits(idle_s=slowness())) as found:
        yield found


def listener_of(served: Served) -> BulkListener:
    assert served.worker.service.bulk is not None
    return served.worker.service.bulk


def test_memory_for_runs_is_that_of_the_largest_whatever_the_first_is(served: Served) -> None:
    in_flight = served.worker.service.in_flight
    with raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(TOKENS)).SerializeToString()
    with greeted(served, "tcp") as channel:
        channel.send(FrameKind.PUT, 1, [encode_request(WAIT_S, 0, start)])
        channel.receive_frame(FrameKind.READY)
        send_head(channel, FrameKind.CHUNKS, 1, 8 + MEDIUM.chunk_bytes + 8 * MEDIUM.section_count)
        channel.send_bytes([memoryview(encode_span(0, 1))])
        eventually(lambda: in_flight.count == 4 * MEDIUM.chunk_bytes, "it is reserved")
        assert is_cut_off(channel)
    eventually(lambda: in_flight.count == 0, "and given back")
    assert served.worker.service.counters()["calls_idle"] == 1


@pytest.mark.parametrize("case", ["with a request", "too many"])
def test_files_that_nobody_asked_for_end_the_connection(served: Served, case: str) -> None:
    with raw_stub(served) as stub:
        start = pb.PutStart(namespace=opened(stub, MEDIUM), tokens=packed(TOKENS)).SerializeToString()
    with greeted(served, "shared") as channel, open(os.devnull, "rb") as file:
        if case == "too many":
            channel.send(FrameKind.ARENA, 0, [ARENA.pack(4096)], [file.fileno()] * 2)
        else:
            channel.send(FrameKind.PUT, 1, [encode_request(WAIT_S, 0, start)], [file.fileno()])
        assert is_cut_off(channel)
    with greeted(served, "shared") as channel:
        assert channel.is_quiet()


def test_a_host_that_vanished_is_noticed_by_the_kernel(served: Served) -> None:
    with greeted(served, "tcp") as channel, socket.socket(fileno=os.dup(channel.fileno())) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == SILENCE_S


def test_many_threads_at_once_open_no_more_connections_and_arenas_than_allowed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    create = UploadArena.__init__

    def noted(self: UploadArena, size_bytes: int, *rest: Any) -> None:
        sizes.append(size_bytes)
        create(self, size_bytes, *rest)

    monkeypatch.setattr(UploadArena, "__init__", noted)
    limits = ClientLimits(bulk_links_max=4, arena_bytes_max=24 << 20)
    with connected(served, bulk="shared", write="behind", limits=limits) as store, ThreadPoolExecutor(16) as threads:
        cache = store.namespace("m", MEDIUM)
        together = threading.Barrier(16)

        def put(seed: int) -> None:
            prompt = tokens_and_kv(20, seed)
            together.wait(WAIT_S)
            cache.put(*prompt)
            assert same(cache.get(prompt[0])[1], prompt[1])

        list(threads.map(put, range(100, 116)))
        assert 1 <= listener_of(served).connections_count <= 4
    assert 1 <= len(sizes) <= 4
    assert sum(sizes) <= limits.arena_bytes_max


def test_a_put_does_not_wait_for_the_arena_of_a_worker_that_is_gone(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = ClientLimits(write_s=NEVER_S)
    with (
        worker_process(tmp_root) as worker,
        connected(worker.address, bulk="shared", write="behind", limits=patient) as store,
    ):
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)

        def never(*_: object) -> None:
            threading.Timer(0.2, worker.kill).start()
            monkeypatch.setattr(UploadArena, "take", lambda *_: None)

        monkeypatch.setattr(UploadArena, "take", never)
        with pytest.raises(Unavailable):
            returns(lambda: cache.put(*tokens_and_kv(4, seed=2)))
