"""Get over a bulk connection: files handed over, or their bytes sent while the next are read on the node's lanes.

The client verifies: what it gets is whole files, with their headers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.format.header import expected_chunk
from kvstore.node.deadline import Deadline
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.reading import Reading
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import FILES_MAX, INDEX_BYTES, Kind, Mode, decode_span, encode_index, encode_span
from kvstore.wire.messages import parse
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.calls import CallContext, Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts


class BulkGets:
    """Serves GET frames."""

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

    def get(self, channel: Channel, number: int, mode: int, message: bytes, context: CallContext) -> None:
        """Answers one request."""
        request = parse(pb.GetRequest, message)
        if request.order not in (pb.ORDER_UNSPECIFIED, pb.ORDER_CHUNKS):
            raise InvalidRequest(f"order is {request.order}: only ORDER_CHUNKS goes over a bulk connection")
        if mode not in (Mode.STREAM, Mode.FILES):
            raise InvalidRequest(f"the mode of a GET is {mode}: expected 0 (a stream) or 1 (files)")
        if mode == Mode.FILES and not (channel.is_unix and self._node.hands_files):
            raise InvalidRequest("files can be handed over only on a unix socket, of a root that has files")
        with self._prompts.held(request, context) as (hold, count):
            tokens = count * hold.chain.namespace.layout.chunk_tokens
            start = pb.GetStart(chunks=count, tokens=tokens).SerializeToString()
            channel.send(Kind.START, number, [start])
            if mode == Mode.FILES:
                self._hand_over(channel, number, hold, request.first, count, context)
            elif request.first < count:
                self._send(channel, number, hold, request.first, count, context)
            if mode == Mode.STREAM:
                channel.send(Kind.END, number)

    def _hand_over(
        self, channel: Channel, number: int, hold: Hold, start: int, count: int, context: CallContext
    ) -> None:
        """Opens what the client wants, run by run, until it says how much it read."""
        while True:
            head, payload = channel.receive_frame(Kind.WANT, Kind.READ)
            first, wanted = decode_span(payload)
            if head.kind is Kind.READ:
                break
            if not 1 <= wanted <= FILES_MAX or first + wanted > count:
                raise InvalidRequest(f"files of chunks {first} to {first + wanted - 1} are wanted: {count} are held")
            left_s = seconds_left(context, self._node.limits.read_deadline_s)
            readers = self._node.open_files(hold, first, wanted, left_s)
            try:
                files = [reader.fileno() for reader in readers]
                channel.send(Kind.FILES, number, [encode_span(first, len(files))], files)
            finally:
                for reader in readers:
                    reader.close()
        good = min(wanted, count)
        read = max(0, good - start)
        size_bytes = read * hold.chain.namespace.layout.chunk_bytes
        self._calls.add("wire_bytes_out", size_bytes)
        self._node.counters.add_read(size_bytes, read)
        self._node.used(hold, good)

    def _send(self, channel: Channel, number: int, hold: Hold, first: int, count: int, context: CallContext) -> None:
        node, chunk_bytes = self._node, hold.chain.namespace.layout.chunk_bytes
        file_bytes = expected_chunk(hold.chain, first).file_bytes
        window = max(1, min(count - first, 2 * self._limits.window_bytes // file_bytes))
        windows = [(at, min(window, count - at)) for at in range(first, count, window)]
        good = first
        with self._in_flight.reserved(2 * window * file_bytes):
            buffers = [self._buffers.take(window * file_bytes) for _ in windows[:2]]

            def begin(at: int) -> tuple[Reading, Sequence[memoryview]]:
                start, size = windows[at]
                memory = memoryview(buffers[at % 2])
                files = [memory[each * file_bytes : (each + 1) * file_bytes] for each in range(size)]
                return node.begin_copy(hold, start, size, lambda index: files[index - start]), files

            following = begin(0)
            first_miss = -1
            settled = False
            try:
                for at, (start, size) in enumerate(windows):
                    reading, files = following
                    done = reading.wait(Deadline(node.clock, seconds_left(context, node.limits.read_deadline_s)))
                    first_miss = done.find(0)
                    good = start + (size if first_miss < 0 else first_miss)
                    if first_miss < 0 and at + 1 < len(windows):
                        following = begin(at + 1)
                    for index in range(start, good):
                        file = files[index - start]
                        channel.send_head(Kind.FILE, number, INDEX_BYTES + len(file))
                        channel.send_bytes([memoryview(encode_index(index)), file])
                        self._calls.add("wire_bytes_out", chunk_bytes)
                    if first_miss >= 0:
                        break
                settled = first_miss < 0
            finally:
                following[0].withdraw()
                node.used(hold, good)
            if settled:
                # Whoever missed its deadline may still be reading into the others: those are nobody's any more.
                for buffer in buffers:
                    self._buffers.give(buffer)
