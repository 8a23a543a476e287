"""Reading chunks and blocks from workers straight into the caller's memory, going on at another worker if one fails.

Images in the memory of a worker on this host, or in open files, are taken there; the rest comes as a stream of images,
and gRPC is left for what came wrong. Every image is verified, and every chunk is copied once.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.failover import Caller, Endpoint, FileLanes
from kvstore.client.pool import ClientLease, DataConnection, Leased
from kvstore.codec.chunk_run import ChunkRun
from kvstore.codec.image import ImagesIn, read_verified, take_images, verified
from kvstore.core.address import TokenArray
from kvstore.core.buffers import BlockBuffers, BufferLoan, BufferMap, Pieces, Withdrawn, address_of, cut_evenly
from kvstore.core.executor import GROUP_BYTES_MIN, Deadline, Executor, group_size
from kvstore.core.layout import Layout
from kvstore.core.metrics import ClientCount
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.format.header import Damage, Damaged, Expected
from kvstore.format.keyset import BlockKeys, ChunkKeys, KeySet, Mask, NativeBatch, leading
from kvstore.native import library as native
from kvstore.root.interface import LocalFiles, Stat
from kvstore.root.posix import PosixReader
from kvstore.transport.channel import (
    NOT_LENT,
    SPAN_BYTES,
    Channel,
    FrameKind,
    Head,
    LentSlots,
    LinkBroken,
    decode_slots,
    decode_span,
    encode_request,
)
from kvstore.transport.images import fill_verified, receive_images
from kvstore.transport.messages import pack_keys, pack_sizes, parse, sealed, traced
from kvstore.transport.status import BrokenTransfer
from kvstore.transport.watchdog import StreamWatchdog
from kvstore.v1 import kvstore_pb2 as pb

# The chunks of one read as arrays, each in a leased slot of the worker's memory, or in memory of its own.


class _Copies(BufferMap):
    """Chunks one after another, each as its sections in file order."""

    def __init__(self, array: npt.NDArray[Any], section_bytes: int) -> None:
        self._bytes = array.reshape(len(array), -1).view(np.uint8)
        self._section_bytes = section_bytes

    def __call__(self, index: int) -> list[memoryview]:
        return cut_evenly(self._bytes[index].data, self._section_bytes)

    @property
    def is_writable(self) -> bool:
        return True

    def covers(self, first: int, count: int) -> bool:
        return 0 <= first <= len(self._bytes) - count

    def lay(self, indexes: Sequence[int], items: npt.NDArray[Any]) -> list[object]:
        items["offset"] = address_of(self._bytes.data) + np.asarray(indexes, np.uint64) * self._bytes.shape[1]
        return [self._bytes]


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
        return _Copies(self._copies, layout.section_bytes)

    def lend(self, wanted: KeySet, index: int, image: memoryview, lease: ClientLease) -> None:
        """Adds a verified chunk in place."""
        layout = self._layout
        payload = Leased(wanted.payload_of(index, image), lease).array()
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
        lanes: FileLanes,
        deadline: Deadline,
        views: ReceivedViews | None = None,
    ) -> None:
        self._link = link
        self._asked = asked
        self._done = done
        self._lanes = lanes
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

        Raises LinkBroken, LinkLate, BulkRefused, InvalidRequest.
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
        right = verified(wanted, indexes, images, self._lanes.copiers(), self._deadline)
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
        return self._in_groups(self._lanes.copiers(), count, size_bytes // count, take, helps=True)

    def _in_groups(
        self,
        lanes: Executor,
        count: int,
        chunk_bytes: int,
        read: Callable[[int, int, BufferLoan], Mask],
        *,
        helps: bool = False,
    ) -> Mask:
        """Reads ``count`` chunks on lanes, some in each call of ``read(start, stop, borrowed)``; True for valid ones.

        At the deadline, what was read by then counts. Nothing is written into the caller's memory afterwards.
        """
        size = group_size(count, max(1, chunk_bytes), lanes.width)
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
                (lanes.share if helps else lanes.each)(-(-count // size), work, self._deadline)
        finally:
            borrowed.withdraw()  # lanes may still be writing, at the deadline or after an interrupt (Ctrl-C)
        return right.copy()

    # Open files

    def _take_files(self, first: int, count: int) -> None:
        link, wanted, sections = self._link, self._asked.wanted, self._asked.sections
        files = link.channel.take_files(count)
        # Each file has one owner that closes it: the lane that takes it out of this dict, or this call at the end.
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
            self._note(indexes, self._in_groups(self._lanes.get(), count, wanted.mean_bytes(first, count), read))
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


def received(
    stub: Any, request: bytes, watch: StreamWatchdog, idle_s: float, timeout_s: float
) -> Generator[pb.GetResponse]:
    """Yields the messages of an answer. Ends with CANCELLED if none comes for ``idle_s``. Close it to end the call."""
    call = stub(request, timeout=timeout_s)
    try:
        with watch.begin(idle_s, timeout_s, call.cancel) as stream:
            for message in call:
                # The worker is not at fault for what the caller does between two messages.
                stream.busy()
                yield parse(pb.GetResponse, message)
                stream.moved()
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
        missing = self._missing()
        if missing:  # else the last one failed behind its last byte
            missing = self._receive_bulk(endpoint, missing)
        if missing:
            self._receive_grpc(endpoint, missing)

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

    def _receive_bulk(self, endpoint: Endpoint, missing: Sequence[int]) -> Sequence[int]:
        """Reads past gRPC if there is a way; returns what is to be read over gRPC after it."""
        with endpoint.bulk.link(self._limits.probe_s) as link:
            if link is None:
                return missing
            self._counters.add(ClientCount.GETS_SHARED if link.is_shared else ClientCount.GETS_TCP)
            try:
                is_right = self._receive_images(link, missing)
            except (LinkBroken, InvalidRequest) as error:
                endpoint.bulk.note_broken(link, error)
                return self._missing()
        if is_right:
            return ()
        # The worker finds out itself what is wrong, and sets it aside.
        self._counters.add(ClientCount.BULK_DAMAGED)
        return sorted({*missing} & {*self._missing()})

    def _receive_images(self, link: DataConnection, chunks: Sequence[int]) -> bool:
        """Reads over one connection; False if an image is not right. Raises LinkBroken, InvalidRequest, BulkRefused."""
        lanes, number = self._caller.lanes, link.next_number()
        link.channel.limit(self._limits.read_s, self.timeout_s)
        message = traced(self._request(chunks))
        link.channel.send(FrameKind.GET, number, [encode_request(self.timeout_s, link.mode, message)])
        wanted = self._wanted_of(chunks)  # while the worker looks for them
        lent = decode_slots(link.receive(FrameKind.SLOTS)[1])
        self._is_counted = True
        asked = self._asked(number, wanted, lent.found, chunks)
        deadline = Deadline(lanes.clock, self.timeout_s)
        return ImageReceiver(link, asked, self.done, lanes, deadline, self._views).receive(lent)

    def _receive_grpc(self, endpoint: Endpoint, chunks: Sequence[int]) -> None:
        self._counters.add(ClientCount.GETS_GRPC)
        stream, request = endpoint.stream_in("Get"), sealed(self._request(chunks))
        messages = received(stream, request, self._caller.watch, self._limits.read_s, self.timeout_s)
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
        self._layout = namespace.layout
        self._get = request
        self._chunks_max = chunks_max
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
        found = min(found, self._chunks_max)
        self._get.uncounted = True  # the worker has counted it: what else this read asks for continues it
        if self._sections is None:
            self._sections = self._memory(found)
            self.done = bytearray(found)
        stop = max(self._get.first, min(found, len(self.done)))
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
