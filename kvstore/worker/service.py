"""The calls of kvstore.v1.KVStore, each a few lines between a message and the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.core.clock import Clock
from kvstore.core.executor import Deadline
from kvstore.core.metrics import STARTED, Latencies, Step, WorkerCount
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.engine import match_each
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.root.interface import StorageSpace
from kvstore.security.access import EVERY, OverQuota, Role
from kvstore.security.guard import ServerSecurity
from kvstore.transport.channel import SHORT_CALLS
from kvstore.transport.limits import SERVICE
from kvstore.transport.messages import (
    namespace_message,
    namespace_of,
    pack_counts,
    parse,
    pin_message,
    unpack_keys,
    unpack_prompts,
)
from kvstore.transport.watchdog import StreamWatchdog, WatchedStream
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.context import Call, Request, UnaryCall, WorkerContext, presented_by
from kvstore.worker.data_get import stream_get
from kvstore.worker.data_put import stream_put
from kvstore.worker.data_server import BulkListener, BulkRequests
from kvstore.worker.limits import WorkerLimits

# gRPC handlers: messages travel as bytes; a call is admitted, watched, and its message parsed inside.


class Handlers:
    """Makes handlers. A peer that sends or takes nothing must not keep a thread for ever: streams are watched."""

    def __init__(self, worker: WorkerContext, watch: StreamWatchdog) -> None:
        self._worker = worker
        self._calls = worker.calls
        self._watch = watch

    def unary(self, name: str, served: UnaryCall[Any]) -> Any:

        def serve(raw: bytes, context: grpc.ServicerContext) -> bytes:
            with self._calls.serving(name, context, light=served.light) as call:
                return served.answer(parse(served.kind, raw), call).SerializeToString()
            raise AssertionError("an error was answered already")

        return grpc.unary_unary_rpc_method_handler(serve)

    def many(self, name: str, kind: type[Request], answer: Callable[[Request, Call], Iterator[bytes]]) -> Any:

        def serve(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._calls.serving(name, context) as call, self._watched(context) as stream:
                yield from _leaving(answer(parse(kind, raw), call), stream)

        return grpc.unary_stream_rpc_method_handler(serve)

    def put(self, name: str, answer: Callable[[Iterator[pb.PutRequest], Call], bytes]) -> Any:

        def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            with self._calls.serving(name, context) as call, self._watched(context) as stream:
                return answer(_arriving(messages, stream), call)
            raise AssertionError("an error was answered already")

        return grpc.stream_unary_rpc_method_handler(serve)

    def _watched(self, context: grpc.ServicerContext) -> WatchedStream:
        """Puts a call under watch: cancelled when its client moves nothing for too long. Ends with the context."""

        def cancel() -> None:
            self._calls.add(WorkerCount.CALLS_IDLE)
            context.cancel()

        limits = self._worker.limits
        return self._watch.begin(limits.idle_s, limits.stream_s_max, cancel)


def _arriving(messages: Iterator[bytes], stream: WatchedStream) -> Iterator[pb.PutRequest]:
    """Yields the messages of a client, the first with ``start``.

    Waiting for the client counts as idle, our own work does not. Raises InvalidRequest if the first has no ``start`` or
    another has one; Unavailable if the watch ended it.
    """
    is_first = True
    for raw in messages:
        stream.busy()
        message = parse(pb.PutRequest, raw)
        if is_first != message.HasField("start"):
            raise InvalidRequest(
                "the first message of the stream has no start"
                if is_first
                else "a later message of the stream has a start"
            )
        is_first = False
        yield message
        stream.moved()
    if stream.expired:
        # gRPC may show a cancelled stream as one that ended.
        raise Unavailable("the client sent nothing for too long: the call was cancelled")
    if is_first:
        raise InvalidRequest("the stream has no message: expected one with start")
    stream.busy()


def _leaving(messages: Iterator[bytes], stream: WatchedStream) -> Iterator[bytes]:
    """Yields messages for a client. Waiting for the client counts as idle, our own work does not."""
    stream.busy()
    for message in messages:
        stream.moved()
        yield message
        stream.busy()


PIN_TTL_S_MAX = 30 * 86_400
RENEWALS_MAX = 65_536
"""Holds that one call renews at most."""


class WorkerService:
    """Serves one member. Messages travel as bytes and are parsed inside, where an error can be explained."""

    def __init__(
        self, member: ClusterMember, limits: WorkerLimits, clock: Clock, security: ServerSecurity | None = None
    ) -> None:
        security = security or ServerSecurity()
        self.worker = worker = WorkerContext(member, limits, clock, security)
        self.calls, self.gate, self.in_flight = worker.calls, worker.gate, worker.in_flight
        self.holds = worker.holds
        self._member = member
        self._node = member.node
        self._started_s = clock.now_s()
        self._certificate = security.tls
        self.watch = StreamWatchdog(clock, "kvstore-worker-watch")
        self.handlers = Handlers(worker, self.watch)
        self.bulk: BulkListener | None = None
        """Set while the worker listens for bulk connections."""
        self.space = StorageSpace(None, None)
        self.root_is_gone = False
        """The space of the root, as last reported by it."""
        self._unary: dict[str, UnaryCall[Any]] = {
            "OpenNamespace": UnaryCall(pb.OpenNamespaceRequest, self._open_namespace),
            "Match": UnaryCall(pb.MatchRequest, self._match),
            "MatchBlocks": UnaryCall(pb.MatchBlocksRequest, self._match_blocks),
            "Hold": UnaryCall(pb.HoldRequest, self._hold),
            "Renew": UnaryCall(pb.RenewRequest, self._renew, light=True),
            "Release": UnaryCall(pb.ReleaseRequest, self._release, light=True),
            "Pin": UnaryCall(pb.PinRequest, self._pin),
            "Unpin": UnaryCall(pb.UnpinRequest, self._unpin),
            "CountRefs": UnaryCall(pb.CountRefsRequest, self._count_refs),
            "Clear": UnaryCall(pb.ClearRequest, self._clear),
            "Stats": UnaryCall(pb.StatsRequest, self._stats, light=True),
            "OpenBulk": UnaryCall(pb.OpenBulkRequest, self._open_bulk),
        }
        self.bulk_requests = BulkRequests(worker, {name: self._unary[name] for name in SHORT_CALLS})

    def counters(self) -> dict[str, int]:
        return {**self._node.counters.snapshot(), **self.calls.counts.snapshot()}

    def gauges(self) -> dict[str, float]:
        counted = self._node.counters.snapshot()
        ends_s = self._certificate.expires_in_s() if self._certificate is not None else None
        space = {"root_free_bytes": self.space.free_bytes, "root_total_bytes": self.space.total_bytes}
        return {
            **{name: float(value) for name, value in space.items() if value is not None},
            **{name: float(value) for name, value in self._member.stats().items() if name not in counted},
            "calls_in_flight": float(self.gate.inside_count),
            "calls_max": float(self.worker.limits.calls_max),
            "bytes_in_flight": float(self.in_flight.count),
            "client_holds": float(len(self.holds)),
            "bulk_connections_open": float(self.bulk.connections_count if self.bulk else 0),
            "leases": float(len(self.bulk_requests.leases or ())),
            "draining": float(self.gate.draining),
            "root_gone": float(self.root_is_gone),
            STARTED: self._started_s,
            **({} if ends_s is None else {"certificate_expires_seconds": ends_s}),
        }

    @property
    def tiers(self) -> Latencies[Step]:
        return self._node.counters.tiers

    def handler(self) -> grpc.GenericRpcHandler:
        handlers = {name: self.handlers.unary(name, call) for name, call in self._unary.items()}
        handlers["Put"] = self.handlers.put("Put", partial(stream_put, self.worker))
        handlers["Get"] = self.handlers.many("Get", pb.GetRequest, partial(stream_get, self.worker))
        handlers["ListNamespaces"] = self.handlers.many(
            "ListNamespaces", pb.ListNamespacesRequest, self._list_namespaces
        )
        handlers["ListPins"] = self.handlers.many("ListPins", pb.ListPinsRequest, self._list_pins)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    # The calls

    def _open_namespace(self, request: pb.OpenNamespaceRequest, call: Call) -> Message:
        namespace = namespace_of(request.namespace)
        call.allow(namespace.tenant, namespace.name)
        if (
            not call.visit.identity.may(Role.WRITE, namespace.tenant)
            and self._member.find_namespace(namespace.digest) is None
        ):
            call.allow(namespace.tenant, namespace.name, role=Role.WRITE)  # it would be made
        # In less time than the client waits, or it would not hear that it is etcd that does not answer.
        self._member.claim_namespace(namespace, call.left_s(self._node.limits.meta_deadline_s))
        layout = namespace.layout
        return pb.OpenNamespaceResponse(
            digest=namespace.digest,
            section_bytes=layout.section_bytes,
            section_count=layout.section_count,
            chunk_bytes=layout.chunk_bytes,
        )

    def _list_namespaces(self, _: pb.ListNamespacesRequest, call: Call) -> Iterator[bytes]:
        for namespace in self._node.namespaces(call.left_s(self._node.limits.read_deadline_s)):
            if call.may_see(namespace.tenant):
                yield pb.ListNamespacesResponse(
                    digest=namespace.digest, namespace=namespace_message(namespace)
                ).SerializeToString()

    def _match(self, request: pb.MatchRequest, call: Call) -> Message:
        if request.lengths:
            namespace = self.worker.namespace(request.namespace, call)
            prompts = unpack_prompts(request.tokens, request.lengths)
            left_s = call.left_s(self._node.limits.match_deadline_s)
            counts = match_each(self._node, namespace, prompts, left_s)
            return pb.MatchResponse(each=pack_counts(counts))
        chain = self.worker.chain(request.namespace, request.tokens, call)
        left_s = call.left_s(self._node.limits.match_deadline_s)
        count = self._node.match(chain, left_s, counts=not request.uncounted)
        return pb.MatchResponse(chunks=count, tokens=count * chain.namespace.layout.chunk_tokens)

    def _match_blocks(self, request: pb.MatchBlocksRequest, call: Call) -> Message:
        namespace, keys = self.worker.namespace(request.namespace, call), unpack_keys(request.keys)
        deadline = Deadline(self._node.clock, call.left_s(self._node.limits.match_deadline_s))
        if request.each:
            present = bytes(self._node.blocks.present(namespace, keys, deadline))
            return pb.MatchBlocksResponse(blocks=len(present) - len(present.lstrip(b"\1")), present=present)
        return pb.MatchBlocksResponse(blocks=self._node.blocks.match(namespace, keys, deadline))

    def _hold(self, request: pb.HoldRequest, call: Call) -> Message:
        if not request.ttl_s >= 0:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 0 or more")
        ttl_s, left_s, present = request.ttl_s or None, call.left_s(self._node.limits.match_deadline_s), b""
        if request.keys:
            if request.tokens:
                raise InvalidRequest("a Hold has both keys of blocks and tokens: expected one of them")
            namespace, keys = self.worker.namespace(request.namespace, call), unpack_keys(request.keys)
            deadline = Deadline(self._node.clock, left_s)
            hold, found = self._node.blocks.hold(namespace, keys, ttl_s, deadline)
            present = bytes(found)
        else:
            chain = self.worker.chain(request.namespace, request.tokens, call)
            hold = self._node.hold(chain, ttl_s, left_s, counts=not request.uncounted)
        if not hold.count and not any(present):
            self._node.holds.release(hold)
            return pb.HoldResponse(present=present)
        self.holds.add(hold)
        return pb.HoldResponse(
            hold=hold.id,
            chunks=hold.count,
            tokens=hold.tokens,
            lease_s=self.worker.limits.hold_lease_s,
            present=present,
        )

    def _renew(self, request: pb.RenewRequest, call: Call) -> Message:
        if len(request.holds) > RENEWALS_MAX:
            raise InvalidRequest(f"{len(request.holds)} holds to be renewed: expected at most {RENEWALS_MAX} in a call")
        allowed: set[bytes] = set()
        ended: list[bytes] = []
        for hold_id in request.holds:
            hold = self.holds.peek(hold_id)
            if hold is not None and hold.chain.namespace.digest not in allowed:
                call.allow(hold.chain.namespace.tenant, hold.chain.namespace.name, metered=False)
                allowed.add(hold.chain.namespace.digest)
            if not self.holds.renew(hold_id):
                ended.append(hold_id)
        return pb.RenewResponse(ended=ended)

    def _release(self, request: pb.ReleaseRequest, call: Call) -> Message:
        hold = self.holds.peek(request.hold)
        if hold is not None:
            call.allow(hold.chain.namespace.tenant, hold.chain.namespace.name, metered=False)
        return pb.ReleaseResponse(released=self.holds.release(request.hold))

    # Pins: each call is checked against the permission and the quota of the pinned tenant.

    def _pin(self, request: pb.PinRequest, call: Call) -> Message:
        if not 1 <= request.ttl_s <= PIN_TTL_S_MAX:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 1 to {PIN_TTL_S_MAX}")
        if request.keys:
            if request.tokens:
                raise InvalidRequest("a Pin has both keys of blocks and tokens: expected one of them")
            namespace, keys = self.worker.namespace(request.namespace, call), unpack_keys(request.keys)
            self._check_quota(namespace.tenant, len(keys) * namespace.layout.chunk_tokens)
            pin = self._member.pin_blocks(namespace, keys, request.ttl_s, request.owner)
        else:
            chain = self.worker.chain(request.namespace, request.tokens, call)
            self._check_quota(chain.namespace.tenant, len(chain.tokens))
            pin = self._member.pin(chain, request.ttl_s, request.owner)
        if pin.id and call.is_late:
            self._member.unpin(pin.id)  # its caller has gone, and would never know of it
            raise Unavailable("the pin was taken too late, and removed again: try again")
        return pb.PinResponse(pin=pin_message(pin))

    def _unpin(self, request: pb.UnpinRequest, call: Call) -> Message:
        # A pin that etcd does not have may have left a twin, whose tenant is not known.
        if not call.visit.identity.may(Role.WRITE, EVERY):
            pin = self._member.find_pin(request.id)
            if pin is None:
                return pb.UnpinResponse(found=False)
            call.allow(pin.tenant, pin.namespace)
        else:
            call.allow_every()
        return pb.UnpinResponse(found=self._member.unpin(request.id))

    def _list_pins(self, _: pb.ListPinsRequest, call: Call) -> Iterator[bytes]:
        for pin in self._member.pins():
            if call.may_see(pin.tenant):
                yield pb.ListPinsResponse(pin=pin_message(pin)).SerializeToString()

    def _count_refs(self, request: pb.CountRefsRequest, call: Call) -> Message:
        chain = self.worker.chain(request.namespace, request.tokens, call)
        return pb.CountRefsResponse(refs=self._member.refcount(chain))

    def _check_quota(self, tenant: str, tokens: int) -> None:
        """Raises OverQuota. Two workers that pin for a tenant concurrently may both find space for the last pin."""
        quota = self.calls.guard.quota(tenant)
        if quota.pins_max is None and quota.pinned_tokens_max is None:
            return
        pins = [pin for pin in self._member.pins() if pin.tenant == tenant]
        pinned = sum(pin.tokens for pin in pins)
        why = None
        if quota.pins_max is not None and len(pins) >= quota.pins_max:
            why = f"has {len(pins)} pins, and may have {quota.pins_max}"
        elif quota.pinned_tokens_max is not None and pinned + tokens > quota.pinned_tokens_max:
            why = f"has {pinned} tokens pinned, and may have {quota.pinned_tokens_max}"
        if why is not None:
            self.calls.guard.over_quota("pins")
            raise OverQuota("pins", f"tenant {tenant!r} {why}: unpin some, or ask the operator for a higher quota")

    # The worker

    def _clear(self, request: pb.ClearRequest, call: Call) -> Message:
        namespace = self.worker.namespace(request.namespace, call)
        cleared = self._member.clear(namespace)
        return pb.ClearResponse(
            chunks=cleared.chunks, bytes=cleared.bytes, unconfirmed=cleared.unconfirmed, pinned=cleared.pinned
        )

    def _stats(self, _: pb.StatsRequest, call: Call) -> Message:
        if call.visit.sees_every:
            return pb.StatsResponse(counters=self.counters(), gauges=self.gauges())
        # The worker's counts reveal other tenants: a caller that may not see those gets its own (rule X7).
        used = self.calls.guard.usage(call.visit.identity).values()
        counters = {
            "calls": sum(each.calls for each in used),
            "wire_bytes_in": sum(each.bytes_in for each in used),
            "wire_bytes_out": sum(each.bytes_out for each in used),
        }
        gauges = {
            "calls_in_flight": float(sum(each.calls_in_flight for each in used)),
            "draining": float(self.gate.draining),
            STARTED: self._started_s,
        }
        return pb.StatsResponse(counters=counters, gauges=gauges)

    def _open_bulk(self, _: pb.OpenBulkRequest, call: Call) -> Message:
        if self.bulk is None:
            return pb.OpenBulkResponse()
        grant, memory = self.bulk.grant(presented_by(call.context)), self.bulk_requests.memory
        # Memory and files hold chunks of all tenants (rule X8).
        shares = call.visit.sees_every
        return pb.OpenBulkResponse(
            unix_path=self.bulk.unix_path,
            boot_id=self.bulk.boot_id,
            tcp_port=self.bulk.tcp_port,
            grant=grant.id,
            secret=grant.secret,
            ttl_s=self.worker.limits.hello_s,
            files=self._node.hands_files and shares,
            memory=self.bulk_requests.memory_id if shares else b"",
            memory_bytes=memory.arena.size_bytes if memory is not None and shares else 0,
        )
