"""Put, over a bulk connection and over gRPC: chunks or blocks are written while the next arrive.

Over a bulk connection they come in the shared arena or as bytes, over gRPC as images in messages.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from kvstore.core.buffers import BlockBuffers, Pieces, Planes, Sections, aligned, cut_evenly
from kvstore.core.executor import Deadline
from kvstore.core.write_mode import RUNS_IN_MEMORY, WriteMode
from kvstore.engine.writer import WriteBatch, WriteResult
from kvstore.errors import InvalidRequest
from kvstore.format.header import Expected
from kvstore.format.keyset import KeySet
from kvstore.security.access import NOTHING, Presented
from kvstore.tiers.arena import follow
from kvstore.transport.channel import (
    LEDGER_BYTES,
    PARTS_BYTES,
    PLACED,
    READY,
    RUN_BYTES,
    SPAN_BYTES,
    SUM_BYTES,
    Channel,
    FrameKind,
    decode_span,
    entry_value,
    receive_planes,
    receive_sections,
    unpacked,
)
from kvstore.transport.images import receive_images
from kvstore.transport.limits import MESSAGE_BYTES_MAX
from kvstore.transport.messages import hints_of, parse, write_of
from kvstore.transport.status import BrokenTransfer
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.context import BufferPool, Call, WorkerContext

# A connection, the arena that its client shares, and the ledger that says which part of it is free.


class ReleaseLedger:
    """Shows a client which memory it may use again: the worker writes it, the client reads it through shared memory."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstore-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, LEDGER_BYTES)
            # Sealed in its size: a client that reads past the end would be killed (SIGBUS).
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._entry = np.frombuffer(mmap.mmap(self.fd, LEDGER_BYTES), np.uint64)
        except BaseException:
            self.close()
            raise

    def released(self, request: int, count: int) -> None:
        """Says that the first ``count`` chunks of a put are no longer needed in the arena."""
        # One aligned store of 8 bytes: the client sees the old value or the new one.
        self._entry[0] = entry_value(request, count)

    def close(self) -> None:
        """Closes the file; the memory stays as long as a put that hangs needs it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Connection:
    """A channel and its arena and ledger. Used by one thread at a time, except the ledger."""

    def __init__(self, channel: Channel, presented: Presented = NOTHING) -> None:
        self.channel = channel
        self.presented = presented
        """The client's credentials from its request to connect; checked again with each request."""
        self.ledger = ReleaseLedger() if channel.is_unix else None
        self._arena = memoryview(b"")
        self._closing = threading.Event()

    def adopt_arena(self, size_bytes: int, arena_bytes_max: int) -> None:
        """Maps the memory that came with the last frame, read-only, in place of the previous mapping.

        Raises InvalidRequest unless it is sealed against shrinking: reading past its end would kill the worker
        (SIGBUS).
        """
        fd = self.channel.take_files(1)[0]
        try:
            if not 0 < size_bytes <= arena_bytes_max:
                raise InvalidRequest(f"an arena of {size_bytes} bytes: expected 1 to {arena_bytes_max}")
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as cause:
                raise InvalidRequest("an arena must be a memfd: this is another kind of file") from cause
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size_bytes:
                raise InvalidRequest("an arena must have its size, and be sealed against shrinking (F_SEAL_SHRINK)")
            if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
                raise InvalidRequest("an arena must have ordinary pages: huge pages can run out while it is read")
            try:
                mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            except (OSError, ValueError) as cause:
                raise InvalidRequest(f"the arena could not be mapped: {cause}") from cause
            self._arena = memoryview(mapped)
            self._closing.set()
            self._closing = threading.Event()
            with suppress(OSError, RuntimeError):  # no more descriptors or threads
                follow(self._arena, fd, self._closing)
        finally:
            os.close(fd)

    def placed(self, offset: int, size_bytes: int) -> memoryview:
        """Returns bytes in the arena. Raises InvalidRequest if they are not all within it."""
        end = offset + size_bytes
        if end > len(self._arena):
            raise InvalidRequest(f"bytes {offset} to {end} are outside of the arena of {len(self._arena)} bytes")
        return self._arena[offset:end]

    def close(self) -> None:
        """Closes the connection. The arena stays mapped while a put that hangs needs it. Idempotent."""
        self._closing.set()
        self.channel.close()
        self._arena = memoryview(b"")
        if self.ledger is not None:
            self.ledger.close()


MEMORY_RUN_BYTES = 16 << 20
"""Limit of several chunks in one run that comes as bytes, and is copied into memory before the next run is received."""


class Upload:
    """The ``count`` chunks or blocks of a put, from index ``first`` on, as a client sends them."""

    def __init__(
        self, connection: Connection, number: int, wanted: KeySet, first: int, count: int, run_bytes: int
    ) -> None:
        """``run_bytes`` limits several chunks in one run that comes as bytes."""
        self.first = first
        self.count = count
        self.run_bytes = run_bytes
        self._connection = connection
        self._number = number
        self._wanted = wanted
        self._ends = [0, *accumulate(wanted.payload_sizes()[first : first + count])]

    def receive(self, write: WriteBatch, worker: WorkerContext, call: Call, reserved: ExitStack) -> None:
        """Receives all runs in order, and adds each to ``write``; into its memory, if it has some for them.

        Memory is reserved for the first run that comes into a buffer, until ``reserved`` ends. Raises BrokenTransfer
        if bytes do not match their checksums, InvalidRequest, LinkBroken, LinkLate.
        """
        channel = self._connection.channel
        is_reserved = False
        index, stop = self.first, self.first + self.count
        while index < stop:
            head = channel.receive_head()
            channel.expect(head, FrameKind.PLACED, FrameKind.CHUNKS)
            offset = 0
            if head.kind is FrameKind.PLACED:
                start, count, offset = unpacked(PLACED, channel.receive(head.length))
            else:
                start, count = decode_span(channel.receive(SPAN_BYTES))
            if start != index or not 1 <= count <= stop - index:
                raise channel.break_off(f"received {count} chunks from {start} on: expected chunks from {index} on")
            size_bytes = self._size_bytes(start, count)
            index += count
            buffer: memoryview | None = None
            if head.kind is FrameKind.PLACED:
                memory = self._connection.placed(offset, size_bytes)
            else:
                length = SPAN_BYTES + size_bytes + self._sums_count(count) * SUM_BYTES
                if head.length != length or (count > 1 and size_bytes > self.run_bytes):
                    raise channel.break_off(
                        f"received {head.length} bytes for {count} chunks: not their size, or too large a run"
                    )
                if self._receive_into_memory(write, start, count):
                    call.received(size_bytes)
                    continue
                if not is_reserved:
                    reserved.enter_context(worker.in_flight.reserved(self._in_memory_bytes, call.visit.pays))
                    is_reserved = True
                memory = buffer = worker.buffers.take(size_bytes)
                if not receive_planes(channel, self._pieces(start, count, memory)):
                    raise self._broken(start, count)
            call.received(size_bytes)
            release = partial(self._release, index - self.first, worker.buffers, buffer)
            write.add(self._sections(start, count, memory), start, count, _deadline(worker, call), release)

    def _receive_into_memory(self, write: WriteBatch, first: int, count: int) -> bool:
        """Receives and stores a run; False if it must come into a buffer."""
        channel, keys = self._connection.channel, self._wanted
        sizes = {keys.section_bytes(index) for index in range(first, first + count)}
        size, parts = sizes.pop(), count if keys.prefix_ordered else 1
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

    def _release(self, count: int, buffers: BufferPool, buffer: memoryview | None) -> None:
        if buffer is not None:
            buffers.give(buffer)
        self.released(count)

    @property
    def _in_memory_bytes(self) -> int:
        """Memory for the runs buffered at the same time, if they come as bytes."""
        largest = max((b - a for a, b in pairwise(self._ends)), default=0)
        return min(self._ends[-1], RUNS_IN_MEMORY * max(self.run_bytes, largest))

    def _size_bytes(self, first: int, count: int) -> int:
        return self._ends[first + count - self.first] - self._ends[first - self.first]

    def _sums_count(self, count: int) -> int:
        """Returns the number of checksums that come with a run of ``count`` chunks."""
        return self._wanted.namespace.layout.section_count if self._wanted.prefix_ordered else count

    def _pieces(self, first: int, count: int, memory: memoryview) -> list[memoryview]:
        """Returns the parts of a run that have a checksum each: planes, or blocks."""
        if self._wanted.prefix_ordered:
            return cut_evenly(memory, len(memory) // self._wanted.namespace.layout.section_count)
        ends = self._ends[first - self.first : first - self.first + count + 1]
        return [memory[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]

    def _sections(self, first: int, count: int, memory: memoryview) -> Sections:
        if not self._wanted.prefix_ordered:
            return BlockBuffers(self._pieces(first, count, memory), first)
        layout = self._wanted.namespace.layout
        return Planes(np.frombuffer(memory, np.uint8).reshape(layout.layers, 2, -1), layout.section_bytes, first)

    def _broken(self, first: int, count: int) -> BrokenTransfer:
        unit = "chunks" if self._wanted.prefix_ordered else "blocks"
        return BrokenTransfer(
            f"{unit} {first} to {first + count - 1} do not match their checksums: bytes changed on the way; "
            "repeat the call"
        )


def serve_put(worker: WorkerContext, connection: Connection, number: int, message: bytes, call: Call) -> None:
    """Answers the PUT frame ``number`` of a bulk connection: asks for the missing chunks, and stores them in order."""
    start = parse(pb.PutStart, message)
    wanted, first = worker.to_put(start, call)
    hints, mode = hints_of(start.hints), write_of(start.write)
    write = worker.node.writer.begin(wanted, first, _deadline(worker, call), hints, mode, skips=True)
    run_bytes = MEMORY_RUN_BYTES if write.mode is WriteMode.BEHIND else RUN_BYTES
    count = 0 if write.refused else len(wanted) - write.first
    upload = Upload(connection, number, wanted, write.first, count, run_bytes)
    try:
        with ExitStack() as reserved:
            connection.channel.send(FrameKind.READY, number, [READY.pack(upload.first, upload.count, upload.run_bytes)])
            upload.receive(write, worker, call, reserved)
            written = write.commit(_deadline(worker, call))
    except BaseException:
        # The client is gone, or sent wrong or damaged bytes: only what arrived whole before may be published.
        write.abort()
        raise
    if not write.is_read:
        upload.released(upload.count)
    connection.channel.send(FrameKind.STORED, number, [_answer(wanted, written)])
    if write.is_read:
        connection.channel.alive = False  # a thread that hangs still reads the arena: the next put needs another one


def stream_put(worker: WorkerContext, messages: Iterator[pb.PutRequest], call: Call) -> bytes:
    """Stores one stream of images as they arrive over gRPC; returns the encoded answer."""
    opening = next(messages)
    start = opening.start
    wanted, first = worker.to_put(start, call)
    sizes = wanted.payload_sizes()[first:]
    in_memory_bytes = min(sum(sizes), RUNS_IN_MEMORY * (RUN_BYTES + max(sizes, default=0)))
    with worker.in_flight.reserved(in_memory_bytes + MESSAGE_BYTES_MAX, call.visit.pays):
        hints, mode = hints_of(start.hints), write_of(start.write)
        write = worker.node.writer.begin(wanted, first, _deadline(worker, call), hints, mode)
        try:
            if not write.refused:
                for index, run in _runs(wanted, first, itertools.chain([opening], messages), call):
                    write.add(buffers_of(wanted, index, run), index, len(run), _deadline(worker, call))
        except BaseException:
            # The client is gone, or sent wrong or damaged bytes: only what was verified before may be published.
            write.abort()
            raise
        return _answer(wanted, write.commit(_deadline(worker, call)))


def _runs(
    wanted: KeySet, first: int, messages: Iterator[pb.PutRequest], call: Call
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yields chunks in runs, each with its first index; a chunk is a buffer with its sections."""
    run: list[memoryview] = []
    run_bytes = 0

    def target(index: int) -> tuple[Expected, Pieces]:
        if index != first + len(run) or index >= len(wanted):
            raise InvalidRequest(
                f"an image of {_unit(wanted)} {index} came: expected {first + len(run)}, of {len(wanted)}"
            )
        expected = wanted.expected(index)
        run.append(aligned(expected.payload_bytes))
        return expected, cut_evenly(run[-1], expected.section_bytes)

    for index in receive_images(messages, target):
        call.received(len(run[-1]))
        run_bytes += len(run[-1])
        if run_bytes >= RUN_BYTES or index + 1 == len(wanted):
            yield first, run
            first, run, run_bytes = index + 1, [], 0
    if first < len(wanted):
        raise InvalidRequest(
            f"the stream ended before {_unit(wanted)} {first + len(run)}: expected all up to {len(wanted) - 1}"
        )


def _answer(wanted: KeySet, written: WriteResult) -> bytes:
    """Encodes the answer to a put."""
    result = written.of_prompt(wanted.namespace.layout.chunk_tokens)
    is_chain = wanted.prefix_ordered
    return pb.PutResponse(
        tokens_present=result.tokens_present if is_chain else 0,
        chunks_written=result.chunks_written,
        chunks_found=result.chunks_found,
        bytes_written=result.bytes_written,
        reason=result.reason,
        stored=b"" if is_chain else written.there.tobytes(),
    ).SerializeToString()


def buffers_of(wanted: KeySet, first: int, buffers: Sequence[memoryview]) -> BlockBuffers:
    """The sections of chunks or blocks from index ``first`` on, in a buffer for each."""
    return BlockBuffers(buffers, first, wanted.namespace.layout.section_bytes if wanted.prefix_ordered else None)


def _unit(wanted: KeySet) -> str:
    return "chunk" if wanted.prefix_ordered else "block"


def _deadline(worker: WorkerContext, call: Call) -> Deadline:
    return Deadline(worker.node.clock, call.left_s(worker.node.limits.write_deadline_s))
