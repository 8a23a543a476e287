"""Operations at workers: begin one, list them, follow one."""

from __future__ import annotations

import time
from functools import partial

from google.protobuf.message import Message

from kvstore.client.caller import Caller, CallFailed
from kvstore.client.endpoints import Endpoint, Endpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.operation import Operation
from kvstore.client.spreading import Marking
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.operations import NoOperation, OperationState, OperationStatus
from kvstore.v1 import control_pb2 as pb
from kvstore.wire.messages import sealed
from kvstore.wire.statuses import Busy

FRESH_S = 0.1
"""A younger status is not requested again, unless a caller waits for the end."""
PAUSE_S = 0.2
"""Pause before the next call to a worker that did not wait for the end."""


class RemoteRun:
    """One operation at one worker; implements ``OperationSource``. Thread-safe."""

    def __init__(self, operations: RemoteOperations, status: OperationStatus) -> None:
        self._operations = operations
        self.status = status
        self._seen_s = time.monotonic()

    def poll(self, wait_s: float = 0.0) -> OperationStatus:
        began_s = time.monotonic()
        if wait_s or began_s - self._seen_s > FRESH_S:
            try:
                self._call("GetOperation", pb.GetOperationRequest(id=self.status.id, wait_s=wait_s), wait_s)
            except Busy:
                pass  # the operation continues
            spent_s = time.monotonic() - began_s
            if spent_s < wait_s and not self.status.state.ended:
                time.sleep(min(PAUSE_S, wait_s - spent_s))
        return self.status

    def cancel(self) -> OperationStatus:
        self._call("CancelOperation", pb.CancelOperationRequest(id=self.status.id), 0.0)
        return self.status

    def _call(self, name: str, request: Message, wait_s: float) -> None:
        self.status = self._operations.call(name, request, self.status.worker, wait_s)
        self._seen_s = time.monotonic()


class RemoteOperations:
    """Operations at the workers of one port. Thread-safe."""

    def __init__(self, port: object, caller: Caller, endpoints: Endpoints, limits: ClientLimits) -> None:
        self._port = port  # kept alive: a dropped port closes the connections
        self._caller = caller
        self._endpoints = endpoints
        self._limits = limits

    def begin(self, name: str, request: Message, worker: str | None, marking: Marking | None = None) -> Operation:
        """Begins an operation by the call ``name`` at a worker, by default the best one. Raises what it raised."""
        # Sent twice it would be two operations, one of which no caller follows.
        status = self._caller.at_worker(
            worker, partial(self._send, name, sealed(request)), self._limits.pin_s, marking, may_repeat=False
        )
        return Operation(RemoteRun(self, status))

    def every(self) -> list[Operation]:
        """Returns the operations of all workers that answer, newest first. Raises Unavailable if none answers."""
        found: list[OperationStatus] = []
        errors: list[KVStoreError] = []
        endpoints = self._endpoints.every()
        for endpoint in endpoints:
            try:
                raw = self._caller.at(endpoint, partial(self._list, endpoint))
            except CallFailed as failed:
                errors.append(failed.failed.error)
            else:
                found += [status_of(pb.OperationResponse.FromString(each).operation, endpoint.address) for each in raw]
        if len(errors) == len(endpoints):
            raise errors[0] if errors else self._endpoints.none_known()
        return [Operation(RemoteRun(self, each)) for each in sorted(found, key=lambda each: -each.began_s)]

    def call(self, name: str, request: Message, worker: str, wait_s: float) -> OperationStatus:
        """Returns the answer of its worker to a call about an operation.

        Raises NoOperation if the worker has none, or has left, and what the call raises.
        """
        try:
            return self._caller.at_worker(
                worker, partial(self._send, name, sealed(request)), wait_s + self._limits.pin_s
            )
        except NoOperation as gone:
            raise NoOperation(
                "the worker has no record of it: it ended long ago, or the worker was restarted"
            ) from gone
        except InvalidRequest as gone:
            if worker not in {each.address for each in self._endpoints.every()}:
                raise NoOperation(f"worker {worker} has left, and its operations have ended: begin it again") from gone
            raise

    def _send(self, name: str, request: bytes, endpoint: Endpoint, left_s: float) -> OperationStatus:
        answer = endpoint.unary(f"Control.{name}")(request, timeout=left_s)
        return status_of(pb.OperationResponse.FromString(answer).operation, endpoint.address)

    def _list(self, endpoint: Endpoint) -> list[bytes]:
        return list(endpoint.stream_in("Control.ListOperations")(b"", timeout=self._limits.pin_s))


def status_of(message: pb.Operation, worker: str) -> OperationStatus:
    """Returns the status in a message of ``worker``."""
    states = {each.value: each for each in OperationState}
    return OperationStatus(
        message.id,
        message.kind,
        message.about,
        message.unit,
        message.began_s,
        states.get(message.state, OperationState.RUNNING),
        message.ended_s,
        message.done,
        message.total,
        message.message,
        dict(message.counts),
        message.identity,
        worker=worker,
    )
