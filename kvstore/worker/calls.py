"""The rim of the worker: admits each call, times it, and turns its exceptions into a status."""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore import tracing
from kvstore.counts import Counts, WorkerCount
from kvstore.errors import KVStoreError
from kvstore.node.counters import Latencies, Latency
from kvstore.security.access import NOTHING, Presented, Role
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import HEADER, Account, Authenticator
from kvstore.security.guard import Guard, Visit
from kvstore.sources import Ids
from kvstore.tracing import REQUEST_ID_KEY, Metadata, accepted
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.statuses import BrokenTransfer, Busy, Draining, Refusal, refusal
from kvstore.worker.admission import Gate

# One call as the worker's code sees it: its client's context, identity and permissions.
#
# Wraps the context of gRPC or of the bulk protocol, so that the code that serves a call always knows whose it is:
# calls of either kind are let in, timed and refused by the same code.


AUTHORIZATION = "authorization"
BEARER = "bearer "


class CallContext(Protocol):
    """What a call knows of its client: gRPC's context, or that of the bulk protocol."""

    def time_remaining(self) -> float | None:
        """Seconds the client still waits; None where it did not say."""
        ...

    def invocation_metadata(self) -> Any:
        """What the client sent with the call: pairs of a key and a value."""
        ...

    def is_active(self) -> bool:
        """Whether the client is there."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What goes with a refusal."""
        ...

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        ...


class Call:
    """An admitted ``CallContext``. Used by one thread at a time."""

    def __init__(self, context: Any, visit: Visit) -> None:
        self._context = context
        self._visit = visit

    # The caller

    @property
    def identity(self) -> str:
        """The caller's name: ``cert:NAME``, a token's subject, ``account:NAME``, or ``anyone``."""
        return self._visit.identity.name

    @property
    def visit(self) -> Visit:
        """The call's entry in the guard's book."""
        return self._visit

    @property
    def sees_every(self) -> bool:
        """True if the caller may read every tenant."""
        return self._visit.sees_every

    @property
    def presented(self) -> Presented:
        """The credentials that the client presented."""
        return presented_by(self._context)

    def may(self, role: Role, tenant: str) -> bool:
        """True if the caller has a role for a tenant. Only asks; denies nothing."""
        return self._visit.identity.may(role, tenant)

    def may_see(self, tenant: str) -> bool:
        """True if the caller may see what belongs to a tenant."""
        return self._visit.may_see(tenant)

    def allow(self, tenant: str, namespace_name: str = "", *, role: Role | None = None, metered: bool = True) -> None:
        """Authorises the call for a tenant. Raises PermissionDenied; Overloaded over the tenant's quota."""
        self._visit.allow(tenant, namespace_name, role=role, metered=metered)

    def allow_every(self, role: Role | None = None) -> None:
        """Authorises the call for all tenants, or for the worker itself. Raises PermissionDenied."""
        self._visit.allow_every(role)

    # The client's context: see ``CallContext``

    def time_remaining(self) -> float | None:
        """Seconds that the client still waits; None if it did not say."""
        left_s: float | None = self._context.time_remaining()
        return left_s

    def invocation_metadata(self) -> Any:
        """The metadata that the client sent with the call."""
        return self._context.invocation_metadata()

    def is_active(self) -> bool:
        """True while the client is connected."""
        return bool(self._context.is_active())

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the call ends; False if it has already ended. gRPC only."""
        return bool(self._context.add_callback(callback))

    def cancel(self) -> bool:
        """Ends the call. gRPC only."""
        return bool(self._context.cancel())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets the metadata that a refusal carries."""
        self._context.set_trailing_metadata(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        return self._context.abort(code, details)


class Refused(Exception):
    """A request was answered with a status; carries it to the sender."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BulkContext:
    """A ``CallContext`` of the bulk protocol: what a request allows: its time, and how it is refused."""

    def __init__(
        self, channel: Channel, timeout_s: float, metadata: Metadata = (), presented: Presented = NOTHING
    ) -> None:
        self._channel = channel
        self.presented = presented
        """The client's credentials from its request to connect."""
        self._metadata = metadata
        self._ends_s = time.monotonic() + timeout_s
        self._trailers: tuple[tuple[str, str], ...] = ()

    def time_remaining(self) -> float | None:
        """Seconds that the client still waits."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def path(self) -> str:
        """The path that the request came on."""
        return "unix" if self._channel.is_unix else "tcp"

    def invocation_metadata(self) -> Metadata:
        """Metadata of the call that this request belongs to."""
        return self._metadata

    def is_active(self) -> bool:
        """True while the client is connected."""
        return self._channel.alive

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str]]) -> None:
        """Sets the metadata that a refusal carries."""
        self._trailers = tuple(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Raises Refused."""
        raise Refused(Refusal(code, details, self._trailers))


def presented_by(context: Any) -> Presented:
    """Returns the client's credentials; of a certificate only what TLS has verified."""
    if isinstance(context, BulkContext):
        return context.presented
    metadata = dict(context.invocation_metadata() or ())
    header = str(metadata.get(AUTHORIZATION, ""))
    token = header[len(BEARER) :].strip() if header.lower().startswith(BEARER) else None
    shown = context.auth_context()
    pem = b"".join(shown.get("x509_pem_cert", ()))
    account = str(metadata.get(HEADER, ""))
    if not pem:
        return Presented(token=token, account=account)
    names = [*shown.get("peer_uri", ()), *shown.get("x509_uri", ())] or [*shown.get("x509_common_name", ())]
    thumbprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).digest()
    return Presented(tuple(name.decode(errors="replace") for name in dict.fromkeys(names)), thumbprint, token, account)


def request_of(context: Any) -> str:
    """Returns the call's id before anything else has read it: the client's, or a fresh one."""
    return accepted(dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY))


def peer_of(context: Any) -> str:
    """Returns the client's address, as far as it is known."""
    return context.path if isinstance(context, BulkContext) else str(context.peer())


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
