"""Get, GetBlocks and MatchBlocks: chunks of a prompt are read and verified while those before them are being sent."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.buffers import cut, cut_evenly, grouped
from kvstore.counts import NodeCount, WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.holds import Hold
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.reader import Reading
from kvstore.node.wanted import leading
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import encode_frame, encode_parts
from kvstore.wire.messages import pack_sizes, unpack_keys, unpack_sizes
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class GetStreams:
    """Serves what reads over gRPC."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        in_flight: BytesInFlight,
        calls: Calls,
        limits: WorkerLimits,
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits

    def get(self, request: pb.GetRequest, context: Call) -> Iterator[bytes]:
        """The encoded messages of one answer about a prompt."""
        if request.memory_only:
            raise InvalidRequest("memory_only goes over a bulk connection only (OpenBulk)")
        with self._prompts.held(request, context) as (hold, count):
            if not request.uncounted:
                self._node.counters.add(NodeCount.REQUESTS_GET)
            tokens = count * hold.chain.namespace.layout.chunk_tokens
            start = pb.GetStart(chunks=count, tokens=tokens).SerializeToString()
            yield encode_frame(start=start)
            if request.first < count:
                yield from self._by_chunk(hold, request.first, count, context)

    def match_blocks(self, request: pb.MatchBlocksRequest, context: Call) -> pb.MatchBlocksResponse:
        """How many leading keys are there, and which of all where that is asked for."""
        namespace, keys = self._prompts.namespace(request.namespace, context), unpack_keys(request.keys)
        deadline = Deadline(self._node.clock, seconds_left(context, self._node.limits.match_deadline_s))
        if request.sizes:
            return pb.MatchBlocksResponse(sizes=pack_sizes(self._node.blocks.sizes(namespace, keys, deadline)))
        if request.each:
            present = bytes(self._node.blocks.present(namespace, keys, deadline))
            return pb.MatchBlocksResponse(blocks=len(present) - len(present.lstrip(b"\1")), present=present)
        return pb.MatchBlocksResponse(blocks=self._node.blocks.match(namespace, keys, deadline))

    def get_blocks(self, request: pb.GetBlocksRequest, context: Call) -> Iterator[bytes]:
        """The encoded messages of one answer about blocks: as many at once as fit into a window of memory."""
        namespace, keys = self._prompts.namespace(request.namespace, context), unpack_keys(request.keys)
        hold = self._prompts.block_hold(request.hold, namespace)
        if not request.uncounted:
            self._node.counters.add(NodeCount.REQUESTS_GET)
        sizes = unpack_sizes(request.sizes, len(keys))
        groups = list(grouped(sizes, self._limits.window_bytes))
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

    def _by_chunk(self, hold: Hold, first: int, count: int, context: Call) -> Iterator[bytes]:
        node, layout = self._node, hold.chain.namespace.layout
        most = max(1, min(count - first, self._limits.window_bytes // layout.chunk_bytes))
        runs = [(at, min(most, count - at)) for at in range(first, count, most)]
        memories = [memoryview(bytearray(most * layout.chunk_bytes)) for _ in runs[:2]]
        good = 0

        def begin(number: int) -> Reading:
            start, size = runs[number]
            memory = memories[number % 2]

            def sections(index: int) -> list[memoryview]:
                at = (index - start) * layout.chunk_bytes
                return cut_evenly(memory[at : at + layout.chunk_bytes], layout.section_bytes)

            return node.begin_read(hold, start, size, sections)

        with self._in_flight.reserved(len(memories) * most * layout.chunk_bytes):
            reading = begin(0)
            try:
                for number, (start, size) in enumerate(runs):
                    done = reading.wait(Deadline(node.clock, seconds_left(context, node.limits.read_deadline_s)))
                    good = start + leading(done)
                    if good == start + size and number + 1 < len(runs):
                        reading = begin(number + 1)
                    good_bytes = (good - start) * layout.chunk_bytes
                    self._calls.add(WorkerCount.WIRE_BYTES_OUT, good_bytes)
                    yield from encode_parts(cut_evenly(memories[number % 2][:good_bytes], layout.section_bytes))
                    if good < start + size:
                        break
            finally:
                # Before the memory is freed: a lane may be reading into it for a client that is gone.
                reading.withdraw()
                node.used(hold, good)
