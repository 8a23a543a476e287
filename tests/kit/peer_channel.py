"""A peer for tests: a gRPC server that offers bulk connections, and answers on them as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any, cast

import grpc
import numpy as np

from kvstore.core.clock import RandomIds
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import ChunkKeys
from kvstore.transport.channel import (
    Channel,
    FrameKind,
    LentSlots,
    LinkBroken,
    LinkLate,
    Mode,
    decode_request,
    encode_slots,
    encode_span,
)
from kvstore.transport.limits import method
from kvstore.transport.messages import parse
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.context import Calls, Gate
from kvstore.worker.data_put import Connection
from kvstore.worker.data_server import BulkListener, BulkRequests
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.server import Health
from tests.kit.images import encoded
from tests.kit.patience import NEVER_S, PATIENCE_S

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16)
SPACE = Namespace.of("m", LAYOUT)

Say = Callable[[Channel, int, pb.GetRequest], None]
"""Answers one GET on a channel, under the number of the request."""


def chain_of(count: int, seed: int = 0) -> ChunkKeys:
    tokens = np.random.default_rng(seed).integers(0, 1 << 31, count * LAYOUT.chunk_tokens).astype("<u4")
    return ChunkKeys.of(SPACE, tokens)


def image_of(chain: ChunkKeys, index: int) -> bytes:
    """The image of a chunk, whose bytes its address determines."""
    expected = chain.expected(index)
    random = np.random.default_rng(int.from_bytes(chain.addresses[index][:8], "little"))
    return encoded(expected, random.integers(0, 256, expected.payload_bytes, dtype=np.uint8).tobytes())


def room_for(chain: ChunkKeys, indexes: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(chain.expected(index).file_bytes)) for index in indexes]


def send_file(channel: Channel, number: int, index: int, image: bytes) -> None:
    channel.send(FrameKind.IMAGES, number, [encode_span(index, 1), image])


def start(channel: Channel, number: int, chunks: int) -> None:
    channel.send(FrameKind.SLOTS, number, [encode_slots(LentSlots(chunks, 0, ()))])


def honest(chain: ChunkKeys, has: set[int] | None = None) -> Say:
    """Returns the answers of a worker whose memory has the chunks ``has`` of a chain (all of them if not given)."""

    def say(channel: Channel, number: int, request: pb.GetRequest) -> None:
        stop = request.first
        while stop < request.chunks_max and (has is None or stop in has):
            stop += 1
        start(channel, number, stop)
        for index in range(request.first, stop):
            send_file(channel, number, index, image_of(chain, index))

    return say


class Speaker:
    """A listener with chosen answers; keeps the questions."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.asked: list[pb.GetRequest] = []
        self.address = ""
        self.dials = 0
        self.port = 0
        """Where bulk connections are taken: the listener's own, unless a test puts something in between."""
        self.health = Health()
        self.ended = threading.Event()

    def serve(self, connection: Connection) -> bool:
        """For ``BulkListener``: one request of a connection."""
        channel = connection.channel
        try:
            channel.limit(NEVER_S, NEVER_S)
            head = channel.receive_head()
            channel.expect(head, FrameKind.GET)
            request = decode_request(channel.receive(head.length))
            assert request.flag == Mode.STREAM
            message = parse(pb.GetRequest, request.message)
            self.asked.append(message)
            self.say(channel, head.request, message)
        except (LinkBroken, LinkLate):
            return False
        return channel.alive

    def close(self, timeout_s: float) -> None:
        """For ``BulkListener``: nothing is left to end."""


@contextmanager
def speaking(say: Say) -> Iterator[Speaker]:
    """A peer that says ``say``."""
    speaker = Speaker(say)
    limits = WorkerLimits()
    calls = Calls(Gate(limits.calls_max), RandomIds())
    listener = BulkListener(cast(BulkRequests, speaker), calls, limits, "127.0.0.1")
    listener.start()
    speaker.port = listener.tcp_port

    def open_bulk(_: bytes, __: grpc.ServicerContext) -> bytes:
        speaker.dials += 1
        grant = listener.grant()
        offer = pb.OpenBulkResponse(tcp_port=speaker.port, grant=grant.id, secret=grant.secret, ttl_s=5.0)
        answer: bytes = offer.SerializeToString()
        return answer

    service, name = method("OpenBulk").lstrip("/").split("/")
    handlers: Any = {name: grpc.unary_unary_rpc_method_handler(open_bulk)}
    server = grpc.server(
        futures.ThreadPoolExecutor(8), handlers=[grpc.method_handlers_generic_handler(service, handlers)]
    )
    speaker.health.add_to(server)
    speaker.health.set(True)
    speaker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield speaker
    finally:
        speaker.ended.set()
        server.stop(0).wait(PATIENCE_S)
        listener.close(5)
