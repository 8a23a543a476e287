"""Bad requests: each gets a status with a message that says what to do, and harms nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.client import Cache, Store
from kvstore.node.member import Member
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.wire.limits import method
from kvstore.worker.limits import WorkerLimits
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.workers import (
    WAIT_S,
    Served,
    connected,
    eventually,
    opened,
    packed,
    raw_channel,
    raw_stub,
    refused,
    sections_of,
    serving,
    sums_of,
)

SIZE = SMALL.chunk_tokens
TOKENS = np.arange(4 * SIZE)
KV = kv_of(SMALL, TOKENS)
SECTIONS = sections_of(KV, SMALL)
DATA = b"".join(SECTIONS)
SUMS = sums_of(SECTIONS)
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[KVStoreStub]:
    with raw_stub(served) as made:
        yield made


@pytest.fixture(scope="module")
def digest(stub: KVStoreStub) -> bytes:
    return opened(stub, SMALL)


@pytest.fixture(scope="module")
def store(served: Served) -> Iterator[Store]:
    with connected(served) as made:
        yield made


@pytest.fixture
def cache(store: Store) -> Cache:
    return store.namespace("others", SMALL)


@pytest.fixture(autouse=True)
def _others_go_on(served: Served, cache: Cache) -> Iterator[None]:
    """After each bad request, everybody else is served, and nothing is still in flight."""
    yield
    cache.put(TOKENS, KV)
    assert same(cache.get(TOKENS)[1], KV)
    eventually(lambda: served.worker.service.gate.inside_count == 0, "all calls ended")
    assert served.worker.service.in_flight.count == 0
    assert len(served.member.node.holds) == 0


def start(digest: bytes, **fields: Any) -> pb.PutStart:
    return pb.PutStart(**{"namespace": digest, "tokens": packed(TOKENS), **fields})


def put_of(digest: bytes, *rest: pb.PutRequest) -> Iterator[pb.PutRequest]:
    return iter([pb.PutRequest(start=start(digest)), *rest])


WRONG_PUTS: dict[str, tuple[Callable[[bytes], Iterator[pb.PutRequest]], str]] = {
    "no message at all": (lambda _: iter(()), "no message: expected one with start"),
    "no start": (lambda _: iter([pb.PutRequest(data=b"x")]), "first message of the stream has no start"),
    "two starts": (lambda ns: put_of(ns, pb.PutRequest(start=start(ns))), "later message of the stream has a start"),
    "no data": (put_of, "ended within chunk 0"),
    "a short chunk": (
        lambda ns: put_of(ns, pb.PutRequest(data=DATA[:-1], checksums=SUMS[:-8])),
        "ended within chunk 3",
    ),
    "a chunk too few": (
        lambda ns: put_of(
            ns,
            pb.PutRequest(data=DATA[: 3 * SMALL.chunk_bytes], checksums=SUMS[: 3 * SMALL.section_count * 8]),
        ),
        "ended within chunk 3",
    ),
    "extra bytes": (lambda ns: put_of(ns, pb.PutRequest(data=DATA + b"x", checksums=SUMS)), "1 bytes more"),
    "no checksums": (lambda ns: put_of(ns, pb.PutRequest(data=DATA)), "no checksum for part 0"),
    "too many checksums": (
        lambda ns: put_of(ns, pb.PutRequest(data=DATA, checksums=SUMS + bytes(8))),
        "bytes of checksums: expected",
    ),
    "half a checksum": (lambda ns: put_of(ns, pb.PutRequest(data=DATA, checksums=SUMS[:-4])), "no checksum for part"),
    "first behind the end": (
        lambda ns: iter([pb.PutRequest(start=start(ns, first=5))]),
        "first is 5: expected at most 4",
    ),
    "half a token": (lambda ns: iter([pb.PutRequest(start=start(ns, tokens=b"123"))]), "tokens have 3 bytes"),
    "no namespace": (lambda ns: iter([pb.PutRequest(start=start(b""))]), "namespace has 0 bytes"),
    "a message too large": (
        lambda ns: put_of(ns, pb.PutRequest(data=bytes(5 << 20))),
        "over the limit of 4194304: send smaller ones",
    ),
}


@for_each("name", WRONG_PUTS)
def test_a_put_that_is_wrong(stub: KVStoreStub, digest: bytes, name: str) -> None:
    messages, says = WRONG_PUTS[name]
    code, message, kind = refused(lambda: stub.Put(messages(digest), timeout=WAIT_S))
    assert code is INVALID
    assert kind == "InvalidRequest"
    assert says in message


@for_each("section", [0, 5, len(SECTIONS) - 1])
def test_a_section_that_changed_on_the_way_is_not_stored(
    served: Served, stub: KVStoreStub, digest: bytes, section: int
) -> None:
    before = served.worker.service.counters()["wire_damaged"]
    tokens = packed(TOKENS + 1000 * (section + 1))
    data = bytearray(DATA)
    data[section * SMALL.section_bytes + 7] ^= 16
    request = pb.PutRequest(start=pb.PutStart(namespace=digest, tokens=tokens), data=bytes(data), checksums=SUMS)
    code, message, kind = refused(lambda: stub.Put(iter([request]), timeout=WAIT_S))
    assert (code, kind) == (grpc.StatusCode.DATA_LOSS, "BrokenTransfer")
    assert f"part {section}" in message
    assert served.worker.service.counters()["wire_damaged"] == before + 1
    # At most the chunks that were whole before it are there, and those are right.
    found = stub.Match(pb.MatchRequest(namespace=digest, tokens=tokens), timeout=WAIT_S).chunks
    assert found <= section // SMALL.section_count
    sent = b"".join(each.data for each in stub.Get(pb.GetRequest(namespace=digest, tokens=tokens), timeout=WAIT_S))
    assert sent == DATA[: len(sent)]


def unary_calls(digest: bytes, tokens: bytes) -> dict[str, Callable[[KVStoreStub], object]]:
    """Every call that names a prompt."""
    return {
        "Match": lambda stub: stub.Match(pb.MatchRequest(namespace=digest, tokens=tokens), timeout=WAIT_S),
        "Get": lambda stub: list(stub.Get(pb.GetRequest(namespace=digest, tokens=tokens), timeout=WAIT_S)),
        "Hold": lambda stub: stub.Hold(pb.HoldRequest(namespace=digest, tokens=tokens), timeout=WAIT_S),
        "Pin": lambda stub: stub.Pin(pb.PinRequest(namespace=digest, tokens=tokens, ttl_s=60), timeout=WAIT_S),
        "CountRefs": lambda stub: stub.CountRefs(pb.CountRefsRequest(namespace=digest, tokens=tokens), timeout=WAIT_S),
        "Put": lambda stub: stub.Put(
            iter([pb.PutRequest(start=pb.PutStart(namespace=digest, tokens=tokens))]), timeout=WAIT_S
        ),
    }


NAMES = list(unary_calls(b"", b""))


@for_each("name", [*NAMES, "Clear", "MatchBlocks", "GetBlocks", "PutBlocks"])
def test_an_unknown_namespace(stub: KVStoreStub, name: str) -> None:
    unknown = bytes(range(32))
    calls = unary_calls(unknown, packed(TOKENS)) | {
        "Clear": lambda stub: stub.Clear(pb.ClearRequest(namespace=unknown), timeout=WAIT_S),
        "MatchBlocks": lambda stub: stub.MatchBlocks(pb.MatchBlocksRequest(namespace=unknown), timeout=WAIT_S),
        "GetBlocks": lambda stub: list(stub.GetBlocks(pb.GetBlocksRequest(namespace=unknown), timeout=WAIT_S)),
        "PutBlocks": lambda stub: stub.PutBlocks(
            iter([pb.PutBlocksRequest(start=pb.PutBlocksStart(namespace=unknown))]), timeout=WAIT_S
        ),
    }
    code, message, kind = refused(lambda: calls[name](stub))
    assert (code, kind) == (grpc.StatusCode.NOT_FOUND, "UnknownNamespace")
    assert "call OpenNamespace" in message


@for_each("name", NAMES)
def test_tokens_and_namespaces_that_are_none(stub: KVStoreStub, digest: bytes, name: str) -> None:
    for namespace, tokens, says in ((digest, b"12345", "5 bytes: expected 4 for each"), (b"short", b"", "has 5 bytes")):
        code, message, _ = refused(lambda n=namespace, t=tokens: unary_calls(n, t)[name](stub))  # type: ignore[misc]
        assert code is INVALID
        assert says in message


OTHERS: dict[str, tuple[Callable[[KVStoreStub, bytes], object], str]] = {
    "hold and prompt": (
        lambda stub, ns: list(stub.Get(pb.GetRequest(namespace=ns, hold=bytes(16)), timeout=WAIT_S)),
        "both a hold and a prompt",
    ),
    "a hold of negative time": (
        lambda stub, ns: stub.Hold(pb.HoldRequest(namespace=ns, ttl_s=-1), timeout=WAIT_S),
        "ttl_s is -1",
    ),
    "a hold of no time": (
        lambda stub, ns: stub.Hold(pb.HoldRequest(namespace=ns, ttl_s=float("nan")), timeout=WAIT_S),
        "ttl_s is nan",
    ),
    "a pin for ever": (
        lambda stub, ns: stub.Pin(pb.PinRequest(namespace=ns, ttl_s=float("inf")), timeout=WAIT_S),
        "ttl_s is inf: expected 1 to",
    ),
    "a pin id that is none": (lambda stub, _: stub.Unpin(pb.UnpinRequest(id="x"), timeout=WAIT_S), "pin id 'x'"),
    "a namespace without layout": (
        lambda stub, _: stub.OpenNamespace(pb.OpenNamespaceRequest(namespace=pb.Namespace(name="m")), timeout=WAIT_S),
        "no layout",
    ),
    "keys without sizes": (
        lambda stub, ns: list(
            stub.GetBlocks(pb.GetBlocksRequest(namespace=ns, keys=b"\x10" + bytes(16)), timeout=WAIT_S)
        ),
        "sizes have 0 bytes: expected 4",
    ),
    "blocks that do not come": (
        lambda stub, ns: stub.PutBlocks(
            iter(
                [
                    pb.PutBlocksRequest(
                        start=pb.PutBlocksStart(namespace=ns, keys=b"\x10" + bytes(16), sizes=packed([5]))
                    )
                ]
            ),
            timeout=WAIT_S,
        ),
        "ended within block 0",
    ),
}


@for_each("name", OTHERS)
def test_other_requests_that_are_wrong(stub: KVStoreStub, digest: bytes, name: str) -> None:
    call, says = OTHERS[name]
    code, message, _ = refused(lambda: call(stub, digest))
    assert code is INVALID
    assert says in message


@for_each("size", [18 << 20, 64 << 20])
def test_a_message_that_is_too_large(served: Served, size: int) -> None:
    with raw_channel(served) as channel:
        match: Any = channel.unary_unary(method("Match"))
        put: Any = channel.stream_unary(method("Put"))
        code, message, _ = refused(lambda: match(bytes(size), timeout=WAIT_S))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in message
        code, _, _ = refused(lambda: put(iter([bytes(size)]), timeout=WAIT_S))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_connections_that_say_nothing(served: Served, cache: Cache) -> None:
    host, port = served.address.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(50)]
    try:
        assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)
    finally:
        for connection in silent:
            connection.close()


def test_a_defect_of_ours_leaks_nothing(
    served: Served, stub: KVStoreStub, digest: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret path /etc/shadow")

    monkeypatch.setattr(Member, "refcount", broken)
    code, message, _ = refused(
        lambda: stub.CountRefs(pb.CountRefsRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S)
    )
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    incident = message.split("incident ")[1].split()[0]
    (record,) = [each for each in caplog.records if incident in each.getMessage()]
    assert record.exc_info is not None
    assert "secret path" in str(record.exc_info[1])


def test_more_calls_than_allowed_are_refused_and_others_go_on() -> None:
    limits = WorkerLimits(calls_max=3, spare_calls_max=4)
    with serving(worker_limits=limits) as served, raw_stub(served) as stub, ThreadPoolExecutor(3) as threads:
        digest = opened(stub, SMALL)
        go_on = threading.Event()

        def slowly() -> Iterator[pb.PutRequest]:
            yield pb.PutRequest(start=start(digest))
            go_on.wait(WAIT_S)
            yield pb.PutRequest(data=DATA, checksums=SUMS)

        puts = [threads.submit(lambda: stub.Put(slowly(), timeout=WAIT_S)) for _ in range(3)]
        eventually(lambda: served.worker.service.gate.inside_count == 3, "three puts inside")
        code, message, kind = refused(lambda: stub.Match(pb.MatchRequest(namespace=digest), timeout=WAIT_S))
        assert (code, kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Busy")
        assert "3 calls in progress: back off" in message
        assert stub.Stats(pb.StatsRequest(), timeout=WAIT_S).gauges["calls_in_flight"] == 3
        go_on.set()
        assert [each.result().tokens_present for each in puts] == 3 * [len(TOKENS)]


def test_holds_of_clients_that_vanished_end_by_themselves() -> None:
    with serving() as served, raw_stub(served) as stub, connected(served) as store:
        store.namespace("m", SMALL).put(TOKENS, KV)
        request = pb.HoldRequest(namespace=opened(stub, SMALL), tokens=packed(TOKENS), ttl_s=0.01)
        stub.Hold(request, timeout=WAIT_S)
        eventually(lambda: len(served.worker.service.holds) == 0, "the hold is over")
        assert len(served.member.node.holds) == 0
