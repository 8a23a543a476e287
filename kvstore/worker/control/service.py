"""The calls of kvstore.v1.Control, each a few lines between a message and the code that does it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.census.selection import Selection
from kvstore.errors import InvalidRequest
from kvstore.node.clear_operation import begin_clear
from kvstore.node.member import Member
from kvstore.node.prefetch import checked_tier
from kvstore.operations import NoOperation, OperationRun, OperationStatus
from kvstore.results import LimitValue
from kvstore.security.access import Role
from kvstore.sources import Clock
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.limits import CONTROL
from kvstore.worker.call import Call
from kvstore.worker.calls import UnaryCall
from kvstore.worker.control.health import About, Examination
from kvstore.worker.control.limits import LiveLimits
from kvstore.worker.control.lookups import lookup
from kvstore.worker.service import Service

Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext

CLOSE_S = 2.0
WAIT_S_MAX = 10.0
"""Longest wait of one GetOperation."""
DRAIN_S_MAX = 86_400.0
"""Limit of ``within_s``: locks accept no endless wait, and a drain that fails would lose what only memory has."""

Drain = Callable[[float | None], float]
"""Ends the worker's program as SIGTERM does, with this many seconds for calls in progress.

None means the time that it was started with. Returns that time at once.
"""


class ControlService:
    """Controls one worker. ``on_drain`` ends its program; without it Drain is refused."""

    def __init__(
        self, member: Member, service: Service, clock: Clock, about: Callable[[], About], on_drain: Drain | None
    ) -> None:
        self._member = member
        self._node = member.node
        self._service = service
        self._about = about
        self._on_drain = on_drain
        self._operations = member.node.operations
        self._tenant_share = 1.0 if service.calls.guard.is_open else 0.5
        """The share of the unfinished operations that one tenant may have, where tenants are told apart."""
        self._waiters = threading.Semaphore(max(1, service.limits.calls_max // 2))
        self._limits = LiveLimits(member, service)
        self._examination = Examination(member, service, clock, about)

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns all calls, for a server."""
        unary, many = self._service.handlers.unary, self._service.handlers.many
        return grpc.method_handlers_generic_handler(
            CONTROL,
            {
                "Lookup": many("Control.Lookup", pb.LookupRequest, self._lookup),
                "Prefetch": unary("Control.Prefetch", UnaryCall(pb.PrefetchRequest, self._prefetch)),
                "EvictFirst": unary("Control.EvictFirst", UnaryCall(pb.EvictFirstRequest, self._evict_first)),
                "ClearSelected": unary(
                    "Control.ClearSelected", UnaryCall(pb.ClearSelectedRequest, self._clear_selected)
                ),
                "ListOperations": many("Control.ListOperations", pb.ListOperationsRequest, self._list_operations),
                "GetOperation": unary(
                    "Control.GetOperation", UnaryCall(pb.GetOperationRequest, self._get_operation, light=True)
                ),
                "CancelOperation": unary(
                    "Control.CancelOperation", UnaryCall(pb.CancelOperationRequest, self._cancel_operation, light=True)
                ),
                "Drain": unary("Control.Drain", UnaryCall(pb.DrainRequest, self._drain, light=True)),
                "GetLimits": unary("Control.GetLimits", UnaryCall(pb.GetLimitsRequest, self._get_limits, light=True)),
                "SetLimits": unary("Control.SetLimits", UnaryCall(pb.SetLimitsRequest, self._set_limits, light=True)),
                "Health": unary("Control.Health", UnaryCall(pb.HealthRequest, self._health, light=True)),
            },
        )

    def close(self) -> None:
        """Cancels all operations. Idempotent."""
        self._operations.close(CLOSE_S, "the worker drains or stops: begin it again at another worker")

    # Places of chunks

    def _lookup(self, request: pb.LookupRequest, call: Call) -> Iterator[bytes]:
        chain = self._service.prompts.chain(request.namespace, request.tokens, call, request.chunks_max)
        yield from lookup(self._member, chain, call)

    # Operations

    def _prefetch(self, request: pb.PrefetchRequest, call: Call) -> Message:
        tier = checked_tier(request.tier or "memory")
        chain = self._service.prompts.chain(request.namespace, request.tokens, call)
        return self._message(self._node.begin_prefetch(chain, tier, call.identity, self._tenant_share).status)

    def _evict_first(self, request: pb.EvictFirstRequest, call: Call) -> Message:
        self._node.evict_first(self._service.prompts.chain(request.namespace, request.tokens, call))
        return pb.EvictFirstResponse()

    def _clear_selected(self, request: pb.ClearSelectedRequest, call: Call) -> Message:
        selection, about, tenant = self._selected(request.selection, call)
        run = begin_clear(
            self._member,
            selection,
            dry_run=request.dry_run,
            pinned=request.pinned,
            about=about,
            identity=call.identity,
            tenant=tenant,
            tenant_share=self._tenant_share,
        )
        return self._message(run.status)

    def _selected(self, message: pb.Selection, call: Call) -> tuple[Selection, str, str | None]:
        """Returns a selection that ``call`` may use, its text for people, and its tenant (None: all tenants)."""
        selection = _selection_of(message)
        if selection.namespace is not None:
            namespace = self._service.prompts.namespace(selection.namespace, call)
            return selection, f"{namespace.name}: {selection.describe()}", namespace.tenant
        if selection.tenant is not None:
            call.allow(selection.tenant)
        else:
            call.allow_every()
        return selection, selection.describe(), selection.tenant

    def _list_operations(self, _: pb.ListOperationsRequest, call: Call) -> Iterator[bytes]:
        for run in self._operations.every():
            tenant = run.status.tenant
            if call.sees_every if tenant is None else call.may_see(tenant):
                yield self._message(run.status).SerializeToString()

    def _get_operation(self, request: pb.GetOperationRequest, call: Call) -> Message:
        if not 0 <= request.wait_s < math.inf:
            raise InvalidRequest(f"wait_s is {request.wait_s}: expected 0 or more")
        run = self._found(request.id, call)
        # A waiter keeps a thread of a call: beyond so many, the answer comes immediately.
        if request.wait_s and self._waiters.acquire(blocking=False):
            try:
                return self._message(run.poll(min(request.wait_s, WAIT_S_MAX)))
            finally:
                self._waiters.release()
        return self._message(run.status)

    def _cancel_operation(self, request: pb.CancelOperationRequest, call: Call) -> Message:
        run = self._found(request.id, call, changes=True)
        return self._message(run.cancel(f"cancelled by {call.identity}"))

    def _found(self, id: str, call: Call, *, changes: bool = False) -> OperationRun:
        run = self._operations.find(id)
        if run is None:
            raise NoOperation(
                f"this worker has no operation {id!r}: kvstore ops lists them (a restarted worker has none)"
            )
        status = run.status
        role = Role.ADMIN if changes and status.kind == "clear" else None
        if status.tenant is None:
            call.allow_every(role)
        else:
            call.allow(status.tenant, role=role)
        return run

    def _message(self, status: OperationStatus) -> pb.OperationResponse:
        return pb.OperationResponse(
            operation=pb.Operation(
                id=status.id,
                kind=status.kind,
                about=status.about,
                identity=status.identity,
                state=status.state.value,
                began_s=status.began_s,
                ended_s=status.ended_s,
                done=status.done,
                total=status.total,
                unit=status.unit,
                message=status.message,
                counts=status.counts,
                worker=self._about().address,
            )
        )

    # The worker

    def _drain(self, request: pb.DrainRequest, call: Call) -> Message:
        call.allow_every()
        if not 0 <= request.within_s <= DRAIN_S_MAX:
            raise InvalidRequest(f"within_s is {request.within_s:g}: expected 0 to {DRAIN_S_MAX:g}")
        if self._on_drain is None:
            raise InvalidRequest("this worker's program cannot be drained by a call: stop the program itself")
        within_s = self._on_drain(request.within_s or None)
        gauges = self._service.gauges()
        return pb.DrainResponse(
            calls=int(gauges["calls_in_flight"]),
            behind_bytes=int(gauges.get("behind_bytes", 0)),
            operations=int(gauges["operations_running"] + gauges["operations_waiting"]),
            within_s=within_s,
        )

    def _get_limits(self, _: pb.GetLimitsRequest, call: Call) -> Message:
        call.allow_every()
        return _limits_message(self._limits.every())

    def _set_limits(self, request: pb.SetLimitsRequest, call: Call) -> Message:
        call.allow_every()
        return _limits_message(self._limits.change(dict(request.limits)))

    def _health(self, _: pb.HealthRequest, call: Call) -> Message:
        call.allow_every()
        return self._examination.answer()


def _limits_message(limits: list[LimitValue]) -> pb.LimitsResponse:
    return pb.LimitsResponse(
        limits=[
            pb.Limit(name=each.name, value=each.value, meaning=each.meaning, started=each.started, before=each.before)
            for each in limits
        ]
    )


def _selection_of(message: pb.Selection) -> Selection:
    """Returns the selection in a message. Raises InvalidRequest if it is empty or invalid."""
    return Selection(
        namespace=message.namespace or None,
        tenant=message.tenant if message.HasField("tenant") else None,
        fingerprint=message.fingerprint,
        older_than_s=message.older_than_s,
        written_by=message.written_by,
        since_s=message.since_s,
        until_s=message.until_s,
    )
