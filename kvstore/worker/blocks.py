"""MatchBlocks and GetBlocks: engine-hashed blocks, as many at once as fit into a window of memory."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.buffers import cut
from kvstore.counts import WorkerCount
from kvstore.node.deadline import Deadline
from kvstore.node.node import Node
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import unpack_keys, unpack_sizes
from kvstore.wire.parts import encode_parts
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.streaming import windows
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class BlockStreams:
    """Serves the calls about blocks."""

    def __init__(
        self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls, limits: WorkerLimits
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits

    def match(self, request: pb.MatchBlocksRequest, context: Call) -> pb.MatchBlocksResponse:
        """How many leading keys are there, and which of all where that is asked for."""
        namespace, keys = self._prompts.namespace(request.namespace, context), unpack_keys(request.keys)
        self._prompts.settle_blocks(namespace, keys)
        deadline = Deadline(self._node.clock, seconds_left(context, self._node.limits.match_deadline_s))
        if request.each:
            present = bytes(self._node.blocks.present(namespace, keys, deadline))
            return pb.MatchBlocksResponse(blocks=len(present) - len(present.lstrip(b"\1")), present=present)
        return pb.MatchBlocksResponse(blocks=self._node.blocks.match(namespace, keys, deadline))

    def get(self, request: pb.GetBlocksRequest, context: Call) -> Iterator[bytes]:
        """The encoded messages of one answer."""
        namespace, keys = self._prompts.namespace(request.namespace, context), unpack_keys(request.keys)
        hold = self._prompts.block_hold(request.hold, namespace)
        sizes = unpack_sizes(request.sizes, len(keys))
        self._prompts.settle_blocks(namespace, keys)
        groups = list(windows(sizes, self._limits.window_bytes))
        largest = max((sum(sizes[group]) for group in groups), default=0)
        with self._in_flight.reserved(largest):
            memory = memoryview(bytearray(largest))
            for group in groups:
                buffers = cut(memory, sizes[group])
                deadline = Deadline(self._node.clock, seconds_left(context, self._node.limits.read_deadline_s))
                if hold is not None:
                    self._node.holds.check(hold)
                hits = self._node.blocks.get(namespace, keys[group], buffers, deadline, held=hold is not None)
                found = [buffer for buffer, hit in zip(buffers, hits, strict=True) if hit]
                self._calls.add(WorkerCount.WIRE_BYTES_OUT, sum(map(len, found)))
                yield from encode_parts(found, bytes(hits))
