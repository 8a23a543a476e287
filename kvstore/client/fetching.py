"""Reads chunks from workers straight into the caller's memory; goes on at another worker if one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing

from kvstore.address import Chain
from kvstore.buffers import Pieces
from kvstore.client.bulk.given import GivenSlots, Giving
from kvstore.client.bulk.handed import leading, take_given
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.receiving import receive_chunks
from kvstore.client.bulk.viewing import Views, view_given
from kvstore.client.endpoint import Endpoint
from kvstore.client.streams import received
from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damaged
from kvstore.namespace import Namespace
from kvstore.node.deadline import Deadline
from kvstore.sections import Sections
from kvstore.tokens import TokenArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import Kind, Mode, encode_request
from kvstore.wire.frames import Frame
from kvstore.wire.messages import parse, sealed
from kvstore.wire.parts import Incoming, SameSize
from kvstore.wire.statuses import BrokenTransfer
from kvstore.wire.traces import traced

log = logging.getLogger(__name__)

LEASES_MAX = 256
"""Maximum of views of one worker's memory at once, one file descriptor each; further views are copies."""


class ChunkFetch:
    """One read of leading chunks. ``receive`` may be called for another worker; it goes on where the last one failed.

    Everything happens in the calling thread, so nothing writes into the caller's memory once it returns.
    """

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
        """``views`` gets the chunks that can stay in place; ``memory`` is then for those that must be copied."""
        self._namespace = namespace
        self._tokens = tokens
        self._chain: Chain | None = None
        self._layout = namespace.layout
        self._request = request
        self._chunks_max = chunks_max
        self._memory = memory
        self._tools = tools
        self._views = views
        self._limits = tools.limits
        self._counters = tools.counters
        self._sections: Sections | None = None
        self._found = chunks_max
        self._cached: tuple[int, Pieces] = (-1, [])
        self.good = 0
        """Number of leading chunks in the caller's memory, verified."""

    def receive(self, endpoint: Endpoint) -> None:
        """Reads what is missing from one worker; ``good`` is always up to date.

        Call it inside a call of ``Caller``, which turns errors into CallFailed.
        """
        request, layout, first = self._request, self._layout, self.good
        if self._sections is not None and first == self._found:
            return  # the last worker failed after its last byte
        if self._receive_bulk(endpoint) or (self._sections is not None and self.good == self._found):
            return
        first = self.good
        request.first, request.chunks_max = first, self._found
        self._counters.add(ClientCount.GETS_GRPC)
        size_bytes = (self._found - first) * layout.chunk_bytes
        timeout_s = self._limits.stream_s(self._limits.read_s, size_bytes)
        frames = received(endpoint.stream_in("Get"), sealed(request), self._tools.watch, self._limits.read_s, timeout_s)
        try:
            with closing(frames):
                incoming: Incoming | None = None
                for frame in frames:
                    if incoming is None:
                        incoming = self._begin(frame, first)
                    for _ in incoming.feed(frame):
                        pass
                    self.good = first + incoming.complete // layout.section_count
        except InvalidRequest as error:
            # The worker sent nonsense. What came before it was verified part by part.
            raise self._damaged(endpoint, error) from error
        except BrokenTransfer as error:
            raise self._damaged(endpoint, error) from error

    def _begin(self, frame: Frame, first: int) -> Incoming:
        if frame.start is None:
            raise InvalidRequest("the answer does not begin with the number of chunks found")
        count = self._announced(frame.start) - first
        return Incoming(
            SameSize(self._layout.section_bytes, count * self._layout.section_count),
            lambda part: self._section(first * self._layout.section_count + part),
        )

    def _receive_bulk(self, endpoint: Endpoint) -> bool:
        """Reads over a bulk connection if there is one; True if it finished, so that gRPC is not needed."""
        limits = self._limits
        with endpoint.bulk.link(limits.probe_s) as link:
            if link is None:
                return False
            try:
                self._counters.add(ClientCount.GETS_SHARED if link.is_shared else ClientCount.GETS_TCP)
                is_right = self._receive_from(link)
            except (LinkBroken, InvalidRequest) as error:
                link.channel.alive = False
                if not link.shortage.note(error):
                    log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
                self._counters.add(ClientCount.BULK_BROKEN)
                return False
        if not is_right:
            # The worker itself finds out what is wrong with that chunk, and quarantines it.
            self._counters.add(ClientCount.BULK_DAMAGED)
        return is_right

    def _receive_from(self, link: Link) -> bool:
        """Reads until the end or the first miss; False if the next chunk exists but was not good."""
        if link.mode is Mode.STREAM:
            return self._receive_stream(link)
        is_right = self._take_given(link)
        if not is_right or self.good == self._found:
            return is_right
        # The next chunk may be in memory that cannot be leased, on a root without files to hand over, or encoded.
        return self._receive_stream(link)

    def _take_given(self, link: Link) -> bool:
        """Reads chunks from a worker on this host, from its memory or its open files; returns as ``_receive_from``."""
        mode = link.mode
        number, count, timeout_s = self._begin_bulk(link, mode)
        chain, first, is_right = self._hashed(), self.good, True
        assert self._sections is not None
        lanes, deadline, keeps = self._tools.lanes, Deadline(self._tools.lanes.clock, timeout_s), False
        views = self._views
        if link.memory is not None and len(link.memory.leases) >= LEASES_MAX:
            views = None
        with Giving(link, number, mode) as giving:
            for given in giving.each(first, count) if first < count else ():
                given_count = given.count  # of files only until they are taken
                if views is None:
                    done = take_given(link, chain, given, self._sections, lanes, deadline)
                else:
                    done = view_given(link, chain, given, views, lanes, deadline)
                    keeps |= isinstance(given, GivenSlots)
                self.good, is_right = given.first + leading(done), leading(done) == given_count
                if not is_right:
                    break
            giving.finish(self.good, keep=keeps)
        return is_right

    def _receive_stream(self, link: Link) -> bool:
        """Reads whole chunk files that come as bytes; returns as ``_receive_from``."""
        number, count, _ = self._begin_bulk(link, Mode.STREAM)
        chain = self._hashed()
        assert self._sections is not None
        try:
            for good in receive_chunks(link, number, chain, self.good, count, self._sections):
                self.good = good
        except Damaged:
            return False
        return True

    def _begin_bulk(self, link: Link, mode: Mode) -> tuple[int, int, float]:
        """Sends the request; returns its number, how many chunks the worker offers, and how long it may take."""
        request = self._request
        request.first, request.chunks_max = self.good, self._found
        timeout_s = self._limits.stream_s(self._limits.read_s, (self._found - self.good) * self._layout.chunk_bytes)
        link.channel.limit(self._limits.read_s, timeout_s)
        number = link.next_number()
        link.channel.send(Kind.GET, number, [encode_request(timeout_s, mode, traced(request))])
        return number, self._announced(link.receive(Kind.START)[1]), timeout_s

    def _hashed(self) -> Chain:
        self._chain = self._chain or Chain.of(self._namespace, self._tokens)
        return self._chain

    def _announced(self, start: bytes) -> int:
        """Returns how many chunks the worker offers; the first answer decides how much memory is needed."""
        found = min(parse(pb.GetStart, start).chunks, self._chunks_max)
        if self._sections is None:
            self._sections = self._memory(found)
            self._found = found
        return max(self.good, min(found, self._found))

    def _section(self, part: int) -> memoryview:
        """Returns the caller's memory for a section, counted from the start of the prompt."""
        index, section = divmod(part, self._layout.section_count)
        if self._cached[0] != index:
            assert self._sections is not None
            self._cached = (index, self._sections(index))
        return self._cached[1][section]

    def _damaged(self, endpoint: Endpoint, error: Exception) -> BrokenTransfer:
        self._counters.add(ClientCount.MISSES_DAMAGED)
        return BrokenTransfer(f"worker {endpoint.address}: {error}")
