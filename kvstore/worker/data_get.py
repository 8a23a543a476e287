"""Get, over a bulk connection and over gRPC.

Over a bulk connection the answer is whole images with their headers, which the client verifies: in lent slots of
memory, in open files, or as bytes. Over gRPC the worker verifies, and sends chunks while it reads the next.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvstore.core.buffers import Pieces, aligned, byte_length, cut, grouped
from kvstore.core.executor import GROUP_BYTES_MAX, Deadline, Loop
from kvstore.core.metrics import NodeCount
from kvstore.engine.reader import ExportRequest, ReadFuture
from kvstore.errors import InvalidRequest
from kvstore.format.header import Expected
from kvstore.tiers.memory import MemoryTier, Slots
from kvstore.transport.channel import (
    FILES_AHEAD,
    FILES_MAX,
    NOT_LENT,
    SPAN_BYTES,
    Channel,
    FrameKind,
    LentSlots,
    Mode,
    encode_head,
    encode_slots,
    encode_span,
)
from kvstore.transport.images import image_messages
from kvstore.transport.messages import parse
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.context import Call, WorkerContext
from kvstore.worker.data_put import buffers_of

# Leases: chunks in the worker's memory that a client on this host reads or has views of; they are not evicted.
#
# A lease is a pipe, and the client gets one end. Whatever ends that client, or drops its arrays, closes its end, and
# the kernel notifies the worker. No message is sent, and a broken connection does not end a lease that is still read.


LEASES_MAX = 1024
"""Maximum of live leases, one file descriptor each; beyond that chunks are read as if memory did not have them."""
WATCH_S = 0.25
"""How long the thread waits for the end of a lease before it looks whether it is to end itself."""


class SlotLease:
    """The slots that one client may read until it closes its end. Used by one thread until it is kept."""

    def __init__(self, epoll: select.epoll) -> None:
        """Has ``epoll`` watch it: later would be too late to fail. Raises OSError if there are no more descriptors."""
        self.watched, self.handed = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.slots: list[Slots] = []
        try:
            # Only its end counts: what a client writes is never read. Once: nothing is done before it is kept.
            epoll.register(self.watched, select.EPOLLONESHOT)
        except BaseException:
            self.handed_over()
            os.close(self.watched)
            raise

    def handed_over(self) -> None:
        """Closes our copy of the client's end. Idempotent."""
        fd, self.handed = self.handed, -1
        if fd >= 0:
            os.close(fd)


class Leases:
    """All leases on one memory; thread-safe. A thread waits for those that outlive their request."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._leases_max = LEASES_MAX
        self._changed = threading.Condition()  # guards what follows
        self._count = 0
        self._kept: dict[int, SlotLease] = {}
        self._epoll: select.epoll | None = None
        self._loop = Loop("kvstore-leases", self._changed, lambda: self._watch if self._count else None)

    def __len__(self) -> int:
        return self._count

    def begin(self) -> SlotLease | None:
        """Returns a new lease, to be kept; None if there are too many."""
        with self._changed:
            if self._loop.closed or self._count >= self._leases_max:
                return None
            try:
                if self._epoll is None:  # first: a lease without a watcher would never end
                    epoll = select.epoll()
                    self._loop.start()
                    self._epoll = epoll
                lease = SlotLease(self._epoll)
            except (OSError, RuntimeError):  # no more descriptors, or threads
                return None
            self._count += 1
            self._changed.notify_all()
        return lease

    def add(self, lease: SlotLease, slots: Slots) -> bool:
        """Adds ``slots`` to the lease; False if too much of the memory is leased (rule L1)."""
        if not self._memory.lease(slots):
            return False
        lease.slots.append(slots)
        return True

    def keep(self, lease: SlotLease) -> None:
        """Ends the lease when its client closes its end, which may have happened already."""
        lease.handed_over()
        with self._changed:
            # After close the worker waits for no client, and the slots that clients read stay taken.
            if self._epoll is None or self._loop.closed:
                os.close(lease.watched)
                return
            self._kept[lease.watched] = lease
            self._epoll.modify(lease.watched, 0)  # also says again what was said before it was kept

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Slots that clients still read stay referenced permanently. Idempotent."""
        self._loop.close(timeout_s)
        with self._changed:
            kept, self._kept = self._kept, {}
            epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()
        for fd in kept:
            os.close(fd)

    def _watch(self) -> None:
        epoll = self._epoll
        if epoll is None:
            return  # closed
        for fd, _ in epoll.poll(WATCH_S):
            with self._changed:
                lease = self._kept.pop(fd, None)
            if lease is not None:
                epoll.unregister(fd)
                self._end(lease)

    def _end(self, lease: SlotLease) -> None:
        os.close(lease.watched)
        for each in lease.slots:
            each.release()
        with self._changed:
            self._count -= 1


WINDOW_CHUNKS = 1024
"""Chunks looked up together: enough that tiny ones cost little each, few enough that the first come soon."""
TINY_BYTES = 1024
"""Pieces smaller than this on average are joined before they are sent: a copy costs less than a piece in the kernel."""
WINDOWS = 2
"""Windows in progress at a time: one is sent while the next is read."""
SILENCE_SHARE = 0.6
"""The part of a read's deadline that may pass without a frame: a client has to learn of a miss before it gives up."""


def serve_get(
    worker: WorkerContext, leases: Leases | None, channel: Channel, number: int, mode: int, message: bytes, call: Call
) -> None:
    """Answers the GET frame ``number`` of a bulk connection. ``leases`` is None if the node has no memory."""
    request = parse(pb.GetRequest, message)
    _check_mode(leases, channel, mode, request, call)
    with worker.asked(request, call) as (asked, stop):
        sender = ImageSender(worker, channel, number, asked, call)
        if not (asked.memory_only or request.uncounted):
            worker.node.counters.add(NodeCount.REQUESTS_GET)
        lends, hands_files = mode == Mode.SLOTS, mode != Mode.STREAM and worker.node.hands_files
        try:
            sender.send(request.first, stop, leases if lends else None, hands_files)
        finally:
            if request.first < stop and not asked.memory_only:
                _note_use(worker, asked, request.first, sender.sent)


def _check_mode(leases: Leases | None, channel: Channel, mode: int, request: pb.GetRequest, call: Call) -> None:
    if mode not in (Mode.STREAM, Mode.FILES, Mode.SLOTS):
        raise InvalidRequest(f"the mode of a get is {mode}: expected 0 (a stream), 1 (files) or 2 (slots)")
    if mode == Mode.STREAM:
        return
    if request.memory_only:
        raise InvalidRequest("memory_only with files or slots: expected mode 0 (a stream)")
    if not channel.is_unix:
        raise InvalidRequest("files and slots can be given only on a unix socket")
    if mode == Mode.SLOTS and leases is None:
        raise InvalidRequest("slots can be given only by a worker that has memory")
    call.allow_every()  # shared memory holds chunks of all tenants (rule X8)


def _note_use(worker: WorkerContext, asked: ExportRequest, first: int, sent: Collection[int]) -> None:
    """Notes a read of the chunks that were sent: of a prompt up to the first that was not."""
    keys = asked.wanted
    present = np.zeros(len(keys), np.bool_)
    present[:first] = keys.prefix_ordered  # the client has them
    present[list(sent)] = True
    worker.node.reader.used(keys.found(present))


@dataclass(slots=True, eq=False)
class Window:
    """Some chunks that are sent as bytes: images in memory, and others that are read into a buffer."""

    indexes: Sequence[int]
    slots: Slots | None = None
    hot: dict[int, memoryview] = field(default_factory=dict)
    """The images in memory that are sent, by chunk index."""
    images: dict[int, memoryview] = field(default_factory=dict)
    """The images that are read, by chunk index."""
    is_whole: bool = False
    """True if all of those could be read."""
    buffer: memoryview | None = None
    reading: ReadFuture | None = None

    def close(self) -> None:
        """Ends the window: nothing writes into the buffer after it, and its memory may be reused. Idempotent."""
        if self.reading is not None:
            self.reading.withdraw()
        if self.slots is not None:
            self.slots.release()


class ImageSender:
    """Answers one GET. ``sent`` has the indexes of the chunks that were sent."""

    def __init__(self, worker: WorkerContext, channel: Channel, number: int, asked: ExportRequest, call: Call) -> None:
        self._worker = worker
        self._node = worker.node
        self._channel = channel
        self._number = number
        self._asked = asked
        self._wanted = asked.wanted
        self._is_chain = asked.wanted.prefix_ordered
        self._call = call
        self._is_announced = False
        self._most_bytes = 0
        self._is_reserved = False
        self._brings = not asked.memory_only
        self._spoke_s = worker.node.clock.monotonic_s()
        self.sent: set[int] = set()

    def send(self, first: int, stop: int, leases: Leases | None = None, hands_files: bool = False) -> None:
        """Gives chunks ``first`` to ``stop - 1``, of a prompt up to the first missing one.

        With ``leases`` those in memory are lent; with ``hands_files`` open files are handed over of others.
        """
        left: Sequence[int] = range(first, stop)
        if leases is not None:
            left = self._lend(left, stop, leases)
            self._brings = False  # to look again would count as a second request (rule R2)
        if not self._is_announced:
            self._announce(LentSlots(stop, first, ()))
        untaken = 0
        if hands_files:
            left, untaken = self._hand_over(left)
        self._stream(left)
        if len(self.sent) < stop - first:
            self._channel.send(FrameKind.END, self._number)
        for _ in range(untaken):
            self._channel.receive_frame(FrameKind.TAKEN)

    # Slots of memory

    def _lend(self, indexes: Sequence[int], found: int, leases: Leases) -> list[int]:
        """Lends what is in memory, then what is worth bringing there, unless too much is lent; returns the others."""
        lease: SlotLease | None = None
        parts: Iterable[Sequence[int]] = [indexes[at : at + FILES_MAX] for at in range(0, len(indexes), FILES_MAX)]
        brings = False  # the root may be slow: what needs none goes first
        try:
            while True:
                left: list[int] = []
                for part in parts:
                    slots, offsets = self._in_memory(self._allowed(part), brings=brings)
                    if slots is not None:
                        lease = (lease or leases.begin()) if offsets else lease
                        if not offsets or lease is None or not leases.add(lease, slots):
                            slots.release()
                            offsets = {}
                        else:
                            each = [offsets.get(index, NOT_LENT) for index in part]
                            self._announce(LentSlots(found, part[0], each), lease)
                            self._count_hot(offsets)
                            self._given(offsets)
                    left += [index for index in part if index not in offsets]
                if brings or not left:
                    return left
                few = GROUP_BYTES_MAX // max(1, self._wanted.mean_bytes(0, len(self._wanted)))
                parts, brings = _runs(left, max(1, min(few, FILES_MAX))), True
        finally:
            if lease is not None:
                leases.keep(lease)  # until the client closes its end

    def _announce(self, lent: LentSlots, lease: SlotLease | None = None) -> None:
        # The client gets its end of the lease with the first slots.
        files = [lease.handed] if lease is not None and lease.handed >= 0 else []
        self._channel.send(FrameKind.SLOTS, self._number, [encode_slots(lent)], files)
        self._is_announced = True
        if lease is not None:
            lease.handed_over()

    def _in_memory(self, indexes: Sequence[int], *, brings: bool) -> tuple[Slots | None, dict[int, int]]:
        """Refers to chunks in memory, and returns the offset of each that is there."""
        if not indexes:
            return None, {}
        span = range(indexes[0], indexes[-1] + 1) if self._is_chain else indexes
        slots = self._node.reader.in_memory(self._wanted, span, self._deadline(), brings=brings)
        if slots is None:
            return None, {}
        entries = dict(zip(span, slots.entries, strict=True))
        return slots, {index: entry.offset for index in indexes if (entry := entries[index]) is not None}

    # Open files

    def _hand_over(self, indexes: Sequence[int]) -> tuple[Sequence[int], int]:
        """Hands over open files; returns the other chunks, and how many frames of files the client has not taken."""
        untaken = 0
        for at in range(0, len(indexes), FILES_MAX):
            part = indexes[at : at + FILES_MAX]
            readers = self._node.reader.open_files(self._wanted, self._allowed(part), self._deadline())
            try:
                for run in _runs(list(readers), FILES_MAX):
                    if untaken == FILES_AHEAD:  # the system limits the files that are on their way
                        self._channel.receive_frame(FrameKind.TAKEN)
                        untaken -= 1
                    files = [readers[index].fileno() for index in run]
                    self._channel.send(FrameKind.FILES, self._number, [encode_span(run[0], len(run))], files)
                    untaken += 1
                    self._node.counters.add_read(self._wanted.payload_bytes(run), len(run))
                    self._given(run)
            finally:
                for reader in readers.values():
                    reader.close()
            if self._is_chain and len(readers) < len(part):
                break
        return [index for index in indexes if index not in self.sent], untaken

    # Bytes

    def _stream(self, indexes: Sequence[int]) -> None:
        sizes = self._wanted.image_sizes(indexes)
        cuts = list(grouped(sizes, 2 * self._worker.limits.window_bytes, WINDOW_CHUNKS))
        self._most_bytes = max((sum(sizes[cut]) for cut in cuts), default=0)
        begun: deque[Window] = deque()
        with ExitStack() as reserved:
            try:
                for at, cut in enumerate(cuts):
                    if not begun:
                        begun.append(Window(indexes[cut]))
                        self._begin(begun[0], sizes[cut], reserved)
                    images, is_whole = self._wait(begun[0], self._deadline())
                    if is_whole and at + 1 < len(cuts):
                        begun.append(Window(indexes[cuts[at + 1]]))  # read while this one is sent
                        self._begin(begun[1], sizes[cuts[at + 1]], reserved)
                    self._send(images)
                    self._end(begun.popleft())
                    if not is_whole:
                        break
            finally:
                for window in begun:
                    window.close()

    def _begin(self, window: Window, sizes: Sequence[int], reserved: ExitStack) -> None:
        allowed = self._allowed(window.indexes)
        window.slots, offsets = self._in_memory(allowed, brings=self._brings)
        size_of = dict(zip(window.indexes, sizes, strict=True))
        if window.slots is not None:
            memory = window.slots.memory
            window.hot = {index: memory[offset : offset + size_of[index]] for index, offset in offsets.items()}
        left = [index for index in allowed if index not in offsets]
        if not left or self._asked.memory_only:
            return
        if not self._is_reserved:
            reserved.enter_context(self._worker.in_flight.reserved(WINDOWS * self._most_bytes, self._call.visit.pays))
            self._is_reserved = True
        window.buffer = self._worker.buffers.take(self._most_bytes)  # of one size, so that they can be reused
        at = 0
        for index in left:
            window.images[index] = window.buffer[at : at + size_of[index]]
            at += size_of[index]
        window.reading = self._node.reader.begin_copy(self._wanted, left, window.images.__getitem__)

    def _wait(self, window: Window, deadline: Deadline) -> tuple[dict[int, memoryview], bool]:
        """Waits for a window; returns the images to send, and whether more may follow them."""
        if not self._is_chain:
            self._send(window.hot)  # while the others are read
        if window.reading is not None:
            done = window.reading.wait(deadline)
            came = [index for index, whole in zip(window.images, done, strict=True) if whole]
            window.is_whole = len(came) == len(window.images)
            window.images = {index: window.images[index] for index in came}
        if not self._is_chain:
            return window.images, True
        found = window.hot | window.images
        end = next((at for at, index in enumerate(window.indexes) if index not in found), len(window.indexes))
        images = {index: found[index] for index in window.indexes[:end]}
        window.hot = {index: image for index, image in window.hot.items() if index in images}
        return images, end == len(window.indexes)

    def _end(self, window: Window) -> None:
        self._count_hot(window.hot)
        window.close()
        if window.buffer is not None and window.is_whole:
            # A thread past its deadline may still be reading into the others: such a buffer is never reused.
            self._worker.buffers.give(window.buffer)

    def _send(self, images: dict[int, memoryview]) -> None:
        # In few system calls: the heads of small chunks would cost more than their bytes.
        pieces: list[memoryview] = []
        for run in _runs(list(images), WINDOW_CHUNKS):
            each = [images[index] for index in run]
            head = encode_head(FrameKind.IMAGES, self._number, SPAN_BYTES + byte_length(each))
            pieces += (memoryview(head + encode_span(run[0], len(run))), *each)
        if byte_length(pieces) < TINY_BYTES * len(pieces):
            pieces = [memoryview(b"".join(pieces))]
        self._channel.send_bytes(pieces)
        self._given(images)

    def _allowed(self, indexes: Sequence[int]) -> Sequence[int]:
        return self._asked.allowed(self._node.holds, self._node.gc_view, indexes)

    def _count_hot(self, indexes: Collection[int]) -> None:
        if not self._asked.memory_only:  # a peer is no caller: it counts what it gives to its own
            self._node.counters.add(NodeCount.MEMORY_HITS, len(indexes))
            self._node.counters.add(NodeCount.MEMORY_BYTES, self._wanted.payload_bytes(list(indexes)))

    def _given(self, indexes: Collection[int]) -> None:
        self._call.sent(self._wanted.payload_bytes(list(indexes)))
        self.sent.update(indexes)
        if indexes:
            self._spoke_s = self._node.clock.monotonic_s()

    def _deadline(self) -> Deadline:
        """The end of all that is done before the next frame."""
        silent_s = self._node.clock.monotonic_s() - self._spoke_s
        left_s = SILENCE_SHARE * self._node.limits.read_deadline_s - silent_s
        return Deadline(self._node.clock, min(left_s, self._call.left_s(left_s)))


def _runs(indexes: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Yields ``indexes``, which ascend, in runs of consecutive ones, at most ``most`` each."""
    starts = [at for at in range(len(indexes)) if not at or indexes[at] != indexes[at - 1] + 1]
    for start, stop in pairwise([*starts, len(indexes)]):
        for at in range(start, stop, most):
            yield indexes[at : min(at + most, stop)]


# Over gRPC: chunks or blocks are read and verified while those before them are being sent.


@dataclass(frozen=True, slots=True)
class _Window:
    """Chunks that are read together: for each its index, what it is, and its sections."""

    chunks: list[tuple[int, Expected, Pieces]]
    reading: ReadFuture


def stream_get(worker: WorkerContext, request: pb.GetRequest, call: Call) -> Iterator[bytes]:
    """Yields the encoded messages that answer a Get over gRPC."""
    if request.memory_only:
        raise InvalidRequest("memory_only goes over a bulk connection only (OpenBulk)")
    with worker.asked(request, call) as (asked, stop):
        if not request.uncounted:
            worker.node.counters.add(NodeCount.REQUESTS_GET)
        tokens = stop * asked.wanted.namespace.layout.chunk_tokens if asked.wanted.prefix_ordered else 0
        yield pb.GetResponse(start=pb.GetStart(chunks=stop, tokens=tokens)).SerializeToString()
        if request.first < stop:
            yield from _images(worker, asked, request.first, stop, call)


def _images(worker: WorkerContext, asked: ExportRequest, first: int, stop: int, call: Call) -> Iterator[bytes]:
    """Yields the messages of the images from ``first`` on, of a prompt up to the first missing one."""
    wanted, is_chain = asked.wanted, asked.wanted.prefix_ordered
    sizes = wanted.payload_sizes()
    windows = [range(first, stop)[part] for part in grouped(sizes[first:stop], worker.limits.window_bytes)]
    largest = max((sum(sizes[window.start : window.stop]) for window in windows), default=0)
    sent: set[int] = set()
    begun: list[_Window] = []
    with worker.in_flight.reserved(min(2, len(windows)) * largest, call.visit.pays):
        memories = [aligned(largest) for _ in windows[:2]]
        try:
            for number, indexes in enumerate(windows):
                if not begun:
                    begun.append(_begin(worker, asked, indexes, memories[number % 2], call))
                window = begun.pop()
                done = window.reading.wait(_deadline(worker, call))
                ends_here = is_chain and not all(done)
                if number + 1 < len(windows) and not ends_here:
                    begun.append(_begin(worker, asked, windows[number + 1], memories[(number + 1) % 2], call))
                for (index, expected, sections), is_done in zip(window.chunks, done, strict=True):
                    if is_done:
                        call.sent(expected.payload_bytes)
                        yield from image_messages(pb.GetResponse, index, expected, sections)
                        sent.add(index)
                    elif is_chain:
                        return
        finally:
            # Before the memory is freed: a thread may be reading into it for a client that is gone.
            for window in begun:
                window.reading.withdraw()
            _note_use(worker, asked, first, sent)


def _begin(worker: WorkerContext, asked: ExportRequest, indexes: range, memory: memoryview, call: Call) -> _Window:
    """Begins to read those of ``indexes`` that may be given, into ``memory``."""
    wanted, node = asked.wanted, worker.node
    allowed = asked.allowed(node.holds, node.gc_view, indexes)
    expected = [wanted.expected(index) for index in allowed]
    buffers = cut(memory, [each.payload_bytes for each in expected])
    part, first = wanted.as_neighbours(allowed)
    sections = buffers_of(part, first, buffers)
    reading = node.reader.begin(part, first, len(allowed), sections, _deadline(worker, call))
    places = range(first, first + len(allowed))
    return _Window(list(zip(allowed, expected, map(sections, places), strict=True)), reading)


def _deadline(worker: WorkerContext, call: Call) -> Deadline:
    return Deadline(worker.node.clock, call.left_s(worker.node.limits.read_deadline_s))
