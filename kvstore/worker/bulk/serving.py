"""One request on a bulk connection, from its first frame to its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.node.node import Node
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel, LinkBroken, LinkLate
from kvstore.wire.bulk.frames import (
    REQUESTS,
    SHORT_CALLS,
    Kind,
    Request,
    decode_arena,
    decode_request,
    encode_arena,
)
from kvstore.wire.messages import parse, trace_of
from kvstore.wire.statuses import Refusal, refusal
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.bulk.getting import BulkGets, Leases
from kvstore.worker.bulk.putting import BulkPuts
from kvstore.worker.calls import BulkContext, Calls, Refused, UnaryCall
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts

LINGER_S = 2.0
"""How long the rest of a refused put is read on, so that the client can read why."""
_STREAMS = {Kind.GET: "Get", Kind.PUT: "Put"}
BULK_METHODS = (*_STREAMS.values(), *SHORT_CALLS)
"""The calls that requests are counted as."""


class BulkRequests:
    """Serves the requests of all bulk connections."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        in_flight: BytesInFlight,
        calls: Calls,
        limits: WorkerLimits,
        buffers: Buffers,
        short: Mapping[str, UnaryCall[Any]],
    ) -> None:
        """``short`` has the calls of SHORT_CALLS."""
        self._calls = calls
        self._limits = limits
        self._short = short
        self.memory = node.memory
        """The memory that clients on this host may map."""
        self.memory_id = node.ids.fresh() if node.memory is not None else b""
        self.leases = Leases(node.memory) if node.memory is not None else None
        self._gets = BulkGets(node, prompts, in_flight, calls, limits, buffers, self.leases)
        self._puts = BulkPuts(node, prompts, in_flight, calls, buffers)

    def serve(self, connection: Connection) -> bool:
        """Serves the request whose first bytes came; returns whether the connection can be used again. Never raises."""
        channel, limits = connection.channel, self._limits
        number = 0
        try:
            channel.limit(limits.idle_s, limits.stream_s_max)
            head = channel.receive_head()
            channel.expect(head, Kind.ARENA, Kind.MAP, *REQUESTS)
            number = head.request
            payload = channel.receive(head.length)
            if head.kind is Kind.ARENA:
                connection.adopt_arena(decode_arena(payload), limits.arena_bytes_max)
                return True
            channel.take_files(0)
            if head.kind is Kind.MAP:
                mapping = BulkContext(channel, limits.idle_s, (), connection.presented)
                with self._calls.serving("MapMemory", mapping, light=True):
                    self._hand_memory(channel, number)
                return True
            request = decode_request(payload)
            channel.limit(limits.idle_s, min(request.timeout_s, limits.stream_s_max))
            context = BulkContext(channel, request.timeout_s, trace_of(request.message), connection.presented)
            if head.kind is Kind.CALL:
                self._answer(channel, number, request, context)
                return channel.alive
            with self._calls.serving(_STREAMS[head.kind], context) as call, self._counting_idle():
                if head.kind is Kind.GET:
                    self._gets.get(channel, number, request.flag, request.message, call)
                else:
                    self._puts.put(connection, number, request.message, call)
            channel.take_files(0)
            return channel.alive
        except Refused as refused:
            self._refuse(connection, number, refused.refusal)
        except LinkLate:
            self._calls.add(WorkerCount.CALLS_IDLE)
        except KVStoreError as error:
            self._refuse(connection, number, refusal(error))
        return False

    def close(self, timeout_s: float) -> None:
        """Stops waiting for clients. Idempotent."""
        if self.leases is not None:
            self.leases.close(timeout_s)

    def _answer(self, channel: Channel, number: int, request: Request, context: BulkContext) -> None:
        if request.flag >= len(SHORT_CALLS):
            raise InvalidRequest(f"call {request.flag} is not known: expected 0 to {len(SHORT_CALLS) - 1}")
        name = SHORT_CALLS[request.flag]
        served = self._short[name]
        with self._counting_idle():
            try:
                with self._calls.serving(name, context, light=served.light) as call:
                    answer = served.answer(parse(served.kind, request.message), call).SerializeToString()
            except Refused as refused:
                # Nothing else is on its way: the connection goes on.
                channel.send(Kind.REFUSED, number, [_message_of(refused.refusal)])
            else:
                channel.send(Kind.ANSWER, number, [answer])

    def _hand_memory(self, channel: Channel, number: int) -> None:
        if self.memory is None or not channel.is_unix:
            raise InvalidRequest(
                "no memory to map: it is offered on a unix socket only, by a worker with a memory tier"
            )
        arena = self.memory.arena
        channel.send(Kind.MEMORY, number, [encode_arena(arena.size_bytes)], [arena.fd])

    @contextmanager
    def _counting_idle(self) -> Iterator[None]:
        try:
            yield
        except LinkLate:
            self._calls.add(WorkerCount.CALLS_IDLE)
            raise

    def _refuse(self, connection: Connection, number: int, refused: Refusal) -> None:
        """Sends the reason and ends the connection: bytes in flight could not be told from a new request."""
        channel = connection.channel
        if not channel.alive:
            return
        try:
            channel.limit(LINGER_S, LINGER_S)
            channel.send(Kind.REFUSED, number, [_message_of(refused)])
            scratch = memoryview(bytearray(1 << 16))
            while True:
                channel.receive_some([scratch])
        except (LinkBroken, LinkLate):
            pass


def _message_of(refused: Refusal) -> bytes:
    message = pb.BulkRefusal(code=refused.code.value[0], message=refused.message, trailers=dict(refused.trailers))
    return message.SerializeToString()
