"""Sends one call: to the best worker, then to the next one if a failed call may be repeated. Maps errors once.

A namespace that a worker does not know yet (on a new root) is opened again, and the call repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from kvstore.client.endpoints import Endpoint, WorkerEndpoints
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import BulkRefused, NoAnswer
from kvstore.client.routing import Marking
from kvstore.core import tracing
from kvstore.core.clock import Clock
from kvstore.core.executor import QUEUE_MAX, STALL_S, WIDTH, Executor, Loop, Owner
from kvstore.core.metrics import ClientCount, Counts
from kvstore.core.namespace import Namespace
from kvstore.core.validate import SECONDS_MAX, brief
from kvstore.core.write_mode import WriteMode
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, Overloaded, StoreClosed, Unavailable
from kvstore.transport.channel import LinkLate
from kvstore.transport.messages import namespace_message, sealed
from kvstore.transport.status import BrokenTransfer, Busy, Draining, Failure, UnknownNamespace, failure
from kvstore.transport.watchdog import StreamWatchdog
from kvstore.v1 import kvstore_pb2 as pb

# Renews the leases of a client's holds: one call per worker, for all holds there.
#
# A thread of its own does it: no call waits for a renewal, and the caller may compute for long. A client that is
# killed renews nothing, so its workers end its holds (gc/PROTOCOL.md, H4).


log = logging.getLogger(__name__)

SHARE = 4
"""A lease is renewed after 1/SHARE of its time, so that a process may stall for the rest."""
CALL_S_MAX = 5.0
RELEASE_S = 1.0
RELEASED_MAX = 1000


class LeasedHold(Protocol):
    """The lease of a hold at a worker. Only the renewing thread writes ``renewed_s``."""

    id: bytes
    lease_s: float
    endpoint: Endpoint
    renewed_s: float
    """Monotonic time at which the last acknowledged renewal was sent."""
    ended: bool
    """Set once the worker says that the hold has ended."""


class Renewing:
    """The live holds of one client, and the thread that renews them; started with the first hold. Thread-safe.

    It refers to holds weakly: one that its owner dropped is not renewed, and so ends.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._live: WeakSet[LeasedHold] = WeakSet()
        self._loop = Loop("kvstore-renewing", self._changed, lambda: self._turn)
        self._owner = Owner()

    def add(self, hold: LeasedHold) -> None:
        """Renews the hold from now on."""
        with self._changed:
            self._live.add(hold)
            if not self._loop.threads:
                self._loop.start()
            self._changed.notify_all()

    def remove(self, hold: LeasedHold) -> None:
        """Stops renewing the hold. Idempotent. Does nothing in a forked child: thread and lock belong to its parent."""
        if not self._owner.is_here:
            return
        with self._changed:
            self._live.discard(hold)

    def close(self) -> None:
        """Ends the holds, as far as their workers answer within RELEASE_S, and the thread. Idempotent."""
        if self._owner.is_here:
            with self._changed:
                live = list(self._live)
                self._live.clear()
            self._release(live)
        self._loop.close(CALL_S_MAX)

    def _release(self, live: list[LeasedHold]) -> None:
        """Releases the last RELEASED_MAX of them in parallel; the others end with their leases."""
        asked: list[Any] = []
        for hold in live:
            hold.ended = True
        for hold in live[-RELEASED_MAX:]:
            with suppress(ValueError):  # its channel is closed
                request = sealed(pb.ReleaseRequest(hold=hold.id))
                asked.append(hold.endpoint.unary("Release").future(request, timeout=RELEASE_S))
        for answer in asked:
            with suppress(grpc.RpcError, grpc.FutureCancelledError):
                answer.result()

    def step(self) -> float | None:
        """Renews the leases that are due; returns the seconds until the next one is, None if nothing is held."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            live = list(self._live)
        due = [hold for hold in live if hold.renewed_s + hold.lease_s / SHARE <= now_s]
        asked: list[tuple[list[LeasedHold], Any]] = []
        for endpoint in {hold.endpoint for hold in due}:
            # All holds of this worker, due or not: one call renews them together.
            holds = [hold for hold in live if hold.endpoint is endpoint]
            request = sealed(pb.RenewRequest(holds=[hold.id for hold in holds]))
            try:
                timeout_s = min(CALL_S_MAX, min(hold.lease_s for hold in holds) / SHARE)
                asked.append((holds, endpoint.unary("Renew").future(request, timeout=timeout_s)))
            except ValueError:
                for hold in holds:  # its channel was closed: the worker ends them
                    self._end(hold)
        for holds, answer in asked:
            self._apply(holds, answer, now_s)
        with self._changed:
            live = list(self._live)
        if not live:
            return None
        return max(0.0, min(hold.renewed_s + hold.lease_s / SHARE for hold in live) - self._clock.monotonic_s())

    def _apply(self, holds: list[LeasedHold], answer: Any, sent_s: float) -> None:
        try:
            ended = set(pb.RenewResponse.FromString(answer.result()).ended)
        except (grpc.RpcError, grpc.FutureCancelledError, DecodeError) as error:
            log.info("client.not_renewed worker=%s holds=%d why=%s", holds[0].endpoint.address, len(holds), error)
            for hold in holds:  # try again after half of that time
                hold.renewed_s = sent_s - hold.lease_s / SHARE / 2
            return
        for hold in holds:
            hold.renewed_s = sent_s
            if hold.id in ended:
                self._end(hold)

    def _end(self, hold: LeasedHold) -> None:
        hold.ended = True
        self.remove(hold)

    def _turn(self) -> None:
        pause_s = self.step()
        with self._changed:
            if not self._loop.closed and (pause_s is not None or not self._live):
                self._changed.wait(pause_s)


class FileLanes:
    """The threads that read files from workers, and others that copy within memory; made when they are
    needed. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._lanes: Executor | None = None
        self._copiers: Executor | None = None
        self._closed = False

    def get(self) -> Executor:
        """Those for files. After ``close`` they refuse work."""
        with self._lock:
            self._lanes = self._lanes or self._made(2)
            return self._lanes

    def copiers(self) -> Executor:
        """Those that never wait for a device: so memory is read while the root hangs. As ``get`` after ``close``."""
        with self._lock:
            self._copiers = self._copiers or self._made(1)
            return self._copiers

    def _made(self, requests: int) -> Executor:
        lanes = Executor(requests * WIDTH, WIDTH, QUEUE_MAX, STALL_S, self.clock)
        if self._closed:  # a call may outlive its store: no other code would end these threads
            lanes.close()
        return lanes

    def close(self) -> None:
        """Ends them. Idempotent."""
        with self._lock:
            self._closed = True
            for lanes in (self._lanes, self._copiers):
                if lanes is not None:
                    lanes.close()


T = TypeVar("T")


class CallFailed(Exception):
    """A call to one worker failed; carries the error to raise."""

    def __init__(self, failed: Failure) -> None:
        super().__init__(str(failed.error))
        self.failed = failed


class Caller:
    """Sends calls to the workers of one client; has what these calls share. Thread-safe."""

    def __init__(
        self,
        endpoints: WorkerEndpoints,
        counters: Counts[ClientCount],
        limits: ClientLimits,
        clock: Clock,
        write: WriteMode | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self.counters = counters
        self.limits = limits
        self.watch = StreamWatchdog(clock, "kvstore-client-watch")
        self.lanes = FileLanes(clock)
        self.renewing = Renewing(clock)
        self.write = write
        """The default write mode of puts; None: the worker's."""

    def stream_s(self, first_s: float, size_bytes: int) -> float:
        """Returns the deadline of a stream of at most ``size_bytes``: ``first_s`` and the time for its bytes."""
        return min(first_s + size_bytes / self.limits.bytes_per_s_min, SECONDS_MAX)

    def unary(
        self,
        name: str,
        request: bytes,
        timeout_s: float,
        marking: Marking | None = None,
        *,
        may_repeat: bool = True,
        even_aside: bool = False,
    ) -> bytes:
        """Returns the answer to a call with one message each way. Raises what the worker raised, or Unavailable."""

        def send(endpoint: Endpoint, left_s: float) -> bytes:
            answer: bytes = endpoint.unary(name)(request, timeout=left_s)
            return answer

        return self.anywhere(send, timeout_s, marking, may_repeat=may_repeat, even_aside=even_aside)

    def every_message(self, name: str, request: bytes, timeout_s: float) -> list[bytes]:
        """Returns all messages of an answer that is a short stream."""

        def send(endpoint: Endpoint, left_s: float) -> list[bytes]:
            return list(endpoint.stream_in(name)(request, timeout=left_s))

        return self.anywhere(send, timeout_s, None, even_aside=True)

    def anywhere(
        self,
        send: Callable[[Endpoint, float], T],
        timeout_s: float,
        marking: Marking | None,
        *,
        may_repeat: bool = True,
        even_aside: bool = False,
    ) -> T:
        """Calls ``send(endpoint, seconds left)`` at one worker after the other, until one answers or time is up.

        A call that must not run twice (``may_repeat`` False) is repeated only if nothing at all was done. All attempts
        carry one request id, which is noted on the error that is raised.
        """
        with tracing.request() as id:
            try:
                return self._anywhere(send, timeout_s, marking, may_repeat, even_aside)
            except KVStoreError as error:
                error.add_note(f"kvstore request {id}: workers' logs name it")
                raise

    def _anywhere(
        self,
        send: Callable[[Endpoint, float], T],
        timeout_s: float,
        marking: Marking | None,
        may_repeat: bool,
        even_aside: bool,
    ) -> T:
        ends_s = self._clock.monotonic_s() + timeout_s
        error: KVStoreError | None = None
        asked = 0
        for endpoint in self._endpoints.ranked(marking, even_aside=even_aside):
            left_s = ends_s - self._clock.monotonic_s()
            if left_s <= 0:
                break
            if error is not None:
                self.counters.add(ClientCount.RETRIES)
            asked += 1
            try:
                return self.at(endpoint, partial(send, endpoint, left_s))
            except CallFailed as failed:
                if error is None or failed.failed.answered:  # a worker's error explains more than silence
                    error = failed.failed.error
                if not (_helps_elsewhere(failed.failed) and (may_repeat or failed.failed.unsent)):
                    break
        if error is not None and asked > 1:
            spent_s = self._clock.monotonic_s() - ends_s + timeout_s
            error.args = (f"{error} ({asked} workers were asked, for {spent_s:.1f} s in all)", *error.args[1:])
        raise error or Unavailable(f"no worker answered within {timeout_s:g} s: retry later")

    def at_worker(
        self,
        worker: str | None,
        send: Callable[[Endpoint, float], T],
        timeout_s: float,
        marking: Marking | None = None,
        *,
        may_repeat: bool = True,
    ) -> T:
        """Calls ``send`` at the worker with this address, or, for None, at the best. Raises what it raised."""
        if worker is None:
            return self.anywhere(send, timeout_s, marking, may_repeat=may_repeat, even_aside=True)
        known = {each.address: each for each in self._endpoints.every()}
        if worker not in known:
            raise InvalidRequest(f"worker {brief(worker)} is not one of {', '.join(known) or 'none'}")
        try:
            return self.at(known[worker], partial(send, known[worker], timeout_s))
        except CallFailed as failed:
            raise failed.failed.error from failed

    def each(self, name: str, request: bytes, timeout_s: float) -> dict[str, bytes | KVStoreError]:
        """Sends a request to every worker in parallel; returns by address what each answered, or why it did not."""
        self._endpoints.check()
        began_s = self._clock.monotonic_s()
        asked: list[tuple[Endpoint, Any]] = []
        answers: dict[str, bytes | KVStoreError] = {}
        for endpoint in self._endpoints.every():
            endpoint.use()
            try:
                asked.append((endpoint, endpoint.unary(name).future(request, timeout=timeout_s)))
            except ValueError:
                endpoint.leave()  # its channel is already closed
        for endpoint, answer in asked:
            try:
                answers[endpoint.address] = self.at(endpoint, answer.result, began_s=began_s)
            except CallFailed as failed:
                answers[endpoint.address] = failed.failed.error
            finally:
                endpoint.leave()
        return answers

    def none_known(self) -> Unavailable:
        """Returns the error where no worker is known at all, with the reason."""
        return self._endpoints.none_known()

    @property
    def is_closed(self) -> bool:
        """True once the client was closed."""
        return self._endpoints.is_closed

    def check(self) -> None:
        """Raises StoreClosed, or InvalidRequest in a forked child: for calls that need no worker."""
        self._endpoints.check()

    # Namespaces

    def open(self, namespace: Namespace) -> None:
        """Claims the namespace. Raises LayoutMismatch, Unavailable."""
        self.unary("OpenNamespace", _opening(namespace), self.limits.pin_s, even_aside=True)

    def within(self, namespace: Namespace, call: Callable[[], T]) -> T:
        """Makes a call about a namespace; if a worker does not know it (a new root), opens it at all and repeats."""
        try:
            return call()
        except UnknownNamespace:
            self.counters.add(ClientCount.NAMESPACES_REOPENED)
        # At all workers: the call goes to the one that does not know it, and the others do nothing.
        opened = self.each("OpenNamespace", _opening(namespace), self.limits.pin_s)
        errors = [answer for answer in opened.values() if isinstance(answer, KVStoreError)]
        if errors and len(errors) == len(opened):
            raise errors[0]
        try:
            return call()
        except UnknownNamespace as unknown:
            raise Unavailable(f"a worker forgot a namespace right after it was opened: {unknown}") from unknown

    def or_miss(self, namespace: Namespace, call: Callable[[], T], miss: T) -> T:
        """Returns the call's result, or ``miss`` if no worker could answer."""
        try:
            return self.within(namespace, call)
        except BrokenTransfer:
            raise
        except (Unavailable, Overloaded):
            self.counters.add(ClientCount.MISSES_UNREACHABLE)
            return miss

    # One worker

    def at(self, endpoint: Endpoint, send: Callable[[], T], *, began_s: float | None = None) -> T:
        """Makes one call to one worker, and sets the worker aside if it does not answer.

        Raises CallFailed, StoreClosed (also if the store is closed during the call), and InvalidRequest in a forked
        child.

        ``began_s`` is when it was sent, if that was before: a message says how long the worker had.
        """
        self._endpoints.owner.check()
        began_s = self._clock.monotonic_s() if began_s is None else began_s
        try:
            with endpoint.calling(), tracing.request(), tracing.span("kvstore.attempt", worker=endpoint.address):
                return send()
        except grpc.RpcError as error:
            failed = _failure_of(error, endpoint.address, self._clock.monotonic_s() - began_s)
        except BulkRefused as refused:
            failed = refused.failed
        except NoAnswer as gone:
            failed = Failure(gone, False, True)
        except (LinkLate, grpc.FutureCancelledError) as late:
            said = str(late) or "it took nothing for too long"
            failed = Failure(Unavailable(f"worker {endpoint.address}: {said}"), False, False)
        except KVStoreError as error:
            if self._endpoints.is_closed:
                raise StoreClosed from error
            raise
        except ValueError:
            # What gRPC says of a closed channel.
            failed = Failure(Unavailable(f"the connection to worker {endpoint.address} was closed"), False, True)
        if self._endpoints.is_closed:
            raise StoreClosed from failed.error  # connections and threads end under a call
        if _is_out(failed):
            self._endpoints.set_aside(endpoint, str(failed.error))
        raise CallFailed(failed)


def _is_out(failed: Failure) -> bool:
    """True if this failure shows that the worker takes no calls at the moment."""
    return isinstance(failed.error, Draining) or not (failed.answered or isinstance(failed.error, Busy))


def _helps_elsewhere(failed: Failure) -> bool:
    """True if another worker may do better: false for a wrong request and for a full root."""
    kind = type(failed.error)
    return issubclass(kind, (Unavailable, Busy)) and not issubclass(kind, HoldBroken)


def _failure_of(error: grpc.RpcError, address: str, within_s: float) -> Failure:
    """Returns the meaning of a gRPC error. Every error that a call raises has ``code`` and the other members."""
    trailers: Any = error.trailing_metadata() or ()
    log.debug("client.call_failed worker=%s code=%s said=%s", address, error.code().name, error.details())
    return failure(error.code(), error.details() or "", trailers, address, within_s)


def _opening(namespace: Namespace) -> bytes:
    return sealed(pb.OpenNamespaceRequest(namespace=namespace_message(namespace)))
