"""Reading chunks from workers straight into the caller's memory, going on at another worker where one fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from kvstore.buffers import Pieces
from kvstore.client.caller import Caller
from kvstore.client.counters import ClientCounters
from kvstore.client.endpoint import Endpoint
from kvstore.client.limits import ClientLimits
from kvstore.client.port import Sections
from kvstore.client.streams import received
from kvstore.errors import InvalidRequest
from kvstore.layout import Layout
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.frames import Frame
from kvstore.wire.messages import parse
from kvstore.wire.parts import Incoming, SameSize
from kvstore.wire.statuses import BrokenTransfer
from kvstore.wire.watch import Watch


class ChunkFetch:
    """One read of leading chunks. ``run`` may be called again, for another worker: it goes on where the last failed.

    Everything happens in the calling thread, so nothing is written into the caller's memory after ``run`` returns.
    """

    def __init__(
        self,
        layout: Layout,
        request: pb.GetRequest,
        chunks_max: int,
        memory: Callable[[int], Sections],
        caller: Caller,
        counters: ClientCounters,
        limits: ClientLimits,
        watch: Watch,
    ) -> None:
        self._layout = layout
        self._request = request
        self._chunks_max = chunks_max
        self._memory = memory
        self._caller = caller
        self._counters = counters
        self._limits = limits
        self._watch = watch
        self._sections: Sections | None = None
        self._found = chunks_max
        self._cached: tuple[int, Pieces] = (-1, [])
        self.good = 0
        """Leading chunks that are in the caller's memory, verified."""

    def run(self, endpoint: Endpoint) -> None:
        """Reads what is missing from one worker. Raises CallFailed, with ``good`` up to date."""
        self._caller.at(endpoint, lambda: self._receive(endpoint))

    def _receive(self, endpoint: Endpoint) -> None:
        request, layout, first = self._request, self._layout, self.good
        if self._sections is not None and first == self._found:
            return  # the last one failed behind its last byte
        request.first, request.chunks_max = first, self._found
        size_bytes = (self._found - first) * layout.chunk_bytes
        timeout_s = self._limits.stream_s(self._limits.read_s, size_bytes)
        frames = received(
            endpoint.stream_in("Get"), request.SerializeToString(), self._watch, self._limits.read_s, timeout_s
        )
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
            # What the worker sent makes no sense; what came before it was verified part by part.
            raise self._damaged(endpoint, error) from error
        except BrokenTransfer as error:
            raise self._damaged(endpoint, error) from error

    def _begin(self, frame: Frame, first: int) -> Incoming:
        if frame.start is None:
            raise InvalidRequest("the answer does not begin with how many chunks were found")
        found = min(parse(pb.GetStart, frame.start).chunks, self._chunks_max)
        if self._sections is None:
            self._sections = self._memory(found)
            self._found = found
        count = max(0, min(found, self._found) - first)
        return Incoming(
            SameSize(self._layout.section_bytes, count * self._layout.section_count),
            lambda part: self._section(first * self._layout.section_count + part),
        )

    def _section(self, part: int) -> memoryview:
        """The caller's memory for a section, counted from the prompt's beginning."""
        index, section = divmod(part, self._layout.section_count)
        if self._cached[0] != index:
            assert self._sections is not None
            self._cached = (index, self._sections(index))
        return self._cached[1][section]

    def _damaged(self, endpoint: Endpoint, error: Exception) -> BrokenTransfer:
        self._counters.add("client_misses_damaged")
        return BrokenTransfer(f"worker {endpoint.address}: {error}")
