"""The calls of kvstore.v1.Control, each a few lines between a message and the code that does it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.census.selection import Selection
from kvstore.core.operations import NoOperation, OperationRun, OperationStatus
from kvstore.core.validate import checked_tier
from kvstore.engine.coordination import ClusterMember
from kvstore.errors import InvalidRequest
from kvstore.security.access import Role
from kvstore.transport.limits import CONTROL
from kvstore.v1 import control_pb2 as pb
from kvstore.worker.context import Call, UnaryCall
from kvstore.worker.service import WorkerService

CLOSE_S = 2.0
WAIT_S_MAX = 10.0
"""Longest wait of one GetOperation."""


class ControlService:
    """Controls one worker. ``address`` returns the one that clients use."""

    def __init__(self, member: ClusterMember, service: WorkerService, address: Callable[[], str]) -> None:
        self._member = member
        self._node = member.node
        self._service = service
        self._address = address
        self._operations = member.node.operations
        self._tenant_share = 1.0 if service.calls.guard.is_open else 0.5
        """The share of the unfinished operations that one tenant may have, if the guard distinguishes tenants."""
        self._waiters = threading.Semaphore(max(1, service.worker.limits.calls_max // 2))

    def handler(self) -> grpc.GenericRpcHandler:
        calls: dict[str, UnaryCall[Any]] = {
            "Prefetch": UnaryCall(pb.PrefetchRequest, self._prefetch),
            "EvictFirst": UnaryCall(pb.EvictFirstRequest, self._evict_first),
            "ClearSelected": UnaryCall(pb.ClearSelectedRequest, self._clear_selected),
            "GetOperation": UnaryCall(pb.GetOperationRequest, self._get_operation, light=True),
            "CancelOperation": UnaryCall(pb.CancelOperationRequest, self._cancel_operation, light=True),
        }
        handlers = self._service.handlers
        found = {name: handlers.unary(f"Control.{name}", call) for name, call in calls.items()}
        found["ListOperations"] = handlers.many(
            "Control.ListOperations", pb.ListOperationsRequest, self._list_operations
        )
        return grpc.method_handlers_generic_handler(CONTROL, found)

    def close(self) -> None:
        """Cancels all operations. Idempotent."""
        self._operations.close(CLOSE_S, "the worker drains or stops: begin it again at another worker")

    # Operations

    def _prefetch(self, request: pb.PrefetchRequest, call: Call) -> Message:
        tier = checked_tier(request.tier or "memory")
        chain = self._service.worker.chain(request.namespace, request.tokens, call)
        return self._message(
            self._node.begin_prefetch(chain, tier, call.visit.identity.name, self._tenant_share).status
        )

    def _evict_first(self, request: pb.EvictFirstRequest, call: Call) -> Message:
        self._node.evict_first(self._service.worker.chain(request.namespace, request.tokens, call))
        return pb.EvictFirstResponse()

    def _clear_selected(self, request: pb.ClearSelectedRequest, call: Call) -> Message:
        selection, about, tenant = self._selected(request.selection, call)
        run = self._member.begin_clear(
            selection,
            dry_run=request.dry_run,
            pinned=request.pinned,
            about=about,
            identity=call.visit.identity.name,
            tenant=tenant,
            tenant_share=self._tenant_share,
        )
        return self._message(run.status)

    def _selected(self, message: pb.Selection, call: Call) -> tuple[Selection, str, str | None]:
        """Returns a selection that ``call`` may use, its text for people, and its tenant (None: all tenants).

        Raises InvalidRequest if it is empty or invalid.
        """
        selection = Selection(
            namespace=message.namespace or None,
            tenant=message.tenant if message.HasField("tenant") else None,
            fingerprint=message.fingerprint,
        )
        if selection.namespace is not None:
            namespace = self._service.worker.namespace(selection.namespace, call)
            return selection, f"{namespace.name}: {selection.describe()}", namespace.tenant
        if selection.tenant is not None:
            call.allow(selection.tenant)
        else:
            call.allow_every()
        return selection, selection.describe(), selection.tenant

    def _list_operations(self, _: pb.ListOperationsRequest, call: Call) -> Iterator[bytes]:
        for run in self._operations.every():
            tenant = run.status.tenant
            if call.visit.sees_every if tenant is None else call.may_see(tenant):
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
        return self._message(run.cancel(f"cancelled by {call.visit.identity.name}"))

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
                worker=self._address(),
            )
        )
