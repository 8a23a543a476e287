"""Bad requests: each gets a status with a message that says what to do, and harms nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.client import Cache, Store
from kvstore.engine.coordination import ClusterMember
from kvstore.transport.limits import method
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.worker.limits import WorkerLimits
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, same
from tests.kit.wire import (
    IMAGES,
    KV,
    SECTIONS,
    TOKENS,
    chain_of,
    images_of,
    opened,
    packed,
    put_messages,
    raw_channel,
    raw_stub,
    refused,
)
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

KEY = b"\x10" + bytes(16)
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
    eventually(lambda: served.worker.service.in_flight.count == 0, "its bytes are given back")
    assert len(served.member.node.holds) == 0


def start(digest: bytes, **fields: Any) -> pb.PutStart:
    return pb.PutStart(**{"namespace": digest, "tokens": packed(TOKENS), **fields})


def put_of(digest: bytes, *rest: pb.PutRequest) -> Iterator[pb.PutRequest]:
    return iter([pb.PutRequest(start=start(digest)), *rest])


def images(*which: int) -> list[pb.PutRequest]:
    return [pb.PutRequest(index=index, data=IMAGES[index]) for index in which]


WRONG_PUTS: dict[str, tuple[Callable[[bytes], Iterator[pb.PutRequest]], str]] = {
    "no message at all": (lambda _: iter(()), "no message: expected one with start"),
    "no start": (lambda _: iter([pb.PutRequest(data=b"x")]), "first message of the stream has no start"),
    "two starts": (lambda ns: put_of(ns, pb.PutRequest(start=start(ns))), "later message of the stream has a start"),
    "no data": (put_of, "ended before chunk 0"),
    "a short chunk": (
        lambda ns: put_of(ns, *images(0, 1, 2), pb.PutRequest(index=3, data=IMAGES[3][:-1])),
        "ended within image 3",
    ),
    "a chunk too few": (lambda ns: put_of(ns, *images(0, 1, 2)), "ended before chunk 3"),
    "a chunk too many": (
        lambda ns: put_of(ns, *images(0, 1, 2, 3), pb.PutRequest(index=4, data=IMAGES[3])),
        "image of chunk 4 came: expected 4, of 4",
    ),
    "chunks out of order": (lambda ns: put_of(ns, *images(1)), "image of chunk 1 came: expected 0, of 4"),
    "extra bytes": (lambda ns: put_of(ns, pb.PutRequest(data=IMAGES[0] + b"x")), "image 0 has 1 bytes more"),
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


@for_each("place", [60, 130, 4096 + 7, -1])
def test_damaged_image_is_not_stored(served: Served, stub: KVStoreStub, digest: bytes, place: int) -> None:
    before = served.worker.service.counters()["wire_damaged"]
    tokens = TOKENS + 1000 * (place + 2)
    *good, last = images_of(chain_of(SMALL, tokens), SECTIONS)
    damaged = bytearray(last)
    damaged[place] ^= 16
    begin = pb.PutStart(namespace=digest, tokens=packed(tokens))
    code, message, kind = refused(lambda: stub.Put(iter(put_messages(begin, [*good, bytes(damaged)])), timeout=WAIT_S))
    assert (code, kind) == (grpc.StatusCode.DATA_LOSS, "BrokenTransfer")
    assert "image 3 changed on the way" in message
    assert served.worker.service.counters()["wire_damaged"] == before + 1
    assert stub.Match(pb.MatchRequest(namespace=digest, tokens=packed(tokens)), timeout=WAIT_S).chunks <= 3


def test_image_of_other_tokens_is_not_stored(stub: KVStoreStub, digest: bytes) -> None:
    """A bit that flips in the tokens of a put makes no other prompt of it."""
    tokens = packed(TOKENS + 50_000)
    messages = put_messages(pb.PutStart(namespace=digest, tokens=tokens), IMAGES)
    code, _, _ = refused(lambda: stub.Put(iter(messages), timeout=WAIT_S))
    assert code is grpc.StatusCode.DATA_LOSS
    assert not stub.Match(pb.MatchRequest(namespace=digest, tokens=tokens), timeout=WAIT_S).chunks


@for_each("name", ["Match", "Get", "Put", "Clear"])
def test_call_about_an_unknown_namespace_is_not_found(stub: KVStoreStub, name: str) -> None:
    unknown, tokens = bytes(range(32)), packed(TOKENS)
    calls: dict[str, Callable[[], object]] = {
        "Match": lambda: stub.Match(pb.MatchRequest(namespace=unknown, tokens=tokens), timeout=WAIT_S),
        "Get": lambda: list(stub.Get(pb.GetRequest(namespace=unknown, tokens=tokens), timeout=WAIT_S)),
        "Put": lambda: stub.Put(iter([pb.PutRequest(start=start(unknown))]), timeout=WAIT_S),
        "Clear": lambda: stub.Clear(pb.ClearRequest(namespace=unknown), timeout=WAIT_S),
    }
    code, message, kind = refused(calls[name])
    assert (code, kind) == (grpc.StatusCode.NOT_FOUND, "UnknownNamespace")
    assert "call OpenNamespace" in message


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
        lambda stub, ns: list(stub.Get(pb.GetRequest(namespace=ns, keys=KEY), timeout=WAIT_S)),
        "sizes have 0 bytes: expected 4",
    ),
    "a get of keys and tokens": (
        lambda stub, ns: list(stub.Get(pb.GetRequest(namespace=ns, keys=KEY, tokens=bytes(4)), timeout=WAIT_S)),
        "both keys of blocks and tokens",
    ),
    "a put of keys and tokens": (
        lambda stub, ns: stub.Put(iter([pb.PutRequest(start=start(ns, keys=KEY))]), timeout=WAIT_S),
        "both keys of blocks and tokens",
    ),
    "blocks that do not come": (
        lambda stub, ns: stub.Put(
            iter([pb.PutRequest(start=pb.PutStart(namespace=ns, keys=KEY, sizes=packed([5])))]), timeout=WAIT_S
        ),
        "ended before block 0",
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


def test_a_defect_of_ours_leaks_nothing(
    served: Served, stub: KVStoreStub, digest: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret path /etc/shadow")

    monkeypatch.setattr(ClusterMember, "refcount", broken)
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
            yield from images(0, 1, 2, 3)

        puts = [threads.submit(lambda: stub.Put(slowly(), timeout=WAIT_S)) for _ in range(3)]
        eventually(lambda: served.worker.service.gate.inside_count == 3, "three puts inside")
        code, message, kind = refused(lambda: stub.Match(pb.MatchRequest(namespace=digest), timeout=WAIT_S))
        assert (code, kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Busy")
        assert "3 calls in progress: back off" in message
        assert stub.Stats(pb.StatsRequest(), timeout=WAIT_S).gauges["calls_in_flight"] == 3
        go_on.set()
        assert [each.result().tokens_present for each in puts] == 3 * [len(TOKENS)]
