"""Engine-hashed blocks through workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from kvstore.buffers import Pieces
from kvstore.client.endpoint import Endpoint
from kvstore.client.streams import Outgoing, received, send_stream
from kvstore.client.tools import Tools
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import hints_message, pack_keys, pack_sizes, sealed, write_message
from kvstore.wire.parts import Incoming
from kvstore.wire.statuses import BrokenTransfer
from kvstore.writes import WriteMode


class RemoteBlocks:
    """The calls about blocks. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def put(
        self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces, hints: Hints, write: WriteMode | None
    ) -> list[bool]:
        """See ``Port.put_blocks``."""
        if not keys:
            return []
        limits, watch = self._tools.limits, self._tools.watch
        sizes = [len(buffer) for buffer in buffers]
        start = pb.PutBlocksStart(
            namespace=namespace.digest,
            keys=pack_keys(keys),
            sizes=pack_sizes(sizes),
            hints=hints_message(hints),
            write=write_message(write),
        )
        opening = start.SerializeToString()

        def send(endpoint: Endpoint, left_s: float) -> bytes:
            outgoing = Outgoing(iter(buffers), opening)
            return send_stream(endpoint.stream_out("PutBlocks"), outgoing, watch, limits.write_s, left_s)

        timeout_s = limits.stream_s(limits.write_s, sum(sizes))
        answer = self._tools.caller.anywhere(send, timeout_s, keys[0], even_aside=True)
        stored = pb.PutBlocksResponse.FromString(answer).stored
        if len(stored) != len(keys):
            raise Unavailable(f"the worker answered for {len(stored)} blocks of {len(keys)}: repeat the call")
        return [bool(each) for each in stored]

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """See ``Port.match_blocks``. Raises Unavailable."""
        if not keys:
            return 0
        request = sealed(pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys)))
        answer = self._tools.caller.unary("MatchBlocks", request, self._tools.limits.match_s, keys[0])
        return min(pb.MatchBlocksResponse.FromString(answer).blocks, len(keys))

    def present(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """See ``Port.present_blocks``. Raises Unavailable."""
        if not keys:
            return []
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), each=True)
        raw = self._tools.caller.unary("MatchBlocks", sealed(request), self._tools.limits.match_s, keys[0])
        answer = pb.MatchBlocksResponse.FromString(raw)
        if len(answer.present) == len(keys):
            return [bool(each) for each in answer.present]
        # An older worker says only how many leading ones there are: the rest counts as a miss.
        leading = min(answer.blocks, len(keys))
        return [True] * leading + [False] * (len(keys) - leading)

    def get(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces, hits: list[bool]) -> None:
        """Sets ``hits`` for each block that is in its buffer, verified. Raises Unavailable, with ``hits`` up to date.

        Where a worker fails, the next one is asked for all of them again.
        """
        if not keys:
            return
        limits = self._tools.limits
        sizes = [len(buffer) for buffer in buffers]
        request = pb.GetBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), sizes=pack_sizes(sizes))
        raw = sealed(request)

        def send(endpoint: Endpoint, left_s: float) -> None:
            # A second attempt writes over what the first one brought, so it counts no more.
            hits[:] = [False] * len(keys)
            frames = received(endpoint.stream_in("GetBlocks"), raw, self._tools.watch, limits.read_s, left_s)
            with closing(frames):
                asked = 0
                found: list[int] = []
                incoming = Incoming([])
                for frame in frames:
                    if frame.start is not None:
                        if not incoming.is_done or asked + len(frame.start) > len(keys):
                            raise BrokenTransfer(f"worker {endpoint.address} mixes up its blocks: repeat the call")
                        found = [asked + at for at, hit in enumerate(frame.start) if hit]
                        asked += len(frame.start)
                        incoming = Incoming(
                            [sizes[index] for index in found],
                            lambda part, of=found: buffers[of[part]],  # type: ignore[misc]
                        )
                    before = incoming.complete
                    try:
                        for _ in incoming.feed(frame):
                            pass
                    except InvalidRequest as error:
                        raise BrokenTransfer(f"worker {endpoint.address}: {error}") from error
                    finally:
                        for part in range(before, incoming.complete):
                            hits[found[part]] = True

        self._tools.caller.anywhere(send, limits.stream_s(limits.read_s, sum(sizes)), keys[0])
