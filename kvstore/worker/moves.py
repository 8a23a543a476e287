"""Move: prefetches, moves and releases of clients, with a message after each progress."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.errors import InvalidRequest
from kvstore.node.moves import Act, Level
from kvstore.node.node import Node
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.statuses import Draining
from kvstore.worker.admission import Gate
from kvstore.worker.call import Call
from kvstore.worker.prompts import Prompts

LOOK_S = 1.0
"""Interval at which a move looks whether the worker drains: a drain must not wait for prefetches."""
PROGRESS_S = 0.1
"""Minimum time between two messages."""

ACTS = {pb.ACT_PREFETCH: Act.PREFETCH, pb.ACT_MOVE: Act.MOVE, pb.ACT_RELEASE: Act.RELEASE}
LEVELS = {
    pb.TIER_UNSPECIFIED: Level.MEMORY,
    pb.TIER_MEMORY: Level.MEMORY,
    pb.TIER_DISK: Level.DISK,
    pb.TIER_ROOT: Level.ROOT,
}


class MoveStreams:
    """Serves Move."""

    def __init__(self, node: Node, prompts: Prompts, gate: Gate) -> None:
        self._node = node
        self._prompts = prompts
        self._gate = gate

    def move(self, request: pb.MoveRequest, context: Call) -> Iterator[bytes]:
        """Yields the encoded messages of one answer. Ends the move, however the call ends."""
        act, level = ACTS.get(request.act), LEVELS.get(request.tier)
        if act is None:
            raise InvalidRequest(f"act is {request.act}: expected ACT_PREFETCH (1), ACT_MOVE (2) or ACT_RELEASE (3)")
        if level is None:
            raise InvalidRequest(f"tier is {request.tier}: expected TIER_MEMORY (1), TIER_DISK (2) or TIER_ROOT (3)")
        chain = self._prompts.chain(request.namespace, request.tokens, context)
        size = chain.namespace.layout.chunk_tokens
        move = self._node.begin_move(chain, act, level)
        try:
            # A client that goes away wakes us up; False: it is gone already.
            if not context.add_callback(move.cancel):
                return
            sent = 0
            yield pb.MoveResponse().SerializeToString()
            while not move.done and not self._gate.draining:
                chunks = move.wait(LOOK_S, beyond=sent)
                if chunks > sent:
                    yield pb.MoveResponse(chunks=chunks, tokens=chunks * size).SerializeToString()
                    sent = chunks
                    move.wait(PROGRESS_S)
            if not move.done:
                raise Draining("the worker is draining: use another worker")
            if move.error is not None:
                raise move.error
            yield pb.MoveResponse(chunks=move.chunks, tokens=move.chunks * size).SerializeToString()
        finally:
            move.cancel()
