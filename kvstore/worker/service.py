"""The calls of kvstore.v1.KVStore, each a few lines between a message and the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.buffers import Pieces, aligned, cut, grouped
from kvstore.counts import STARTED, NodeCount, WorkerCount
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.header import Expected
from kvstore.hints import checked_unused_s
from kvstore.keyset import BlockKeys, KeySet
from kvstore.node.counters import Latencies, Step
from kvstore.node.lanes import Deadline
from kvstore.node.member import Member
from kvstore.node.node import Node, match_each
from kvstore.node.reader import Asked, Reading
from kvstore.results import PinRecord
from kvstore.root.interface import Space
from kvstore.security.access import EVERY, OverQuota, Role
from kvstore.security.guard import Guard, ServerSecurity
from kvstore.security.tls import Certificate
from kvstore.sources import Clock
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.images import image_messages
from kvstore.wire.limits import SERVICE
from kvstore.wire.messages import (
    namespace_message,
    namespace_of,
    pack_counts,
    pack_sizes,
    parse,
    pin_message,
    unpack_keys,
    unpack_prompts,
)
from kvstore.wire.watch import Watch, Watched
from kvstore.worker.admission import Buffers, BytesInFlight, Gate
from kvstore.worker.bulk.listener import BulkListener
from kvstore.worker.bulk.serving import BulkRequests
from kvstore.worker.calls import Call, Calls, UnaryCall, seconds_left
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.prompts import ClientHolds, Prompts
from kvstore.worker.putting import PutStreams, buffers_of

# gRPC handlers: messages travel as bytes; a call is admitted, watched, and its message parsed inside.


Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext


class Handlers:
    """Makes handlers. A peer that sends or takes nothing must not keep a thread for ever: streams are watched."""

    def __init__(self, calls: Calls, watch: Watch, limits: WorkerLimits) -> None:
        self._calls = calls
        self._watch = watch
        self.limits = limits
        """Limits of a call that begins now."""

    def unary(self, name: str, served: UnaryCall[Any]) -> Any:
        """Returns the handler of a call with one message each way."""

        def serve(raw: bytes, context: Context) -> bytes:
            with self._calls.serving(name, context, light=served.light) as call:
                return served.answer(parse(served.kind, raw), call).SerializeToString()
            raise AssertionError("an error was answered already")

        return grpc.unary_unary_rpc_method_handler(serve)

    def many(self, name: str, kind: type[Request], answer: Callable[[Request, Call], Iterator[bytes]]) -> Any:
        """Returns the handler of a call that is answered by a stream."""

        def serve(raw: bytes, context: Context) -> Iterator[bytes]:
            with self._calls.serving(name, context) as call, self._watched(context) as stream:
                yield from _leaving(answer(parse(kind, raw), call), stream)

        return grpc.unary_stream_rpc_method_handler(serve)

    def put(self, name: str, answer: Callable[[Iterator[pb.PutRequest], Call], bytes]) -> Any:
        """Returns the handler of a call that sends a stream of chunks."""

        def serve(messages: Iterator[bytes], context: Context) -> bytes:
            with self._calls.serving(name, context) as call, self._watched(context) as stream:
                return answer(_arriving(messages, stream), call)
            raise AssertionError("an error was answered already")

        return grpc.stream_unary_rpc_method_handler(serve)

    def _watched(self, context: Context) -> Watched:
        """Puts a call under watch: cancelled when its client moves nothing for too long. Ends with the context."""

        def cancel() -> None:
            self._calls.add(WorkerCount.CALLS_IDLE)
            context.cancel()

        return self._watch.begin(self.limits.idle_s, self.limits.stream_s_max, cancel)


def _arriving(messages: Iterator[bytes], stream: Watched) -> Iterator[pb.PutRequest]:
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


def _leaving(messages: Iterator[bytes], stream: Watched) -> Iterator[bytes]:
    """Yields messages for a client. Waiting for the client counts as idle, our own work does not."""
    stream.busy()
    for message in messages:
        stream.moved()
        yield message
        stream.busy()


# The calls about pins, each checked against the permission and the quota of the pinned tenant.


PIN_TTL_S_MAX = 30 * 86_400


class PinCalls:
    """Serves Pin, Unpin, ListPins and CountRefs."""

    def __init__(self, member: Member, prompts: Prompts, guard: Guard) -> None:
        self._member = member
        self._prompts = prompts
        self._guard = guard

    def pin(self, request: pb.PinRequest, call: Call) -> pb.PinResponse:
        """Pins the longest stored prefix, or blocks."""
        if not 1 <= request.ttl_s <= PIN_TTL_S_MAX:
            raise InvalidRequest(f"ttl_s is {request.ttl_s}: expected 1 to {PIN_TTL_S_MAX}")
        if request.keys:
            return pb.PinResponse(pin=pin_message(self._pin_blocks(request, call)))
        chain = self._prompts.chain(request.namespace, request.tokens, call)
        self._check_quota(chain.namespace.tenant, len(chain.tokens))
        return pb.PinResponse(pin=pin_message(self._member.pin(chain, request.ttl_s, request.owner)))

    def _pin_blocks(self, request: pb.PinRequest, call: Call) -> PinRecord:
        if request.tokens:
            raise InvalidRequest("a Pin has both keys of blocks and tokens: expected one of them")
        namespace, keys = self._prompts.namespace(request.namespace, call), unpack_keys(request.keys)
        self._check_quota(namespace.tenant, len(keys) * namespace.layout.chunk_tokens)
        return self._member.pin_blocks(namespace, keys, request.ttl_s, request.owner)

    def unpin(self, request: pb.UnpinRequest, call: Call) -> pb.UnpinResponse:
        """Ends a pin. One that etcd does not have may have left a twin, whose tenant nobody knows."""
        if not call.may(Role.WRITE, EVERY):
            pin = self._member.find_pin(request.id)
            if pin is None:
                return pb.UnpinResponse(found=False)
            call.allow(pin.tenant, pin.namespace)
        else:
            call.allow_every()
        return pb.UnpinResponse(found=self._member.unpin(request.id))

    def list(self, _: pb.ListPinsRequest, call: Call) -> Iterator[bytes]:
        """Yields all live pins that the caller may see."""
        for pin in self._member.pins():
            if call.may_see(pin.tenant):
                yield pb.ListPinsResponse(pin=pin_message(pin)).SerializeToString()

    def count_refs(self, request: pb.CountRefsRequest, call: Call) -> pb.CountRefsResponse:
        """Counts the live pins that cover all full chunks of a prompt."""
        chain = self._prompts.chain(request.namespace, request.tokens, call)
        return pb.CountRefsResponse(refs=self._member.refcount(chain))

    def _check_quota(self, tenant: str, tokens: int) -> None:
        """Raises OverQuota. Two workers that pin at once for a tenant may both find room for the last one."""
        quota = self._guard.quota(tenant)
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
            self._guard.over_quota("pins")
            raise OverQuota("pins", f"tenant {tenant!r} {why}: unpin some, or ask the operator for a higher quota")


# Get and MatchBlocks: chunks or blocks are read and verified while those before them are being sent.


@dataclass(frozen=True, slots=True)
class _Window:
    """Chunks that are read at once: for each its index, what it is, and its sections."""

    chunks: list[tuple[int, Expected, Pieces]]
    reading: Reading


class GetStreams:
    """Serves what reads over gRPC."""

    def __init__(
        self, node: Node, prompts: Prompts, in_flight: BytesInFlight, calls: Calls, limits: WorkerLimits
    ) -> None:
        self._node = node
        self._prompts = prompts
        self._in_flight = in_flight
        self._calls = calls
        self._limits = limits

    def get(self, request: pb.GetRequest, context: Call) -> Iterator[bytes]:
        """The encoded messages of one answer."""
        if request.memory_only:
            raise InvalidRequest("memory_only goes over a bulk connection only (OpenBulk)")
        with self._prompts.asked(request, context) as (asked, count):
            if not request.uncounted:
                self._node.counters.add(NodeCount.REQUESTS_GET)
            chunk_tokens = asked.wanted.namespace.layout.chunk_tokens
            tokens = count * chunk_tokens if asked.wanted.prefix_ordered else 0
            yield pb.GetResponse(start=pb.GetStart(chunks=count, tokens=tokens)).SerializeToString()
            if request.first < count:
                yield from self._images(asked, request.first, count, context)

    def match_blocks(self, request: pb.MatchBlocksRequest, context: Call) -> pb.MatchBlocksResponse:
        """How many leading keys are there, and which of all where that is asked for."""
        namespace, keys = self._prompts.namespace(request.namespace, context), unpack_keys(request.keys)
        deadline = Deadline(self._node.clock, seconds_left(context, self._node.limits.match_deadline_s))
        if request.sizes:
            return pb.MatchBlocksResponse(sizes=pack_sizes(self._node.blocks.sizes(namespace, keys, deadline)))
        if request.each:
            present = bytes(self._node.blocks.present(namespace, keys, deadline))
            return pb.MatchBlocksResponse(blocks=len(present) - len(present.lstrip(b"\1")), present=present)
        return pb.MatchBlocksResponse(blocks=self._node.blocks.match(namespace, keys, deadline))

    def _images(self, asked: Asked, first: int, stop: int, context: Call) -> Iterator[bytes]:
        """The messages of the images from ``first`` on, of a prompt up to the first missing one."""
        wanted, is_chain = asked.wanted, asked.wanted.prefix_ordered
        sizes = wanted.payload_sizes()
        windows = [range(first, stop)[part] for part in grouped(sizes[first:stop], self._limits.window_bytes)]
        largest = max((sum(sizes[window.start : window.stop]) for window in windows), default=0)
        sent: list[int] = []
        begun: list[_Window] = []
        with self._in_flight.reserved(min(2, len(windows)) * largest):
            memories = [aligned(largest) for _ in windows[:2]]
            try:
                for number, indexes in enumerate(windows):
                    if not begun:
                        begun.append(self._begin(asked, indexes, memories[number % 2], context))
                    window = begun.pop()
                    done = window.reading.wait(self._deadline(context))
                    ends_here = is_chain and not all(done)
                    if number + 1 < len(windows) and not ends_here:
                        begun.append(self._begin(asked, windows[number + 1], memories[(number + 1) % 2], context))
                    for (index, expected, sections), is_done in zip(window.chunks, done, strict=True):
                        if is_done:
                            self._calls.add(WorkerCount.WIRE_BYTES_OUT, expected.payload_bytes)
                            yield from image_messages(pb.GetResponse, index, expected, sections)
                            sent.append(index)
                        elif is_chain:
                            return
            finally:
                # Before the memory is freed: a lane may be reading into it for a client that is gone.
                for window in begun:
                    window.reading.withdraw()
                self._node.reader.used(wanted.take([*range(first), *sent] if is_chain else sent))

    def _begin(self, asked: Asked, indexes: range, memory: memoryview, context: Call) -> _Window:
        """Begins to read those of ``indexes`` that may be given, into ``memory``."""
        wanted, node = asked.wanted, self._node
        allowed = asked.allowed(node.holds, node.gc_view, indexes)
        expected = [wanted.expected(index) for index in allowed]
        buffers = cut(memory, [each.payload_bytes for each in expected])
        part, first = wanted.as_neighbours(allowed)
        sections = buffers_of(part, first, buffers)
        reading = node.reader.begin(part, first, len(allowed), sections, self._deadline(context))
        places = range(first, first + len(allowed))
        return _Window(list(zip(allowed, expected, map(sections, places), strict=True)), reading)

    def _deadline(self, context: Call) -> Deadline:
        return Deadline(self._node.clock, seconds_left(context, self._node.limits.read_deadline_s))


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
        wanted: KeySet
        if request.keys:
            wanted = BlockKeys.of(self.prompts.namespace(request.namespace, call), unpack_keys(request.keys), ())
        else:
            wanted = self.prompts.chain(request.namespace, request.tokens, call)
        self._node.reader.superseded(wanted, request.first, unused_s)
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
