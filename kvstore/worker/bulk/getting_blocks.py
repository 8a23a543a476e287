"""Get of engine-hashed blocks over a bulk connection: what there is of them, by slots and files, or as bytes.

Apart from gets of prompts, because nothing is held, a block that is missing ends nothing, and each has its own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvstore.errors import InvalidRequest
from kvstore.node.deadline import Deadline
from kvstore.node.node import Node
from kvstore.node.slots import Slots
from kvstore.node.wanted import Keyed, image_bytes
from kvstore.root.posix import PosixReader
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.bulk.frames import INDEX_BYTES, Kind, Mode, encode_index, encode_span
from kvstore.wire.messages import parse
from kvstore.worker.admission import BytesInFlight
from kvstore.worker.bulk.handing import HandingOver
from kvstore.worker.bulk.leases import Leases
from kvstore.worker.bulk.memory import Buffers
from kvstore.worker.calls import CallContext, Calls, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import Prompts

WINDOW_BLOCKS = 64
"""Blocks that are looked for at once, as many as one WANT may ask for."""


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

    def get(self, channel: Channel, number: int, mode: int, message: bytes, context: CallContext) -> None:
        """Answers one request."""
        request = parse(pb.GetBlocksRequest, message)
        if mode not in (Mode.STREAM, Mode.FILES, Mode.SLOTS):
            raise InvalidRequest(f"the mode of a GET_BLOCKS is {mode}: expected 0 (a stream), 1 (files) or 2 (slots)")
        if mode != Mode.STREAM and not channel.is_unix:
            raise InvalidRequest("files and slots can be given only on a unix socket")
        wanted = self._prompts.blocks(request.namespace, request.keys, request.sizes)
        self._prompts.settle_blocks(wanted.namespace, wanted.keys)
        if mode == Mode.STREAM:
            BlockStream(
                self._node, channel, number, wanted, self._in_flight, self._calls, self._buffers, self._limits
            ).send(context)
            return
        leases = self._leases if mode == Mode.SLOTS else None
        given = BlockHanding(self._node, channel, number, wanted, leases, context).serve()
        size_bytes = sum(wanted.sizes_bytes[index] for index in given)
        self._calls.add("wire_bytes_out", size_bytes)
        self._node.counters.add_read(size_bytes, len(given))
        self._node.handed_blocks.used(wanted, given)


class BlockHanding:
    """One GET_BLOCKS of mode FILES or SLOTS."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        wanted: Keyed,
        leases: Leases | None,
        context: CallContext,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._wanted = wanted
        self._context = context
        self._handing = HandingOver(channel, number, len(wanted), leases)
        self._has_slots = leases is not None
        self._given: list[int] = []

    def serve(self) -> list[int]:
        """Hands over what the client wants until it has read it; which blocks were given."""
        self._handing.serve(self._answer)
        return self._given

    def _answer(self, first: int, count: int) -> None:
        """One WANT: frames for each run of blocks that are to be had in the same way, or not at all."""
        blocks, deadline = self._node.handed_blocks, Deadline(self._node.clock, self._left_s())
        allowed = blocks.allowed(self._wanted, range(first, first + count))
        how = dict.fromkeys(range(first, first + count), Kind.ABSENT)
        offsets: dict[int, int] = {}
        readers: dict[int, PosixReader] = {}
        slots = blocks.in_memory(self._wanted, allowed, deadline) if allowed else None
        try:
            there = _there(allowed, slots)
            if there and slots is not None and self._has_slots and self._handing.lease(slots):
                slots, offsets = None, there
                self._node.counters.add("memory_hits", len(there))
            left = [index for index in allowed if index not in offsets]
            how.update(dict.fromkeys(offsets, Kind.SLOTS))
            if self._node.hands_files:
                readers = self._opened(left, deadline)
                how.update(dict.fromkeys(readers, Kind.FILES))
                left = [index for index in left if index in there and index not in readers]
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


class BlockStream:
    """One GET_BLOCKS of mode STREAM: the images of those that are there, as they lie in memory or were read."""

    def __init__(
        self,
        node: Node,
        channel: Channel,
        number: int,
        wanted: Keyed,
        in_flight: BytesInFlight,
        calls: Calls,
        buffers: Buffers,
        limits: WorkerLimits,
    ) -> None:
        self._node = node
        self._channel = channel
        self._number = number
        self._wanted = wanted
        self._in_flight = in_flight
        self._calls = calls
        self._buffers = buffers
        self._sizes = [image_bytes(wanted, index) for index in range(len(wanted))]
        self._windows = list(windows(self._sizes, 2 * limits.window_bytes))

    def send(self, context: CallContext) -> None:
        """Sends them, in order, and END."""
        # Of one size, so that they are used again.
        most = max((sum(self._sizes[window]) for window in self._windows), default=0)
        for window in self._windows:
            indexes = range(len(self._wanted))[window]
            deadline = Deadline(self._node.clock, seconds_left(context, self._node.limits.read_deadline_s))
            self._send_window(indexes, most, deadline)
        self._channel.send(Kind.END, self._number)

    def _send_window(self, indexes: range, most_bytes: int, deadline: Deadline) -> None:
        blocks, sent = self._node.handed_blocks, list[int]()
        allowed = blocks.allowed(self._wanted, indexes)
        slots = blocks.in_memory(self._wanted, allowed, deadline) if allowed else None
        try:
            there = _there(allowed, slots)
            left = [index for index in allowed if index not in there]
            if slots is not None and there:
                self._node.counters.add("memory_hits", len(there))
                for index in there:
                    at = allowed.index(index)
                    self._send_image(index, slots.images(at, at + 1)[0])
                sent += there
        finally:
            if slots is not None:
                slots.release()
        if left:
            sent += self._send_from_root(left, most_bytes, deadline)
        blocks.used(self._wanted, sorted(sent))

    def _send_from_root(self, indexes: Sequence[int], most_bytes: int, deadline: Deadline) -> list[int]:
        """Reads them into memory of ours and sends what came; which did."""
        with self._in_flight.reserved(most_bytes):
            buffer = self._buffers.take(most_bytes)
            images: dict[int, memoryview] = {}
            at, memory = 0, memoryview(buffer)
            for index in indexes:
                images[index] = memory[at : at + self._sizes[index]]
                at += self._sizes[index]
            reading = self._node.handed_blocks.begin_copy(self._wanted, indexes, images.__getitem__)
            try:
                done = reading.wait(deadline)
                came = [index for index, whole in zip(indexes, done, strict=True) if whole]
                for index in came:
                    self._send_image(index, images[index])
            finally:
                reading.withdraw()
        if len(came) == len(indexes):
            # A lane that missed the deadline may still be reading into the others: then it is nobody's any more.
            self._buffers.give(buffer)
        return came

    def _send_image(self, index: int, image: memoryview) -> None:
        self._channel.send_head(Kind.FILE, self._number, INDEX_BYTES + len(image))
        self._channel.send_bytes([memoryview(encode_index(index)), image])
        self._calls.add("wire_bytes_out", self._wanted.sizes_bytes[index])


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
