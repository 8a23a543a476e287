"""Runs of chunks or blocks as they arrive from a client: in its arena, or as bytes with their checksums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.counts import WorkerCount
from kvstore.wire.bulk.frames import SPAN_BYTES, Kind, decode_placed, decode_span
from kvstore.wire.bulk.runs import SUM_BYTES, receive_planes
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.bulk.cargo import Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.calls import Calls


@dataclass(slots=True)
class Arrived:
    """A run that has arrived; with its buffer, if it came as bytes."""

    first: int
    count: int
    memory: memoryview
    buffer: memoryview | None = None


class Arriving:
    """Receives runs. Thread-safe."""

    def __init__(self, in_flight: BytesInFlight, calls: Calls, buffers: Buffers) -> None:
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers

    def runs(self, connection: Connection, cargo: Cargo, reserved: ExitStack) -> Iterator[Arrived]:
        """Yields the runs of a client, in order. Memory is reserved for the first run that comes as bytes.

        Raises BrokenTransfer if bytes do not match their checksums, InvalidRequest, LinkBroken, LinkLate.
        """
        channel = connection.channel
        is_reserved = False
        index, stop = cargo.first, cargo.first + cargo.count
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
            size_bytes = cargo.size_bytes(start, count)
            buffer: memoryview | None = None
            if head.kind is Kind.PLACED:
                memory = connection.placed(offset, size_bytes)
            else:
                length = SPAN_BYTES + size_bytes + cargo.sums_count(count) * SUM_BYTES
                if head.length != length or (count > 1 and size_bytes > cargo.run_bytes):
                    raise channel.break_off(
                        f"received {head.length} bytes for {count} chunks: not their size, or too large a run"
                    )
                if not is_reserved:
                    reserved.enter_context(self._in_flight.reserved(cargo.in_memory_bytes))
                    is_reserved = True
                memory = buffer = self._buffers.take(size_bytes)
                if not receive_planes(channel, cargo.pieces(start, count, memory)):
                    raise cargo.broken(start, count)
            self._calls.add(WorkerCount.WIRE_BYTES_IN, size_bytes)
            yield Arrived(start, count, memory, buffer)
            index += count

    def let_go(self, run: Arrived) -> None:
        """Frees the buffer of a run. Idempotent."""
        buffer, run.buffer = run.buffer, None
        if buffer is not None:
            self._buffers.give(buffer)
