"""The calls of kvstore.v1.KVStore, each a few lines between a message and the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.counts import STARTED
from kvstore.errors import InvalidRequest
from kvstore.hints import checked_unused_s
from kvstore.node.asking import match_each
from kvstore.node.counters import Latencies, Step
from kvstore.node.lanes import Deadline
from kvstore.node.member import Member
from kvstore.node.wanted import Wanted, keyed
from kvstore.root.interface import Space
from kvstore.security.access import Role
from kvstore.security.guard import ServerSecurity
from kvstore.security.tls import Certificate
from kvstore.sources import Clock
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.limits import SERVICE
from kvstore.wire.messages import namespace_message, namespace_of, pack_counts, unpack_keys, unpack_prompts
from kvstore.wire.watch import Watch
from kvstore.worker.admission import Buffers, BytesInFlight, Gate
from kvstore.worker.bulk.listener import BulkListener
from kvstore.worker.bulk.serving import BulkRequests
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, UnaryCall, seconds_left
from kvstore.worker.getting import GetStreams
from kvstore.worker.handlers import Handlers
from kvstore.worker.holds import ClientHolds
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.pinning import PinCalls
from kvstore.worker.prompts import Prompts
from kvstore.worker.putting import PutStreams

Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext
Gauges = Callable[[], Mapping[str, float]]

RENEWALS_MAX = 65_536
"""Holds that one call renews at most."""


class Service:
    """Serves one member. Messages travel as bytes and are parsed inside, where an error can be explained."""

    def __init__(
        self, member: Member, limits: WorkerLimits, clock: Clock, security: ServerSecurity | None = None
    ) -> None:
        node = member.node
        self._member = member
        self._node = node
        self._limits = limits
        self._started_s = clock.now_s()
        self._more_gauges: list[Gauges] = []
        self.gate = Gate(limits.calls_max)
        security = security or ServerSecurity()
        if security.tls is not None:
            self.add_gauges(partial(_expiry, security.tls))
        self.calls = Calls(self.gate, node.ids, security.authenticator, security.audit, security.account)
        self.in_flight = BytesInFlight(limits.bytes_in_flight_max, self.calls.tenant)
        self.holds = ClientHolds(
            limits.holds_max,
            limits.hold_tokens_max,
            node.holds.release,
            lambda hold: node.holds.renew(hold, self._limits.hold_lease_s),
            node.clock,
            tells_tenants=not self.calls.guard.is_open,
        )
        self.watch = Watch(clock, "kvstore-worker-watch")
        self.handlers = Handlers(self.calls, self.watch, limits)
        self.bulk: BulkListener | None = None
        """Set while the worker listens for bulk connections."""
        self.room = Space(None, None)
        """Room on the root, as last reported by it."""
        self.prompts = Prompts(member, self.holds)
        buffers = Buffers(limits.buffers_bytes_max)
        self._putting = PutStreams(node, self.prompts, self.in_flight, self.calls)
        self._getting = GetStreams(node, self.prompts, self.in_flight, self.calls, limits)
        self._short: dict[str, UnaryCall[Any]] = {
            "MatchBlocks": UnaryCall(pb.MatchBlocksRequest, self._getting.match_blocks),
            "Hold": UnaryCall(pb.HoldRequest, self._hold),
            "Release": UnaryCall(pb.ReleaseRequest, self._release, light=True),
        }
        """The calls that a bulk connection takes too."""
        self.bulk_requests = BulkRequests(node, self.prompts, self.in_flight, self.calls, limits, buffers, self._short)
        self._pins = PinCalls(member, self.prompts, self.calls.guard)

    @property
    def limits(self) -> WorkerLimits:
        """The current limits for clients."""
        return self._limits

    def add_gauges(self, gauges: Gauges) -> None:
        """Adds the gauges of another part of the worker."""
        self._more_gauges.append(gauges)

    def adjust(self, limits: WorkerLimits) -> None:
        """Takes over the limits that may change at run time; work in progress keeps its old ones."""
        self._limits = self.handlers.limits = limits
        self.gate.calls_max = limits.calls_max
        self.in_flight.bytes_max = limits.bytes_in_flight_max
        self.holds.holds_max, self.holds.tokens_max = limits.holds_max, limits.hold_tokens_max

    def counters(self) -> dict[str, int]:
        """Counters of the node and of the worker."""
        return {**self._node.counters.snapshot(), **self.calls.counters()}

    def gauges(self) -> dict[str, float]:
        """Gauges: the current state."""
        counted = self._node.counters.snapshot()
        room = {"root_free_bytes": self.room.free_bytes, "root_total_bytes": self.room.total_bytes}
        return {
            **{name: float(value) for name, value in room.items() if value is not None},
            **{name: float(value) for name, value in self._member.stats().items() if name not in counted},
            "calls_in_flight": float(self.gate.inside_count),
            "calls_max": float(self._limits.calls_max),
            "bytes_in_flight": float(self.in_flight.count),
            "client_holds": float(len(self.holds)),
            "bulk_connections_open": float(self.bulk.connections_count if self.bulk else 0),
            "leases": float(len(self.bulk_requests.leases or ())),
            "draining": float(self.gate.draining),
            STARTED: self._started_s,
            **{name: value for gauges in self._more_gauges for name, value in gauges().items()},
        }

    @property
    def tiers(self) -> Latencies[Step]:
        """Timings of the node's tiers."""
        return self._node.counters.tiers

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns all calls, for a server."""
        unary, many = self.handlers.unary, self.handlers.many
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                **{name: unary(name, call) for name, call in self._short.items()},
                "OpenNamespace": unary("OpenNamespace", UnaryCall(pb.OpenNamespaceRequest, self._open_namespace)),
                "ListNamespaces": many("ListNamespaces", pb.ListNamespacesRequest, self._list_namespaces),
                "Match": unary("Match", UnaryCall(pb.MatchRequest, self._match)),
                "Put": self.handlers.put("Put", self._putting.put),
                "Get": many("Get", pb.GetRequest, self._getting.get),
                "Renew": unary("Renew", UnaryCall(pb.RenewRequest, self._renew, light=True)),
                "Pin": unary("Pin", UnaryCall(pb.PinRequest, self._pins.pin)),
                "Unpin": unary("Unpin", UnaryCall(pb.UnpinRequest, self._pins.unpin)),
                "ListPins": many("ListPins", pb.ListPinsRequest, self._pins.list),
                "CountRefs": unary("CountRefs", UnaryCall(pb.CountRefsRequest, self._pins.count_refs)),
                "Supersede": unary("Supersede", UnaryCall(pb.SupersedeRequest, self._supersede)),
                "Clear": unary("Clear", UnaryCall(pb.ClearRequest, self._clear)),
                "Stats": unary("Stats", UnaryCall(pb.StatsRequest, self._stats, light=True)),
                "OpenBulk": unary("OpenBulk", UnaryCall(pb.OpenBulkRequest, self._open_bulk)),
            },
        )

    def close(self) -> None:
        """Ends the watch over streams; idempotent."""
        self.watch.close()

    # The calls

    def _open_namespace(self, request: pb.OpenNamespaceRequest, call: Call) -> Message:
        namespace = namespace_of(request.namespace)
        call.allow(namespace.tenant, namespace.name)
        if not call.may(Role.WRITE, namespace.tenant) and self._member.find_namespace(namespace.digest) is None:
            call.allow(namespace.tenant, namespace.name, role=Role.WRITE)  # it would be made
        # In less time than the client waits, or it would not hear that it is etcd that does not answer.
        self._member.claim_namespace(namespace, seconds_left(call, self._node.limits.meta_deadline_s))
        layout = namespace.layout
        return pb.OpenNamespaceResponse(
            digest=namespace.digest,
            section_bytes=layout.section_bytes,
            section_count=layout.section_count,
            chunk_bytes=layout.chunk_bytes,
        )

    def _list_namespaces(self, _: pb.ListNamespacesRequest, call: Call) -> Iterator[bytes]:
        for namespace in self._node.namespaces(seconds_left(call, self._node.limits.read_deadline_s)):
            if call.may_see(namespace.tenant):
                yield pb.ListNamespacesResponse(
                    digest=namespace.digest, namespace=namespace_message(namespace)
                ).SerializeToString()

    def _match(self, request: pb.MatchRequest, call: Call) -> Message:
        if request.lengths:
            namespace = self.prompts.namespace(request.namespace, call)
            prompts = unpack_prompts(request.tokens, request.lengths)
            left_s = seconds_left(call, self._node.limits.match_deadline_s)
            counts = match_each(self._node, namespace, prompts, left_s)
            return pb.MatchResponse(each=pack_counts(counts))
        chain = self.prompts.chain(request.namespace, request.tokens, call)
        left_s = seconds_left(call, self._node.limits.match_deadline_s)
        count = self._node.match(chain, left_s, counts=not request.uncounted)
        return pb.MatchResponse(chunks=count, tokens=count * chain.namespace.layout.chunk_tokens)

    def _supersede(self, request: pb.SupersedeRequest, call: Call) -> Message:
        unused_s = checked_unused_s(request.unused_s)
        if request.keys and request.tokens:
            raise InvalidRequest("a Supersede has both keys of blocks and tokens: expected one of them")
        wanted: Wanted
        if request.keys:
            wanted = keyed(self.prompts.namespace(request.namespace, call), unpack_keys(request.keys), ())
        else:
            wanted = self.prompts.chain(request.namespace, request.tokens, call)
        self._node.reads.superseded(wanted, request.first, unused_s)
        return pb.SupersedeResponse()

    def _hold(self, request: pb.HoldRequest, call: Call) -> Message:
        if not request.ttl_s >= 0:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 0 or more")
        ttl_s, left_s, present = request.ttl_s or None, seconds_left(call, self._node.limits.match_deadline_s), b""
        if request.keys:
            if request.tokens:
                raise InvalidRequest("a Hold has both keys of blocks and tokens: expected one of them")
            namespace, keys = self.prompts.namespace(request.namespace, call), unpack_keys(request.keys)
            deadline = Deadline(self._node.clock, left_s)
            hold, found = self._node.blocks.hold(namespace, keys, ttl_s, deadline)
            present = bytes(found)
        else:
            chain = self.prompts.chain(request.namespace, request.tokens, call)
            hold = self._node.hold(chain, ttl_s, left_s, counts=not request.uncounted)
        if not hold.count and not any(present):
            self._node.holds.release(hold)
            return pb.HoldResponse(present=present)
        self.holds.add(hold)
        return pb.HoldResponse(
            hold=hold.id,
            chunks=hold.count,
            tokens=hold.tokens,
            lease_s=self._limits.hold_lease_s,
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

    def _clear(self, request: pb.ClearRequest, call: Call) -> Message:
        namespace = self.prompts.namespace(request.namespace, call)
        cleared = self._member.clear(namespace)
        return pb.ClearResponse(
            chunks=cleared.chunks, bytes=cleared.bytes, unconfirmed=cleared.unconfirmed, pinned=cleared.pinned
        )

    def _stats(self, _: pb.StatsRequest, call: Call) -> Message:
        if call.sees_every:
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
        grant, memory = self.bulk.grant(call.presented), self.bulk_requests.memory
        # Memory and files hold chunks of all tenants (rule X8).
        shares = call.sees_every
        return pb.OpenBulkResponse(
            unix_path=self.bulk.unix_path,
            boot_id=self.bulk.boot_id,
            tcp_port=self.bulk.tcp_port,
            grant=grant.id,
            secret=grant.secret,
            ttl_s=self._limits.hello_s,
            files=self._node.hands_files and shares,
            memory=self.bulk_requests.memory_id if shares else b"",
            memory_bytes=memory.arena.size_bytes if memory is not None and shares else 0,
        )


def _expiry(certificate: Certificate) -> dict[str, float]:
    ends_s = certificate.expires_in_s()
    return {} if ends_s is None else {"certificate_expires_seconds": ends_s}
