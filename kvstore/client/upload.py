"""Putting chunks and blocks to a worker: copied into a shared arena, sent from the caller's memory, or over gRPC.

Several lanes copy, past the caches and without the GIL.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvstore.client.failover import Caller, Endpoint, FileLanes
from kvstore.client.pool import DataConnection, UploadArena
from kvstore.core.buffers import Pieces, Planes, Sections, grouped
from kvstore.core.executor import Deadline, Executor
from kvstore.core.layout import Layout
from kvstore.core.metrics import ClientCount
from kvstore.core.write_mode import RUNS_IN_MEMORY
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.keyset import KeySet
from kvstore.native import library as native
from kvstore.transport.channel import (
    READY,
    RUN_BYTES,
    RUN_BYTES_MAX,
    SPAN_BYTES,
    SUM_BYTES,
    Channel,
    FrameKind,
    LinkBroken,
    Placed,
    block_sums,
    encode_head,
    encode_placed,
    encode_request,
    encode_span,
    send_run,
    unpacked,
)
from kvstore.transport.images import image_messages
from kvstore.transport.messages import parse, sealed, traced
from kvstore.transport.watchdog import StreamWatchdog, WatchedStream
from kvstore.v1 import kvstore_pb2 as pb

FULL_PAUSE_S = 0.0005
"""Pause between two looks at a full arena."""
LAST_WORD_S = 1.0
STEP_BYTES = 4 << 20
"""Bytes that one lane copies at a time: a fraction of a millisecond."""
PAGE_BYTES = 4096
ARENA_RUNS = RUNS_IN_MEMORY + 1
"""Number of runs that an arena must have room for: those that need memory, and one more because the end of the ring may
be too short for a run.
"""
BLOCKS_BYTES = 32 << 20
"""Size of a run of blocks in the arena. Each run costs one hand-over, and we copy the next run while the worker writes
this one: on two cores runs of 8 MiB took four times as long.
"""

Addresses = npt.NDArray[np.uint64]


class UploadSource(ABC):
    """The ``count`` chunks or blocks that a caller puts, addressed by their index in what is wanted."""

    count: int
    largest_bytes: int
    """Size of the largest chunk."""
    placed_bytes: int
    """Size of a run in the arena, if the arena has room for it."""

    @abstractmethod
    def size_bytes(self, first: int, count: int) -> int:
        """Size of ``count`` chunks from index ``first`` on."""

    @abstractmethod
    def sums_count(self, count: int) -> int:
        """Number of checksums that go with a run of ``count`` chunks."""

    @abstractmethod
    def place(self, first: int, count: int, target: npt.NDArray[np.uint8], lanes: Executor, deadline: Deadline) -> None:
        """Copies a run into ``target``, which has its size."""

    @abstractmethod
    def send(self, channel: Channel, first: int, count: int) -> None:
        """Sends the bytes of a run and its checksums."""


class ChunkUpload(UploadSource):
    """The first ``count`` chunks of a prompt, as far as ``planes`` have them."""

    def __init__(self, planes: Planes, layout: Layout, count: int) -> None:
        self.count = count
        self.largest_bytes = layout.chunk_bytes
        self.placed_bytes = max(RUN_BYTES, layout.chunk_bytes)
        self._planes = planes
        self._layout = layout

    def size_bytes(self, first: int, count: int) -> int:
        return count * self._layout.chunk_bytes

    def sums_count(self, count: int) -> int:
        return self._layout.section_count

    def place(self, first: int, count: int, target: npt.NDArray[np.uint8], lanes: Executor, deadline: Deadline) -> None:
        planes, size = self._planes, target.nbytes // self._layout.section_count
        assert planes.covers(first, count) and planes.is_contiguous
        start: int = target.__array_interface__["data"][0]
        to = np.arange(start, start + target.nbytes, size, dtype=np.uint64)
        source = planes.addresses() + np.uint64(planes.offset(first))
        copy_rows(to, source, size, (target, planes), lanes, deadline)

    def send(self, channel: Channel, first: int, count: int) -> None:
        send_run(channel, self._planes, first, count)


class BlockUpload(UploadSource):
    """Engine-hashed blocks."""

    def __init__(self, buffers: Pieces) -> None:
        self.count = len(buffers)
        self.largest_bytes = max(map(len, buffers), default=0)
        self.placed_bytes = max(BLOCKS_BYTES, self.largest_bytes)
        self._buffers = buffers
        self._ends = np.cumsum([0, *map(len, buffers)]).tolist()

    def size_bytes(self, first: int, count: int) -> int:
        size: int = self._ends[first + count] - self._ends[first]
        return size

    def sums_count(self, count: int) -> int:
        return count

    def place(self, first: int, count: int, target: npt.NDArray[np.uint8], lanes: Executor, deadline: Deadline) -> None:
        arrays = [np.frombuffer(block, np.uint8) for block in self._buffers[first : first + count]]
        addresses = np.fromiter((each.__array_interface__["data"][0] for each in arrays), np.uint64, count)
        sizes = np.fromiter(map(len, arrays), np.uint64, count)
        to = np.uint64(target.__array_interface__["data"][0]) + np.cumsum(sizes) - sizes
        for size in np.unique(sizes):
            same = sizes == size
            copy_rows(to[same], addresses[same], int(size), (target, arrays), lanes, deadline)

    def send(self, channel: Channel, first: int, count: int) -> None:
        blocks = self._buffers[first : first + count]
        channel.send_bytes([*blocks, memoryview(np.array(block_sums(blocks), "<u8").tobytes())])


def _send_put(
    link: DataConnection, endpoint: Endpoint, start: pb.PutStart, cargo: UploadSource, caller: Caller, timeout_s: float
) -> pb.PutResponse:
    """Sends a put; returns the worker's answer. ``start`` describes the cargo.

    Raises LinkBroken, LinkLate, BulkRefused; InvalidRequest for an answer that is not valid.
    """
    channel, ends_s = link.channel, time.monotonic() + timeout_s
    channel.limit(caller.limits.write_s, timeout_s)
    first = 0 if start.keys else start.first
    size_bytes = cargo.size_bytes(first, cargo.count - first)
    reserve = partial(endpoint.bulk.reserve_arena, link)
    link.share(min(size_bytes, ARENA_RUNS * cargo.placed_bytes), reserve)
    arena, number = link.arena, link.next_number()
    if arena is not None:
        arena.begin(number)
    channel.send(FrameKind.PUT, number, [encode_request(timeout_s, 0, traced(start))])
    begin, count, sent_bytes = unpacked(READY, link.receive(FrameKind.READY)[1])
    if count and not (first <= begin and begin + count == cargo.count):
        raise channel.break_off(f"chunks {begin} to {begin + count - 1} are wanted of {cargo.count}")
    run_bytes = 0 if arena is None else _placed_bytes(arena, cargo, cargo.size_bytes(begin, count))
    try:
        sizes = [cargo.size_bytes(index, 1) for index in range(begin, begin + count)]
        for run in grouped(sizes, run_bytes or min(sent_bytes, RUN_BYTES_MAX)):
            at, chunks = begin + run.start, run.stop - run.start
            if at > begin and not channel.is_quiet():
                break  # the worker has something to say: it refuses
            if arena is not None and run_bytes:
                _place(link, arena, number, cargo, begin, at, chunks, ends_s, caller.lanes)
            else:
                _send(link, number, cargo, at, chunks)
        return parse(pb.PutResponse, link.receive(FrameKind.STORED)[1])
    except LinkBroken as broken:
        _raise_refusal(link)
        raise broken


def _placed_bytes(arena: UploadArena, cargo: UploadSource, size_bytes: int) -> int:
    """Returns the size of runs in the arena for a put of ``size_bytes``; 0 if the arena is too small for any."""
    placed_bytes = min(cargo.placed_bytes, size_bytes)
    if arena.size_bytes >= size_bytes + placed_bytes:
        return placed_bytes
    # With room for fewer runs the worker would wait for the next run, and we for it to release one.
    placed_bytes = min(placed_bytes, arena.size_bytes // ARENA_RUNS)
    return placed_bytes if placed_bytes >= cargo.largest_bytes else 0


def _place(
    link: DataConnection,
    arena: UploadArena,
    number: int,
    cargo: UploadSource,
    begin: int,
    first: int,
    count: int,
    ends_s: float,
    lanes: FileLanes,
) -> None:
    size_bytes = cargo.size_bytes(first, count)
    while (offset := arena.take(size_bytes, first + count - begin)) is None:
        if not link.channel.is_quiet():
            return  # the caller reads the worker's answer
        _pause(ends_s)
    target, deadline = arena.bytes_at(offset, size_bytes), Deadline(lanes.clock, ends_s - time.monotonic())
    cargo.place(first, count, target, lanes.copiers(), deadline)
    link.channel.send(FrameKind.PLACED, number, [encode_placed(Placed(first, count, offset))])


def _send(link: DataConnection, number: int, cargo: UploadSource, first: int, count: int) -> None:
    length = SPAN_BYTES + cargo.size_bytes(first, count) + cargo.sums_count(count) * SUM_BYTES
    link.channel.send_bytes([memoryview(encode_head(FrameKind.CHUNKS, number, length) + encode_span(first, count))])
    cargo.send(link.channel, first, count)


def _pause(ends_s: float) -> None:
    """Waits a little for room in an arena. Raises Unavailable once the time is over."""
    if time.monotonic() > ends_s:
        raise Unavailable("the worker did not store the chunks in shared memory in time: retry later")
    time.sleep(FULL_PAUSE_S)


def _raise_refusal(link: DataConnection) -> None:
    """Raises BulkRefused if the worker said why it refused before it closed the connection."""
    link.channel.limit(LAST_WORD_S, LAST_WORD_S)
    with suppress(Unavailable):
        link.receive(FrameKind.STORED)


def copy_rows(
    to: Addresses, source: Addresses, row_bytes: int, alive: object, lanes: Executor, deadline: Deadline
) -> None:
    """Copies ``row_bytes`` bytes from each address in ``source`` to the one in ``to``; both have shape ``(rows,)``.

    ``alive`` owns the memory: a lane that is still copying at the deadline keeps a reference to it. Raises
    DeadlinePassed, Overloaded, Unavailable.
    """
    rows = len(to)
    if not rows or not row_bytes:
        return
    # Each step takes whole pages of every row, so the number of rows does not matter.
    pages = -(-row_bytes // PAGE_BYTES)
    steps = max(1, min(pages, rows * row_bytes // STEP_BYTES))
    starts = [step * pages // steps * PAGE_BYTES for step in range(steps)]
    spans = list(pairwise([*starts, row_bytes]))
    lanes.share(steps, partial(_copy_step, alive, to, source, spans), deadline)


def _copy_step(_: object, to: Addresses, source: Addresses, spans: list[tuple[int, int]], step: int) -> bool:
    (start, stop), at = spans[step], [each.__array_interface__["data"][0] for each in (to, source)]
    native.library.kv_copy_rows(*at, len(to), start, stop - start)
    return True


def put_past_grpc(
    endpoint: Endpoint, start: pb.PutStart, cargo: UploadSource, caller: Caller, timeout_s: float
) -> pb.PutResponse | None:
    """Puts ``cargo`` over a bulk connection; None if there is none, or it broke."""
    with endpoint.bulk.link(timeout_s) as link:
        if link is None:
            return None
        caller.counters.add(ClientCount.PUTS_SHARED if link.is_shared else ClientCount.PUTS_TCP)
        try:
            return _send_put(link, endpoint, start, cargo, caller, timeout_s)
        except (LinkBroken, InvalidRequest) as error:
            endpoint.bulk.note_broken(link, error)
    return None


def put_over_grpc(
    endpoint: Endpoint, start: pb.PutStart, wanted: KeySet, sections: Sections, caller: Caller, left_s: float
) -> pb.PutResponse:
    """Sends images of blocks, or of the chunks of a prompt that are missing."""
    ends_s = time.monotonic() + left_s
    opening, is_chain = pb.PutStart(), wanted.prefix_ordered
    opening.CopyFrom(start)
    first = start.first if is_chain else 0
    present = _present(endpoint, start, caller.limits.match_s) if is_chain else 0
    while True:
        begin = max(first, present)
        if is_chain:
            opening.first = begin
        caller.counters.add(ClientCount.PUTS_GRPC)
        outgoing, stream = Outgoing(_messages(opening, wanted, begin, sections)), endpoint.stream_out("Put")
        raw = send_stream(stream, outgoing, caller.watch, caller.limits.write_s, ends_s - time.monotonic())
        answer = pb.PutResponse.FromString(raw)
        if begin == first or answer.tokens_present >= begin * wanted.namespace.layout.chunk_tokens:
            answer.chunks_found += begin - first
            return answer
        present = 0  # a chunk that was there is deleted: send all


def _messages(start: pb.PutStart, wanted: KeySet, first: int, sections: Sections) -> Iterator[bytes]:
    yield pb.PutRequest(start=start).SerializeToString()
    for index in range(first, len(wanted)):
        yield from image_messages(pb.PutRequest, index, wanted.expected(index), sections(index))


def _present(endpoint: Endpoint, start: pb.PutStart, timeout_s: float) -> int:
    """Returns how many leading chunks need no sending. Errors are left to the put: not knowing costs only bytes."""
    request = sealed(pb.MatchRequest(namespace=start.namespace, tokens=start.tokens, uncounted=True))
    try:
        return pb.MatchResponse.FromString(endpoint.unary("Match")(request, timeout=timeout_s)).chunks
    except grpc.RpcError:
        return 0


class Outgoing:
    """The messages of a put. gRPC takes them in its own thread, which must not outlive the call.

    ``close`` returns once that thread has let go of the caller's memory.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._lock = threading.Lock()
        self._messages: Iterator[bytes] | None = messages
        self._stream: WatchedStream | None = None

    def watch(self, stream: WatchedStream) -> None:
        """Counts each message taken as progress of ``stream``."""
        self._stream = stream

    def __iter__(self) -> Outgoing:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._messages is None:
                raise StopIteration
            if self._stream is not None:
                self._stream.moved()
            return next(self._messages)

    def close(self) -> None:
        """Ends the messages. Idempotent."""
        with self._lock:
            self._messages = None


def send_stream(stub: Any, outgoing: Outgoing, watch: StreamWatchdog, idle_s: float, timeout_s: float) -> bytes:
    """Sends a stream; returns the answer. Raises what gRPC raises."""
    call = stub.future(outgoing, timeout=timeout_s)
    try:
        with watch.begin(idle_s, timeout_s, call.cancel) as stream:
            outgoing.watch(stream)
            answer: bytes = call.result()
            return answer
    finally:
        call.cancel()
        outgoing.close()
