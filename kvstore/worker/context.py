"""What all calls of a worker share: admission, the calls in progress and their counts, clients' holds, namespaces."""

from __future__ import annotations

import hashlib
import logging
import queue
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.core import tracing
from kvstore.core.buffers import aligned
from kvstore.core.clock import Clock, Ids
from kvstore.core.metrics import Counts, Latencies, Latency, WorkerCount
from kvstore.core.namespace import DIGEST_BYTES, Namespace, NamespaceDigest
from kvstore.core.tracing import REQUEST_ID_KEY, Metadata, accepted
from kvstore.core.validate import size
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.gc_state import ChunkHold
from kvstore.engine.reader import ExportRequest
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, Overloaded
from kvstore.format.header import Ancestry
from kvstore.format.keyset import BlockKeys, ChunkKeys, KeySet
from kvstore.security.access import NOTHING, Presented
from kvstore.security.authentication import HEADER
from kvstore.security.guard import AccessGuard, ServerSecurity, Visit
from kvstore.transport.channel import Channel, LinkLate
from kvstore.transport.messages import unpack_descents, unpack_keys, unpack_sizes, unpack_tokens
from kvstore.transport.status import BrokenTransfer, Busy, Draining, Refusal, UnknownNamespace, refusal
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.worker.limits import WorkerLimits

log = logging.getLogger(__name__)

GRPC = "grpc"


class Gate:
    """Counts the calls inside; thread-safe."""

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        """Limit on concurrent calls. May change at any time: calls inside stay."""
        self._changed = threading.Condition()  # guards calls under way, and whether the worker drains
        self._inside = 0
        self._draining = False

    @property
    def inside_count(self) -> int:
        return self._inside

    @property
    def draining(self) -> bool:
        """True once the gate is closed, which is permanent."""
        return self._draining

    @contextmanager
    def passing(self, *, light: bool) -> Iterator[None]:
        """Lets one call in while it runs; a light one always. Raises Draining or Busy."""
        with self._changed:
            if not light:
                if self._draining:
                    raise Draining("the worker is draining and takes no new calls: use another worker")
                if self._inside >= self.calls_max:
                    raise Busy(f"the worker has {self.calls_max} calls in progress: back off, or use another worker")
                self._inside += 1
        try:
            yield
        finally:
            if not light:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Lets no more calls in. Idempotent."""
        with self._changed:
            self._draining = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits for the calls inside; returns True if all ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)


class BytesInFlight:
    """A bound on the memory that calls in progress use for payload; thread-safe.

    One tenant gets at most half: a single call may claim all of it and then send nothing.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        """Limit on bytes in flight. May change at any time: reserved bytes stay."""
        self._lock = threading.Lock()  # guards bytes in flight, by tenant
        self._by_tenant: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def reserved(self, count: int, tenant: str | None = None) -> Iterator[None]:
        """Reserves bytes while they are used, for the ``tenant`` that pays, if any. Raises Busy if they are not free.

        A call may exceed the limit if it is alone: a limit below a chunk must not make the chunk unreachable. A
        tenant's only call may exceed half; it then counts as half, or it would keep others out.
        """
        with self._lock:
            if tenant is not None:
                most = max(1, self.bytes_max // 2)
                needed, count = count, min(count, most)
                if self._by_tenant[tenant] and self._by_tenant[tenant] + count > most:
                    raise Busy(
                        f"this call needs {size(needed)}, which with the calls of tenant {tenant!r} in "
                        f"progress exceeds its share of {size(most)}: back off, or use another worker"
                    )
            if self.count and self.count + count > self.bytes_max:
                # Do not say how many are free: a reader of one tenant could watch by it what the others do (rule X7).
                raise Busy(
                    f"this call needs {size(count)}, which with the calls in progress exceeds the worker's "
                    f"limit of {size(self.bytes_max)}: back off, or use another worker"
                )
            self.count += count
            if tenant is not None:
                self._by_tenant[tenant] += count
        try:
            yield
        finally:
            with self._lock:
                self.count -= count
                if tenant is not None:
                    self._by_tenant[tenant] -= count
                    if not self._by_tenant[tenant]:
                        del self._by_tenant[tenant]


class BufferPool:
    """Reusable memory for payload, by size: at most ``kept_bytes_max`` are kept. Thread-safe.

    Fresh memory has to be zeroed first, which costs about as much as copying into it.
    """

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Returns a buffer of exactly this size, which begins at a page; its content is undefined."""
        with self._lock:
            free = self._free.get(size_bytes)
            if free:
                self._kept_bytes -= size_bytes
                return free.pop()
        return aligned(size_bytes)

    def give(self, buffer: memoryview) -> None:
        """Takes a buffer back, which must not be used any more."""
        with self._lock:
            if self._kept_bytes + len(buffer) > self._kept_bytes_max:
                # Sizes that are no longer in use must not keep out those that are.
                self._free.clear()
                self._kept_bytes = 0
            if len(buffer) <= self._kept_bytes_max:
                self._free.setdefault(len(buffer), []).append(buffer)
                self._kept_bytes += len(buffer)


Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """At most ``threads_max`` threads that serve calls, started on demand; daemons, so that the interpreter can end.

    The standard executor joins its threads at exit, and so would wait for a call that waits for a dead mount.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs ``fn`` on a thread. Raises RuntimeError after ``shutdown``, as every executor does."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker has stopped")
            if self._idle > 0:
                self._idle -= 1  # one of them will take this task
            elif len(self._threads) < self._threads_max:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()  # raises RuntimeError if the system has no more
                self._threads.append(thread)
            else:
                self._idle -= 1  # it waits in the queue; the next free thread is then not idle
            self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float = 5.0) -> None:
        """Ends the threads; waits at most ``timeout_s`` for busy ones. Tasks in the queue are still done."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        ends_s = time.monotonic() + timeout_s
        for thread in threads if wait else ():
            thread.join(max(0.0, ends_s - time.monotonic()))

    def _serve(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  # belongs to the thread that waits for the future
                    future.set_exception(error)
            del task, future, work  # an idle thread must not keep a message in memory
            with self._lock:
                self._idle += 1


# Calls: a client's context, identity and permissions. Calls of gRPC and of the bulk protocol are admitted, timed and
# refused by the same code.


class CallRefused(Exception):
    """A request was answered with a status; carries it to the sender."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BulkContext:
    """The bulk protocol's counterpart of gRPC's context: the client of a request, and the time that it has."""

    def __init__(
        self, channel: Channel, timeout_s: float, metadata: Metadata = (), presented: Presented = NOTHING
    ) -> None:
        self._channel = channel
        self.presented = presented
        """The client's credentials from its request to connect."""
        self._metadata = metadata
        self._ends_s = time.monotonic() + timeout_s

    def time_remaining(self) -> float | None:
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def path(self) -> str:
        return "unix" if self._channel.is_unix else "tcp"

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def is_active(self) -> bool:
        return self._channel.alive


Context = grpc.ServicerContext | BulkContext


def presented_by(context: Context) -> Presented:
    """Returns the client's credentials; of a certificate only what TLS has verified."""
    if isinstance(context, BulkContext):
        return context.presented
    metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
    header = str(metadata.get("authorization", ""))
    token = header[len("bearer ") :].strip() if header.lower().startswith("bearer ") else None
    shown: Any = context.auth_context()
    pem = b"".join(shown.get("x509_pem_cert", ()))
    account = str(metadata.get(HEADER, ""))
    if not pem:
        return Presented(token=token, account=account)
    names = [*shown.get("peer_uri", ()), *shown.get("x509_uri", ())] or [*shown.get("x509_common_name", ())]
    thumbprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).digest()
    return Presented(tuple(name.decode(errors="replace") for name in dict.fromkeys(names)), thumbprint, token, account)


def request_of(context: grpc.ServicerContext) -> str:
    """Returns the call's id before anything else has read it: the client's, or a fresh one."""
    return accepted(dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY))


def abort(context: Context, refused: Refusal) -> NoReturn:
    """Ends a call with this status, by an exception."""
    if isinstance(context, BulkContext):
        raise CallRefused(refused)
    context.set_trailing_metadata(refused.trailers)
    context.abort(refused.code, refused.message)
    raise AssertionError("abort raises")


class Call:
    """An admitted call: its client, and what the client may do. Used by one thread at a time."""

    def __init__(self, calls: Calls, context: Context, path: str, visit: Visit) -> None:
        self.context = context
        self.visit = visit
        self._calls = calls
        self._path = path
        # See ``Visit``.
        self.allow = visit.allow
        self.allow_every = visit.allow_every
        self.may_see = visit.may_see

    def left_s(self, most_s: float) -> float:
        """Returns the time for a step: the worker's own limit, or most of the client's, to answer in time."""
        remaining_s = self.context.time_remaining()
        return most_s if remaining_s is None else max(0.001, min(most_s, 0.9 * remaining_s))

    @property
    def is_late(self) -> bool:
        """True if its client no longer waits."""
        remaining_s = self.context.time_remaining()
        return remaining_s is not None and remaining_s <= 0

    def received(self, count: int) -> None:
        """Counts payload bytes from the client."""
        self._calls.moved(WorkerCount.WIRE_BYTES_IN, ("in", self._path), count)
        self.visit.moved(bytes_in=count)

    def sent(self, count: int) -> None:
        """Counts payload bytes to the client."""
        self._calls.moved(WorkerCount.WIRE_BYTES_OUT, ("out", self._path), count)
        self.visit.moved(bytes_out=count)


Request = TypeVar("Request", bound=Message)


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

    def __init__(self, gate: Gate, ids: Ids, security: ServerSecurity | None = None) -> None:
        security = security or ServerSecurity()
        self._gate = gate
        self.guard = AccessGuard(self.add, security.authenticator, security.audit, account=security.account)
        self._ids = ids
        self._lock = threading.Lock()  # guards counts of calls, and of bytes by path
        self.counts = Counts(WorkerCount)
        self._ended: dict[Ended, int] = {}
        self._latencies: Latencies[tuple[str, str]] = Latencies()
        self._bytes: dict[tuple[str, str], int] = {}

    def add(self, counter: WorkerCount, count: int = 1) -> None:
        self.counts.add(counter, count)

    def moved(self, counter: WorkerCount, key: tuple[str, str], count: int) -> None:
        """Counts payload bytes by direction and path."""
        self.counts.add(counter, count)
        with self._lock:
            self._bytes[key] = self._bytes.get(key, 0) + count

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
    def serving(self, name: str, context: Context, *, light: bool = False) -> Iterator[Call]:
        """Admits one call and runs inside of it; an exception becomes the call's status.

        Inside, ``tracing.request_id()`` is the id that the client gave the call.
        """
        path = context.path if isinstance(context, BulkContext) else GRPC
        with tracing.served(f"kvstore.{name}", context.invocation_metadata() or (), path=path):
            began_s = time.perf_counter()
            code = grpc.StatusCode.OK
            visit: Visit | None = None
            try:
                visit = self._admitted(name, context)
                with self._gate.passing(light=light):
                    yield Call(self, context, path, visit)
            except KVStoreError as error:
                refused = refusal(error)
                if isinstance(error, LinkLate):
                    self.add(WorkerCount.CALLS_IDLE)
                if context.is_active():
                    code = refused.code
                    if isinstance(error, (Busy, Draining)):
                        self.add(WorkerCount.CALLS_REFUSED)
                    elif isinstance(error, BrokenTransfer):
                        self.add(WorkerCount.WIRE_DAMAGED)
                else:
                    # The client is gone, which may look like a stream that ended too early.
                    code = grpc.StatusCode.CANCELLED
                    self.add(WorkerCount.CALLS_CANCELLED)
                abort(context, refused)
            except (grpc.RpcError, GeneratorExit):
                # The client is gone, or our own watch cancelled the call: the status is read by no one.
                code = grpc.StatusCode.CANCELLED
                self.add(WorkerCount.CALLS_CANCELLED)
                raise
            except Exception:
                # Anything else is a defect of ours. Its traceback is only logged: it may hold paths and tokens.
                code = grpc.StatusCode.INTERNAL
                incident = self._ids.fresh().hex()[:12]
                self.add(WorkerCount.CALLS_FAILED)
                log.exception("call.failed method=%s incident=%s", name, incident)
                abort(context, Refusal(code, f"the worker failed: look for incident {incident} in its log", ()))
            finally:
                if visit is not None:
                    visit.end(code.name)
                self._observe(Ended(name, code.name, path), time.perf_counter() - began_s)

    def _admitted(self, name: str, context: Context) -> Visit:
        if not self.guard.asks:
            return self.guard.admit(name, NOTHING)
        peer = context.path if isinstance(context, BulkContext) else str(context.peer())
        return self.guard.admit(name, presented_by(context), peer, tracing.request_id())

    def _observe(self, ended: Ended, seconds: float) -> None:
        with self._lock:
            self._ended[ended] = self._ended.get(ended, 0) + 1
        self._latencies.observe((ended.method, ended.path), seconds)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "call.ended method=%s path=%s code=%s seconds=%.6f", ended.method, ended.path, ended.code, seconds
            )


# Holds of clients by id. Bounded more tightly than a node's own: each keeps a prompt in memory.
#
# Each hold is leased: a client that was killed renews nothing, so its holds end (gc/PROTOCOL.md, H4).


class ClientHolds:
    """The live holds of all clients; thread-safe. ``release`` ends a hold in the node, ``renew`` its lease there.

    With ``limits_tenants`` one tenant has at most half of them: others need some too.
    """

    def __init__(
        self,
        holds_max: int,
        tokens_max: int,
        release: Callable[[ChunkHold], None],
        renew: Callable[[ChunkHold], bool],
        clock: Clock,
        *,
        limits_tenants: bool = False,
    ) -> None:
        self.holds_max = holds_max
        """May change at any time, like ``tokens_max``: live holds stay."""
        self.tokens_max = tokens_max
        self._release = release
        self._renew = renew
        self._clock = clock
        self._lock = threading.Lock()
        self._limits_tenants = limits_tenants
        self._live: dict[bytes, ChunkHold] = {}
        self._tokens = 0
        self._holds_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, hold: ChunkHold) -> None:
        """Leases a hold: keeps it until it is released, expires, or is not renewed.

        Raises Overloaded if there are too many, and releases it.
        """
        size = len(hold.chain.tokens)
        with self._lock:
            fits = len(self._live) < self.holds_max and self._tokens + size <= self.tokens_max
            fits = fits and not (self._limits_tenants and self._is_over_half(hold.chain.namespace.tenant, size))
            if fits:
                self._renew(hold)
                self._live[hold.id] = hold
                self._note(hold, 1)
        if not fits:
            self._release(hold)
            raise Overloaded(
                f"clients may hold at most {self.holds_max} prompts and {self.tokens_max} tokens here: "
                "release some, or back off"
            )

    def find(self, hold_id: bytes) -> ChunkHold:
        """Returns the live hold with this id, renewed. Raises HoldBroken if it has ended."""
        hold = self._live.get(hold_id)
        if hold is None or not self._renew(hold):
            raise HoldBroken(
                "the hold has ended (released, past its time, not renewed, or the worker was restarted): match again"
            )
        return hold

    def renew(self, hold_id: bytes) -> bool:
        """Renews the lease of a hold; False if it has ended."""
        hold = self._live.get(hold_id)
        return hold is not None and self._renew(hold)

    def peek(self, hold_id: bytes) -> ChunkHold | None:
        """Returns the hold with this id, even if it has expired; None if it was released."""
        return self._live.get(hold_id)

    def release(self, hold_id: bytes) -> bool:
        """Ends a hold; False if it had already ended."""
        with self._lock:
            hold = self._live.pop(hold_id, None)
            if hold is not None:
                self._note(hold, -1)
        if hold is not None:
            self._release(hold)
        return hold is not None

    def expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for hold_id in [hold.id for hold in list(self._live.values()) if hold.ends_s <= now_s]:
            self.release(hold_id)

    def _note(self, hold: ChunkHold, count: int) -> None:
        tenant, tokens = hold.chain.namespace.tenant, count * len(hold.chain.tokens)
        self._tokens += tokens
        self._holds_of[tenant] += count
        self._tokens_of[tenant] += tokens
        if not self._holds_of[tenant]:
            del self._holds_of[tenant], self._tokens_of[tenant]

    def _is_over_half(self, tenant: str, tokens: int) -> bool:
        """True if one more hold is too much for a tenant; its only one never is."""
        held = self._holds_of[tenant]
        is_over = held >= self.holds_max // 2 or self._tokens_of[tenant] + tokens > self.tokens_max // 2
        return held > 0 and is_over


class WorkerContext:
    """The node of one worker, and what its calls share; finds the namespace, chunks or hold of a request."""

    def __init__(self, member: ClusterMember, limits: WorkerLimits, clock: Clock, security: ServerSecurity) -> None:
        node = member.node
        self.member = member
        self.node = node
        self.limits = limits
        """The limits of a call that begins now."""
        self.clock = clock
        self.gate = Gate(limits.calls_max)
        self.calls = Calls(self.gate, node.ids, security)
        self.in_flight = BytesInFlight(limits.bytes_in_flight_max)
        self.buffers = BufferPool(limits.buffers_bytes_max)
        self.holds = ClientHolds(
            limits.holds_max,
            limits.hold_tokens_max,
            node.holds.release,
            partial(node.holds.renew, lease_s=limits.hold_lease_s),
            node.clock,
            limits_tenants=not self.calls.guard.is_open,
        )

    def namespace(self, digest: bytes, call: Call) -> Namespace:
        """Returns the namespace with this digest, authorised for ``call``: there is no other way to one.

        Raises UnknownNamespace, InvalidRequest, PermissionDenied, Overloaded, or what the root raised.
        """
        if len(digest) != DIGEST_BYTES:
            raise InvalidRequest(
                f"namespace has {len(digest)} bytes: expected the {DIGEST_BYTES} that OpenNamespace gave"
            )
        key = NamespaceDigest(digest)
        namespace = self.member.claimed.get(key) or self.member.find_namespace(key)
        if namespace is None:
            raise UnknownNamespace(
                f"namespace {digest.hex()} was never opened on this root: call OpenNamespace, then repeat"
            )
        call.allow(namespace.tenant, namespace.name)
        return namespace

    def chain(self, digest: bytes, packed_tokens: bytes, call: Call, chunks_max: int = 0) -> ChunkKeys:
        """Returns the full chunks of a prompt, at most ``chunks_max`` unless that is 0."""
        return self._chain_of(self.namespace(digest, call), packed_tokens, chunks_max)

    def to_put(self, start: pb.PutStart, call: Call) -> tuple[KeySet, int]:
        """Returns the full chunks of a prompt, or blocks, and the first one that is put. Raises as ``chain`` does."""
        if start.keys:
            if start.tokens:
                raise InvalidRequest("a Put has both keys of blocks and tokens: expected one of them")
            namespace, keys = self.namespace(start.namespace, call), unpack_keys(start.keys)
            ancestry = Ancestry(start.first, unpack_descents(start.descents, len(keys)) if start.descents else ())
            return BlockKeys.of(namespace, keys, unpack_sizes(start.sizes, len(keys)), ancestry), 0
        chain = self.chain(start.namespace, start.tokens, call)
        if start.first > len(chain):
            raise InvalidRequest(
                f"first is {start.first}: expected at most {len(chain)}, the full chunks of the prompt"
            )
        return chain, start.first

    @contextmanager
    def asked(self, request: pb.GetRequest, call: Call) -> Iterator[tuple[ExportRequest, int]]:
        """Yields the chunks or blocks of a read, and the end of those that may be sent: of a prompt the stored prefix.

        Raises as ``namespace`` does, and HoldBroken.
        """
        node = self.node
        if request.memory_only:
            yield self._asked_by_peer(request, call)
        elif request.keys:
            yield self._asked_blocks(request, call)
        elif request.hold:
            yield self._asked_held(request, call)
        else:
            chain = self.chain(request.namespace, request.tokens, call, request.chunks_max)
            left_s = call.left_s(node.limits.match_deadline_s)
            hold = node.hold(chain, deadline_s=left_s, counts=not request.uncounted)
            try:
                yield ExportRequest(hold.chain, hold), hold.count
            finally:
                node.holds.release(hold)

    def _asked_blocks(self, request: pb.GetRequest, call: Call) -> tuple[ExportRequest, int]:
        if request.tokens:
            raise InvalidRequest("a Get has both keys of blocks and tokens: expected one of them")
        namespace, keys = self.namespace(request.namespace, call), unpack_keys(request.keys)
        wanted = BlockKeys.of(namespace, keys, unpack_sizes(request.sizes, len(keys)))
        hold = self.holds.find(request.hold) if request.hold else None
        if hold is not None:
            if hold.chain.namespace.digest != namespace.digest:
                raise InvalidRequest("the hold is of another namespace: expected one that Hold gave for this namespace")
            self.node.holds.check(hold)
        return ExportRequest(wanted, hold), len(wanted)

    def _asked_held(self, request: pb.GetRequest, call: Call) -> tuple[ExportRequest, int]:
        if request.namespace or request.tokens:
            raise InvalidRequest("a Get has both a hold and a prompt: expected one of them")
        hold = self.holds.find(request.hold)
        call.allow(hold.chain.namespace.tenant, hold.chain.namespace.name)
        self.node.holds.check(hold)  # on every path: even memory is not read under a lost session
        return ExportRequest(hold.chain, hold), min(hold.count, request.chunks_max or hold.count)

    def _asked_by_peer(self, request: pb.GetRequest, call: Call) -> tuple[ExportRequest, int]:
        """Returns what memory has now of a prompt that another worker asks for.

        It reads no namespace from the root, and asks no other worker (rule P2).
        """
        if request.hold:
            raise InvalidRequest("memory_only with a hold: expected a prompt")
        namespace = self.member.claimed.get(NamespaceDigest(request.namespace))
        if namespace is None:
            raise UnknownNamespace(f"namespace {request.namespace.hex()} is not known here: a miss")
        # The tenant pays at the worker that its client asked; a peer only brings what is already paid for.
        call.allow(namespace.tenant, namespace.name, metered=not call.visit.sees_every)
        chain = self._chain_of(namespace, request.tokens, request.chunks_max)
        memory, first = self.node.memory, request.first
        count = memory.leading(chain, first) if memory is not None and first < len(chain) else 0
        return ExportRequest(chain, memory_only=True), first + count

    def _chain_of(self, namespace: Namespace, packed_tokens: bytes, chunks_max: int) -> ChunkKeys:
        tokens = unpack_tokens(packed_tokens)
        if chunks_max:
            tokens = tokens[: chunks_max * namespace.layout.chunk_tokens]
        return self.node.chains.of(namespace, tokens)
