"""The rim of the worker: admits each call, times it, and turns its exceptions into a status."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore import tracing
from kvstore.counts import WorkerCount
from kvstore.errors import KVStoreError
from kvstore.node.counters import Counts, Latencies, Latency
from kvstore.security.access import NOTHING
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import Account, Authenticator
from kvstore.security.guard import Guard, Visit
from kvstore.sources import Ids
from kvstore.wire.statuses import BrokenTransfer, Busy, Draining, Refusal, refusal
from kvstore.worker.admission import Gate
from kvstore.worker.call import BulkContext, Call, CallContext, peer_of, presented_by

log = logging.getLogger(__name__)

GRPC = "grpc"
Request = TypeVar("Request", bound=Message)
_MOVED = {WorkerCount.WIRE_BYTES_IN: "in", WorkerCount.WIRE_BYTES_OUT: "out"}


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[Request]):
    """A call with one message each way; a ``light`` one is always admitted."""

    kind: type[Request]
    answer: Callable[[Request, Call], Message]
    light: bool = False


class Ended(NamedTuple):
    """The key by which calls are counted."""

    method: str
    code: str
    path: str
    """``grpc``, or for the bulk protocol ``unix`` or ``tcp``."""


class Calls:
    """Counts and timings of the worker's calls; thread-safe."""

    def __init__(
        self,
        gate: Gate,
        ids: Ids,
        authenticator: Authenticator | None = None,
        audit: AuditLog | None = None,
        account: Account | None = None,
    ) -> None:
        self.gate = gate
        self.guard = Guard(self.add, authenticator, audit, account=account)
        self._ids = ids
        self._lock = threading.Lock()  # guards counts of calls, and of bytes by path
        self._counts = Counts(WorkerCount)
        self._ended: dict[Ended, int] = {}
        self._latencies: Latencies[tuple[str, str]] = Latencies()
        self._bytes: dict[tuple[str, str], int] = {}
        self._serving = threading.local()
        """For each thread, the visit that it serves and the path of the call."""

    def add(self, counter: WorkerCount, count: int = 1) -> None:
        """Adds to one of the worker's counters."""
        self._counts.add(counter, count)
        direction = _MOVED.get(counter)
        if direction is None:
            return
        key = (direction, getattr(self._serving, "path", GRPC))
        with self._lock:
            self._bytes[key] = self._bytes.get(key, 0) + count
        visit: Visit | None = getattr(self._serving, "visit", None)
        if visit is not None:
            visit.moved(**{f"bytes_{direction}": count})

    def tenant(self) -> str | None:
        """The tenant of the call that this thread serves; None if no tenant pays for it."""
        visit: Visit | None = getattr(self._serving, "visit", None)
        return visit.pays if visit is not None else None

    def counters(self) -> dict[str, int]:
        """The worker's own counters."""
        return self._counts.snapshot()

    def ended(self) -> dict[Ended, int]:
        """Ended calls by method, status code and path."""
        with self._lock:
            return dict(self._ended)

    def latencies(self) -> dict[tuple[str, str], Latency]:
        """Durations of calls by method and path."""
        return self._latencies.snapshot()

    def moved_bytes(self) -> dict[tuple[str, str], int]:
        """Payload bytes from and to clients, by direction (``in``, ``out``) and path."""
        with self._lock:
            return dict(self._bytes)

    @contextmanager
    def serving(self, name: str, context: CallContext, *, light: bool = False) -> Iterator[Call]:
        """Admits one call and runs inside of it; an exception becomes the call's status.

        Inside, ``tracing.request_id()`` is the id that the client gave the call.
        """
        path = context.path if isinstance(context, BulkContext) else GRPC
        with tracing.served(f"kvstore.{name}", context.invocation_metadata() or (), path=path):
            self._serving.path = path
            with self._answering(name, path, context, light) as call:
                yield call

    @contextmanager
    def _answering(self, name: str, path: str, context: CallContext, light: bool) -> Iterator[Call]:
        began_s = time.perf_counter()
        code = grpc.StatusCode.OK
        visit: Visit | None = None
        try:
            visit = self._admitted(name, context)
            with self.gate.passing(light=light):
                self._serving.visit = visit
                yield Call(context, visit)
        except KVStoreError as error:
            refused = refusal(error)
            if context.is_active():
                code = refused.code
                self._note(error)
            else:
                # The client is gone, which may look like a stream that ended too early.
                code = grpc.StatusCode.CANCELLED
                self.add(WorkerCount.CALLS_CANCELLED)
            _abort(context, refused)
        except (grpc.RpcError, GeneratorExit):
            # The client is gone, or our own watch cancelled the call: nobody reads a status.
            code = grpc.StatusCode.CANCELLED
            self.add(WorkerCount.CALLS_CANCELLED)
            raise
        except Exception:
            # Anything else is a defect of ours. Its traceback goes to the log only: it may hold paths and tokens.
            code = grpc.StatusCode.INTERNAL
            incident = self._ids.fresh().hex()[:12]
            self.add(WorkerCount.CALLS_FAILED)
            log.exception("call.failed method=%s incident=%s", name, incident)
            _abort(context, Refusal(code, f"the worker failed: look for incident {incident} in its log", ()))
        finally:
            self._serving.visit = None
            if visit is not None:
                visit.end(code.name)
            self._observe(Ended(name, code.name, path), time.perf_counter() - began_s)

    def _admitted(self, name: str, context: CallContext) -> Visit:
        """Admits a call. Raises PermissionDenied."""
        if not self.guard.asks:
            return self.guard.admit(name, NOTHING)
        return self.guard.admit(name, presented_by(context), peer_of(context), tracing.request_id())

    def _note(self, error: KVStoreError) -> None:
        if isinstance(error, (Busy, Draining)):
            self.add(WorkerCount.CALLS_REFUSED)
        elif isinstance(error, BrokenTransfer):
            self.add(WorkerCount.WIRE_DAMAGED)

    def _observe(self, ended: Ended, seconds: float) -> None:
        with self._lock:
            self._ended[ended] = self._ended.get(ended, 0) + 1
        self._latencies.observe((ended.method, ended.path), seconds)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "call.ended method=%s path=%s code=%s seconds=%.6f", ended.method, ended.path, ended.code, seconds
            )


def seconds_left(context: CallContext, most_s: float) -> float:
    """Returns the time for a step of the call: the worker's own limit, or most of the client's, to answer in time."""
    remaining_s = context.time_remaining()
    return most_s if remaining_s is None else max(0.001, min(most_s, 0.9 * remaining_s))


def _abort(context: CallContext, refused: Refusal) -> None:
    context.set_trailing_metadata(refused.trailers)
    context.abort(refused.code, refused.message)
