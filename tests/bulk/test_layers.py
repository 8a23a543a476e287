"""Layers over a bulk connection, as a stream or given on this host: right or missing, whatever fails in the middle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from kvstore import Layout
from kvstore.address import Chain
from kvstore.client.cache import Cache
from kvstore.client.layers_ahead import LayersAhead
from kvstore.client.store import Store
from kvstore.errors import HoldBroken, InvalidRequest
from kvstore.namespace import Namespace
from kvstore.sections import Planes
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import Kind, Mode, encode_head, encode_request
from kvstore.wire.bulk.runs import send_run
from kvstore.wire.bulk.sums import plane_sums
from kvstore.worker.bulk import layering
from kvstore.worker.bulk.getting import BulkGets
from tests.kit.stores import chunk_files
from tests.kit.transports import MEDIUM, greeted, same, tokens_and_kv
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving, worker_process

COUNT = 6
TOKENS, KV = tokens_and_kv(COUNT)
SIZE = MEDIUM.chunk_tokens
BULK = pytest.mark.parametrize("way", ["given", "shared", "tcp"])
STREAM = pytest.mark.parametrize("way", ["shared", "tcp"])


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving(tmp_root) as found:
        yield found


@pytest.fixture(autouse=True)
def streamed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way ``given`` takes what a worker gives to its host; ``shared`` is a stream over the same connection."""
    if "way" in request.fixturenames and request.getfixturevalue("way") == "shared":
        monkeypatch.setattr(LayersAhead, "_given", lambda *_: None)


def connect(worker: Served | str, way: str) -> Store:
    return connected(worker, bulk="shared" if way == "given" else way)


@pytest.fixture(params=["native", "python"])
def natively(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(Channel, "moves_natively", False)


@pytest.fixture
def no_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> NoReturn:
        raise AssertionError("the layers came over gRPC")

    monkeypatch.setattr(LayersAhead, "_receive_chunks", refuse)


def check(cache: Cache, count: int = COUNT) -> None:
    """Reads all layers, and compares them."""
    with cache.hold(TOKENS) as hold:
        layers = 0
        for layer, k, v in hold.layers():
            assert same(k, KV[layer, 0, : count * SIZE]) and same(v, KV[layer, 1, : count * SIZE])
            layers += 1
        assert layers == MEDIUM.layers


def layer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvstore-layers"]


@BULK
@pytest.mark.usefixtures("natively", "no_grpc")
def test_layers_come_past_grpc(served: Served, way: str) -> None:
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS[: 4 * SIZE], KV[:, :, : 4 * SIZE])
        check(cache, 4)
        cache.put(TOKENS, KV)
        check(cache)
        assert same(cache.get(TOKENS)[1], KV), "the connection is good for other calls after it"
        assert store.stats()["client_bulk_broken"] == 0


@BULK
@pytest.mark.usefixtures("no_grpc")
def test_layers_that_are_left_in_the_middle_leave_nothing(served: Served, way: str) -> None:
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        with cache.hold(TOKENS) as hold:
            for taken in (0, 1, 2, 3) * 5:
                layers: Any = hold.layers()
                for _ in range(taken):
                    next(layers)
                layers.close()
                assert same(cache.get(TOKENS)[1], KV), "it did not cut a connection of another call"
        assert layer_threads() == []
        check(cache)
    service = served.worker.service
    eventually(lambda: service.in_flight.count == 0, "its memory is given back")
    eventually(lambda: service.gate.inside_count == 0, "its calls are over")


@BULK
def test_a_chunk_that_is_damaged_ends_the_layers_where_it_is(served: Served, tmp_root: Path, way: str) -> None:
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        chain = Chain.of(Namespace.of("m", MEDIUM), TOKENS.astype(np.uint32))
        (file,) = [each for each in chunk_files(tmp_root) if each.name.startswith(chain.addresses[3].hex())]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1  # V of the last layer
        file.write_bytes(content)
        seen = 0
        with cache.hold(TOKENS) as hold, pytest.raises(HoldBroken) as broken:
            for layer, k, v in hold.layers():
                assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])
                seen += 1
        assert seen < MEDIUM.layers
        assert broken.value.tokens_valid == 3 * SIZE
        assert cache.match(TOKENS) == 3 * SIZE


@STREAM
@pytest.mark.usefixtures("natively")
def test_i1_bytes_that_change_on_the_way_are_never_a_layer(
    served: Served, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    def send(channel: Channel, planes: Planes, first: int, count: int) -> None:
        nonlocal sent
        sent += 1
        rows = planes.strided(first, count).copy()
        rows[0, 1, -1] ^= sent == 3
        channel.send_bytes([rows[0, 0].data, rows[0, 1].data])
        channel.send_bytes([np.array(plane_sums(planes, first, count), "<u8").view(np.uint8).data])

    monkeypatch.setattr(layering, "send_run", send)
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        seen = 0
        with cache.hold(TOKENS) as hold, pytest.raises(HoldBroken):
            for layer, k, v in hold.layers():
                assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])
                seen += 1
        assert seen == 2
        assert store.stats()["client_misses_damaged"] == 1


@STREAM
def test_an_older_worker_sends_layers_over_grpc(served: Served, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BulkGets.get

    def get(self: BulkGets, channel: Channel, number: int, mode: int, message: bytes, context: Any) -> None:
        if pb.GetRequest.FromString(message).order == pb.ORDER_LAYERS:
            raise InvalidRequest("order is 2: only ORDER_CHUNKS goes over a bulk connection")
        real(self, channel, number, mode, message, context)

    monkeypatch.setattr(BulkGets, "get", get)
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        check(cache)
        assert same(cache.get(TOKENS)[1], KV)


@STREAM
def test_a_worker_that_ends_in_the_middle_is_a_miss(served: Served, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        with cache.hold(TOKENS) as hold:
            layers: Any = hold.layers()
            layer, k, v = next(layers)
            assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])

            def cut(channel: Channel, planes: Planes, first: int, count: int) -> None:
                channel.cut()
                send_run(channel, planes, first, count)

            monkeypatch.setattr(layering, "send_run", cut)
            try:
                for layer, k, v in layers:
                    assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])
            except HoldBroken as broken:
                assert broken.tokens_valid == 0
    assert layer_threads() == []


def test_layers_in_another_way_are_refused(served: Served) -> None:
    for mode, fields in ((Mode.FILES, {}), (Mode.STREAM, {"first": 1}), (Mode.STREAM, {"memory_only": True})):
        with connected(served) as store:
            store.namespace("m", MEDIUM).put(TOKENS, KV)
        with greeted(served, "shared") as channel:
            request = pb.GetRequest(order=pb.ORDER_LAYERS, **fields).SerializeToString()
            channel.send(Kind.GET, 1, [encode_request(WAIT_S, mode, request)])
            refused = pb.BulkRefusal.FromString(channel.receive_frame(Kind.REFUSED)[1])
            assert "expected mode 0 (a stream), first 0 and no memory_only" in refused.message


@STREAM
def test_a_layer_of_another_request_is_not_taken(served: Served, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layering, "encode_head", lambda kind, number, length: encode_head(kind, number + 7, length))
    asked: list[object] = []
    real = LayersAhead._receive_chunks

    def receive(self: LayersAhead) -> None:
        asked.append(self)
        real(self)

    monkeypatch.setattr(LayersAhead, "_receive_chunks", receive)
    with connect(served, way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        check(cache)
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("way", "how"), [("given", "closes"), ("shared", "drops"), ("tcp", "closes"), ("grpc", "drops")]
)
def test_a_forked_child_does_not_end_the_layers_of_its_parent(tmp_root: Path, way: str, how: str) -> None:
    layout = Layout(layers=24, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=128)
    tokens, kv = tokens_and_kv(4, layout=layout)
    with worker_process(tmp_root) as worker, connect(worker.address, way) as store:
        cache = store.namespace("m", layout)
        cache.put(tokens, kv)
        with cache.hold(tokens) as hold:
            layers: Any = hold.layers()
            next(layers)
            time.sleep(0.2)  # the next ones fill what the connection takes
            child = os.fork()
            if not child:
                try:
                    if how == "closes":
                        layers.close()
                    else:
                        del layers
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            seen = 1
            for layer, k, v in layers:
                assert same(k, kv[layer, 0]) and same(v, kv[layer, 1])
                seen += 1
            assert seen == layout.layers
