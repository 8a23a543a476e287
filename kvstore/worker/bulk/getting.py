"""Get over a bulk connection: which chunks, under which hold, and in which mode."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.counts import NodeCount, WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.handing import Asked
from kvstore.node.node import Node
from kvstore.node.wanted import Wanted, payload_bytes
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import Kind, Mode
from kvstore.wire.messages import parse
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.bulk.handing import ImageHanding
from kvstore.worker.bulk.layering import layers_of, send_layers
from kvstore.worker.bulk.leases import Leases
from kvstore.worker.bulk.streaming import ImageStream
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class BulkGets:
    """Serves GET frames. ``leases`` is None if the node has no memory."""

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
        self._check_mode(channel, mode, context)
        if request.keys:
            self._get_blocks(channel, number, mode, request, context)
            return
        if request.memory_only:
            self._from_memory(channel, number, mode, request, context)
            return
        with self._prompts.held(request, context) as (hold, count):
            if not request.uncounted:
                self._node.counters.add(NodeCount.REQUESTS_GET)
            self._start(channel, number, count, hold.chain.namespace.layout.chunk_tokens)
            asked = Asked(hold.chain, hold)
            if mode != Mode.STREAM:
                handing = self._handing(channel, number, mode, asked, count, context)
                good = handing.serve()
                self._count(handing, hold.chain, range(request.first, good))
                self._node.used(hold, good)
            elif by_layer and count:
                layers = layers_of(self._node, hold, count, self._in_flight, self._buffers, context)
                send_layers(channel, number, hold.chain.namespace.layout.section_bytes, layers, self._calls)
                channel.send(Kind.END, number)
            else:
                stream = self._stream(channel, number, asked)
                try:
                    stream.send(request.first, count, context)
                finally:
                    if request.first < count:
                        self._node.used(hold, request.first + len(stream.sent))

    def _get_blocks(self, channel: Channel, number: int, mode: int, request: pb.GetRequest, context: Call) -> None:
        wanted = self._prompts.blocks(request.namespace, request.keys, request.sizes, context)
        asked = Asked(wanted, self._prompts.block_hold(request.hold, wanted.namespace))
        if not request.uncounted:
            self._node.counters.add(NodeCount.REQUESTS_GET)
        self._prompts.settle_blocks(wanted.namespace, wanted.keys)
        if mode == Mode.STREAM:
            stream = self._stream(channel, number, asked)
            try:
                stream.send(0, len(wanted), context)
            finally:
                self._node.reads.used(wanted.picked(sorted(stream.sent)))
            return
        handing = self._handing(channel, number, mode, asked, len(wanted), context)
        handing.serve()
        self._count(handing, wanted, handing.given)
        self._node.reads.used(wanted.picked(handing.given))

    def _from_memory(self, channel: Channel, number: int, mode: int, request: pb.GetRequest, context: Call) -> None:
        """Gives only what memory has now, and asks nobody else: the client is a peer (rule P2)."""
        memory = self._node.memory
        if mode == Mode.FILES:
            raise InvalidRequest("memory_only with files: expected mode 0 (a stream) or 2 (slots)")
        chain = self._prompts.known_chain(request, context)
        first = request.first
        count = first + (memory.leading(chain, first) if memory is not None and first < len(chain) else 0)
        self._start(channel, number, count, chain.namespace.layout.chunk_tokens)
        asked = Asked(chain, memory_only=True)
        if mode == Mode.SLOTS:
            self._handing(channel, number, mode, asked, count, context).serve()
        else:
            self._stream(channel, number, asked).send(first, count, context)

    def _check_mode(self, channel: Channel, mode: int, context: Call) -> None:
        if mode not in (Mode.STREAM, Mode.FILES, Mode.SLOTS):
            raise InvalidRequest(f"the mode of a get is {mode}: expected 0 (a stream), 1 (files) or 2 (slots)")
        if mode == Mode.STREAM:
            return
        if not channel.is_unix:
            raise InvalidRequest("files and slots can be given only on a unix socket")
        if mode == Mode.FILES and not self._node.hands_files:
            raise InvalidRequest("files can be handed over only of a root that has files")
        if mode == Mode.SLOTS and self._leases is None:
            raise InvalidRequest("slots can be given only by a worker that has memory")
        context.allow_every()  # shared memory holds chunks of all tenants (rule X8)

    def _count(self, handing: ImageHanding, wanted: Wanted, indexes: Sequence[int]) -> None:
        """Counts the handed-over chunks that the client read."""
        from_files = [index for index in indexes if index not in handing.in_memory]
        all_bytes, files_bytes = payload_bytes(wanted, indexes), payload_bytes(wanted, from_files)
        self._calls.add(WorkerCount.WIRE_BYTES_OUT, all_bytes)
        counters = self._node.counters
        counters.add_read(files_bytes, len(from_files))
        counters.add(NodeCount.MEMORY_HITS, len(indexes) - len(from_files))
        counters.add(NodeCount.MEMORY_BYTES, all_bytes - files_bytes)

    def _start(self, channel: Channel, number: int, count: int, chunk_tokens: int) -> None:
        start = pb.GetStart(chunks=count, tokens=count * chunk_tokens)
        channel.send(Kind.START, number, [start.SerializeToString()])

    def _stream(self, channel: Channel, number: int, asked: Asked) -> ImageStream:
        return ImageStream(
            self._node,
            channel,
            number,
            asked,
            self._in_flight,
            self._calls,
            self._buffers,
            self._limits.window_bytes,
        )

    def _handing(
        self, channel: Channel, number: int, mode: int, asked: Asked, count: int, context: Call
    ) -> ImageHanding:
        leases = self._leases if mode == Mode.SLOTS else None
        return ImageHanding(self._node, channel, number, asked, count, leases, context)
