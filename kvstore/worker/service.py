"""The calls of kvstore.v1.KVStore, each a few lines between a message and the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.errors import InvalidRequest
from kvstore.node.member import Member
from kvstore.sources import Clock
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.limits import SERVICE
from kvstore.wire.messages import namespace_message, namespace_of, parse, pin_message
from kvstore.wire.watch import Watch
from kvstore.worker.admission import BytesInFlight, Gate
from kvstore.worker.blocks import BlockStreams
from kvstore.worker.bulk.deferred import Deferred
from kvstore.worker.bulk.listener import BulkListener
from kvstore.worker.bulk.serving import BulkRequests
from kvstore.worker.calls import Calls, seconds_left
from kvstore.worker.getting import GetStreams
from kvstore.worker.holds import ClientHolds
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.moves import MoveStreams
from kvstore.worker.prompts import Prompts
from kvstore.worker.putting import PutStreams
from kvstore.worker.streams import arriving, leaving, watched

Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext

PIN_TTL_S_MAX = 30 * 86_400
DEFERRED_S = 10.0
"""How long a worker that stops writes on what it has acknowledged."""


class Service:
    """Serves one member. Messages come and go as bytes and are parsed inside, where an error can be explained."""

    def __init__(self, member: Member, limits: WorkerLimits, clock: Clock) -> None:
        node = member.node
        self._member = member
        self._node = node
        self._limits = limits
        self.gate = Gate(limits.calls_max)
        self.in_flight = BytesInFlight(limits.bytes_in_flight_max)
        self.calls = Calls(self.gate, node.ids)
        self.holds = ClientHolds(limits.holds_max, limits.hold_tokens_max, node.release, node.clock)
        self.watch = Watch(clock, "kvstore-worker-watch")
        self.deferred = Deferred(self.calls)
        self.bulk: BulkListener | None = None
        """Set while the worker listens for bulk connections."""
        self._prompts = Prompts(member, self.holds, self.deferred)
        self.bulk_requests = BulkRequests(node, self._prompts, self.in_flight, self.calls, limits, self.deferred)
        self._putting = PutStreams(node, self._prompts, self.in_flight, self.calls)
        self._getting = GetStreams(node, self._prompts, self.in_flight, self.calls, limits)
        self._blocks = BlockStreams(node, self._prompts, self.in_flight, self.calls, limits)
        self._moves = MoveStreams(node, self._prompts, self.gate)

    def counters(self) -> dict[str, int]:
        """What only grows: the node's counters and the worker's."""
        return {**self._node.counters.snapshot(), **self.calls.counters()}

    def gauges(self) -> dict[str, float]:
        """How things stand now."""
        counted = self._node.counters.snapshot()
        return {
            **{name: float(value) for name, value in self._member.stats().items() if name not in counted},
            "calls_in_flight": float(self.gate.inside_count),
            "bytes_in_flight": float(self.in_flight.count),
            "client_holds": float(len(self.holds)),
            "bulk_connections_open": float(self.bulk.connections_count if self.bulk else 0),
            "deferred_chunks": float(self.deferred.chunks_count),
            "leases": float(len(self.bulk_requests.leases or ())),
            "draining": float(self.gate.draining),
        }

    def handler(self) -> grpc.GenericRpcHandler:
        """All calls, for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "OpenNamespace": self._unary("OpenNamespace", pb.OpenNamespaceRequest, self._open_namespace),
                "ListNamespaces": self._many("ListNamespaces", pb.ListNamespacesRequest, self._list_namespaces),
                "Match": self._unary("Match", pb.MatchRequest, self._match),
                "Put": self._stream_in("Put", self._putting.put),
                "Get": self._many("Get", pb.GetRequest, self._getting.get),
                "Hold": self._unary("Hold", pb.HoldRequest, self._hold),
                "Release": self._unary("Release", pb.ReleaseRequest, self._release, light=True),
                "Pin": self._unary("Pin", pb.PinRequest, self._pin),
                "Unpin": self._unary("Unpin", pb.UnpinRequest, self._unpin),
                "ListPins": self._many("ListPins", pb.ListPinsRequest, self._list_pins),
                "CountRefs": self._unary("CountRefs", pb.CountRefsRequest, self._count_refs),
                "PutBlocks": self._stream_in("PutBlocks", self._blocks.put),
                "MatchBlocks": self._unary("MatchBlocks", pb.MatchBlocksRequest, self._blocks.match),
                "GetBlocks": self._many("GetBlocks", pb.GetBlocksRequest, self._blocks.get),
                "Move": self._many("Move", pb.MoveRequest, self._moves.move),
                "Clear": self._unary("Clear", pb.ClearRequest, self._clear),
                "Stats": self._unary("Stats", pb.StatsRequest, self._stats, light=True),
                "OpenBulk": self._unary("OpenBulk", pb.OpenBulkRequest, self._open_bulk),
            },
        )

    def close(self) -> None:
        """Ends the watch over streams, and what is written behind; idempotent."""
        self.watch.close()
        self.deferred.close(DEFERRED_S)

    # How calls are served

    def _unary(
        self, name: str, kind: type[Request], answer: Callable[[Request, Context], Message], *, light: bool = False
    ) -> Any:
        def serve(raw: bytes, context: Context) -> bytes:
            with self.calls.serving(name, context, light=light):
                return answer(parse(kind, raw), context).SerializeToString()
            raise AssertionError("an error was answered already")

        return grpc.unary_unary_rpc_method_handler(serve)

    def _many(self, name: str, kind: type[Request], answer: Callable[[Request, Context], Iterator[bytes]]) -> Any:
        def serve(raw: bytes, context: Context) -> Iterator[bytes]:
            with self.calls.serving(name, context), watched(self.watch, context, self._limits, self.calls) as stream:
                yield from leaving(answer(parse(kind, raw), context), stream)

        return grpc.unary_stream_rpc_method_handler(serve)

    def _stream_in(self, name: str, answer: Callable[[Any, Context], bytes]) -> Any:
        def serve(messages: Iterator[bytes], context: Context) -> bytes:
            with self.calls.serving(name, context), watched(self.watch, context, self._limits, self.calls) as stream:
                return answer(arriving(messages, stream), context)
            raise AssertionError("an error was answered already")

        return grpc.stream_unary_rpc_method_handler(serve)

    # The calls

    def _open_namespace(self, request: pb.OpenNamespaceRequest, _: Context) -> Message:
        namespace = namespace_of(request.namespace)
        self._member.claim_namespace(namespace)
        layout = namespace.layout
        return pb.OpenNamespaceResponse(
            digest=namespace.digest,
            section_bytes=layout.section_bytes,
            section_count=layout.section_count,
            chunk_bytes=layout.chunk_bytes,
        )

    def _list_namespaces(self, _: pb.ListNamespacesRequest, context: Context) -> Iterator[bytes]:
        for namespace in self._node.namespaces(seconds_left(context, self._node.limits.read_deadline_s)):
            yield pb.ListNamespacesResponse(
                digest=namespace.digest, namespace=namespace_message(namespace)
            ).SerializeToString()

    def _match(self, request: pb.MatchRequest, context: Context) -> Message:
        chain = self._prompts.chain(request.namespace, request.tokens)
        count = self._node.match(chain, seconds_left(context, self._node.limits.match_deadline_s))
        return pb.MatchResponse(chunks=count, tokens=count * chain.namespace.layout.chunk_tokens)

    def _hold(self, request: pb.HoldRequest, context: Context) -> Message:
        if not request.ttl_s >= 0:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 0 or more")
        chain = self._prompts.chain(request.namespace, request.tokens)
        left_s = seconds_left(context, self._node.limits.match_deadline_s)
        hold = self._node.hold(chain, request.ttl_s or None, left_s)
        if not hold.count:
            self._node.release(hold)
            return pb.HoldResponse()
        self.holds.add(hold)
        return pb.HoldResponse(hold=hold.id, chunks=hold.count, tokens=hold.tokens)

    def _release(self, request: pb.ReleaseRequest, _: Context) -> Message:
        return pb.ReleaseResponse(released=self.holds.release(request.hold))

    def _pin(self, request: pb.PinRequest, _: Context) -> Message:
        if not 1 <= request.ttl_s <= PIN_TTL_S_MAX:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 1 to {PIN_TTL_S_MAX}")
        chain = self._prompts.chain(request.namespace, request.tokens)
        return pb.PinResponse(pin=pin_message(self._member.pin(chain, request.ttl_s, request.owner)))

    def _unpin(self, request: pb.UnpinRequest, _: Context) -> Message:
        return pb.UnpinResponse(found=self._member.unpin(request.id))

    def _list_pins(self, _: pb.ListPinsRequest, __: Context) -> Iterator[bytes]:
        for pin in self._member.pins():
            yield pb.ListPinsResponse(pin=pin_message(pin)).SerializeToString()

    def _count_refs(self, request: pb.CountRefsRequest, _: Context) -> Message:
        chain = self._prompts.chain(request.namespace, request.tokens)
        return pb.CountRefsResponse(refs=self._member.refcount(chain))

    def _clear(self, request: pb.ClearRequest, _: Context) -> Message:
        namespace = self._prompts.namespace(request.namespace)
        self.deferred.wait_empty(DEFERRED_S)  # or what is written behind would come after it
        cleared = self._member.clear(namespace)
        return pb.ClearResponse(chunks=cleared.chunks, bytes=cleared.bytes)

    def _stats(self, _: pb.StatsRequest, __: Context) -> Message:
        return pb.StatsResponse(counters=self.counters(), gauges=self.gauges())

    def _open_bulk(self, _: pb.OpenBulkRequest, __: Context) -> Message:
        if self.bulk is None:
            return pb.OpenBulkResponse()
        grant, memory = self.bulk.grant(), self.bulk_requests.memory
        return pb.OpenBulkResponse(
            unix_path=self.bulk.unix_path,
            boot_id=self.bulk.boot_id,
            tcp_port=self.bulk.tcp_port,
            grant=grant.id,
            secret=grant.secret,
            ttl_s=self._limits.hello_s,
            files=self._node.hands_files,
            memory=self.bulk_requests.memory_id,
            memory_bytes=memory.arena.size_bytes if memory is not None else 0,
        )
