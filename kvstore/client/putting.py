"""Putting chunks and blocks to a worker, straight from the caller's memory: past gRPC, or over it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc

from kvstore.buffers import Sections
from kvstore.client.bulk.sending import Cargo, send_put
from kvstore.client.caller import Tools
from kvstore.client.endpoints import Endpoint
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.keyset import KeySet
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.images import image_messages
from kvstore.wire.messages import parse, sealed
from kvstore.wire.watch import Watch, Watched

log = logging.getLogger(__name__)


def put_past_grpc(
    endpoint: Endpoint, start: pb.PutStart, cargo: Callable[[], Cargo], tools: Tools, timeout_s: float
) -> pb.PutResponse | None:
    """Puts what ``cargo()`` has over a bulk connection; None if there is none, or it broke."""
    with endpoint.bulk.link(timeout_s) as link:
        if link is None:
            return None
        tools.counters.add(ClientCount.PUTS_SHARED if link.is_shared else ClientCount.PUTS_TCP)
        try:
            answer = send_put(
                link,
                start,
                cargo(),
                reserve=partial(endpoint.bulk.reserve_arena, link),
                idle_s=tools.limits.write_s,
                timeout_s=timeout_s,
                lanes=tools.lanes,
            )
            return parse(pb.PutResponse, answer)
        except (LinkBroken, InvalidRequest) as error:
            link.channel.alive = False
            log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
            tools.counters.add(ClientCount.BULK_BROKEN)
    return None


def put_over_grpc(
    endpoint: Endpoint, start: pb.PutStart, wanted: KeySet, sections: Sections, tools: Tools, left_s: float
) -> pb.PutResponse:
    """Sends images of blocks, or of the chunks of a prompt that are missing."""
    ends_s = time.monotonic() + left_s
    opening, is_chain = pb.PutStart(), wanted.prefix_ordered
    opening.CopyFrom(start)
    first = start.first if is_chain else 0
    present = _present(endpoint, start, tools.limits.match_s) if is_chain else 0
    while True:
        begin = max(first, present)
        if is_chain:
            opening.first = begin
        tools.counters.add(ClientCount.PUTS_GRPC)
        outgoing, stream = Outgoing(_messages(opening, wanted, begin, sections)), endpoint.stream_out("Put")
        raw = send_stream(stream, outgoing, tools.watch, tools.limits.write_s, ends_s - time.monotonic())
        answer = pb.PutResponse.FromString(raw)
        if begin == first or answer.tokens_present >= begin * wanted.namespace.layout.chunk_tokens:
            answer.chunks_found += begin - first
            return answer
        present = 0  # a chunk that was there is deleted: send all


def _messages(start: pb.PutStart, wanted: KeySet, first: int, sections: Sections) -> Iterator[bytes]:
    yield pb.PutRequest(start=start).SerializeToString()
    for index in range(first, len(wanted)):
        yield from image_messages(pb.PutRequest, index, wanted.expected(index), sections(index))


def _present(endpoint: Endpoint, start: pb.PutStart, timeout_s: float) -> int:
    """Returns how many leading chunks need no sending. Errors are left to the put: not knowing costs only bytes."""
    request = sealed(pb.MatchRequest(namespace=start.namespace, tokens=start.tokens, uncounted=True))
    try:
        return pb.MatchResponse.FromString(endpoint.unary("Match")(request, timeout=timeout_s)).chunks
    except grpc.RpcError:
        return 0


class Outgoing:
    """The messages of a put. gRPC takes them in its own thread, which must not outlive the call.

    ``close`` returns once that thread has let go of the caller's memory.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._lock = threading.Lock()
        self._messages: Iterator[bytes] | None = messages
        self._stream: Watched | None = None

    def watch(self, stream: Watched) -> None:
        """Counts each message taken as progress of ``stream``."""
        self._stream = stream

    def __iter__(self) -> Outgoing:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._messages is None:
                raise StopIteration
            if self._stream is not None:
                self._stream.moved()
            return next(self._messages)

    def close(self) -> None:
        """Ends the messages. Idempotent."""
        with self._lock:
            self._messages = None


def send_stream(stub: Any, outgoing: Outgoing, watch: Watch, idle_s: float, timeout_s: float) -> bytes:
    """Sends a stream; returns the answer. Raises what gRPC raises."""
    call = stub.future(outgoing, timeout=timeout_s)
    try:
        with watch.begin(idle_s, timeout_s, call.cancel) as stream:
            outgoing.watch(stream)
            answer: bytes = call.result()
            return answer
    finally:
        call.cancel()
        outgoing.close()
