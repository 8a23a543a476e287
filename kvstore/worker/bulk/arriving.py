"""Runs of chunks or blocks as they arrive from a client: in its arena, or as bytes with their checksums.

Separate from storing them, which differs between chunks and blocks; their arrival does not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.counts import WorkerCount
from kvstore.node.memory_puts import Room
from kvstore.node.write import Write
from kvstore.wire.bulk.frames import SPAN_BYTES, Kind, decode_placed, decode_span
from kvstore.wire.statuses import Busy
from kvstore.worker.admission import Buffers, BytesInFlight
from kvstore.worker.bulk.cargo import Cargo
from kvstore.worker.bulk.connection import Connection
from kvstore.worker.calls import Calls
from kvstore.writes import WriteMode


@dataclass(slots=True)
class Arrived:
    """A run that has arrived; if it came as bytes, with its checksums and its buffer, or in the node's memory."""

    first: int
    count: int
    memory: memoryview
    sums: tuple[int, ...] = ()
    buffer: memoryview | None = None
    room: Room | None = None


class Arriving:
    """Receives runs. Thread-safe."""

    def __init__(self, in_flight: BytesInFlight, calls: Calls, buffers: Buffers, behind_bytes_max: int) -> None:
        """``behind_bytes_max`` limits one put whose runs come as bytes."""
        self._behind_bytes_max = behind_bytes_max
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers

    def has_room(self, connection: Connection, size_bytes: int, reserved: ExitStack) -> bool:
        """True if there is memory for a whole put at once: the client's arena, or ours, which is then reserved."""
        if connection.has_arena:
            return True
        if size_bytes > self._behind_bytes_max:
            return False
        try:
            reserved.enter_context(self._in_flight.reserved(size_bytes))
        except Busy:
            return False
        return True

    def runs(
        self, connection: Connection, cargo: Cargo, write: Write, reserved: ExitStack, *, is_behind: bool = False
    ) -> Iterator[Arrived]:
        """Yields the runs of a client, in order. Bytes go straight into the node's memory while ``write`` has room.

        Memory is reserved for the first run that comes as bytes and not into the node's memory. A put behind has
        reserved it before, or uses the client's arena: then nothing may come as bytes.
        """
        channel = connection.channel
        kinds = (Kind.PLACED,) if is_behind and connection.has_arena else (Kind.PLACED, Kind.CHUNKS)
        is_reserved, is_straight = is_behind, write.mode is WriteMode.BEHIND
        index, stop = cargo.first, cargo.first + cargo.count
        while index < stop:
            head = channel.receive_head()
            channel.expect(head, *kinds)
            if head.kind is Kind.PLACED:
                placed = decode_placed(channel.receive(head.length))
                start, count, offset = placed.first, placed.count, placed.offset
            else:
                start, count = decode_span(channel.receive(SPAN_BYTES))
                offset = 0
            if start != index or not 1 <= count <= stop - index:
                raise channel.break_off(f"received {count} chunks from {start} on: expected chunks from {index} on")
            size_bytes = cargo.size_bytes(start, count)
            buffer: memoryview | None = None
            sums: tuple[int, ...] = ()
            room: Room | None = None
            if head.kind is Kind.PLACED:
                memory = connection.placed(offset, size_bytes)
            else:
                table = struct.Struct(f"<{cargo.sums_count(count)}Q")
                if head.length != SPAN_BYTES + size_bytes + table.size or (count > 1 and size_bytes > cargo.run_bytes):
                    raise channel.break_off(
                        f"received {head.length} bytes for {count} chunks: not their size, or too large a run"
                    )
                if is_straight and channel.moves_natively and cargo.suits_room(start, count):
                    room = write.room(start, count)
                is_straight = room is not None  # chunks reach memory in order, or not at all
                if room is not None:
                    reserved.callback(write.give_up, room)  # unless it is filled before
                    cargo.receive(channel, room)
                    memory = memoryview(b"")
                else:
                    if not is_reserved:
                        reserved.enter_context(self._in_flight.reserved(cargo.in_memory_bytes))
                        is_reserved = True
                    memory = buffer = self._buffers.take(size_bytes)
                    channel.receive_into([memory])
                    sums = table.unpack(channel.receive(table.size))
            self._calls.add(WorkerCount.WIRE_BYTES_IN, size_bytes)
            yield Arrived(start, count, memory, sums, buffer, room)
            index += count

    def let_go(self, *runs: Arrived) -> None:
        """Frees the buffers of these runs. Idempotent."""
        for run in runs:
            buffer, run.buffer = run.buffer, None
            if buffer is not None:
                self._buffers.give(buffer)
