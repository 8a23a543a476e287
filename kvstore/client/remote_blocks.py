"""Engine-hashed blocks through workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from kvstore.buffers import Pieces
from kvstore.client.bulk.cargo import BlockCargo
from kvstore.client.bulk.reading_blocks import BlockReading
from kvstore.client.bulk.sending import send_put
from kvstore.client.endpoint import Endpoint
from kvstore.client.remote_hold import HeldAtWorker
from kvstore.client.spreading import marks_of_keys
from kvstore.client.streams import Outgoing, received, send_stream
from kvstore.client.tools import Tools
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.node.wanted import Keyed, keyed
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.messages import hints_message, pack_keys, pack_sizes, parse, sealed, write_message
from kvstore.wire.parts import Incoming
from kvstore.wire.statuses import BrokenTransfer
from kvstore.writes import WriteMode

log = logging.getLogger(__name__)


class RemoteBlocks:
    """The calls about blocks. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def put(
        self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces, hints: Hints, write: WriteMode | None
    ) -> list[bool]:
        """Implements ``Port.put_blocks``."""
        if not keys:
            self._tools.caller.check()
            return []
        limits, watch = self._tools.limits, self._tools.watch
        sizes = [len(buffer) for buffer in buffers]
        start = pb.PutBlocksStart(
            namespace=namespace.digest,
            keys=pack_keys(keys),
            sizes=pack_sizes(sizes),
            hints=hints_message(hints),
            write=write_message(write or self._tools.write),
        )
        opening = start.SerializeToString()

        def send(endpoint: Endpoint, left_s: float) -> list[bool]:
            stored = self._put_past_grpc(endpoint, start, buffers, left_s)
            if stored is not None:
                return stored
            self._tools.counters.add(ClientCount.PUTS_GRPC)
            outgoing = Outgoing(iter(buffers), opening)
            answer = send_stream(endpoint.stream_out("PutBlocks"), outgoing, watch, limits.write_s, left_s)
            there = pb.PutBlocksResponse.FromString(answer).stored
            if len(there) != len(keys):
                raise Unavailable(f"the worker answered for {len(there)} blocks of {len(keys)}: repeat the call")
            return [bool(each) for each in there]

        timeout_s = limits.stream_s(limits.write_s, sum(sizes))
        return self._tools.caller.anywhere(send, timeout_s, partial(marks_of_keys, keys), even_aside=True)

    def _put_past_grpc(
        self, endpoint: Endpoint, start: pb.PutBlocksStart, buffers: Pieces, timeout_s: float
    ) -> list[bool] | None:
        """Sends the blocks over a bulk connection; None if there is none or it broke."""
        counters = self._tools.counters
        with endpoint.bulk.link(timeout_s) as link:
            if link is None:
                return None
            counters.add(ClientCount.PUTS_SHARED if link.is_shared else ClientCount.PUTS_TCP)
            try:
                answer = send_put(
                    link,
                    start,
                    BlockCargo(buffers),
                    # acknowledged on receipt, so never for through or around
                    behind=start.write == pb.WRITE_BEHIND,
                    reserve=partial(endpoint.bulk.reserve_arena, link),
                    idle_s=self._tools.limits.write_s,
                    timeout_s=timeout_s,
                    lanes=self._tools.lanes,
                )
                stored = parse(pb.PutBlocksResponse, answer).stored
                if len(stored) != len(buffers):
                    raise link.channel.break_off(f"the worker answered for {len(stored)} blocks of {len(buffers)}")
                return [bool(each) for each in stored]
            except (LinkBroken, InvalidRequest) as error:
                link.channel.alive = False
                log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
                counters.add(ClientCount.BULK_BROKEN)
        return None

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Implements ``Port.match_blocks``. Raises Unavailable."""
        if not keys:
            self._tools.caller.check()
            return 0
        request = sealed(pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys)))
        answer = self._tools.caller.unary(
            "MatchBlocks", request, self._tools.limits.match_s, partial(marks_of_keys, keys)
        )
        return min(pb.MatchBlocksResponse.FromString(answer).blocks, len(keys))

    def present(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """Implements ``Port.present_blocks``. Raises Unavailable."""
        if not keys:
            self._tools.caller.check()
            return []
        request = pb.MatchBlocksRequest(namespace=namespace.digest, keys=pack_keys(keys), each=True)
        raw = self._tools.caller.unary(
            "MatchBlocks", sealed(request), self._tools.limits.match_s, partial(marks_of_keys, keys)
        )
        return _each(pb.MatchBlocksResponse.FromString(raw).present, keys)

    def hold(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> RemoteBlockHold:
        """Implements ``Port.hold_blocks``. Raises Unavailable, Overloaded."""
        if not keys:
            self._tools.caller.check()
            return self.unheld(namespace, keys)
        request = sealed(pb.HoldRequest(namespace=namespace.digest, ttl_s=ttl_s or 0.0, keys=pack_keys(keys)))

        def send(endpoint: Endpoint, left_s: float) -> RemoteBlockHold:
            answer = pb.HoldResponse.FromString(endpoint.unary("Hold")(request, timeout=left_s))
            present = _each(answer.present, keys)
            return RemoteBlockHold(self, namespace, present, answer, endpoint if answer.hold else None, self._tools)

        return self._tools.caller.anywhere(send, self._tools.limits.match_s, partial(marks_of_keys, keys))

    def unheld(self, namespace: Namespace, keys: Sequence[bytes]) -> RemoteBlockHold:
        """Returns a hold of nothing, for keys that no worker could look up."""
        return RemoteBlockHold(self, namespace, [False] * len(keys), pb.HoldResponse(), None, self._tools)

    def get(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces, hits: list[bool]) -> None:
        """Sets ``hits`` for each block that is in its buffer, verified. Raises Unavailable, with ``hits`` up to date.

        If a worker fails, the next one is asked for the rest.
        """
        if not keys:
            self._tools.caller.check()
            return
        wanted, limits = keyed(namespace, keys, [len(buffer) for buffer in buffers]), self._tools.limits

        def send(endpoint: Endpoint, left_s: float) -> None:
            self.get_at(endpoint, wanted, buffers, hits, left_s)

        self._tools.caller.anywhere(
            send, limits.stream_s(limits.read_s, sum(wanted.sizes_bytes)), partial(marks_of_keys, keys)
        )

    def get_at(
        self,
        endpoint: Endpoint,
        wanted: Keyed,
        buffers: Pieces,
        hits: list[bool],
        left_s: float,
        hold: bytes = b"",
    ) -> None:
        """Reads the blocks that ``hits`` lacks from one worker, under a hold of it; inside a call of ``Caller``."""
        left = [index for index, hit in enumerate(hits) if not hit]
        left = self._get_past_grpc(endpoint, wanted, buffers, hits, left, hold)
        if left:
            self._get_over_grpc(endpoint, wanted, buffers, hits, left, left_s, hold)

    def _get_past_grpc(
        self, endpoint: Endpoint, wanted: Keyed, buffers: Pieces, hits: list[bool], left: list[int], hold: bytes
    ) -> list[int]:
        """Reads over a bulk connection; returns the indexes to read over gRPC instead."""
        tools = self._tools
        with endpoint.bulk.link(tools.limits.probe_s) as link:
            if link is None:
                return left
            tools.counters.add(ClientCount.GETS_SHARED if link.is_shared else ClientCount.GETS_TCP)
            reading = BlockReading(link, wanted, buffers, hits, tools.lanes, tools.limits, hold)
            try:
                reading.run(left)
            except (LinkBroken, InvalidRequest) as error:
                link.channel.alive = False
                if not link.shortage.note(error):
                    log.info("client.bulk_broken worker=%s why=%s", endpoint.address, error)
                tools.counters.add(ClientCount.BULK_BROKEN)
                return [index for index in left if not hits[index]]
        if reading.damaged:
            # The worker itself finds out what is wrong with these, and quarantines them.
            tools.counters.add(ClientCount.BULK_DAMAGED)
        return reading.damaged

    def _get_over_grpc(
        self,
        endpoint: Endpoint,
        wanted: Keyed,
        buffers: Pieces,
        hits: list[bool],
        left: list[int],
        left_s: float,
        hold: bytes,
    ) -> None:
        tools = self._tools
        tools.counters.add(ClientCount.GETS_GRPC)
        sizes = [wanted.sizes_bytes[index] for index in left]
        request = pb.GetBlocksRequest(
            namespace=wanted.namespace.digest,
            keys=pack_keys([wanted.keys[index] for index in left]),
            sizes=pack_sizes(sizes),
            hold=hold,
        )
        stream = endpoint.stream_in("GetBlocks")
        frames = received(stream, sealed(request), tools.watch, tools.limits.read_s, left_s)
        with closing(frames):
            asked = 0
            found: list[int] = []
            incoming = Incoming([])
            for frame in frames:
                if frame.start is not None:
                    if not incoming.is_done or asked + len(frame.start) > len(left):
                        raise BrokenTransfer(
                            f"worker {endpoint.address} sent other blocks than asked for: repeat the call"
                        )
                    found = [asked + at for at, hit in enumerate(frame.start) if hit]
                    asked += len(frame.start)
                    incoming = Incoming(
                        [sizes[at] for at in found],
                        lambda part, of=found: buffers[left[of[part]]],  # type: ignore[misc]
                    )
                before = incoming.complete
                try:
                    for _ in incoming.feed(frame):
                        pass
                except InvalidRequest as error:
                    raise BrokenTransfer(f"worker {endpoint.address}: {error}") from error
                finally:
                    for part in range(before, incoming.complete):
                        hits[left[found[part]]] = True


class RemoteBlockHold(HeldAtWorker):
    """Blocks held by a worker. Like a hold of chunks, it protects everything from garbage collection."""

    def __init__(
        self,
        blocks: RemoteBlocks,
        namespace: Namespace,
        present: list[bool],
        answer: pb.HoldResponse,
        endpoint: Endpoint | None,
        tools: Tools,
    ) -> None:
        super().__init__(answer, endpoint, tools)
        self._blocks = blocks
        self._namespace = namespace
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        hits, limits = [False] * len(keys), self._tools.limits
        wanted = keyed(self._namespace, keys, [len(buffer) for buffer in buffers])
        timeout_s = limits.stream_s(limits.read_s, sum(wanted.sizes_bytes))
        try:
            self._at_worker(
                lambda endpoint, hold_id: self._blocks.get_at(endpoint, wanted, buffers, hits, timeout_s, hold_id)
            )
        except BrokenTransfer:
            self._tools.counters.add(ClientCount.MISSES_DAMAGED)
        return hits


def _each(present: bytes, keys: Sequence[bytes]) -> list[bool]:
    """Returns the worker's answer for each key. Raises Unavailable if some are missing."""
    if len(present) != len(keys):
        raise Unavailable(f"the worker answered for {len(present)} blocks of {len(keys)}: repeat the call")
    return [bool(each) for each in present]
