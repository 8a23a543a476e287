"""Put over a bulk connection: chunks or blocks come in the shared arena or as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from kvstore.address import Chain
from kvstore.buffers import Buffers as Blocks
from kvstore.buffers import Planes, Sections, cut_evenly
from kvstore.counts import WorkerCount
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.puts import Write, Written
from kvstore.node.wanted import Wanted, section_bytes, sizes_of
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.frames import READY, RUN_BYTES, SPAN_BYTES, Kind, decode_placed, decode_span
from kvstore.wire.bulk.runs import PARTS_BYTES, SUM_BYTES, receive_planes, receive_sections
from kvstore.wire.messages import hints_of, parse, write_of
from kvstore.wire.statuses import BrokenTransfer
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.calls import Call, Calls, seconds_left
from kvstore.worker.prompts import Prompts
from kvstore.worker.putting import put_answer
from kvstore.writes import RUNS_IN_MEMORY, WriteMode

MEMORY_RUN_BYTES = 16 << 20
"""Limit of several chunks in one run that comes as bytes, and is copied into memory before the next run is received."""


@dataclass(frozen=True, slots=True)
class UploadedRun:
    """A run that has arrived."""

    first: int
    count: int
    sections: Sections
    release: Callable[[], None]
    """Frees its memory."""


class Upload:
    """The ``count`` chunks or blocks of a put, from index ``first`` on, as a client sends them."""

    def __init__(
        self, connection: Connection, number: int, wanted: Wanted, first: int, count: int, run_bytes: int = RUN_BYTES
    ) -> None:
        """``run_bytes`` limits several chunks in one run that comes as bytes."""
        self.first = first
        self.count = count
        self.run_bytes = run_bytes
        self._connection = connection
        self._number = number
        self._wanted = wanted
        self._ends = [0, *accumulate(sizes_of(wanted)[first : first + count])]

    def runs(
        self, write: Write, in_flight: BytesInFlight, buffers: Buffers, calls: Calls, reserved: ExitStack
    ) -> Iterator[UploadedRun]:
        """Yields runs in order, except those that ``write`` has memory for: they are received there, and stored.

        Memory is reserved for the first run that comes into a buffer, until ``reserved`` ends. Raises BrokenTransfer
        if bytes do not match their checksums, InvalidRequest, LinkBroken, LinkLate.
        """
        channel = self._connection.channel
        is_reserved = False
        index, stop = self.first, self.first + self.count
        while index < stop:
            head = channel.receive_head()
            channel.expect(head, Kind.PLACED, Kind.CHUNKS)
            offset = 0
            if head.kind is Kind.PLACED:
                placed = decode_placed(channel.receive(head.length))
                start, count, offset = placed.first, placed.count, placed.offset
            else:
                start, count = decode_span(channel.receive(SPAN_BYTES))
            if start != index or not 1 <= count <= stop - index:
                raise channel.break_off(f"received {count} chunks from {start} on: expected chunks from {index} on")
            size_bytes = self._size_bytes(start, count)
            index += count
            buffer: memoryview | None = None
            if head.kind is Kind.PLACED:
                memory = self._connection.placed(offset, size_bytes)
            else:
                length = SPAN_BYTES + size_bytes + self._sums_count(count) * SUM_BYTES
                if head.length != length or (count > 1 and size_bytes > self.run_bytes):
                    raise channel.break_off(
                        f"received {head.length} bytes for {count} chunks: not their size, or too large a run"
                    )
                if self._receive_into_memory(write, start, count):
                    calls.add(WorkerCount.WIRE_BYTES_IN, size_bytes)
                    continue
                if not is_reserved:
                    reserved.enter_context(in_flight.reserved(self._in_memory_bytes))
                    is_reserved = True
                memory = buffer = buffers.take(size_bytes)
                if not receive_planes(channel, self._pieces(start, count, memory)):
                    raise self._broken(start, count)
            calls.add(WorkerCount.WIRE_BYTES_IN, size_bytes)
            release = partial(self._release, index - self.first, buffers, buffer)
            yield UploadedRun(start, count, self._sections(start, count, memory), release)

    def _receive_into_memory(self, write: Write, first: int, count: int) -> bool:
        """Receives and stores a run; False if it must come into a buffer."""
        channel, is_chain = self._connection.channel, isinstance(self._wanted, Chain)
        sizes = {section_bytes(self._wanted, index) for index in range(first, first + count)}
        size, parts = sizes.pop(), count if is_chain else 1
        if sizes or not size or not channel.moves_natively or (parts > 1 and size % PARTS_BYTES):
            return False
        reserved = write.reserve(first, count)
        if reserved is None:
            return False
        with reserved:
            sums = receive_sections(channel, reserved.bases(), size, parts)
            if sums is None:
                raise self._broken(first, count)
            write.add_arrived(reserved, sums)
        return True

    def released(self, count: int) -> None:
        """Notes that the client may use the arena memory of its first ``count`` chunks again."""
        if self._connection.ledger is not None:
            self._connection.ledger.released(self._number, count)

    def _release(self, count: int, buffers: Buffers, buffer: memoryview | None) -> None:
        if buffer is not None:
            buffers.give(buffer)
        self.released(count)

    @property
    def _in_memory_bytes(self) -> int:
        """Memory for the runs that are here at once, if they come as bytes."""
        largest = max((b - a for a, b in pairwise(self._ends)), default=0)
        return min(self._ends[-1], RUNS_IN_MEMORY * max(self.run_bytes, largest))

    def _size_bytes(self, first: int, count: int) -> int:
        return self._ends[first + count - self.first] - self._ends[first - self.first]

    def _sums_count(self, count: int) -> int:
        """Returns the number of checksums that come with a run of ``count`` chunks."""
        return self._wanted.namespace.layout.section_count if isinstance(self._wanted, Chain) else count

    def _pieces(self, first: int, count: int, memory: memoryview) -> list[memoryview]:
        """Returns the parts of a run that have a checksum each: planes, or blocks."""
        if isinstance(self._wanted, Chain):
            return cut_evenly(memory, len(memory) // self._wanted.namespace.layout.section_count)
        ends = self._ends[first - self.first : first - self.first + count + 1]
        return [memory[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]

    def _sections(self, first: int, count: int, memory: memoryview) -> Sections:
        if not isinstance(self._wanted, Chain):
            return Blocks(self._pieces(first, count, memory), first)
        layout = self._wanted.namespace.layout
        return Planes(np.frombuffer(memory, np.uint8).reshape(layout.layers, 2, -1), layout.section_bytes, first)

    def _broken(self, first: int, count: int) -> BrokenTransfer:
        unit = "chunks" if isinstance(self._wanted, Chain) else "blocks"
        return BrokenTransfer(
            f"{unit} {first} to {first + count - 1} do not match their checksums: bytes changed on the way; "
            "repeat the call"
        )


class BulkPuts:
    """Serves PUT frames."""

    def __init__(self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls, buffers: Buffers) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers

    def put(self, connection: Connection, number: int, message: bytes, call: Call) -> None:
        """Answers one request about a prompt, or about engine-hashed blocks."""
        start = parse(pb.PutStart, message)
        wanted, first = self._prompts.to_put(start, call)
        written = self._store(connection, number, call, wanted, first, start)
        connection.channel.send(Kind.STORED, number, [put_answer(wanted, written)])

    def _store(
        self, connection: Connection, number: int, call: Call, wanted: Wanted, first: int, start: pb.PutStart
    ) -> Written:
        """Asks for the missing chunks, and stores them as they arrive."""

        def deadline() -> Deadline:
            return Deadline(self._node.clock, seconds_left(call, self._node.limits.write_deadline_s))

        write = self._node.puts.begin(
            wanted, first, deadline(), hints_of(start.hints), write_of(start.write), skips=True
        )
        run_bytes = MEMORY_RUN_BYTES if write.mode is WriteMode.BEHIND else RUN_BYTES
        count = 0 if write.refused else len(wanted) - write.first
        upload = Upload(connection, number, wanted, write.first, count, run_bytes)
        try:
            with ExitStack() as reserved:
                connection.channel.send(Kind.READY, number, [READY.pack(upload.first, upload.count, upload.run_bytes)])
                for run in upload.runs(write, self._in_flight, self._buffers, self._calls, reserved):
                    write.add(run.sections, run.first, run.count, deadline(), run.release)
                written = write.finish(deadline())
        except BaseException:
            # The client is gone, or sent wrong or damaged bytes: only what arrived whole before may be published.
            write.abandon()
            raise
        upload.released(upload.count)
        return written
