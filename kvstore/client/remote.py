"""The transport to workers: the calls of a node in this process, each with a deadline and failover.

Chunk bytes go past gRPC where they can. A read takes images in the memory of a worker on this host, or in open files,
there; the rest comes as a stream of images, and gRPC is left for what came wrong. Every image is verified, and every
chunk is copied once. A put is copied into a shared arena, sent from the caller's memory, or goes over gRPC.

If no worker answers, a read is a miss (counted in ``stats()``), and all else raises Unavailable. It serves no fork.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvstore.census.selection import Selection
from kvstore.client.failover import Caller, Endpoint, FileExecutor, HoldLease, WorkerEndpoints, opening
from kvstore.client.limits import ClientLimits
from kvstore.client.operation import Operation
from kvstore.client.pool import PLAIN, Bulk, ClientLease, Credentials, DataConnection, Leased, UploadArena
from kvstore.client.routing import Marking, marks_of, marks_of_keys
from kvstore.codec.image import ChunkRun, ImagesIn, read_verified, take_images, verified
from kvstore.core.address import TokenArray
from kvstore.core.buffers import BlockBuffers, BufferLoan, BufferMap, Pieces, Planes, Sections, Withdrawn, grouped
from kvstore.core.clock import SystemClock
from kvstore.core.executor import GROUP_BYTES_MIN, Deadline, Executor, group_size
from kvstore.core.layout import Layout
from kvstore.core.metrics import ClientCount, Counts, merged
from kvstore.core.namespace import Namespace
from kvstore.core.operations import NoOperation, OperationState, OperationStatus
from kvstore.core.recency import Hints
from kvstore.core.results import Cleared, LayerMemory, PinRecord, PutResult, StoredBlocks
from kvstore.core.validate import TierName, brief
from kvstore.core.write_mode import RUNS_IN_MEMORY, WriteMode
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.format.header import Ancestry, Damage, Damaged, Expected, checksum
from kvstore.format.keyset import BlockKeys, ChunkKeys, KeySet, Mask, NativeBatch, leading
from kvstore.meta.keys import ID_BYTES, Keys, parse_id
from kvstore.meta.store import MetadataStore
from kvstore.meta.workers import WorkerRegistry
from kvstore.native import library as native
from kvstore.root.interface import LocalFiles, Stat
from kvstore.root.posix import PosixReader
from kvstore.transport.channel import (
    NOT_LENT,
    PLACED,
    READY,
    RUN_BYTES,
    RUN_BYTES_MAX,
    SPAN_BYTES,
    SUM_BYTES,
    Channel,
    FrameKind,
    Head,
    LentSlots,
    LinkBroken,
    decode_slots,
    decode_span,
    encode_head,
    encode_request,
    encode_span,
    send_run,
    unpacked,
)
from kvstore.transport.images import fill_verified, image_messages, receive_images
from kvstore.transport.messages import (
    TOKEN_BYTES,
    hints_message,
    namespace_of,
    pack_descents,
    pack_keys,
    pack_prompts,
    pack_sizes,
    pack_tokens,
    parse,
    pin_of,
    sealed,
    traced,
    unpack_counts,
    unpack_tokens,
    write_message,
)
from kvstore.transport.status import BrokenTransfer, Busy, CallFailed, UnknownNamespace
from kvstore.v1 import control_pb2 as control
from kvstore.v1 import kvstore_pb2 as pb

# Discovery of workers in etcd, for one root.


ROOTS = "/kv/roots/"


class Discovery:
    """Looks up workers in a cluster's metadata. ``root`` is the root's id in hex, required if the cluster has several.

    Raises InvalidRequest if ``root`` is not an id.
    """

    def __init__(self, meta: MetadataStore, root: str | None) -> None:
        self._meta = meta
        self._root: bytes | None = None
        if root is not None:
            self._root = parse_id(root) if isinstance(root, str) else None
            if self._root is None:
                raise InvalidRequest(
                    f"root={brief(root)}: expected the root's id, {2 * ID_BYTES} hex digits, as its FORMAT has it"
                )

    def addresses(self) -> list[str]:
        """Returns the addresses of all workers of the root; none if no root is known yet.

        Raises InvalidRequest, which names them, if there are several roots; Unavailable or PermissionDenied.
        """
        if self._root is None:
            found = self._meta.list(ROOTS)
            roots = sorted({kv.value for kv in found.items if len(kv.value) == ID_BYTES})
            if len(roots) > 1:
                # A root without workers, perhaps made from a mistyped path, must not hide the others.
                roots = [root for root in roots if WorkerRegistry(self._meta, Keys(root)).list()] or roots
            if len(roots) > 1:
                names = ", ".join(root.hex() for root in roots)
                raise InvalidRequest(
                    f"etcd knows {len(roots)} roots: say which one is meant, root= (--root-id) one of {names}"
                )
            if not roots:
                return []
            self._root = roots[0]
        workers = WorkerRegistry(self._meta, Keys(self._root)).list()
        return sorted({record.address for record in workers.values()})

    def close(self) -> None:
        """Closes the connection to etcd; idempotent."""
        self._meta.close()


# Puts. Several threads copy, past the caches and without the GIL.


FULL_PAUSE_S = 0.0005
"""Pause between two looks at a full arena."""
LAST_WORD_S = 1.0
STEP_BYTES = 4 << 20
"""Bytes that one thread copies at a time: a fraction of a millisecond."""
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


class ChunkUpload:
    """The first ``count`` chunks of a prompt, as far as ``planes`` have them."""

    def __init__(self, planes: Planes, layout: Layout, count: int) -> None:
        self.count = count
        self.largest_bytes = layout.chunk_bytes
        """Size of the largest chunk."""
        self.placed_bytes = max(RUN_BYTES, layout.chunk_bytes)
        """Size of a run in the arena, if the arena has room for it."""
        self._planes = planes
        self._layout = layout

    def size_bytes(self, first: int, count: int) -> int:
        """Size of ``count`` chunks from index ``first`` on."""
        return count * self._layout.chunk_bytes

    def sums_count(self, _: int) -> int:
        """Number of checksums that go with a run of so many chunks."""
        return self._layout.section_count

    def place(
        self, first: int, count: int, target: npt.NDArray[np.uint8], executor: Executor, deadline: Deadline
    ) -> None:
        """Copies a run into ``target``, which has its size."""
        planes, size = self._planes, target.nbytes // self._layout.section_count
        assert planes.covers(first, count) and planes.is_contiguous
        start: int = target.__array_interface__["data"][0]
        to = np.arange(start, start + target.nbytes, size, dtype=np.uint64)
        source = planes.addresses() + np.uint64(planes.offset(first))
        copy_rows(to, source, size, (target, planes), executor, deadline)

    def send(self, channel: Channel, first: int, count: int) -> None:
        """Sends the bytes of a run and its checksums."""
        send_run(channel, self._planes, first, count)


class BlockUpload:
    """Engine-hashed blocks, as ``ChunkUpload`` has chunks."""

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

    def place(
        self, first: int, count: int, target: npt.NDArray[np.uint8], executor: Executor, deadline: Deadline
    ) -> None:
        arrays = [np.frombuffer(block, np.uint8) for block in self._buffers[first : first + count]]
        addresses = np.fromiter((each.__array_interface__["data"][0] for each in arrays), np.uint64, count)
        sizes = np.fromiter(map(len, arrays), np.uint64, count)
        to = np.uint64(target.__array_interface__["data"][0]) + np.cumsum(sizes) - sizes
        for size in np.unique(sizes):
            same = sizes == size
            copy_rows(to[same], addresses[same], int(size), (target, arrays), executor, deadline)

    def send(self, channel: Channel, first: int, count: int) -> None:
        blocks = self._buffers[first : first + count]
        channel.send_bytes([*blocks, memoryview(np.array([checksum(block) for block in blocks], "<u8").tobytes())])


UploadSource = ChunkUpload | BlockUpload


def _send_put(
    link: DataConnection, endpoint: Endpoint, start: pb.PutStart, cargo: UploadSource, caller: Caller, ends_s: float
) -> pb.PutResponse:
    """Sends a put; returns the worker's answer. ``start`` describes the cargo.

    Raises LinkBroken, LinkLate, CallFailed; InvalidRequest for an answer that is not valid.
    """
    channel, timeout_s = link.channel, ends_s - time.monotonic()
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
                _place(link, arena, number, cargo, begin, at, chunks, ends_s, caller.executor)
            else:
                _send(link, number, cargo, at, chunks)
        return parse(pb.PutResponse, link.receive(FrameKind.STORED)[1])
    except LinkBroken as broken:
        # The worker may have said why it refused before it closed the connection.
        channel.limit(LAST_WORD_S, LAST_WORD_S)
        with suppress(Unavailable):
            link.receive(FrameKind.STORED)
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
    executor: FileExecutor,
) -> None:
    size_bytes = cargo.size_bytes(first, count)
    while (offset := arena.take(size_bytes, first + count - begin)) is None:
        if not link.channel.is_quiet():
            return  # the caller reads the worker's answer
        if time.monotonic() > ends_s:
            raise Unavailable("the worker did not store the chunks in shared memory in time: retry later")
        time.sleep(FULL_PAUSE_S)
    target, deadline = arena.bytes_at(offset, size_bytes), Deadline(executor.clock, ends_s - time.monotonic())
    cargo.place(first, count, target, executor.copiers(), deadline)
    link.channel.send(FrameKind.PLACED, number, [PLACED.pack(first, count, offset)])


def _send(link: DataConnection, number: int, cargo: UploadSource, first: int, count: int) -> None:
    length = SPAN_BYTES + cargo.size_bytes(first, count) + cargo.sums_count(count) * SUM_BYTES
    link.channel.send_bytes([memoryview(encode_head(FrameKind.CHUNKS, number, length) + encode_span(first, count))])
    cargo.send(link.channel, first, count)


def copy_rows(
    to: Addresses, source: Addresses, row_bytes: int, alive: object, executor: Executor, deadline: Deadline
) -> None:
    """Copies ``row_bytes`` bytes from each address in ``source`` to the one in ``to``; both have shape ``(rows,)``.

    ``alive`` owns the memory: a thread that is still copying at the deadline keeps a reference to it. Raises
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
    executor.share(steps, partial(_copy_step, alive, to, source, spans), deadline)


def _copy_step(_: object, to: Addresses, source: Addresses, spans: list[tuple[int, int]], step: int) -> bool:
    (start, stop), at = spans[step], [each.__array_interface__["data"][0] for each in (to, source)]
    native.library.kv_copy_rows(*at, len(to), start, stop - start)
    return True


def put_at(
    endpoint: Endpoint,
    start: pb.PutStart,
    cargo: UploadSource,
    wanted: Callable[[], KeySet],
    sections: Sections,
    caller: Caller,
    left_s: float,
) -> pb.PutResponse:
    """Puts at one worker: ``cargo`` over a bulk connection, else ``sections`` over gRPC in the time that is left."""
    ends_s = time.monotonic() + left_s
    with endpoint.bulk.link(left_s) as link:
        if link is not None:
            caller.counters.add(ClientCount.PUTS_SHARED if link.is_shared else ClientCount.PUTS_TCP)
            try:
                return _send_put(link, endpoint, start, cargo, caller, ends_s)
            except (LinkBroken, InvalidRequest) as error:
                endpoint.bulk.note_broken(link, error)
    return put_over_grpc(endpoint, start, wanted(), sections, caller, ends_s)


def put_over_grpc(
    endpoint: Endpoint, start: pb.PutStart, wanted: KeySet, sections: Sections, caller: Caller, ends_s: float
) -> pb.PutResponse:
    """Sends images of blocks, or of the chunks of a prompt that are missing."""
    opening, is_chain = pb.PutStart(), wanted.prefix_ordered
    opening.CopyFrom(start)
    first = start.first if is_chain else 0
    present = _present(endpoint, start, min(caller.limits.match_s, ends_s - time.monotonic())) if is_chain else 0
    while True:
        begin = max(first, present)
        if is_chain:
            opening.first = begin
        caller.counters.add(ClientCount.PUTS_GRPC)
        outgoing, stream = Outgoing(_messages(opening, wanted, begin, sections)), endpoint.stub("Put", "stream_unary")
        raw = send_stream(stream, outgoing, ends_s - time.monotonic())
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
        return pb.MatchResponse.FromString(endpoint.stub("Match")(request, timeout=timeout_s)).chunks
    except grpc.RpcError:
        return 0


class Outgoing:
    """The messages of a put. gRPC takes them in its own thread, which must not outlive the call.

    ``close`` returns once that thread has let go of the caller's memory.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._lock = threading.Lock()
        self._messages: Iterator[bytes] | None = messages

    def __iter__(self) -> Outgoing:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._messages is None:
                raise StopIteration
            return next(self._messages)

    def close(self) -> None:
        """Ends the messages. Idempotent."""
        with self._lock:
            self._messages = None


def send_stream(stub: Any, outgoing: Outgoing, timeout_s: float) -> bytes:
    """Sends a stream; returns the answer. Raises what gRPC raises."""
    call = stub.future(outgoing, timeout=timeout_s)
    try:
        answer: bytes = call.result()
        return answer
    finally:
        call.cancel()
        outgoing.close()


# Reads, straight into the caller's memory, which go on at another worker if one fails.
#
# The chunks of one read as arrays, each in a leased slot of the worker's memory, or in memory of its own.


class ReceivedViews:
    """The arrays of one read, by chunk index, as they come."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lent: dict[int, npt.NDArray[Any]] = {}
        self._copies = np.empty(layout.shape(0), layout.numpy_dtype)

    def sections(self, count: int) -> BufferMap:
        """Makes memory for chunks that are copied; the system gives no page of it before one comes."""
        layout = self._layout
        self._copies = np.empty((count, *layout.shape(layout.chunk_tokens)), layout.numpy_dtype)
        rows = [chunk.reshape(-1).view(np.uint8).data for chunk in self._copies]
        return BlockBuffers(rows, section_bytes=layout.section_bytes)

    def lend(self, wanted: KeySet, index: int, image: memoryview, lease: ClientLease) -> None:
        """Adds a verified chunk in place."""
        layout = self._layout
        payload = np.asarray(Leased(wanted.payload_of(index, image), lease))
        self._lent[index] = payload.view(layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens))

    def leading(self, count: int) -> list[npt.NDArray[Any]]:
        """Returns the read-only arrays of the first ``count`` chunks."""
        arrays = [self._lent[index] if index in self._lent else self._copies[index] for index in range(count)]
        for array in arrays:
            array.flags.writeable = False
        return arrays


@dataclass(frozen=True, slots=True)
class Ask:
    """The chunks that one request asks for: those of ``wanted`` from ``first`` up to ``stop``.

    The worker's answer has the indexes of ``wanted``, and so does ``sections``.
    """

    number: int
    """The request's."""
    wanted: KeySet
    first: int
    stop: int
    sections: BufferMap
    places: Sequence[int]
    """Where the caller counts each of them."""


class ImageReceiver:
    """The images of one request as they come, in whatever order; ``done[place]`` is 1 for those that are in place.

    ``done`` is up to date whatever is raised. With ``views``, slots stay where they are, and their lease lives on.
    """

    def __init__(
        self,
        link: DataConnection,
        asked: Ask,
        done: bytearray,
        executor: FileExecutor,
        deadline: Deadline,
        views: ReceivedViews | None = None,
    ) -> None:
        self._link = link
        self._asked = asked
        self._done = done
        self._executor = executor
        self._deadline = deadline
        has_lease = link.memory is not None and link.memory.has_lease
        self._views = views if has_lease else None
        self._lease: ClientLease | None = None
        self._awaited = bytearray(asked.first) + b"\1" * (asked.stop - asked.first)
        self._left = asked.stop - asked.first
        self._natively: Natively | None = None
        self._is_right = True

    def receive(self, lent: LentSlots) -> bool:
        """Reads the answer, which begins with ``lent``, up to its end. False if an image is not right.

        Raises LinkBroken, LinkLate, CallFailed, InvalidRequest.
        """
        link, number = self._link, self._asked.number
        try:
            self._take_slots(lent)
            while self._left:
                head = link.receive_head(FrameKind.SLOTS, FrameKind.FILES, FrameKind.IMAGES, FrameKind.END)
                if head.request != number:
                    raise link.channel.break_off(f"a frame of request {head.request} came: expected {number}")
                if head.kind is FrameKind.IMAGES:
                    if not self._receive_images(head):
                        link.channel.alive = False  # what follows was not read, perhaps from the middle of a frame on
                        return False
                    continue
                payload = link.channel.receive(head.length)
                if head.kind is FrameKind.END:
                    break
                if head.kind is FrameKind.SLOTS:
                    self._take_slots(decode_slots(payload))
                else:
                    self._take_files(*decode_span(payload))
        finally:
            if self._lease is not None and self._views is None:
                self._lease.close()
        return self._is_right

    def _accept(self, indexes: Sequence[int]) -> None:
        """Raises LinkBroken unless these images, at least one, were asked for and come for the first time."""
        if not indexes:
            raise self._link.channel.break_off("a frame without a chunk came")
        for index in indexes:
            if not 0 <= index < len(self._awaited) or not self._awaited[index]:
                raise self._link.channel.break_off(f"chunk {index} came, which was not asked for, or twice")
            self._awaited[index] = 0
        self._left -= len(indexes)

    def _note(self, indexes: Sequence[int], right: bytes | bytearray | npt.NDArray[np.bool_]) -> None:
        for index, is_right in zip(indexes, right, strict=True):
            self._done[self._asked.places[index]] = bool(is_right)
            self._is_right &= bool(is_right)

    # Slots

    def _take_slots(self, lent: LentSlots) -> None:
        given = {index: offset for index, offset in enumerate(lent.offsets, lent.first) if offset != NOT_LENT}
        if not given:
            return
        link, wanted = self._link, self._asked.wanted
        if link.memory is None:
            raise link.channel.break_off("slots came on a connection without memory")
        if self._lease is None:
            self._lease = ClientLease(link.channel.take_files(1)[0], link.memory.leases)
        found = range(lent.first, lent.first + len(lent.offsets))
        indexes: Sequence[int] = found if len(given) == len(found) else list(given)  # a run is faster
        self._accept(indexes)
        images = link.memory.images(list(given.values()), wanted.image_sizes(indexes))
        if self._views is None:
            self._note(indexes, self._copied(indexes, images))
            return
        right = verified(wanted, indexes, images, self._executor.copiers(), self._deadline)
        for at, index in enumerate(indexes):
            if right[at]:
                self._views.lend(wanted, index, images[at], self._lease)
        self._note(indexes, right)

    def _copied(self, indexes: Sequence[int], images: ImagesIn) -> Mask:
        wanted, sections, count = self._asked.wanted, self._asked.sections, len(indexes)
        size_bytes = wanted.payload_bytes(indexes)
        if size_bytes <= GROUP_BYTES_MIN:
            return take_images(wanted, indexes, images, sections, BufferLoan())

        def take(start: int, stop: int, borrowed: BufferLoan) -> Mask:
            return take_images(wanted, indexes[start:stop], images[start:stop], sections, borrowed)

        # The caller does a share, because nothing here waits for a device.
        return self._in_groups(self._executor.copiers(), count, size_bytes // count, take, helps=True)

    def _in_groups(
        self,
        executor: Executor,
        count: int,
        chunk_bytes: int,
        read: Callable[[int, int, BufferLoan], Mask],
        *,
        helps: bool = False,
    ) -> Mask:
        """Reads ``count`` chunks on threads, some in each call of ``read(start, stop, borrowed)``; True for valid ones.

        At the deadline, what was read by then counts. Nothing is written into the caller's memory afterwards.
        """
        size = group_size(count, max(1, chunk_bytes), executor.width)
        right, borrowed = np.zeros(count, np.bool_), BufferLoan()

        def work(number: int) -> bool:
            start, stop = number * size, min((number + 1) * size, count)
            try:
                right[start:stop] = read(start, stop, borrowed)
            except Withdrawn:
                return False
            return True

        try:
            with suppress(KVStoreError):
                (executor.share if helps else executor.each)(-(-count // size), work, self._deadline)
        finally:
            borrowed.withdraw()  # threads may still be writing, at the deadline or after an interrupt (Ctrl-C)
        return right.copy()

    # Open files

    def _take_files(self, first: int, count: int) -> None:
        link, wanted, sections = self._link, self._asked.wanted, self._asked.sections
        files = link.channel.take_files(count)
        # Each file has one owner that closes it: the thread that takes it out of this dict, or this call at the end.
        left, indexes = dict(enumerate(files)), range(first, first + count)

        def read_one(at: int, borrowed: BufferLoan) -> bool:
            fd = left.pop(at, None)
            if fd is None:
                return False
            with PosixReader(fd, f"of chunk {first + at}, from a worker", Stat(0, 0), never_blocks) as reader:
                try:
                    read_verified(reader, wanted.expected(first + at), sections(first + at), borrowed)
                except (Damaged, KVStoreError):
                    return False
            return True

        def read(start: int, stop: int, borrowed: BufferLoan) -> Mask:
            if run is None:
                return np.array([read_one(at, borrowed) for at in range(start, stop)], np.bool_)
            run.items["fd"][start:stop] = [left.pop(at, -1) for at in range(start, stop)]
            return run.read_open(first + start, first + stop, borrowed)

        try:
            self._accept(indexes)
            link.channel.send(FrameKind.TAKEN, self._asked.number)
            never_blocks = all(map(link.never_blocks, files))
            run: ChunkRun | None = None
            if native.library is not native.PurePython:
                assert sections.covers(first, count)
                local = LocalFiles("", never_blocks, stages=False, direct=False)
                run = ChunkRun(local, 0, wanted, first, count, sections)
            self._note(indexes, self._in_groups(self._executor.get(), count, wanted.mean_bytes(first, count), read))
        finally:
            for fd in [fd for at in range(count) if (fd := left.pop(at, None)) is not None]:
                with suppress(OSError):
                    os.close(fd)

    # Bytes

    def _receive_images(self, head: Head) -> bool:
        """Reads images straight into their sections; True if all are right."""
        channel, asked = self._link.channel, self._asked
        first, count = decode_span(channel.receive(SPAN_BYTES)) if head.length > SPAN_BYTES else (0, 0)
        indexes = range(first, first + count)
        self._accept(indexes)
        size_bytes = sum(asked.wanted.image_sizes(indexes))
        if head.length != SPAN_BYTES + size_bytes:
            raise channel.break_off(f"{head.length} bytes came for chunks {first} to {first + count - 1}")
        for index in indexes:
            try:
                if channel.moves_natively:
                    self._natively = self._natively or Natively(asked.wanted, asked.first, asked.stop, asked.sections)
                    self._natively.receive(channel, index)
                else:
                    fill_verified(channel.receive_some, asked.wanted.expected(index), asked.sections(index))
            except Damaged:
                return False
            self._done[asked.places[index]] = 1
        return True


class Natively(NativeBatch):
    """Images of a stream that native code receives into their sections, piece by piece, verifying each in the cache."""

    def __init__(self, wanted: KeySet, first: int, stop: int, sections: BufferMap) -> None:
        super().__init__(wanted, range(first, stop))
        self.lay(sections, fills=True)
        self._first = first
        self._header = np.empty(int(self.items["header_bytes"].max()), np.uint8)

    def receive(self, channel: Channel, index: int) -> None:
        """Receives the image of one chunk. Raises Damaged, LinkBroken, LinkLate."""
        header: int = self._header.__array_interface__["data"][0]
        came = ctypes.create_string_buffer(native.MOVED_BYTES)
        at = self.at(index - self._first)
        if channel.receive_by(partial(native.library.kv_receive, self.common, at, header, came)) != native.DONE:
            raise Damaged(Damage.SECTION_CHECKSUM)


def received(stub: Any, request: bytes, timeout_s: float) -> Generator[pb.GetResponse]:
    """Yields the messages of an answer. Close it to end the call."""
    call = stub(request, timeout=timeout_s)
    try:
        for message in call:
            yield parse(pb.GetResponse, message)
    finally:
        call.cancel()


class RemoteRead(ABC):
    """One read. ``receive`` may be called for another worker, and goes on where the last one failed.

    Everything happens in the calling thread, so nothing writes into the caller's memory once it returns.
    """

    ends_at_miss: bool
    """True if nothing counts behind the first chunk that is missing."""

    def __init__(self, count: int, size_bytes: int, caller: Caller, views: ReceivedViews | None = None) -> None:
        """``count`` chunks of ``size_bytes`` are wanted at most; ``views`` gets what can stay where it is."""
        self._caller = caller
        self._limits = caller.limits
        self._counters = caller.counters
        self._views = views
        self.done = bytearray(count)
        """A byte for each chunk that is wanted, 1 once it is in the caller's memory, verified."""
        self.timeout_s = caller.stream_s(caller.limits.read_s, size_bytes)
        """How long a worker has for it."""
        self._is_counted = False
        """A worker has counted this get: what is asked for again, or in another way, goes on with it."""

    def receive(self, endpoint: Endpoint, _: float = 0.0) -> None:
        """Reads what is missing from one worker, with ``done`` up to date whatever happens.

        ``Caller`` calls it, and turns what it raises into CallFailed. The time that ``Caller`` passes is ignored:
        each worker has ``timeout_s``. Raises BrokenTransfer too, which is counted then.
        """
        missing, ends_s = self._missing(), time.monotonic() + self.timeout_s
        if missing:  # else the last one failed behind its last byte
            missing = self._receive_bulk(endpoint, missing, ends_s)
        if missing and time.monotonic() < ends_s:  # else the worker would seem to be late, and we are
            self._receive_grpc(endpoint, missing, ends_s)

    def _missing(self) -> Sequence[int]:
        """Returns the chunks that are not in the caller's memory: of a prompt all from the first one on."""
        if self.ends_at_miss:
            return range(leading(self.done), len(self.done))
        return [chunk for chunk, is_done in enumerate(self.done) if not is_done]

    @abstractmethod
    def _request(self, chunks: Sequence[int]) -> pb.GetRequest:
        """Returns the message that asks for chunks."""

    @abstractmethod
    def _wanted_of(self, chunks: Sequence[int]) -> KeySet:
        """Returns what to verify chunks against; a prompt takes time to hash."""

    @abstractmethod
    def _asked(self, number: int, wanted: KeySet, found: int, chunks: Sequence[int]) -> Ask:
        """Returns the chunks that come, as the worker has ``found``. Raises InvalidRequest."""

    def _receive_bulk(self, endpoint: Endpoint, missing: Sequence[int], ends_s: float) -> Sequence[int]:
        """Reads past gRPC if there is a way; returns what is to be read over gRPC after it."""
        with endpoint.bulk.link(self._limits.probe_s) as link:
            if link is None:
                return missing
            self._counters.add(ClientCount.GETS_SHARED if link.is_shared else ClientCount.GETS_TCP)
            try:
                is_right = self._receive_images(link, missing, ends_s)
            except (LinkBroken, InvalidRequest) as error:
                endpoint.bulk.note_broken(link, error)
                return self._missing()
        if is_right:
            return ()
        if time.monotonic() < ends_s:  # else the bytes may be right: we had no time to look
            # The worker finds out itself what is wrong, and sets it aside.
            self._counters.add(ClientCount.BULK_DAMAGED)
        return sorted({*missing} & {*self._missing()})

    def _receive_images(self, link: DataConnection, chunks: Sequence[int], ends_s: float) -> bool:
        """Reads over one connection; False if an image is not right. Raises LinkBroken, InvalidRequest, CallFailed."""
        executor, number = self._caller.executor, link.next_number()
        left_s = ends_s - time.monotonic()
        link.channel.limit(self._limits.read_s, left_s)
        message = traced(self._request(chunks))
        link.channel.send(FrameKind.GET, number, [encode_request(left_s, link.mode, message)])
        wanted = self._wanted_of(chunks)  # while the worker looks for them
        lent = decode_slots(link.receive(FrameKind.SLOTS)[1])
        self._is_counted = True
        asked = self._asked(number, wanted, lent.found, chunks)
        deadline = Deadline(executor.clock, ends_s - time.monotonic())
        return ImageReceiver(link, asked, self.done, executor, deadline, self._views).receive(lent)

    def _receive_grpc(self, endpoint: Endpoint, chunks: Sequence[int], ends_s: float) -> None:
        self._counters.add(ClientCount.GETS_GRPC)
        stream, request = endpoint.stub("Get", "unary_stream"), sealed(self._request(chunks))
        messages = received(stream, request, ends_s - time.monotonic())
        try:
            with closing(messages):
                opening = next(messages, None)
                if opening is None:
                    return
                if not opening.HasField("start"):
                    raise InvalidRequest("the answer does not begin with how many chunks were found")
                self._is_counted = True
                asked = self._asked(0, self._wanted_of(chunks), opening.start.chunks, chunks)
                for index in receive_images(messages, partial(self._target, asked)):
                    self.done[asked.places[index]] = 1
        except (InvalidRequest, BrokenTransfer) as error:
            # What came before it was verified image by image.
            self._counters.add(ClientCount.MISSES_DAMAGED)
            raise BrokenTransfer(f"worker {endpoint.address}: {error}") from error

    def _target(self, asked: Ask, index: int) -> tuple[Expected, Pieces]:
        """Returns what image ``index`` must be, and where it goes."""
        if not asked.first <= index < asked.stop or self.done[asked.places[index]]:
            raise InvalidRequest(f"an image of chunk {index} came, which was not asked for, or twice")
        return asked.wanted.expected(index), asked.sections(index)


class ChunkFetch(RemoteRead):
    """One read of leading chunks of a prompt."""

    ends_at_miss = True

    def __init__(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        request: pb.GetRequest,
        chunks_max: int,
        memory: Callable[[int], BufferMap],
        caller: Caller,
        views: ReceivedViews | None = None,
    ) -> None:
        """With ``views``, ``memory`` is for what has to be copied."""
        super().__init__(chunks_max, chunks_max * namespace.layout.chunk_bytes, caller, views)
        self._namespace = namespace
        self._tokens = tokens
        self._chain: ChunkKeys | None = None
        self._get = request
        self._memory = memory
        self._sections: BufferMap | None = None

    def _request(self, chunks: Sequence[int]) -> pb.GetRequest:
        good = self._get.first = leading(self.done)
        self._get.chunks_max = len(self.done)
        self.done[good:] = bytes(len(self.done) - good)  # what came behind a miss comes again, over what is there
        return self._get

    def _wanted_of(self, _: Sequence[int]) -> ChunkKeys:
        self._chain = self._chain or ChunkKeys.of(self._namespace, self._tokens)
        return self._chain

    def _asked(self, number: int, wanted: KeySet, found: int, _: Sequence[int]) -> Ask:
        # The first answer decides how much memory is needed.
        found = min(found, len(self.done))
        self._get.uncounted = True  # the worker has counted it: what else this read asks for continues it
        if self._sections is None:
            self._sections = self._memory(found)
            self.done = bytearray(found)
        stop = max(self._get.first, found)
        return Ask(number, wanted, self._get.first, stop, self._sections, range(stop))


class BlockFetch(RemoteRead):
    """One read of engine-hashed blocks, each into its buffer; under a hold if ``hold`` is the id of one."""

    ends_at_miss = False

    def __init__(self, wanted: BlockKeys, buffers: Pieces, caller: Caller, hold: bytes = b"") -> None:
        super().__init__(len(wanted), sum(wanted.sizes_bytes), caller)
        self._wanted = wanted
        self._buffers = buffers
        self._hold = hold

    def _request(self, chunks: Sequence[int]) -> pb.GetRequest:
        wanted = self._wanted.take(chunks)
        return pb.GetRequest(
            namespace=wanted.namespace.digest,
            keys=pack_keys(wanted.keys),
            sizes=pack_sizes(wanted.sizes_bytes),
            hold=self._hold,
            uncounted=self._is_counted or any(self.done),
        )

    def _wanted_of(self, chunks: Sequence[int]) -> BlockKeys:
        return self._wanted.take(chunks)

    def _asked(self, number: int, wanted: KeySet, found: int, chunks: Sequence[int]) -> Ask:
        if found != len(chunks):
            raise InvalidRequest(f"the worker answers for {found} blocks: expected {len(chunks)}")
        return Ask(number, wanted, 0, len(chunks), BlockBuffers([self._buffers[index] for index in chunks]), chunks)


H = TypeVar("H")


class RemoteTransport:
    """Workers as a port. Thread-safe. Closes ``discovery``, if given."""

    def __init__(
        self,
        workers: Sequence[str],
        limits: ClientLimits | None = None,
        *,
        discovery: Discovery | None = None,
        bulk: Bulk = Bulk.AUTO,
        write: WriteMode | None = None,
        credentials: Credentials = PLAIN,
    ) -> None:
        clock = SystemClock()
        self.limits = limits = limits or ClientLimits()
        self.counters = counters = Counts(ClientCount)
        addresses = discovery.addresses if discovery else None
        self.endpoints = WorkerEndpoints(workers, addresses, limits, counters, clock, bulk, credentials)
        self._caller = caller = Caller(self.endpoints, counters, limits, clock, write)
        self.shared: dict[Hashable, Any] = {}
        self.parts = ExitStack()
        """What is closed with the port, last first; it does not refer to the port."""
        for part in (caller.executor, self.endpoints, caller.renewing):
            self.parts.callback(part.close)
        self.parts.callback(self.endpoints.stop)
        if discovery is not None:
            self.parts.callback(discovery.close)  # first: the thread of the endpoints may be waiting for it

    @property
    def place(self) -> str:
        return self.endpoints.place

    # Namespaces

    def open_namespace(self, namespace: Namespace) -> None:
        self._caller.unary("OpenNamespace", opening(namespace), self.limits.pin_s, even_aside=True)

    def namespaces(self) -> list[Namespace]:
        raw = self._caller.every_message("ListNamespaces", b"", self.limits.read_s)
        return [namespace_of(pb.ListNamespacesResponse.FromString(each).namespace) for each in raw]

    # Prefixes

    def match(self, namespace: Namespace, tokens: TokenArray, *, counts: bool = True) -> int:
        tokens = _full_chunks(namespace, tokens)
        if not len(tokens):
            self.endpoints.check()
            return 0
        answer = self._matched(namespace, tokens, tokens=pack_tokens(tokens), uncounted=not counts)
        return min(answer.chunks, len(tokens) // namespace.layout.chunk_tokens) if answer is not None else 0

    def match_each(self, namespace: Namespace, prompts: Sequence[TokenArray]) -> list[int]:
        answer = self._matched(namespace, prompts[0], uncounted=True, **pack_prompts(prompts))
        return unpack_counts(answer.each, len(prompts)) if answer is not None else []

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], BufferMap]) -> int:
        layout = namespace.layout
        chunks_max = min(chunks_max, len(tokens) // layout.chunk_tokens)
        if not chunks_max:
            self.endpoints.check()
            memory(0)
            return 0
        packed = pack_tokens(tokens[: chunks_max * layout.chunk_tokens])
        request = pb.GetRequest(namespace=namespace.digest, tokens=packed)
        fetch = ChunkFetch(namespace, unpack_tokens(packed), request, chunks_max, memory, self._caller)
        self._receive(namespace, fetch, partial(marks_of, namespace, tokens))
        return leading(fetch.done)

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None, *, counts: bool = True) -> RemoteHold:
        packed = pack_tokens(_full_chunks(namespace, tokens))

        def held(answer: pb.HoldResponse, endpoint: Endpoint | None) -> RemoteHold:
            return RemoteHold(namespace, packed, answer, endpoint, self._caller)

        if not packed:
            self.endpoints.check()
            return held(pb.HoldResponse(), None)
        request = pb.HoldRequest(namespace=namespace.digest, tokens=packed, ttl_s=ttl_s or 0.0, uncounted=not counts)
        return self._hold(namespace, request, partial(marks_of, namespace, tokens), held)

    # Publishing

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Planes,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        tokens = _full_chunks(namespace, tokens)
        count = len(tokens) // namespace.layout.chunk_tokens
        if not count:
            self.endpoints.check()
            return PutResult(0, 0, 0, 0)
        start = pb.PutStart(
            namespace=namespace.digest,
            tokens=pack_tokens(tokens),
            hints=hints_message(hints),
            first=first,
            write=write_message(write or self._caller.write),
        )
        timeout_s = self._caller.stream_s(self.limits.write_s, (count - first) * namespace.layout.chunk_bytes)

        cargo, wanted = ChunkUpload(sections, namespace.layout, count), partial(ChunkKeys.of, namespace, tokens)

        def send(endpoint: Endpoint, left_s: float) -> pb.PutResponse:
            return put_at(endpoint, start, cargo, wanted, sections, self._caller, left_s)

        answer = self._caller.within(
            namespace,
            lambda: self._caller.anywhere(send, timeout_s, partial(marks_of, namespace, tokens), even_aside=True),
        )
        return PutResult(
            answer.tokens_present, answer.chunks_written, answer.chunks_found, answer.bytes_written, answer.reason
        )

    # Pins

    def pin(self, namespace: Namespace, prompt: TokenArray | list[bytes], ttl_s: float, owner: str) -> PinRecord:
        fields, marks = naming_of(namespace, prompt)
        raw = sealed(pb.PinRequest(namespace=namespace.digest, ttl_s=ttl_s, owner=owner, **fields))
        # A repeated request would make a second pin, which no caller knows.
        answer = self._caller.within(
            namespace,
            lambda: self._caller.unary("Pin", raw, self.limits.pin_s, marks, may_repeat=False, even_aside=True),
        )
        return pin_of(pb.PinResponse.FromString(answer).pin)

    def unpin(self, pin_id: str) -> bool:
        answer = self._caller.unary("Unpin", sealed(pb.UnpinRequest(id=pin_id)), self.limits.pin_s, even_aside=True)
        return pb.UnpinResponse.FromString(answer).found

    def pins(self) -> list[PinRecord]:
        raw = self._caller.every_message("ListPins", b"", self.limits.read_s)
        return [pin_of(pb.ListPinsResponse.FromString(each).pin) for each in raw]

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        chunks = _full_chunks(namespace, tokens)
        request = sealed(pb.CountRefsRequest(namespace=namespace.digest, tokens=pack_tokens(chunks)))
        answer = self._caller.within(
            namespace, lambda: self._caller.unary("CountRefs", request, self.limits.pin_s, even_aside=True)
        )
        return pb.CountRefsResponse.FromString(answer).refs

    # Blocks

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
        ancestry: Ancestry | None = None,
    ) -> StoredBlocks:
        if not keys:
            self.endpoints.check()
            return StoredBlocks(())
        sizes, ancestry = [len(buffer) for buffer in buffers], ancestry or Ancestry()
        start = pb.PutStart(
            namespace=namespace.digest,
            keys=pack_keys(keys),
            sizes=pack_sizes(sizes),
            hints=hints_message(hints),
            write=write_message(write or self._caller.write),
            first=ancestry.first,
            descents=pack_descents(ancestry.descents) if ancestry.descents else b"",
        )

        cargo, wanted = BlockUpload(buffers), partial(BlockKeys.of, namespace, keys, sizes)

        def send(endpoint: Endpoint, left_s: float) -> StoredBlocks:
            answer = put_at(endpoint, start, cargo, wanted, BlockBuffers(buffers), self._caller, left_s)
            return StoredBlocks(_each(answer.stored, keys), answer.reason)

        timeout_s, marks = self._caller.stream_s(self.limits.write_s, sum(sizes)), partial(marks_of_keys, keys)
        return self._caller.within(namespace, lambda: self._caller.anywhere(send, timeout_s, marks, even_aside=True))

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        if not keys:
            self.endpoints.check()
            return 0
        look = partial(self._look_for, namespace, keys)
        return self._caller.or_miss(namespace, lambda: min(look().blocks, len(keys)), 0)

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            self.endpoints.check()
            return []
        look = partial(self._look_for, namespace, keys, each=True)
        return self._caller.or_miss(namespace, lambda: _each(look().present, keys), [False] * len(keys))

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> RemoteBlockHold:
        def held(answer: pb.HoldResponse, endpoint: Endpoint | None) -> RemoteBlockHold:
            present = [False] * len(keys) if endpoint is None else _each(answer.present, keys)
            return RemoteBlockHold(namespace, present, answer, endpoint, self._caller)

        if not keys:
            self.endpoints.check()
            return held(pb.HoldResponse(), None)
        request = pb.HoldRequest(namespace=namespace.digest, ttl_s=ttl_s or 0.0, keys=pack_keys(keys))
        return self._hold(namespace, request, partial(marks_of_keys, keys), held)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        if not keys:
            self.endpoints.check()
            return []
        fetch = BlockFetch(BlockKeys.of(namespace, keys, [len(buffer) for buffer in buffers]), buffers, self._caller)
        self._receive(namespace, fetch, partial(marks_of_keys, keys))
        return list(map(bool, fetch.done))

    # Memory and disk

    def evict_first(self, namespace: Namespace, tokens: TokenArray) -> None:
        fields, marks = naming_of(namespace, tokens)
        request = control.EvictFirstRequest(namespace=namespace.digest, **fields)
        with suppress(UnknownNamespace):  # a new root has none of it
            self._caller.unary("Control.EvictFirst", sealed(request), self.limits.match_s, marks)

    # Operations

    def prefetch(self, namespace: Namespace, tokens: TokenArray, tier: TierName, worker: str | None) -> Operation:
        fields, marks = naming_of(namespace, tokens)
        request = control.PrefetchRequest(namespace=namespace.digest, tier=tier, **fields)
        return self._caller.within(namespace, partial(self._begin, "Prefetch", request, worker, marks))

    def clear_selected(self, selection: Selection, *, dry_run: bool, pinned: bool, worker: str | None) -> Operation:
        message = control.Selection(
            namespace=selection.namespace or b"", tenant=selection.tenant, fingerprint=selection.fingerprint
        )
        request = control.ClearSelectedRequest(selection=message, dry_run=dry_run, pinned=pinned)
        return self._begin("ClearSelected", request, worker)

    def operations(self) -> list[Operation]:
        found: list[OperationStatus] = []
        errors: list[KVStoreError] = []
        endpoints = self.endpoints.every()
        for endpoint in endpoints:
            stub = endpoint.stub("Control.ListOperations", "unary_stream")
            try:
                raw = self._caller.at(endpoint, lambda: list(stub(b"", timeout=self.limits.pin_s)))  # noqa: B023
            except CallFailed as failed:
                errors.append(failed.error)
            else:
                found += [status_of(control.OperationResponse.FromString(each), endpoint.address) for each in raw]
        if len(errors) == len(endpoints):
            raise errors[0] if errors else self.endpoints.none()
        return [Operation(RemoteRun(self, each)) for each in sorted(found, key=lambda each: -each.began_s)]

    def operation_call(self, name: str, request: Message, worker: str, wait_s: float) -> OperationStatus:
        """Returns the answer of its worker to a call about an operation.

        Raises NoOperation if the worker has none, or has left, and what the call raises.
        """
        send = partial(_send_operation, name, sealed(request))
        try:
            return self._caller.at_worker(worker, send, wait_s + self.limits.pin_s)
        except NoOperation as gone:
            raise NoOperation(
                "the worker has no record of it: it ended long ago, or the worker was restarted"
            ) from gone
        except InvalidRequest as gone:
            if worker not in {each.address for each in self.endpoints.every()}:
                raise NoOperation(f"worker {worker} has left, and its operations have ended: begin it again") from gone
            raise

    def _begin(self, name: str, request: Message, worker: str | None, marks: Marking | None = None) -> Operation:
        """Begins an operation by the call ``name`` at a worker, by default the best one. Raises what it raised."""
        # A repeated request would begin a second operation, which no caller follows.
        send = partial(_send_operation, name, sealed(request))
        status = self._caller.at_worker(worker, send, self.limits.pin_s, marks, may_repeat=False)
        return Operation(RemoteRun(self, status))

    # Statistics and closing

    def clear(self, namespace: Namespace) -> Cleared:
        request = sealed(pb.ClearRequest(namespace=namespace.digest))
        raw = self._caller.within(
            namespace, lambda: self._caller.unary("Clear", request, self.limits.clear_s, even_aside=True)
        )
        answer = pb.ClearResponse.FromString(raw)
        return Cleared(answer.chunks, answer.bytes, answer.pinned, unconfirmed=tuple(answer.unconfirmed))

    def stats(self) -> dict[str, int | float]:
        """Returns the sums over all workers that answer, and this client's counts. Raises Unavailable if none does.

        Some gauges are no sums: see ``counts.merged``.
        """
        answers = list(self.stats_each().values())
        found = [each for each in answers if not isinstance(each, KVStoreError)]
        if not found:
            raise next((each for each in answers if isinstance(each, KVStoreError)), self.endpoints.none())
        return {**merged(found), "workers": len(found), **self.counters.snapshot()}

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        answers = self._caller.each("Stats", b"", self.limits.stats_s)
        return {
            address: raw if isinstance(raw, KVStoreError) else _counts(pb.StatsResponse.FromString(raw))
            for address, raw in answers.items()
        }

    def close(self) -> None:
        if self.endpoints.owner.is_here:  # in a forked child, threads and connections belong to the parent
            self.parts.close()

    def _receive(self, namespace: Namespace, fetch: RemoteRead, marks: Marking) -> None:
        """Reads from one worker after the other; what none of them could give is a miss."""
        try:
            self._caller.within(namespace, partial(self._caller.anywhere, fetch.receive, fetch.timeout_s, marks))
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        except (Unavailable, Overloaded):
            self.counters.add(ClientCount.MISSES_UNREACHABLE)

    def _hold(self, namespace: Namespace, request: pb.HoldRequest, marks: Marking, held: Callable[..., H]) -> H:
        """Takes a hold at a worker; one of nothing if no worker answers. ``held(answer, endpoint)`` makes it."""

        def send(endpoint: Endpoint, left_s: float) -> H:
            answer = pb.HoldResponse.FromString(endpoint.call("Hold", request, left_s))
            return held(answer, endpoint if answer.hold else None)

        try:
            return self._caller.within(namespace, lambda: self._caller.anywhere(send, self.limits.match_s, marks))
        except Unavailable:
            self.counters.add(ClientCount.MISSES_UNREACHABLE)
            return held(pb.HoldResponse(), None)

    def _look_for(self, namespace: Namespace, keys: Sequence[bytes], **fields: bool) -> pb.MatchBlocksResponse:
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), **fields)

        def send(endpoint: Endpoint, left_s: float) -> pb.MatchBlocksResponse:
            return pb.MatchBlocksResponse.FromString(endpoint.call("MatchBlocks", request, left_s))

        return self._caller.anywhere(send, self.limits.match_s, partial(marks_of_keys, keys))

    def _matched(self, namespace: Namespace, like: TokenArray, **asked: Any) -> pb.MatchResponse | None:
        """Asks the worker that would serve the prompt ``like``. Returns None if no worker could answer."""
        raw = sealed(pb.MatchRequest(namespace=namespace.digest, **asked))
        call = partial(self._caller.unary, "Match", raw, self.limits.match_s, partial(marks_of, namespace, like))
        answer: bytes | None = self._caller.or_miss(namespace, call, None)
        return pb.MatchResponse.FromString(answer) if answer is not None else None


def _counts(answer: pb.StatsResponse) -> dict[str, int | float]:
    """Returns counters and gauges in one dict; whole numbers as int."""
    gauges = {name: int(value) if value.is_integer() else value for name, value in answer.gauges.items()}
    return {**answer.counters, **gauges}


def _full_chunks(namespace: Namespace, tokens: TokenArray) -> TokenArray:
    """Returns the tokens without the trailing part chunk, which is never stored."""
    return tokens[: len(tokens) - len(tokens) % namespace.layout.chunk_tokens]


def naming_of(namespace: Namespace, prompt: TokenArray | list[bytes]) -> tuple[dict[str, bytes], Marking]:
    """Returns the field of a request that names a prompt by its full chunks, or blocks, and what chooses the worker."""
    if isinstance(prompt, list):
        return {"keys": pack_keys(prompt)}, partial(marks_of_keys, prompt)
    size = namespace.layout.chunk_tokens
    return {"tokens": pack_tokens(prompt[: len(prompt) // size * size])}, partial(marks_of, namespace, prompt)


def _each(present: bytes, keys: Sequence[bytes]) -> list[bool]:
    """Returns the worker's answer for each key. Raises Unavailable if some are missing."""
    if len(present) != len(keys):
        raise Unavailable(f"the worker answered for {len(present)} blocks of {len(keys)}: repeat the call")
    return [bool(each) for each in present]


# Operations at workers.


FRESH_S = 0.1
"""A younger status is not requested again, unless a caller waits for the end."""
PAUSE_S = 0.2
"""Pause before the next call to a worker that did not wait for the end."""


class RemoteRun:
    """One operation at one worker; implements ``OperationSource``. Thread-safe."""

    def __init__(self, port: RemoteTransport, status: OperationStatus) -> None:
        self._port = port
        self.status = status
        self._seen_s = time.monotonic()

    def poll(self, wait_s: float = 0.0) -> OperationStatus:
        began_s = time.monotonic()
        if wait_s or began_s - self._seen_s > FRESH_S:
            with suppress(Busy):  # the operation continues
                self._call("GetOperation", control.GetOperationRequest(id=self.status.id, wait_s=wait_s), wait_s)
            spent_s = time.monotonic() - began_s
            if spent_s < wait_s and not self.status.state.ended:
                time.sleep(min(PAUSE_S, wait_s - spent_s))
        return self.status

    def cancel(self) -> OperationStatus:
        self._call("CancelOperation", control.CancelOperationRequest(id=self.status.id), 0.0)
        return self.status

    def _call(self, name: str, request: Message, wait_s: float) -> None:
        self.status = self._port.operation_call(name, request, self.status.worker, wait_s)
        self._seen_s = time.monotonic()


def _send_operation(name: str, request: bytes, endpoint: Endpoint, left_s: float) -> OperationStatus:
    answer = endpoint.stub(f"Control.{name}")(request, timeout=left_s)
    return status_of(control.OperationResponse.FromString(answer), endpoint.address)


def status_of(response: control.OperationResponse, worker: str) -> OperationStatus:
    """Returns the status in a message of ``worker``."""
    message = response.operation
    states = {each.value: each for each in OperationState}
    return OperationStatus(
        message.id,
        message.kind,
        message.about,
        message.unit,
        message.began_s,
        states.get(message.state, OperationState.RUNNING),
        message.ended_s,
        message.done,
        message.total,
        message.message,
        dict(message.counts),
        message.identity,
        worker=worker,
    )


# Holds at one worker: if that worker is gone, so is the hold, and reading raises.
#
# A chunk or block lost under a live hold is a miss. ``HoldBroken`` means that the hold has ended, or that its worker
# does not answer, so the client cannot know whether the hold still protects.


RELEASE_S = 2.0


class HeldAtWorker:
    """A hold at one worker, renewed until it is released. ``endpoint`` is None if nothing is held.

    Reads of what is held are given to ``_receive``.
    """

    def __init__(self, answer: pb.HoldResponse, endpoint: Endpoint | None, caller: Caller) -> None:
        self._caller = caller
        self._lock = threading.Lock()
        self._released = False
        self._lease: HoldLease | None = None
        self._hold_id: bytes = answer.hold
        if endpoint is not None:
            endpoint.use()
            self._lease = HoldLease(answer.hold, answer.lease_s, endpoint, caller.executor.clock.monotonic_s())
            caller.renewing.add(self._lease)

    @property
    def protects(self) -> bool:
        lease = self._lease
        return lease is not None and not (lease.ended or self._released or self._caller.endpoints.is_closed)

    def release(self) -> None:
        """Ends the hold; idempotent, never raises."""
        with self._lock:
            if self._released:
                return
            self._released = True
        if self._lease is None:
            return
        self._caller.renewing.remove(self._lease)
        request = pb.ReleaseRequest(hold=self._lease.id)
        endpoint = self._lease.endpoint
        # A worker that is gone holds nothing; any other lets go when the hold's lease is over.
        with suppress(CallFailed, KVStoreError):
            self._caller.at(endpoint, lambda: endpoint.call("Release", request, RELEASE_S))
        endpoint.leave()

    def _receive(self, fetch: RemoteRead, tokens_valid: Callable[[], int] = lambda: 0) -> None:
        """Reads from the worker that has the hold; nothing if nothing is held.

        Raises HoldBroken, with what ``tokens_valid`` says then.
        """
        self.check()
        if self._lease is None:
            return
        endpoint = self._lease.endpoint
        try:
            self._caller.at(endpoint, partial(fetch.receive, endpoint))
        except BrokenTransfer:
            pass  # counted where it was found; what came before it is good
        except CallFailed as failed:
            error = failed.error
            if isinstance(error, HoldBroken):
                raise error from failed
            self._caller.counters.add(ClientCount.MISSES_UNREACHABLE)
            if not failed.answered:
                raise HoldBroken(
                    f"the worker that has the hold does not answer ({error}): match again", tokens_valid()
                ) from failed

    def check(self) -> None:
        """Raises HoldBroken once the hold has ended, as far as this process knows."""
        lease = self._lease
        if self._released or lease is None or lease.ended:
            self._caller.endpoints.check()  # raises if the store is closed; nothing is sent
        if self._released:
            raise HoldBroken("the hold has ended (it was released): match again")
        if lease is not None and lease.ended:
            raise HoldBroken(
                "the hold has ended (its worker was restarted or lost its session, or this process did not renew it in "
                "time): match again"
            )


class RemoteHold(HeldAtWorker):
    """Held leading chunks of one prompt."""

    def __init__(
        self,
        namespace: Namespace,
        packed_tokens: bytes,
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        caller: Caller,
    ) -> None:
        super().__init__(answer, endpoint, caller)
        self.chunks = min(answer.chunks, len(packed_tokens) // TOKEN_BYTES // namespace.layout.chunk_tokens)
        self._namespace = namespace
        self._packed = packed_tokens
        self._layout = namespace.layout

    def read(self, sections: BufferMap) -> int:
        return self._fetch(lambda _: sections)

    def view(self) -> list[npt.NDArray[Any]]:
        views = ReceivedViews(self._layout)
        return views.leading(self._fetch(views.sections, views))

    def layers(self, memory: Callable[[int], LayerMemory], band: int) -> Iterator[tuple[int, LayerMemory]]:
        """Slices of the chunks, which are all received or lent before the first layer: ``band`` has no effect."""
        chunks, layout = self.view(), self._layout
        if len(chunks) < self.chunks:
            valid, end = len(chunks) * layout.chunk_tokens, (len(chunks) + 1) * layout.chunk_tokens
            raise HoldBroken(f"the chunk of tokens {valid} to {end} was lost: compute from token {valid} on", valid)
        parts = [chunk.view(np.uint8).reshape(layout.layers, 2, -1) for chunk in chunks]
        for layer in range(layout.layers if parts else 0):
            self.check()  # what was given can be read on, but nothing protects it any more
            into = memory(layer)
            for plane, target in enumerate((into.k, into.v)):
                np.concatenate([part[layer, plane] for part in parts], out=np.frombuffer(target, np.uint8))
            yield layer, into

    def _fetch(self, memory: Callable[[int], BufferMap], views: ReceivedViews | None = None) -> int:
        request, tokens = pb.GetRequest(hold=self._hold_id), unpack_tokens(self._packed)
        fetch = ChunkFetch(self._namespace, tokens, request, self.chunks, memory, self._caller, views)
        self._receive(fetch, lambda: leading(fetch.done) * self._layout.chunk_tokens)
        return leading(fetch.done)


class RemoteBlockHold(HeldAtWorker):
    """Blocks held by a worker."""

    def __init__(
        self,
        namespace: Namespace,
        present: list[bool],
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        caller: Caller,
    ) -> None:
        super().__init__(answer, endpoint, caller)
        self._namespace = namespace
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        wanted = BlockKeys.of(self._namespace, keys, [len(buffer) for buffer in buffers])
        fetch = BlockFetch(wanted, buffers, self._caller, self._hold_id)
        self._receive(fetch)
        return list(map(bool, fetch.done))
