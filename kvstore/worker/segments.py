"""FindSegments: which ranges of a prompt are stored segments, and one hold for all of them."""

from __future__ import annotations

from itertools import chain

from kvstore.errors import InvalidRequest
from kvstore.node.node import Node
from kvstore.node.segment_search import find_segments, hold_segments
from kvstore.segments.search import Search
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import pack_places, unpack_places, unpack_tokens
from kvstore.worker.call import Call
from kvstore.worker.calls import seconds_left
from kvstore.worker.holds import ClientHolds
from kvstore.worker.prompts import Prompts


class SegmentCalls:
    """Serves FindSegments."""

    def __init__(self, node: Node, prompts: Prompts, holds: ClientHolds) -> None:
        self._node = node
        self._prompts = prompts
        self._holds = holds

    def find(self, request: pb.FindSegmentsRequest, call: Call, lease_s: float) -> pb.FindSegmentsResponse:
        """Answers one search; a hold that it takes has a lease of ``lease_s``."""
        if request.HasField("hold_s") and not request.hold_s >= 0:
            raise InvalidRequest(f"hold_s is {request.hold_s}: expected 0 or more")
        namespace = self._prompts.namespace(request.namespace, call)
        starts = unpack_places(request.starts) if request.HasField("starts") else None
        search = Search.of(unpack_tokens(request.tokens), starts, request.after)
        node = self._node
        left_s = seconds_left(call, node.limits.match_deadline_s)
        if not request.HasField("hold_s"):
            matches, hold = find_segments(node, namespace, search, left_s), None
        else:
            matches, hold = hold_segments(node, namespace, search, request.hold_s or None, left_s)
        ranges = pack_places(chain.from_iterable((match.start, match.end) for match in matches))
        if hold is None:
            return pb.FindSegmentsResponse(ranges=ranges)
        self._holds.add(hold)
        return pb.FindSegmentsResponse(ranges=ranges, hold=hold.id, lease_s=lease_s)
