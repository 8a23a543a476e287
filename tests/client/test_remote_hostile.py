"""Workers and networks that lie, break off or fall silent: a miss or an error in time, and never a wrong byte."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore import Layout
from kvstore.client.limits import ClientLimits
from kvstore.core.namespace import Namespace
from kvstore.errors import KVStoreError, Unavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from tests.kit.cases import for_each
from tests.kit.etcd import Proxy
from tests.kit.patience import stretched
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.wire import IMAGES, KV, TOKENS
from tests.kit.workers import WAIT_S, connected, serving, tokens_of

pytestmark = pytest.mark.slow

NAMESPACE = Namespace.of("m", SMALL)
HASTY = stretched(
    ClientLimits(match_s=2.0, read_s=0.5, write_s=2.0, pin_s=5.0), "match_s", "read_s", "write_s", "pin_s"
)
"""For calls that end by their deadline."""
START = pb.GetResponse(start=pb.GetStart(chunks=4, tokens=len(TOKENS)))

Answer = Callable[[Any, grpc.ServicerContext], Iterator[Any]]


class Liar(KVStoreServicer):
    """A worker that answers reads as it was told to."""

    def __init__(self, get: Answer | None = None) -> None:
        self._get = get
        self.ended = threading.Event()

    def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: object) -> pb.OpenNamespaceResponse:
        return pb.OpenNamespaceResponse(digest=NAMESPACE.digest)

    def Hold(self, request: pb.HoldRequest, context: object) -> pb.HoldResponse:
        return pb.HoldResponse(hold=bytes(16), chunks=4, tokens=len(TOKENS))

    def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=True)

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.GetResponse]:
        assert self._get is not None
        yield from self._get(request, context)

    def Put(self, messages: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        self.ended.wait(WAIT_S)  # takes nothing and says nothing
        return pb.PutResponse()

    def Match(self, request: pb.MatchRequest, context: object) -> pb.MatchResponse:
        return pb.MatchResponse(chunks=0 if request.uncounted else 1 << 31)


@contextmanager
def lying(liar: Liar) -> Iterator[str]:
    """Starts a server for a liar."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_KVStoreServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        liar.ended.set()
        server.stop(0).wait(WAIT_S)


def frames(*messages: pb.GetResponse) -> Answer:
    return lambda request, context: iter(messages)


def image(index: int, data: bytes = b"") -> pb.GetResponse:
    return pb.GetResponse(index=index, data=data or IMAGES[index])


def flipped(index: int, position: int) -> pb.GetResponse:
    data = bytearray(IMAGES[index])
    data[position] ^= 1
    return image(index, bytes(data))


def broken_off(request: object, context: grpc.ServicerContext) -> Iterator[pb.GetResponse]:
    yield from (START, image(0), image(1), image(2, IMAGES[2][:5000]))
    context.abort(grpc.StatusCode.INTERNAL, "gone")


def silent(request: object, context: grpc.ServicerContext) -> Iterator[pb.GetResponse]:
    ended = threading.Event()
    context.add_callback(ended.set)
    yield from (START, image(0))
    ended.wait(WAIT_S)


ALL = [image(index) for index in range(4)]
GETS: dict[str, tuple[Answer, int]] = {
    "nothing": (frames(), 0),
    "no start": (frames(*ALL), 0),
    "only a start": (frames(START), 0),
    "more chunks than asked for": (frames(pb.GetResponse(start=pb.GetStart(chunks=2**31)), *ALL), 4),
    "more chunks than announced": (frames(START, *ALL, image(4, IMAGES[3])), 4),
    "more bytes than an image": (frames(START, image(0, IMAGES[0] + b"x")), 0),
    "a chunk twice": (frames(START, image(0), image(0)), 1),
    "another chunk": (frames(START, image(0, IMAGES[1])), 0),
    "a wrong byte in the first header": (frames(START, flipped(0, 70), *ALL[1:]), 0),
    "a wrong byte in the third chunk": (frames(START, *ALL[:2], flipped(2, 5000), ALL[3]), 2),
    "an end within a chunk": (frames(START, image(0), image(1, IMAGES[1][:5000])), 1),
    "an error in the middle": (broken_off, 2),
    "silence in the middle": (silent, 1),
}


@for_each("name", GETS)
def test_a_get_that_is_answered_wrongly(name: str) -> None:
    answer, good = GETS[name]
    limits = HASTY if answer is silent else ClientLimits()
    with lying(Liar(answer)) as address, connected(address, limits=limits) as store:
        cache = store.namespace("m", SMALL)
        assert cache.match(TOKENS) == len(TOKENS), "no more than it was asked for"
        out = np.zeros_like(KV)
        count = cache.get(TOKENS, out=out)
        assert count <= good * SMALL.chunk_tokens
        assert same(out[:, :, :count], KV[:, :, :count])
        if good and "silence" not in name:
            assert count == good * SMALL.chunk_tokens
        after = out.copy()
        with cache.hold(TOKENS) as hold:
            again = np.zeros_like(KV)
            held = hold.read_into(again)
            assert same(again[:, :, :held], KV[:, :, :held])
            assert same(np.concatenate([KV[:, :, :0], *hold.view()], axis=2), KV[:, :, : len(hold.view()) * 16])
        assert same(out, after)  # nobody wrote into it after the return


def test_a_put_that_nobody_takes_returns_in_time_and_lets_go_of_the_memory() -> None:
    layout = Layout(layers=4, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=256)  # 4 MiB
    tokens = np.arange(32 * layout.chunk_tokens)
    array = np.zeros(layout.shape(len(tokens)), np.float16)
    with lying(Liar()) as address, connected(address, limits=HASTY) as store:
        cache = store.namespace("m", layout)
        with pytest.raises(Unavailable):
            cache.put(tokens, array)
        gc.collect()
        assert sys.getrefcount(array) == 2  # this name, and the argument of getrefcount


class Flipping:
    """Turns a bit now and then, where no checksum of the network would see it."""

    def __init__(self, seed: int, every_bytes: int) -> None:
        self._random = random.Random(seed)
        self._every_bytes = every_bytes
        self.flipped = 0

    def __call__(self, data: bytes) -> bytes:
        if self._random.random() >= len(data) / self._every_bytes:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        self.flipped += 1
        return bytes(changed)


@pytest.mark.slow
@for_each("bulk", ["grpc", "tcp"])
@for_each("seed", range(2))
def test_a_network_that_flips_bits_never_makes_a_wrong_byte(seed: int, bulk: str) -> None:
    layout = Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=64)  # 128 KiB
    with serving() as served:
        listener = served.worker.service.bulk
        assert listener is not None
        calls, data = Flipping(seed, 400_000), Flipping(seed, 400_000)
        proxy = Proxy(served.address, change=calls)
        bulk_proxy = Proxy(f"127.0.0.1:{listener.tcp_port}", change=data)
        listener.tcp_port = bulk_proxy.port
        acknowledged: set[int] = set()
        misses = 0
        try:
            with connected(proxy.endpoint, limits=HASTY, bulk=bulk) as store, connected(served) as direct:
                direct.namespace("m", layout)
                cache = None
                for turn in range(60):
                    key = turn % 20
                    tokens = tokens_of(key, 4 * layout.chunk_tokens)
                    kv = kv_of(layout, tokens)
                    try:
                        cache = cache or store.namespace("m", layout)
                        if cache.put(tokens, kv).tokens_present == len(tokens):
                            acknowledged.add(key)
                    except KVStoreError:
                        pass
                    if cache is not None:
                        count, array = cache.get(tokens)
                        assert same(array, kv[:, :, :count])
                        misses += count < len(tokens)
                clean = direct.namespace("m", layout)
                for key in range(20):
                    tokens = tokens_of(key, 4 * layout.chunk_tokens)
                    count, array = clean.get(tokens)
                    assert same(array, kv_of(layout, tokens)[:, :, :count])
                    assert count == len(tokens) or key not in acknowledged
        finally:
            proxy.close()
            bulk_proxy.close()
        assert calls.flipped + data.flipped > 5
        assert bool(data.flipped) == (bulk == "tcp")
