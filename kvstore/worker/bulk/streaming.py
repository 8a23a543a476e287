"""Whole chunks sent as bytes: from memory as they lie there, others while the next are read on the node's lanes.

The client verifies: what it gets is whole files, with their headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from kvstore.address import Chain
from kvstore.counts import NodeCount, WorkerCount
from kvstore.format.header import expected_chunk
from kvstore.node.deadline import Deadline
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.reading import Reading
from kvstore.node.slots import Slots
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, encode_head, encode_index
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.calls import CallContext, Calls, seconds_left


class Window:
    """Some consecutive chunks on their way: ``slots`` where memory has them, or ``reading`` into a buffer of ours."""

    __slots__ = ("files", "first", "reading", "slots")

    def __init__(self, first: int, files: Sequence[memoryview], slots: Slots | None, reading: Reading | None) -> None:
        self.first = first
        self.files = files
        self.slots = slots
        self.reading = reading

    def good_count(self, deadline: Deadline) -> int:
        """Waits; how many leading ones are here."""
        if self.reading is None:
            return len(self.files)
        first_miss = self.reading.wait(deadline).find(0)
        return len(self.files) if first_miss < 0 else first_miss

    def close(self) -> None:
        """Nobody writes into the buffer any more, and the memory may be given away. Idempotent."""
        if self.reading is not None:
            self.reading.withdraw()
        if self.slots is not None:
            self.slots.release()


class ChunkStream:
    """One GET of mode STREAM, after its START. ``hold`` is None where only memory may be asked (rule P2)."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        chain: Chain,
        hold: Hold | None,
        in_flight: BytesInFlight,
        calls: Calls,
        buffers: Buffers,
        window_bytes: int,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._chain = chain
        self._hold = hold
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers
        self._file_bytes = expected_chunk(chain, 0).file_bytes
        self._window = max(1, 2 * window_bytes // self._file_bytes)
        self._taken: list[memoryview] = []

    def send(self, first: int, count: int, context: CallContext) -> None:
        """Sends chunks ``first`` to ``count - 1``, at least one, up to the first that is missing."""
        node, good = self._node, first
        self._window = min(self._window, count - first)
        windows: list[Window] = []
        whole = True
        with ExitStack() as reserved:
            try:
                at = first
                while whole and good < count:
                    if not windows:
                        windows.append(self._begin(at, count, reserved, context))
                    window = windows[0]
                    deadline = Deadline(node.clock, seconds_left(context, node.limits.read_deadline_s))
                    here = window.good_count(deadline)
                    whole = here == len(window.files) > 0
                    good, at = window.first + here, window.first + len(window.files)
                    if whole and at < count:
                        windows.append(self._begin(at, count, reserved, context))
                    self._send(window.first, window.files[:here])
                    windows.pop(0).close()
            finally:
                for window in windows:
                    window.close()
                if self._hold is not None:
                    node.used(self._hold, good)
            if whole:
                # Whoever missed its deadline may still be reading into the others: those are nobody's any more.
                for buffer in self._taken:
                    self._buffers.give(buffer)

    def _begin(self, first: int, count: int, reserved: ExitStack, context: CallContext) -> Window:
        """The next chunks that are all in memory, or all not, at most a window. Brings what is worth it there first."""
        stop, memory = min(count, first + self._window), self._node.memory
        end = first if memory is not None else stop
        if memory is not None:
            if self._hold is not None and memory.leading(self._chain, first) < stop - first:
                left_s = seconds_left(context, self._node.limits.read_deadline_s)
                self._node.bring(self._hold, first, stop - first, left_s)
            slots = memory.refer(self._chain, first, stop - first)
            if slots.leading_count:
                self._node.counters.add(NodeCount.MEMORY_HITS, slots.leading_count)
                return Window(first, slots.images(first, first + slots.leading_count), slots, None)
            slots.release()
            end = next((first + at for at, entry in enumerate(slots.entries) if entry is not None), stop)
        if self._hold is None:
            return Window(first, [], None, None)
        size, buffer = self._file_bytes, self._buffer(reserved)
        files = [buffer[at * size : (at + 1) * size] for at in range(end - first)]
        reading = self._node.begin_copy(self._hold, first, end - first, lambda index: files[index - first])
        return Window(first, files, None, reading)

    def _buffer(self, reserved: ExitStack) -> memoryview:
        """Two in turn: when a window is begun, the one before the last was sent."""
        if not self._taken:
            reserved.enter_context(self._in_flight.reserved(2 * self._window * self._file_bytes))
        if len(self._taken) < 2:
            self._taken.append(self._buffers.take(self._window * self._file_bytes))
        else:
            self._taken.reverse()
        return self._taken[-1]

    def _send(self, first: int, files: Sequence[memoryview]) -> None:
        # In as few system calls as they take together: the heads of small chunks would cost more than their bytes.
        pieces: list[memoryview] = []
        for index, file in enumerate(files, first):
            head = encode_head(Kind.FILE, self._number, INDEX_BYTES + len(file))
            pieces += (memoryview(head + encode_index(index)), file)
        self._channel.send_bytes(pieces)
        self._calls.add(WorkerCount.WIRE_BYTES_OUT, len(files) * self._chain.namespace.layout.chunk_bytes)
