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

from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.client.bulk.given import GivenSlots, Giving, NotGiven
from kvstore.client.bulk.handed import take_given
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.receiving import Ask, ImageReceiver
from kvstore.client.bulk.viewing import Views, view_given
from kvstore.client.endpoint import Endpoint
from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.format.header import Expected
from kvstore.namespace import Namespace
from kvstore.node.lanes import Deadline
from kvstore.node.wanted import Keyed, expected_of, leading
from kvstore.sections import Buffers, Sections
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import Kind, Mode, encode_request
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
    def _asked(self, number: int, chunks: Sequence[int], start: pb.GetStart) -> Ask:
        """Returns what a request that was sent asks for, of which the worker has ``start``."""

    def _receive_bulk(self, endpoint: Endpoint, missing: Sequence[int]) -> Sequence[int]:
        """Reads past gRPC if there is a way; returns what is to be read over gRPC after it."""
        damaged: list[int] = []
        with endpoint.bulk.link(self._limits.probe_s) as link:
            if link is None:
                return missing
            self._counters.add(ClientCount.GETS_SHARED if link.is_shared else ClientCount.GETS_TCP)
            try:
                if (mode := link.mode) is not Mode.STREAM:
                    missing = self._take_given(link, mode, missing, damaged)
                    self._is_counted = True
                if missing:
                    asked = self._ask(link, Mode.STREAM, missing)
                    is_whole = ImageReceiver(link, asked, self.done).receive()
                    self._is_counted = True
                    if not is_whole:
                        damaged += sorted({*missing} & {*self._missing()})
            except (LinkBroken, InvalidRequest) as error:
                link.channel.alive = False
                if not link.shortage.note(error):
                    log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
                self._counters.add(ClientCount.BULK_BROKEN)
                return self._missing()
        if damaged:
            # The worker finds out itself what is wrong with these, and sets them aside.
            self._counters.add(ClientCount.BULK_DAMAGED)
        return damaged

    def _take_given(self, link: Link, mode: Mode, missing: Sequence[int], damaged: list[int]) -> Sequence[int]:
        """Reads what the worker gives to a client on its host, and adds those that are not right to ``damaged``.

        Returns those that may be had as a stream.
        """
        asked, elsewhere = self._ask(link, mode, missing), list[int]()
        lanes, deadline, keeps = self._tools.lanes, Deadline(self._tools.lanes.clock, self.timeout_s), False
        has_room = link.memory is None or link.memory.has_lease
        views = self._views if has_room else None
        with Giving(link, asked.number, mode, has_gaps=not self.ends_at_miss) as giving:
            for given in giving.each(asked.first, asked.stop):
                chunks = asked.places[given.first : given.first + given.count]
                if isinstance(given, NotGiven):
                    elsewhere += chunks if given.is_elsewhere else ()
                    continue
                right: bytes | bytearray
                if views is None:
                    right = take_given(link, asked.wanted, given, asked.sections, lanes, deadline)
                else:
                    right = view_given(link, asked.wanted, given, views, lanes, deadline)
                    keeps |= isinstance(given, GivenSlots)
                for chunk, is_right in zip(chunks, right, strict=True):
                    self.done[chunk] = is_right
                damaged += [chunk for chunk in chunks if not self.done[chunk]]
                if damaged and self.ends_at_miss:
                    break
            giving.finish(leading(self.done), keep=keeps)
        if self.ends_at_miss:
            # What comes next may also be in memory, where a worker does not look for a client that takes files alone.
            return () if damaged else self._missing()
        return elsewhere

    def _ask(self, link: Link, mode: Mode, chunks: Sequence[int]) -> Ask:
        """Sends a request for chunks; the answer may say how many of them there are, which sets ``done`` anew."""
        number = link.next_number()
        link.channel.limit(self._limits.read_s, self.timeout_s)
        request = self._request(chunks)
        link.channel.send(Kind.GET, number, [encode_request(self.timeout_s, mode, traced(request))])
        start = b"" if request.keys else link.channel.receive(link.receive_head(Kind.START).length)
        return self._asked(number, chunks, parse(pb.GetStart, start))

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
                asked = self._asked(0, chunks, opening.start)
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
        return expected_of(asked.wanted, index), asked.sections(index)


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
        self._chain: Chain | None = None
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

    def _asked(self, number: int, chunks: Sequence[int], start: pb.GetStart) -> Ask:
        # The first answer decides how much memory is needed.
        found = min(start.chunks, self._chunks_max)
        self._get.uncounted = True  # the worker has counted it: what else this read asks for continues it
        if self._sections is None:
            self._sections = self._memory(found)
            self.done = bytearray(found)
        stop = max(self._get.first, min(found, len(self.done)))
        self._chain = self._chain or Chain.of(self._namespace, self._tokens)
        return Ask(number, self._chain, self._get.first, stop, self._sections, range(stop))


class BlockFetch(Fetch):
    """One read of engine-hashed blocks, each into its buffer; under a hold if ``hold`` is the id of one."""

    ends_at_miss = False

    def __init__(self, wanted: Keyed, buffers: Pieces, tools: Tools, hold: bytes = b"") -> None:
        super().__init__(len(wanted), sum(wanted.sizes_bytes), tools)
        self._wanted = wanted
        self._buffers = buffers
        self._hold = hold

    def _request(self, chunks: Sequence[int]) -> pb.GetRequest:
        wanted = self._wanted.picked(chunks)
        return pb.GetRequest(
            namespace=wanted.namespace.digest,
            keys=pack_keys(wanted.keys),
            sizes=pack_sizes(wanted.sizes_bytes),
            hold=self._hold,
            uncounted=self._is_counted or any(self.done),
        )

    def _asked(self, number: int, chunks: Sequence[int], start: pb.GetStart) -> Ask:
        sections = Buffers([self._buffers[index] for index in chunks])
        return Ask(number, self._wanted.picked(chunks), 0, len(chunks), sections, chunks)
