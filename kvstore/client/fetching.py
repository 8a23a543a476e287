"""Reading chunks and blocks from workers straight into the caller's memory, going on at another worker if one fails.

One way for both: what lies on this host is taken there, the rest comes as a stream of images, and gRPC is left for what
came wrong. They differ in how a request is written, and in what a miss ends.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from kvstore.buffers import Buffers, Pieces, Sections
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.receiving import Ask, ImageReceiver, Views
from kvstore.client.caller import Tools
from kvstore.client.endpoints import Endpoint
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.format.header import Expected
from kvstore.keyset import BlockKeys, ChunkKeys, KeySet, leading
from kvstore.namespace import Namespace
from kvstore.node.lanes import Deadline
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import Kind, decode_slots, encode_request
from kvstore.wire.images import receive_images
from kvstore.wire.messages import pack_keys, pack_sizes, parse, sealed, traced
from kvstore.wire.statuses import BrokenTransfer
from kvstore.wire.watch import Watch

log = logging.getLogger(__name__)


def received(stub: Any, request: bytes, watch: Watch, idle_s: float, timeout_s: float) -> Generator[pb.GetResponse]:
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


class Fetch(ABC):
    """One read. ``receive`` may be called for another worker, and goes on where the last one failed.

    Everything happens in the calling thread, so nothing writes into the caller's memory once it returns.
    """

    ends_at_miss: bool
    """True if nothing counts behind the first chunk that is missing."""

    def __init__(self, count: int, size_bytes: int, tools: Tools, views: Views | None = None) -> None:
        """``count`` chunks of ``size_bytes`` are wanted at most; ``views`` gets what can stay where it is."""
        self._tools = tools
        self._limits = tools.limits
        self._counters = tools.counters
        self._views = views
        self.done = bytearray(count)
        """A byte for each chunk that is wanted, 1 once it is in the caller's memory, verified."""
        self.timeout_s = tools.limits.stream_s(tools.limits.read_s, size_bytes)
        """How long a worker has for it."""
        self._is_counted = False
        """A worker has counted this get: what is asked for again, or in another way, goes on with it."""

    def receive(self, endpoint: Endpoint, _: float = 0.0) -> None:
        """Reads what is missing from one worker, with ``done`` up to date whatever happens.

        Called by ``Caller``, which turns what this raises into CallFailed, and says how long the call may take:
        each worker has ``timeout_s`` all the same. Raises BrokenTransfer too, which is counted then.
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
                link.channel.alive = False
                log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
                self._counters.add(ClientCount.BULK_BROKEN)
                return self._missing()
        if is_right:
            return ()
        # The worker finds out itself what is wrong, and sets it aside.
        self._counters.add(ClientCount.BULK_DAMAGED)
        return sorted({*missing} & {*self._missing()})

    def _receive_images(self, link: Link, chunks: Sequence[int]) -> bool:
        """Reads over one connection; False if an image is not right. Raises LinkBroken, InvalidRequest, BulkRefused."""
        lanes, number = self._tools.lanes, link.next_number()
        link.channel.limit(self._limits.read_s, self.timeout_s)
        message = traced(self._request(chunks))
        link.channel.send(Kind.GET, number, [encode_request(self.timeout_s, link.mode, message)])
        wanted = self._wanted_of(chunks)  # while the worker looks for them
        lent = decode_slots(link.receive(Kind.SLOTS)[1])
        self._is_counted = True
        asked = self._asked(number, wanted, lent.found, chunks)
        deadline = Deadline(lanes.clock, self.timeout_s)
        return ImageReceiver(link, asked, self.done, lanes, deadline, self._views).receive(lent)

    def _receive_grpc(self, endpoint: Endpoint, chunks: Sequence[int]) -> None:
        self._counters.add(ClientCount.GETS_GRPC)
        stream, request = endpoint.stream_in("Get"), sealed(self._request(chunks))
        messages = received(stream, request, self._tools.watch, self._limits.read_s, self.timeout_s)
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


class ChunkFetch(Fetch):
    """One read of leading chunks of a prompt."""

    ends_at_miss = True

    def __init__(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        request: pb.GetRequest,
        chunks_max: int,
        memory: Callable[[int], Sections],
        tools: Tools,
        views: Views | None = None,
    ) -> None:
        """With ``views``, ``memory`` is for what has to be copied."""
        super().__init__(chunks_max, chunks_max * namespace.layout.chunk_bytes, tools, views)
        self._namespace = namespace
        self._tokens = tokens
        self._chain: ChunkKeys | None = None
        self._layout = namespace.layout
        self._get = request
        self._chunks_max = chunks_max
        self._memory = memory
        self._sections: Sections | None = None

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


class BlockFetch(Fetch):
    """One read of engine-hashed blocks, each into its buffer; under a hold if ``hold`` is the id of one."""

    ends_at_miss = False

    def __init__(self, wanted: BlockKeys, buffers: Pieces, tools: Tools, hold: bytes = b"") -> None:
        super().__init__(len(wanted), sum(wanted.sizes_bytes), tools)
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
        return Ask(number, wanted, 0, len(chunks), Buffers([self._buffers[index] for index in chunks]), chunks)
