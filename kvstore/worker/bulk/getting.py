"""Get over a bulk connection: which chunks, under which hold, and in which of its ways."""

from __future__ import annotations

from kvstore.address import Chain
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import Kind, Mode
from kvstore.wire.messages import parse
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.handing import ChunkHanding
from kvstore.worker.bulk.layering import send_layers
from kvstore.worker.bulk.leases import Leases
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.bulk.streaming import ChunkStream
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class BulkGets:
    """Serves GET frames. ``leases`` is None where the node has no memory."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        in_flight: BytesInFlight,
        calls: Calls,
        limits: WorkerLimits,
        buffers: Buffers,
        leases: Leases | None,
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits
        self._buffers = buffers
        self._leases = leases

    def get(self, channel: Channel, number: int, mode: int, message: bytes, context: Call) -> None:
        """Answers one request."""
        request = parse(pb.GetRequest, message)
        by_layer = request.order == pb.ORDER_LAYERS
        if request.order not in (pb.ORDER_UNSPECIFIED, pb.ORDER_CHUNKS, pb.ORDER_LAYERS):
            raise InvalidRequest(f"order is {request.order}: expected ORDER_CHUNKS (1) or ORDER_LAYERS (2)")
        if by_layer and (mode != Mode.STREAM or request.first or request.memory_only):
            raise InvalidRequest("layer by layer: expected mode 0 (a stream), first 0 and no memory_only")
        if mode not in (Mode.STREAM, Mode.FILES, Mode.SLOTS):
            raise InvalidRequest(f"the mode of a GET is {mode}: expected 0 (a stream), 1 (files) or 2 (slots)")
        if mode == Mode.FILES and not (channel.is_unix and self._node.hands_files):
            raise InvalidRequest("files can be handed over only on a unix socket, of a root that has files")
        if mode == Mode.SLOTS and not (channel.is_unix and self._leases is not None):
            raise InvalidRequest("slots can be given only on a unix socket, by a worker that has memory")
        if mode != Mode.STREAM:
            context.allow_every()  # what is shared is not one tenant's alone (rule X8)
        if request.memory_only:
            self._from_memory(channel, number, mode, request, context)
            return
        with self._prompts.held(request, context) as (hold, count):
            self._start(channel, number, count, hold.chain.namespace.layout.chunk_tokens)
            if mode != Mode.STREAM:
                self._hand_over(channel, number, mode, hold, request.first, count, context)
                return
            if by_layer and count:
                send_layers(
                    self._node, channel, number, hold, count, self._in_flight, self._buffers, self._calls, context
                )
            elif request.first < count:
                self._stream(channel, number, hold.chain, hold).send(request.first, count, context)
            channel.send(Kind.END, number)

    def _from_memory(self, channel: Channel, number: int, mode: int, request: pb.GetRequest, context: Call) -> None:
        """Gives what memory has at this moment, and asks nobody else: the client is a peer (rule P2)."""
        memory = self._node.memory
        if mode == Mode.FILES:
            raise InvalidRequest("memory_only with files: expected mode 0 (a stream) or 2 (slots)")
        chain = self._prompts.known_chain(request, context)
        first = request.first
        count = first + (memory.leading(chain, first) if memory is not None and first < len(chain) else 0)
        self._start(channel, number, count, chain.namespace.layout.chunk_tokens)
        if mode == Mode.SLOTS:
            ChunkHanding(self._node, channel, number, chain, None, count, self._leases, context).serve(mode)
            return
        if first < count:
            self._stream(channel, number, chain, None).send(first, count, context)
        channel.send(Kind.END, number)

    def _hand_over(
        self, channel: Channel, number: int, mode: int, hold: Hold, first: int, count: int, context: Call
    ) -> None:
        handing = ChunkHanding(self._node, channel, number, hold.chain, hold, count, self._leases, context)
        good = handing.serve(mode)
        read = max(0, good - first)
        chunk_bytes = hold.chain.namespace.layout.chunk_bytes
        self._calls.add(WorkerCount.WIRE_BYTES_OUT, read * chunk_bytes)
        from_files = max(0, read - handing.from_memory_count)
        self._node.counters.add_read(from_files * chunk_bytes, from_files)
        self._node.used(hold, good)

    def _start(self, channel: Channel, number: int, count: int, chunk_tokens: int) -> None:
        start = pb.GetStart(chunks=count, tokens=count * chunk_tokens)
        channel.send(Kind.START, number, [start.SerializeToString()])

    def _stream(self, channel: Channel, number: int, chain: Chain, hold: Hold | None) -> ChunkStream:
        return ChunkStream(
            self._node,
            channel,
            number,
            chain,
            hold,
            self._in_flight,
            self._calls,
            self._buffers,
            self._limits.window_bytes,
        )
