"""Get and MatchBlocks: chunks or blocks are read and verified while those before them are being sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.address import Chain
from kvstore.buffers import Pieces, aligned, cut, grouped
from kvstore.counts import NodeCount, WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.format.header import Expected
from kvstore.node.handing import Asked
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.reader import Reading
from kvstore.node.wanted import expected_of, sizes_of
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.images import image_messages
from kvstore.wire.messages import pack_sizes, unpack_keys
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts
from kvstore.worker.putting import buffers_of


@dataclass(frozen=True, slots=True)
class _Window:
    """Chunks that are read at once: for each its index, what it is, and its sections."""

    chunks: list[tuple[int, Expected, Pieces]]
    reading: Reading


class GetStreams:
    """Serves what reads over gRPC."""

    def __init__(
        self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls, limits: WorkerLimits
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits

    def get(self, request: pb.GetRequest, context: Call) -> Iterator[bytes]:
        """The encoded messages of one answer."""
        if request.memory_only:
            raise InvalidRequest("memory_only goes over a bulk connection only (OpenBulk)")
        with self._prompts.asked(request, context) as (asked, count):
            if not request.uncounted:
                self._node.counters.add(NodeCount.REQUESTS_GET)
            chunk_tokens = asked.wanted.namespace.layout.chunk_tokens
            tokens = count * chunk_tokens if isinstance(asked.wanted, Chain) else 0
            yield pb.GetResponse(start=pb.GetStart(chunks=count, tokens=tokens)).SerializeToString()
            if request.first < count:
                yield from self._images(asked, request.first, count, context)

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

    def _images(self, asked: Asked, first: int, stop: int, context: Call) -> Iterator[bytes]:
        """The messages of the images from ``first`` on, of a prompt up to the first missing one."""
        wanted, is_chain = asked.wanted, isinstance(asked.wanted, Chain)
        sizes = sizes_of(wanted)
        windows = [range(first, stop)[part] for part in grouped(sizes[first:stop], self._limits.window_bytes)]
        largest = max((sum(sizes[window.start : window.stop]) for window in windows), default=0)
        sent: list[int] = []
        begun: list[_Window] = []
        with self._in_flight.reserved(min(2, len(windows)) * largest):
            memories = [aligned(largest) for _ in windows[:2]]
            try:
                for number, indexes in enumerate(windows):
                    if not begun:
                        begun.append(self._begin(asked, indexes, memories[number % 2], context))
                    window = begun.pop()
                    done = window.reading.wait(self._deadline(context))
                    ends_here = is_chain and not all(done)
                    if number + 1 < len(windows) and not ends_here:
                        begun.append(self._begin(asked, windows[number + 1], memories[(number + 1) % 2], context))
                    for (index, expected, sections), is_done in zip(window.chunks, done, strict=True):
                        if is_done:
                            self._calls.add(WorkerCount.WIRE_BYTES_OUT, expected.payload_bytes)
                            yield from image_messages(pb.GetResponse, index, expected, sections)
                            sent.append(index)
                        elif is_chain:
                            return
            finally:
                # Before the memory is freed: a lane may be reading into it for a client that is gone.
                for window in begun:
                    window.reading.withdraw()
                if isinstance(wanted, Chain):
                    self._node.reads.used(wanted.leading(first + len(sent)))
                else:
                    self._node.reads.used(wanted.picked(sent))

    def _begin(self, asked: Asked, indexes: range, memory: memoryview, context: Call) -> _Window:
        """Begins to read those of ``indexes`` that may be given, into ``memory``."""
        wanted, node = asked.wanted, self._node
        allowed = asked.allowed(node.holds, node.gc_view, indexes)
        expected = [expected_of(wanted, index) for index in allowed]
        buffers = cut(memory, [each.payload_bytes for each in expected])
        part, first = (wanted, indexes.start) if isinstance(wanted, Chain) else (wanted.picked(allowed), 0)
        sections = buffers_of(part, first, buffers)
        reading = node.reads.begin(part, first, len(allowed), sections, self._deadline(context))
        places = range(first, first + len(allowed))
        return _Window(list(zip(allowed, expected, map(sections, places), strict=True)), reading)

    def _deadline(self, context: Call) -> Deadline:
        return Deadline(self._node.clock, seconds_left(context, self._node.limits.read_deadline_s))
