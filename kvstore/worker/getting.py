"""Get: chunks are read and verified on the node's lanes while earlier ones are sent."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import cast

from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.deadline import Deadline
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.reading import Reading
from kvstore.results import LayerMemory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import encode_frame
from kvstore.wire.parts import encode_parts
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class GetStreams:
    """Serves Get, by chunk and by layer."""

    def __init__(
        self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls, limits: WorkerLimits
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits

    def get(self, request: pb.GetRequest, context: Call) -> Iterator[bytes]:
        """Yields the encoded messages of one answer."""
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
                return _split(memory, layout.section_bytes, index - start, layout.section_count)

            return node.begin_read(hold, start, size, sections)

        with self._in_flight.reserved(len(memories) * window * layout.chunk_bytes):
            reading = begin(0)
            try:
                for number, (start, size) in enumerate(windows):
                    done = reading.wait(Deadline(node.clock, seconds_left(context, node.limits.read_deadline_s)))
                    first_miss = done.find(0)
                    good = start + (size if first_miss < 0 else first_miss)
                    if first_miss < 0 and number + 1 < len(windows):
                        reading = begin(number + 1)
                    self._calls.add(WorkerCount.WIRE_BYTES_OUT, (good - start) * layout.chunk_bytes)
                    yield from encode_parts(
                        _split(memories[number % 2], layout.section_bytes, 0, (good - start) * layout.section_count)
                    )
                    if first_miss >= 0:
                        break
            finally:
                # Before the memory is freed: a lane may be reading into it for a client that is gone.
                reading.withdraw()
                node.used(hold, good)

    def _by_layer(self, hold: Hold, count: int, context: Call) -> Iterator[bytes]:
        if count < hold.count:
            raise InvalidRequest(f"chunks_max is {count}: expected 0 or {hold.count} for a hold read layer by layer")
        layout = hold.chain.namespace.layout
        plane_bytes = count * layout.section_bytes
        with self._in_flight.reserved(4 * plane_bytes):
            memories = [memoryview(bytearray(2 * plane_bytes)) for _ in range(2)]

            def memory(layer: int) -> LayerMemory:
                # Two in turn: when a layer begins, the one before the last has been sent.
                both = memories[layer % 2]
                return LayerMemory(both[:plane_bytes], both[plane_bytes:])

            each_s = seconds_left(context, self._node.limits.read_deadline_s)
            layers = cast("Generator[tuple[int, LayerMemory]]", self._node.read_layers(hold, memory, each_s))
            with closing(layers):
                for layer, _ in layers:
                    self._calls.add(WorkerCount.WIRE_BYTES_OUT, 2 * plane_bytes)
                    yield from encode_parts(_split(memories[layer % 2], layout.section_bytes, 0, 2 * count))


def _split(memory: memoryview, section_bytes: int, chunk: int, count: int) -> list[memoryview]:
    """Returns the ``count`` sections of chunk number ``chunk`` in ``memory``."""
    start = chunk * count * section_bytes
    return [memory[at : at + section_bytes] for at in range(start, start + count * section_bytes, section_bytes)]
