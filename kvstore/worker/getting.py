"""Get: chunks are read and verified on the node's lanes while those before them are being sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from kvstore.buffers import cut_evenly
from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.deadline import Deadline
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.reading import Reading, leading
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import encode_frame
from kvstore.wire.parts import encode_parts
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.layering import layers_of
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class GetStreams:
    """Serves Get, in both orders."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        in_flight: BytesInFlight,
        calls: Calls,
        limits: WorkerLimits,
        buffers: Buffers,
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits
        self._buffers = buffers

    def get(self, request: pb.GetRequest, context: Call) -> Iterator[bytes]:
        """The encoded messages of one answer."""
        by_layer = request.order == pb.ORDER_LAYERS
        if request.order not in (pb.ORDER_UNSPECIFIED, pb.ORDER_CHUNKS, pb.ORDER_LAYERS):
            raise InvalidRequest(f"order is {request.order}: expected ORDER_CHUNKS (1) or ORDER_LAYERS (2)")
        if request.memory_only:
            raise InvalidRequest("memory_only goes over a bulk connection only (OpenBulk)")
        if by_layer and request.first:
            raise InvalidRequest(f"first is {request.first}: expected 0 when reading layer by layer")
        with self._prompts.held(request, context) as (hold, count):
            tokens = count * hold.chain.namespace.layout.chunk_tokens
            start = pb.GetStart(chunks=count, tokens=tokens).SerializeToString()
            yield encode_frame(start=start)
            if request.first < count:
                yield from (
                    self._by_layer(hold, count, context)
                    if by_layer
                    else self._by_chunk(hold, request.first, count, context)
                )

    def _by_chunk(self, hold: Hold, first: int, count: int, context: Call) -> Iterator[bytes]:
        node, layout = self._node, hold.chain.namespace.layout
        window = max(1, min(count - first, self._limits.window_bytes // layout.chunk_bytes))
        windows = [(at, min(window, count - at)) for at in range(first, count, window)]
        memories = [memoryview(bytearray(window * layout.chunk_bytes)) for _ in windows[:2]]
        good = 0

        def begin(number: int) -> Reading:
            start, size = windows[number]
            memory = memories[number % 2]

            def sections(index: int) -> list[memoryview]:
                at = (index - start) * layout.chunk_bytes
                return cut_evenly(memory[at : at + layout.chunk_bytes], layout.section_bytes)

            return node.begin_read(hold, start, size, sections)

        with self._in_flight.reserved(len(memories) * window * layout.chunk_bytes):
            reading = begin(0)
            try:
                for number, (start, size) in enumerate(windows):
                    done = reading.wait(Deadline(node.clock, seconds_left(context, node.limits.read_deadline_s)))
                    good = start + leading(done)
                    if good == start + size and number + 1 < len(windows):
                        reading = begin(number + 1)
                    good_bytes = (good - start) * layout.chunk_bytes
                    self._calls.add(WorkerCount.WIRE_BYTES_OUT, good_bytes)
                    yield from encode_parts(cut_evenly(memories[number % 2][:good_bytes], layout.section_bytes))
                    if good < start + size:
                        break
            finally:
                # Before the memory is given up: a lane may be reading into it for a client that is gone.
                reading.withdraw()
                node.used(hold, good)

    def _by_layer(self, hold: Hold, count: int, context: Call) -> Iterator[bytes]:
        section_bytes = hold.chain.namespace.layout.section_bytes
        with closing(layers_of(self._node, hold, count, self._in_flight, self._buffers, context)) as layers:
            for _, memory in layers:
                self._calls.add(WorkerCount.WIRE_BYTES_OUT, len(memory))
                yield from encode_parts(cut_evenly(memory, section_bytes))
