"""Get of engine-hashed blocks over a bulk connection: what there is of them, by slots and files, or as bytes.

Apart from gets of prompts, because a block that is missing ends nothing, and each has its own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from kvstore.buffers import byte_length
from kvstore.counts import NodeCount, WorkerCount
from kvstore.errors import InvalidRequest
from kvstore.node.deadline import Deadline
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.reading import Reading
from kvstore.node.slots import Slots
from kvstore.node.wanted import Keyed, image_bytes
from kvstore.root.posix_reader import PosixReader
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, Mode, encode_head, encode_index, encode_span
from kvstore.wire.messages import parse
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.handing import HandingOver
from kvstore.worker.bulk.leases import Leases
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.call import Call
from kvstore.worker.calls import CallContext, Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts

WINDOW_BLOCKS = 1024
"""Blocks that are looked for at once: so many that tiny ones cost little each, so few that the first come soon."""
TINY_BYTES = 1024
"""Pieces smaller than this on average are joined before they are sent: a copy is cheaper than a piece to the kernel."""
WINDOWS = 2
"""On their way at once: one is sent while the next is read."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The blocks of one request, and the hold that they are read under, if any."""

    wanted: Keyed
    hold: Hold | None

    def allowed(self, node: Node, indexes: range) -> Sequence[int]:
        """Those that may be given: all under a hold, else those that no sweep has condemned. Raises HoldBroken."""
        if self.hold is None:
            return node.handed_blocks.allowed(self.wanted, indexes)
        node.holds.check(self.hold)
        return indexes


class BlockGets:
    """Serves GET_BLOCKS frames. ``leases`` is None where the node has no memory."""

    def __init__(
        self,
        node: Node,
        prompts: Prompts,
        in_flight: BytesInFlight,
        calls: Calls,
        limits: WorkerLimits,
        buffers: Buffers,
        leases: Leases | None,
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits
        self._buffers = buffers
        self._leases = leases

    def get(self, channel: Channel, number: int, mode: int, message: bytes, context: Call) -> None:
        """Answers one request."""
        request = parse(pb.GetBlocksRequest, message)
        if mode not in (Mode.STREAM, Mode.FILES, Mode.SLOTS):
            raise InvalidRequest(f"the mode of a GET_BLOCKS is {mode}: expected 0 (a stream), 1 (files) or 2 (slots)")
        if mode != Mode.STREAM and not channel.is_unix:
            raise InvalidRequest("files and slots can be given only on a unix socket")
        if mode != Mode.STREAM:
            context.allow_every()  # what is shared is not one tenant's alone (rule X8)
        wanted = self._prompts.blocks(request.namespace, request.keys, request.sizes, context)
        asked = Asked(wanted, self._prompts.block_hold(request.hold, wanted.namespace))
        self._prompts.settle_blocks(wanted.namespace, wanted.keys)
        if mode == Mode.STREAM:
            BlockStream(
                self._node, channel, number, asked, self._in_flight, self._calls, self._buffers, self._limits
            ).send(context)
            return
        leases = self._leases if mode == Mode.SLOTS else None
        handing = BlockHanding(self._node, channel, number, asked, leases, context)
        given = handing.serve()
        self._calls.add(WorkerCount.WIRE_BYTES_OUT, sum(wanted.sizes_bytes[index] for index in given))
        from_files = [index for index in given if index not in handing.in_memory]
        self._node.counters.add_read(sum(wanted.sizes_bytes[index] for index in from_files), len(from_files))
        self._node.handed_blocks.used(wanted, given)


class BlockHanding:
    """One GET_BLOCKS of mode FILES or SLOTS."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        asked: Asked,
        leases: Leases | None,
        context: CallContext,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._asked = asked
        self._wanted = wanted = asked.wanted
        self._context = context
        self._handing = HandingOver(channel, number, len(wanted), leases)
        self._has_slots = leases is not None
        self._given: list[int] = []
        self.in_memory: set[int] = set()
        """Those of the blocks given that were handed over in memory; the others in files."""

    def serve(self) -> list[int]:
        """Hands over what the client wants until it has read it; which blocks were given."""
        self._handing.serve(self._answer)
        return self._given

    def _answer(self, first: int, count: int) -> None:
        """One WANT: frames for each run of blocks that are to be had in the same way, or not at all."""
        blocks, deadline = self._node.handed_blocks, Deadline(self._node.clock, self._left_s())
        allowed = self._asked.allowed(self._node, range(first, first + count))
        how = dict.fromkeys(range(first, first + count), Kind.ABSENT)
        offsets: dict[int, int] = {}
        readers: dict[int, PosixReader] = {}
        slots = blocks.in_memory(self._wanted, allowed, deadline) if allowed else None
        try:
            there = _there(allowed, slots)
            if there and slots is not None and self._has_slots and self._handing.lease(slots):
                slots, offsets = None, there
                self._node.counters.add(NodeCount.MEMORY_HITS, len(there))
                self.in_memory.update(there)
            left = [index for index in allowed if index not in offsets]
            how.update(dict.fromkeys(offsets, Kind.SLOTS))
            if self._node.hands_files:
                readers = self._opened(left, deadline)
                how.update(dict.fromkeys(readers, Kind.FILES))
                left = [
                    index
                    for index in left
                    if index not in readers and (index in there or blocks.is_elsewhere(self._wanted, index))
                ]
            # Of a root that has no files to hand over it is not known here whether it has them.
            how.update(dict.fromkeys(left, Kind.ELSEWHERE))
            for kind, run in groupby(how, how.__getitem__):
                self._send(kind, list(run), offsets, readers)
        finally:
            if slots is not None:
                slots.release()
            for reader in readers.values():
                reader.close()

    def _opened(self, indexes: Sequence[int], deadline: Deadline) -> dict[int, PosixReader]:
        found = self._node.handed_blocks.open_files(self._wanted, indexes, deadline) if indexes else []
        return {index: reader for index, reader in zip(indexes, found, strict=True) if reader is not None}

    def _send(self, kind: Kind, run: list[int], offsets: dict[int, int], readers: dict[int, PosixReader]) -> None:
        if kind is Kind.SLOTS:
            self._handing.send_slots(run[0], [offsets[index] for index in run])
        elif kind is Kind.FILES:
            self._handing.send_files(run[0], [readers[index] for index in run])
        else:
            self._channel.send(kind, self._number, [encode_span(run[0], len(run))])
            return
        self._given += run

    def _left_s(self) -> float:
        return seconds_left(self._context, self._node.limits.read_deadline_s)


class Window:
    """Some blocks on their way: images in memory, which are sent first, and others that are read into a buffer."""

    __slots__ = ("buffer", "hot", "images", "indexes", "reading", "slots")

    def __init__(self) -> None:
        self.slots: Slots | None = None
        self.hot: dict[int, memoryview] = {}
        self.indexes: list[int] = []
        """Those that are read."""
        self.images: dict[int, memoryview] = {}
        self.buffer: memoryview | None = None
        self.reading: Reading | None = None

    def close(self) -> None:
        """Nobody writes into the buffer any more, and the memory may be given away. Idempotent."""
        if self.reading is not None:
            self.reading.withdraw()
        if self.slots is not None:
            self.slots.release()


class BlockStream:
    """One GET_BLOCKS of mode STREAM: the images of those that are there, some sent while the next are read."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        asked: Asked,
        in_flight: BytesInFlight,
        calls: Calls,
        buffers: Buffers,
        limits: WorkerLimits,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._asked = asked
        self._wanted = wanted = asked.wanted
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers
        self._sizes = [image_bytes(wanted, index) for index in range(len(wanted))]
        self._cuts = list(windows(self._sizes, 2 * limits.window_bytes))
        self._most_bytes = max((sum(self._sizes[cut]) for cut in self._cuts), default=0)
        self._is_reserved = False

    def send(self, context: CallContext) -> None:
        """Sends them, and END."""
        begun: list[Window] = []
        with ExitStack() as reserved:
            try:
                for cut in self._cuts:
                    begun.append(Window())
                    self._begin(begun[-1], range(len(self._wanted))[cut], reserved, self._deadline(context))
                    if len(begun) == WINDOWS:
                        self._finish(begun[0], self._deadline(context))
                        begun.pop(0)
                while begun:
                    self._finish(begun[0], self._deadline(context))
                    begun.pop(0)
            finally:
                for window in begun:
                    window.close()
        self._channel.send(Kind.END, self._number)

    def _begin(self, window: Window, indexes: range, reserved: ExitStack, deadline: Deadline) -> None:
        blocks = self._node.handed_blocks
        allowed = self._asked.allowed(self._node, indexes)
        window.slots = slots = blocks.in_memory(self._wanted, allowed, deadline) if allowed else None
        if slots is not None:
            there = [index for index, entry in zip(allowed, slots.entries, strict=True) if entry is not None]
            window.hot = dict(zip(there, slots.present_images(), strict=True))
        window.indexes = [index for index in allowed if index not in window.hot]
        if not window.indexes:
            return
        if not self._is_reserved:
            reserved.enter_context(self._in_flight.reserved(WINDOWS * self._most_bytes))
            self._is_reserved = True
        window.buffer = self._buffers.take(self._most_bytes)  # of one size, so that they are used again
        at, memory = 0, window.buffer
        for index in window.indexes:
            window.images[index] = memory[at : at + self._sizes[index]]
            at += self._sizes[index]
        window.reading = blocks.begin_copy(self._wanted, window.indexes, window.images.__getitem__)

    def _finish(self, window: Window, deadline: Deadline) -> None:
        self._send(window.hot)
        sent = [*window.hot]
        if window.reading is not None and window.buffer is not None:
            done = window.reading.wait(deadline)
            came = [index for index, whole in zip(window.indexes, done, strict=True) if whole]
            self._send({index: window.images[index] for index in came})
            sent += came
            if len(came) == len(window.indexes):
                # A lane that missed the deadline may still be reading into the others: then it is nobody's any more.
                self._buffers.give(window.buffer)
        self._node.counters.add(NodeCount.MEMORY_HITS, len(window.hot))
        self._node.handed_blocks.used(self._wanted, sorted(sent))
        window.close()

    def _send(self, images: dict[int, memoryview]) -> None:
        # In as few system calls as they take together: the heads of small blocks would cost more than their bytes.
        pieces: list[memoryview] = []
        for index, image in images.items():
            head = encode_head(Kind.FILE, self._number, INDEX_BYTES + len(image))
            pieces += (memoryview(head + encode_index(index)), image)
        self._calls.add(WorkerCount.WIRE_BYTES_OUT, sum(self._wanted.sizes_bytes[index] for index in images))
        if byte_length(pieces) < TINY_BYTES * len(pieces):
            pieces = [memoryview(b"".join(pieces))]
        self._channel.send_bytes(pieces)

    def _deadline(self, context: CallContext) -> Deadline:
        return Deadline(self._node.clock, seconds_left(context, self._node.limits.read_deadline_s))


def windows(sizes: Sequence[int], bytes_max: int) -> Iterator[slice]:
    """Neighbours that are looked for together: at most WINDOW_BLOCKS, of ``bytes_max`` or one alone."""
    start = used = 0
    for index, size in enumerate(sizes):
        if index > start and (used + size > bytes_max or index - start == WINDOW_BLOCKS):
            yield slice(start, index)
            start, used = index, 0
        used += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _there(indexes: Sequence[int], slots: Slots | None) -> dict[int, int]:
    """Where those blocks lie that are in memory."""
    entries = slots.entries if slots is not None else []
    return {index: entry.offset for index, entry in zip(indexes, entries, strict=False) if entry is not None}
