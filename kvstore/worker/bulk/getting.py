"""Get over a bulk connection: which chunks, under which hold, and what the client takes."""

from __future__ import annotations

from kvstore.counts import NodeCount
from kvstore.errors import InvalidRequest
from kvstore.node.handing import Asked
from kvstore.node.node import Node
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import Mode
from kvstore.wire.messages import parse
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.bulk.images import ImageSender
from kvstore.worker.bulk.leases import Leases
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class BulkGets:
    """Serves GET and GET_BLOCKS frames. ``leases`` is None if the node has no memory."""

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
        """Answers one request about a prompt."""
        request = parse(pb.GetRequest, message)
        self._check_mode(channel, mode, context)
        first = request.first
        if request.memory_only:
            # Only what memory has now, and without a request to another worker: the client is a peer (rule P2).
            if mode != Mode.STREAM:
                raise InvalidRequest("memory_only with files or slots: expected mode 0 (a stream)")
            chain, memory = self._prompts.known_chain(request, context), self._node.memory
            count = first + (memory.leading(chain, first) if memory is not None and first < len(chain) else 0)
            self._sender(channel, number, Asked(chain, memory_only=True), context).send(first, count)
            return
        with self._prompts.held(request, context) as (hold, count):
            if not request.uncounted:
                self._node.counters.add(NodeCount.REQUESTS_GET)
            sender = self._sender(channel, number, Asked(hold.chain, hold), context)
            try:
                sender.send(first, count, *self._taken(mode))
            finally:
                if first < count:
                    good = next((index for index in range(first, count) if index not in sender.sent), count)
                    self._node.used(hold, good)

    def get_blocks(self, channel: Channel, number: int, mode: int, message: bytes, context: Call) -> None:
        """Answers one request about engine-hashed blocks."""
        request = parse(pb.GetBlocksRequest, message)
        self._check_mode(channel, mode, context)
        wanted = self._prompts.blocks(request.namespace, request.keys, request.sizes, context)
        asked = Asked(wanted, self._prompts.block_hold(request.hold, wanted.namespace))
        if not request.uncounted:
            self._node.counters.add(NodeCount.REQUESTS_GET)
        self._prompts.settle_blocks(wanted.namespace, wanted.keys)
        sender = self._sender(channel, number, asked, context)
        try:
            sender.send(0, len(wanted), *self._taken(mode))
        finally:
            self._node.reads.used(wanted.picked(sorted(sender.sent)))

    def _check_mode(self, channel: Channel, mode: int, context: Call) -> None:
        if mode not in (Mode.STREAM, Mode.FILES, Mode.SLOTS):
            raise InvalidRequest(f"the mode of a get is {mode}: expected 0 (a stream), 1 (files) or 2 (slots)")
        if mode == Mode.STREAM:
            return
        if not channel.is_unix:
            raise InvalidRequest("files and slots can be given only on a unix socket")
        if mode == Mode.SLOTS and self._leases is None:
            raise InvalidRequest("slots can be given only by a worker that has memory")
        context.allow_every()  # shared memory holds chunks of all tenants (rule X8)

    def _taken(self, mode: int) -> tuple[Leases | None, bool]:
        """Returns what the client takes beside bytes: slots under a lease, open files."""
        return self._leases if mode == Mode.SLOTS else None, mode != Mode.STREAM and self._node.hands_files

    def _sender(self, channel: Channel, number: int, asked: Asked, context: Call) -> ImageSender:
        in_flight, window_bytes = self._in_flight, self._limits.window_bytes
        return ImageSender(
            self._node, channel, number, asked, in_flight, self._calls, self._buffers, window_bytes, context
        )
