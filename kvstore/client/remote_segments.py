"""Segments through workers: a search is one call, with one hold for all that it finds."""

from __future__ import annotations

from functools import partial

from kvstore.client.caller import Reopening
from kvstore.client.endpoint import Endpoint
from kvstore.client.remote_hold import HeldAtWorker
from kvstore.client.spreading import marks_of
from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import Unavailable
from kvstore.namespace import Namespace
from kvstore.segments.match import Match
from kvstore.segments.search import Search
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import pack_places, pack_tokens, unpack_ranges


class RemoteSegments:
    """Implements ``PortSegments``. Thread-safe."""

    def __init__(self, tools: Tools, reopening: Reopening) -> None:
        self._tools = tools
        self._reopening = reopening

    def find(self, namespace: Namespace, search: Search) -> list[Match]:
        marks = partial(marks_of, namespace, search.tokens)
        request, limit_s = _request(namespace, search), self._tools.limits.match_s
        call = partial(self._tools.caller.short, "FindSegments", request, limit_s, marks)
        answer = self._reopening.or_miss(namespace, call, b"")
        return _matches(namespace, search, pb.FindSegmentsResponse.FromString(answer))

    def hold(
        self, namespace: Namespace, search: Search, ttl_s: float | None
    ) -> tuple[list[Match], HeldAtWorker | None]:
        request = _request(namespace, search, ttl_s or 0.0)

        def send(endpoint: Endpoint, left_s: float) -> tuple[list[Match], HeldAtWorker | None]:
            answer = pb.FindSegmentsResponse.FromString(endpoint.call("FindSegments", request, left_s))
            guard = HeldAtWorker(answer, endpoint, self._tools) if answer.hold else None
            return _matches(namespace, search, answer), guard

        marks = partial(marks_of, namespace, search.tokens)
        try:
            return self._reopening(
                namespace, lambda: self._tools.caller.anywhere(send, self._tools.limits.match_s, marks)
            )
        except Unavailable:
            self._tools.counters.add(ClientCount.MISSES_UNREACHABLE)
            return [], None


def _request(namespace: Namespace, search: Search, hold_s: float | None = None) -> pb.FindSegmentsRequest:
    return pb.FindSegmentsRequest(
        namespace=namespace.digest,
        tokens=pack_tokens(search.tokens),
        starts=None if search.starts is None else pack_places(search.starts),
        after=search.after,
        hold_s=hold_s,
    )


def _matches(namespace: Namespace, search: Search, answer: pb.FindSegmentsResponse) -> list[Match]:
    """Returns the ranges of an answer, up to the first that does not fit the question: that and the rest are misses."""
    found, end = list[Match](), search.after
    for start, stop in unpack_ranges(answer.ranges):
        if start < end or not start < stop <= len(search.tokens) or (stop - start) % namespace.layout.chunk_tokens:
            break
        # A copy: engines reuse their token buffers while a match is alive.
        found.append(Match(start, stop, search.tokens[start:stop].copy()))
        end = stop
    return found
