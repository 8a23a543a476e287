"""The workers of a client: which one a call is sent to, how it is repeated at another, and leases of holds there.

A worker that does not answer is set aside and probed at growing intervals until it answers SERVING. A namespace that a
worker does not know yet (on a new root) is opened again, and the call repeated. Errors are mapped here, once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.client.limits import ClientLimits
from kvstore.client.pool import PLAIN, Bulk, Credentials, Links
from kvstore.client.routing import Marking, Spreading
from kvstore.core import tracing
from kvstore.core.clock import Clock
from kvstore.core.executor import CLOSE_S, QUEUE_MAX, STALL_S, WIDTH, Decision, Executor, Loop, Owner, within
from kvstore.core.metrics import ClientCount, Counts
from kvstore.core.namespace import Namespace
from kvstore.core.validate import SECONDS_MAX, brief, kind_of
from kvstore.core.write_mode import WriteMode
from kvstore.errors import (
    HoldBroken,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    PermissionDenied,
    StoreClosed,
    Unavailable,
)
from kvstore.transport.channel import LinkBroken, LinkLate
from kvstore.transport.limits import CHANNEL_OPTIONS, method
from kvstore.transport.messages import namespace_message, sealed
from kvstore.transport.status import BrokenTransfer, Busy, CallFailed, Draining, UnknownNamespace, failure
from kvstore.v1 import kvstore_pb2 as pb

log = logging.getLogger(__name__)

# One worker as a client sees it: its channel, how busy it is, and whether it is set aside.


HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""``HealthCheckResponse{status: SERVING}``: two bytes, so that a client needs no health package."""


def check_address(address: str) -> str:
    """Checks an address: ``host:port``, ``[v6]:port`` or ``unix:path``. Raises InvalidRequest."""
    if not isinstance(address, str):
        raise InvalidRequest(
            f"worker {brief(address)} is {kind_of(address)}: expected host:port as text, such as 10.0.0.7:7070"
        )
    text = address.strip()
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise _no_address(address) from cause
    if text.startswith("unix:") and len(text) > len("unix:"):
        return text
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    odd = any(character in host for character in "/@?# ") or (":" in host and not is_bracketed)
    if not colon or not host or odd or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise _no_address(address)
    return text


def _no_address(given: str) -> InvalidRequest:
    return InvalidRequest(
        f"worker {brief(given)}: expected host:port, such as 10.0.0.7:7070 or [::1]:7070, or unix:path"
    )


class Endpoint:
    """One worker. After ``retire``, its channel closes once no call uses it. Thread-safe."""

    def __init__(
        self,
        address: str,
        bulk: Bulk,
        limits: ClientLimits,
        credentials: Credentials = PLAIN,
        counters: Counts[ClientCount] | None = None,
    ) -> None:
        """Raises InvalidRequest if the files of ``credentials`` are wrong or must not be used with this address."""
        credentials.check(address)
        self.address = address
        self.bulk = Links(address, bulk, limits, self._open_bulk, credentials, counters)
        """The bulk connections."""
        self.connection_version = credentials.connection_version
        """Version of the certificate of its connections; with another version this endpoint must be replaced."""
        self._credentials = credentials
        self._account = credentials.account(address)
        self._channel: grpc.Channel = credentials.channel(address, CHANNEL_OPTIONS)
        self._stubs: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self.calls = 0
        """Number of calls in progress."""
        self.aside: str | None = None
        """Reason why no calls are sent there now; None while the worker is well."""
        self.probe_at_s = 0.0
        self.probe_pause_s = 0.0

    def call(self, name: str, message: Message, timeout_s: float) -> bytes:
        """Returns the answer to a call of SHORT_CALLS: over a bulk connection, or over gRPC without one.

        Raises what gRPC raises, CallFailed, LinkLate.
        """
        ends_s = time.monotonic() + timeout_s
        answer: bytes | CallFailed | None = None
        with self.bulk.link(timeout_s) as link:
            if link is not None:
                try:
                    answer = link.call(name, message, ends_s - time.monotonic())
                except (LinkBroken, InvalidRequest) as error:
                    self.bulk.note_broken(link, error)
        if answer is None:
            over_grpc: bytes = self.stub(name)(sealed(message), timeout=ends_s - time.monotonic())
            return over_grpc
        if isinstance(answer, CallFailed):
            raise answer
        return answer

    def stub(self, name: str, kind: str = "unary_unary") -> Any:
        """Returns a call by its name in our services, or by its whole path in another one; messages are bytes."""
        stub = self._stubs.get(name)
        if stub is None:
            path = name if name.startswith("/") else method(name)
            stub = self._stubs[name] = _Saying(getattr(self._channel, kind)(path), self._metadata)
        return stub

    def probe(self, timeout_s: float) -> Any:
        """Asks for the worker's health; returns a future of the answer."""
        return self.stub(HEALTH_CHECK).future(b"", timeout=timeout_s)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Counts one call while it runs, and keeps the channel open."""
        self.use()
        with self._lock:
            self.calls += 1
        try:
            yield
        finally:
            with self._lock:
                self.calls -= 1
            self.leave()

    def use(self) -> None:
        """Keeps the channel open until ``leave``, even after ``retire``: for a hold."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Ends ``use``."""
        with self._lock:
            self._users -= 1
            over = self._retired and not self._users
        if over:
            self.close()

    def retire(self) -> None:
        """Closes the channel once no call uses it. Idempotent."""
        with self._lock:
            over = not self._retired and not self._users
            self._retired = True
        if over:
            self.close()

    def close(self) -> None:
        """Closes the channel and all connections now; calls in progress are cancelled."""
        self.bulk.close()
        within(CLOSE_S, self._channel.close)

    def _open_bulk(self, request: bytes, timeout_s: float) -> bytes:
        answer: bytes = self.stub("OpenBulk")(request, timeout=timeout_s)
        return answer

    def _metadata(self) -> tracing.Metadata:
        return tracing.metadata() + self._credentials.metadata + self._account


class _Saying:
    """A gRPC call that adds the request id and the other metadata of every call."""

    __slots__ = ("_call", "_metadata")

    def __init__(self, call: Any, metadata: Callable[[], tracing.Metadata]) -> None:
        self._call = call
        self._metadata = metadata

    def __call__(self, message: Any, *, timeout: float) -> Any:
        return self._call(message, timeout=timeout, metadata=self._metadata())

    def future(self, message: Any, *, timeout: float) -> Any:
        """Starts the call; returns its future."""
        return self._call.future(message, timeout=timeout, metadata=self._metadata())


ENDPOINTS_MAX = 4096
NAMED_MAX = 4
"""Workers that ``place`` names."""


class WorkerEndpoints:
    """The workers of one client, and the thread that probes them. Thread-safe; not usable in a forked child.

    ``discover`` returns the addresses of all workers and is called regularly; without it the list is fixed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        discover: Callable[[], Sequence[str]] | None,
        limits: ClientLimits,
        counters: Counts[ClientCount],
        clock: Clock,
        bulk: Bulk = Bulk.AUTO,
        credentials: Credentials = PLAIN,
    ) -> None:
        self._credentials = credentials
        self._connection_version = credentials.connection_version
        self._bulk = bulk
        self._spreading = Spreading()
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._discover = discover
        self._changed = threading.Condition()
        self._live: dict[str, Endpoint] = {}
        self._refresh_at_s = clock.monotonic_s() + limits.refresh_s
        self._trouble = ""
        """Why no worker is known, if so."""
        self.owner = Owner()
        self._loop = Loop("kvstore-endpoints", self._changed, self._next)
        self._list(addresses)
        if discover is not None:
            self.refresh()
            self._loop.start()

    @property
    def place(self) -> str:
        """The workers that are known, and whether this is closed, for people."""
        known = [*self._live]
        named = ", ".join(known[:NAMED_MAX]) + ", ..." * (len(known) > NAMED_MAX)
        return f"workers {named or 'that etcd lists'}" + self._loop.closed * ", closed"

    @property
    def is_closed(self) -> bool:
        """True once ``close`` was called: what fails after that fails because of it."""
        return self._loop.closed

    def check(self) -> None:
        """Raises StoreClosed once this is closed, and InvalidRequest in a forked child."""
        self.owner.check()
        if self._loop.closed:
            raise StoreClosed

    def ranked(self, marking: Marking | None = None, *, even_aside: bool = False) -> list[Endpoint]:
        """The workers to try, best first. Those set aside only with ``even_aside``, and only if no other is there.

        Raises Unavailable where there is none, StoreClosed, and InvalidRequest in a forked child.
        """
        self.owner.check()
        if self._credentials.connection_version != self._connection_version:
            self._list([each.address for each in self.every()])
        with self._changed:
            if self._loop.closed:
                raise StoreClosed
            every = list(self._live.values())
        if len(every) > 1 and not self._loop.threads:
            self._loop.start()  # so that one that freezes is left out before a call has to find out
        live = [each for each in every if each.aside is None]
        if not live:
            if not (even_aside and every):
                raise self.none(every)
            return sorted(every, key=lambda each: each.probe_at_s)
        if len(live) == 1:
            return live
        live.sort(key=lambda each: each.calls)
        if marking is not None and (marks := marking()):
            busy = live[0].calls + self._limits.affinity_slack
            avoided = {each.address for each in live if each.calls > busy}
            chosen = self._spreading.chosen(marks, sorted(each.address for each in live), avoided)
            live.sort(key=lambda each: each.address != chosen)  # stable: the others stay as they are
        return live

    def every(self) -> list[Endpoint]:
        """Returns all workers, including those set aside. Raises InvalidRequest in a forked child."""
        self.owner.check()
        with self._changed:
            return list(self._live.values())

    def set_aside(self, endpoint: Endpoint, why: str) -> None:
        """Sends no more calls to this worker until it answers that it is well."""
        with self._changed:
            if endpoint.aside is not None or self._loop.closed:
                return
            endpoint.aside = why
            endpoint.probe_pause_s = self._limits.probe_pause_s_min
            endpoint.probe_at_s = self._clock.monotonic_s()
            self._refresh_at_s = endpoint.probe_at_s  # its successor may be in the list already
            self._changed.notify_all()
        self._counters.add(ClientCount.SET_ASIDE)
        log.info("client.set_aside worker=%s why=%s", endpoint.address, why)
        self._loop.start()

    def refresh(self) -> None:
        """Reads the list of workers again; without an answer the old list stays, since serving does not need etcd.

        Raises InvalidRequest if it is unclear which workers are meant, PermissionDenied if etcd says so.
        """
        if self._discover is None:
            return
        try:
            found = self._discover()
        except (InvalidRequest, PermissionDenied):
            raise
        except KVStoreError as error:
            self._trouble = f"{error}; until then no worker is known"
            return
        self._trouble = "" if found else "no worker is known: start one (no worker is registered)"
        if found:
            self._list(found)

    def stop(self) -> None:
        """Has every new call raise StoreClosed, and those that fail from now on. Idempotent."""
        self._loop.stop()

    def close(self) -> None:
        """Closes all channels and ends the thread; calls in progress are cancelled. Idempotent."""
        with self._changed:
            self._loop.stop()
            endpoints = list(self._live.values())
        for endpoint in endpoints:
            endpoint.close()
        self._loop.close(self._limits.probe_s + self._limits.refresh_s)

    def _list(self, addresses: Sequence[str]) -> None:
        """Adds new workers; retires those that are no longer listed or whose connections have an old certificate."""
        wanted = list(dict.fromkeys(check_address(address) for address in addresses))[:ENDPOINTS_MAX]
        with self._changed:
            if self._loop.closed:
                return
            version = self._connection_version = self._credentials.connection_version
            kept = {
                address: endpoint
                for address, endpoint in self._live.items()
                if address in wanted and endpoint.connection_version == version
            }
            gone = [endpoint for address, endpoint in self._live.items() if address not in kept]
            self._live = {
                address: kept.get(address)
                or Endpoint(address, self._bulk, self._limits, self._credentials, self._counters)
                for address in wanted
            }
        for endpoint in gone:
            endpoint.retire()

    def none(self, every: Sequence[Endpoint] = ()) -> Unavailable:
        """Returns the error where none of these workers, all that are known, takes calls, with the reasons."""
        if not every:
            return Unavailable(self._trouble or "no worker is known: start one (none was given)")
        reasons = "; ".join(
            each.aside if each.aside and each.address in each.aside else f"{each.address}: {each.aside}"
            for each in every[:3]
        )
        return Unavailable(
            f"no worker answers, of {len(every)} ({reasons}): check that they run; calls go through once one does"
        )

    # Probing

    def _next(self) -> Decision:
        now_s = self._clock.monotonic_s()
        aside = [each for each in self._live.values() if each.aside is not None]
        due_s = min([self._refresh_at_s, *(each.probe_at_s for each in aside)])
        if due_s > now_s:
            return due_s - now_s
        is_refresh = self._refresh_at_s <= now_s
        if is_refresh:
            self._refresh_at_s = now_s + self._limits.refresh_s
        return partial(self._look, now_s, is_refresh=is_refresh)

    def _look(self, now_s: float, *, is_refresh: bool) -> None:
        """Lists the workers again, and asks those that are due how they are."""
        if is_refresh:
            try:
                self.refresh()
            except (InvalidRequest, PermissionDenied) as error:
                self._trouble = str(error)  # such as a second root that appeared: those known go on
        self._probe([each for each in self.every() if is_refresh or (each.aside and each.probe_at_s <= now_s)])

    def _probe(self, endpoints: list[Endpoint]) -> None:
        """Queries the health of workers in parallel, and records what they answer."""
        asked: list[tuple[Endpoint, Any]] = []
        for endpoint in endpoints:
            endpoint.use()
            try:
                asked.append((endpoint, endpoint.probe(self._limits.probe_s)))
            except ValueError:
                endpoint.leave()  # its channel is already closed
        for endpoint, answer in asked:
            why = why_unwell(answer)
            endpoint.leave()
            if why is not None and endpoint.aside is None:
                self.set_aside(endpoint, why)
            with self._changed:
                if why is None and endpoint.aside is not None:
                    endpoint.aside = None
                    log.info("client.back worker=%s", endpoint.address)
                endpoint.probe_at_s = self._clock.monotonic_s() + endpoint.probe_pause_s
                endpoint.probe_pause_s = min(2 * endpoint.probe_pause_s, self._limits.probe_pause_s_max)


def why_unwell(answer: Any) -> str | None:
    """Returns None if the worker serves, else why not."""
    try:
        status = answer.result()
    except grpc.RpcError as error:
        # A worker without the health service still serves.
        return None if error.code() is grpc.StatusCode.UNIMPLEMENTED else "it did not answer when asked for its health"
    except grpc.FutureCancelledError:
        return "it was not asked for its health: the client is being closed"
    return None if status == SERVING else "it reports NOT_SERVING (draining, or its root hangs)"


# Renews the leases of a client's holds: one call per worker, for all holds there.
#
# A thread of its own does it: no call waits for a renewal, and the caller may compute for long. A client that is
# killed renews nothing, so its workers end its holds (gc/PROTOCOL.md, H4).


SHARE = 4
"""A lease is renewed after 1/SHARE of its time, so that a process may stall for the rest."""
CALL_S_MAX = 5.0
RELEASE_S = 1.0
RELEASED_MAX = 1000


@dataclass(slots=True, eq=False, weakref_slot=True)
class HoldLease:
    """The lease of a hold at a worker. Only the renewing thread writes ``renewed_s``."""

    id: bytes
    lease_s: float
    endpoint: Endpoint
    renewed_s: float
    """Monotonic time at which the last acknowledged renewal was sent."""
    ended: bool = False
    """Set once the worker says that the hold has ended."""


class Renewing:
    """The live holds of one client, and the thread that renews them; started with the first hold. Thread-safe.

    It refers to holds weakly: one that its owner dropped is not renewed, and so ends.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._live: WeakSet[HoldLease] = WeakSet()
        self._loop = Loop("kvstore-renewing", self._changed, lambda: self._turn)

    def add(self, hold: HoldLease) -> None:
        """Renews the hold from now on."""
        with self._changed:
            self._live.add(hold)
            if not self._loop.threads:
                self._loop.start()
            self._changed.notify_all()

    def remove(self, hold: HoldLease) -> None:
        """Stops renewing the hold. Idempotent. Does nothing in a forked child: thread and lock belong to its parent."""
        if not self._loop.owner.is_here:
            return
        with self._changed:
            self._live.discard(hold)

    def close(self) -> None:
        """Ends the holds, as far as their workers answer within RELEASE_S, and the thread. Idempotent."""
        if self._loop.owner.is_here:
            with self._changed:
                live = list(self._live)
                self._live.clear()
            self._release(live)
        self._loop.close(CALL_S_MAX)

    def _release(self, live: list[HoldLease]) -> None:
        """Releases the last RELEASED_MAX of them in parallel; the others end with their leases."""
        asked: list[Any] = []
        for hold in live:
            hold.ended = True
        for hold in live[-RELEASED_MAX:]:
            with suppress(ValueError):  # its channel is closed
                request = sealed(pb.ReleaseRequest(hold=hold.id))
                asked.append(hold.endpoint.stub("Release").future(request, timeout=RELEASE_S))
        for answer in asked:
            with suppress(grpc.RpcError, grpc.FutureCancelledError):
                answer.result()

    def step(self) -> float | None:
        """Renews the leases that are due; returns the seconds until the next one is, None if nothing is held."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            live = list(self._live)
        due = [hold for hold in live if hold.renewed_s + hold.lease_s / SHARE <= now_s]
        asked: list[tuple[list[HoldLease], Any]] = []
        for endpoint in {hold.endpoint for hold in due}:
            # All holds of this worker, due or not: one call renews them together.
            holds = [hold for hold in live if hold.endpoint is endpoint]
            request = sealed(pb.RenewRequest(holds=[hold.id for hold in holds]))
            for hold in holds:  # unless it is acknowledged: try again after half of that time
                hold.renewed_s = now_s - hold.lease_s / SHARE / 2
            try:
                timeout_s = min(CALL_S_MAX, min(hold.lease_s for hold in holds) / SHARE)
                asked.append((holds, endpoint.stub("Renew").future(request, timeout=timeout_s)))
            except KVStoreError as error:
                log.info("client.not_renewed worker=%s holds=%d why=%s", endpoint.address, len(holds), error)
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

    def _apply(self, holds: list[HoldLease], answer: Any, sent_s: float) -> None:
        try:
            ended = set(pb.RenewResponse.FromString(answer.result()).ended)
        except (grpc.RpcError, grpc.FutureCancelledError, DecodeError) as error:
            log.info("client.not_renewed worker=%s holds=%d why=%s", holds[0].endpoint.address, len(holds), error)
            return
        for hold in holds:
            hold.renewed_s = sent_s
            if hold.id in ended:
                self._end(hold)

    def _end(self, hold: HoldLease) -> None:
        hold.ended = True
        self.remove(hold)

    def _turn(self) -> None:
        pause_s = self.step()
        with self._changed:
            if not self._loop.closed and (pause_s is not None or not self._live):
                self._changed.wait(pause_s)


class FileExecutor:
    """The threads that read files from workers, and others that copy within memory; made when they are
    needed. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._executor: Executor | None = None
        self._copiers: Executor | None = None
        self._closed = False

    def get(self) -> Executor:
        """Those for files. After ``close`` they refuse work."""
        with self._lock:
            self._executor = self._executor or self._made(2)
            return self._executor

    def copiers(self) -> Executor:
        """Those that never wait for a device: so memory is read while the root hangs. As ``get`` after ``close``."""
        with self._lock:
            self._copiers = self._copiers or self._made(1)
            return self._copiers

    def _made(self, requests: int) -> Executor:
        executor = Executor(requests * WIDTH, WIDTH, QUEUE_MAX, STALL_S, self.clock)
        if self._closed:  # a call may outlive its store: no other code would end these threads
            executor.close()
        return executor

    def close(self) -> None:
        """Ends them. Idempotent."""
        with self._lock:
            self._closed = True
            for executor in (self._executor, self._copiers):
                if executor is not None:
                    executor.close()


T = TypeVar("T")


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
        self.endpoints = endpoints
        self._clock = clock
        self.counters = counters
        self.limits = limits
        self.executor = FileExecutor(clock)
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
            answer: bytes = endpoint.stub(name)(request, timeout=left_s)
            return answer

        return self.anywhere(send, timeout_s, marking, may_repeat=may_repeat, even_aside=even_aside)

    def every_message(self, name: str, request: bytes, timeout_s: float) -> list[bytes]:
        """Returns all messages of an answer that is a short stream."""

        def send(endpoint: Endpoint, left_s: float) -> list[bytes]:
            return list(endpoint.stub(name, "unary_stream")(request, timeout=left_s))

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
        for endpoint in self.endpoints.ranked(marking, even_aside=even_aside):
            left_s = ends_s - self._clock.monotonic_s()
            if left_s <= 0:
                break
            if error is not None:
                self.counters.add(ClientCount.RETRIES)
            asked += 1
            try:
                return self.at(endpoint, partial(send, endpoint, left_s))
            except CallFailed as failed:
                if error is None or failed.answered:  # a worker's error explains more than silence
                    error = failed.error
                # Another worker does no better with a wrong request or a full root.
                helps = isinstance(failed.error, (Unavailable, Busy)) and not isinstance(failed.error, HoldBroken)
                if not (helps and (may_repeat or failed.unsent)):
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
        known = {each.address: each for each in self.endpoints.every()}
        if worker not in known:
            raise InvalidRequest(f"worker {brief(worker)} is not one of {', '.join(known) or 'none'}")
        try:
            return self.at(known[worker], partial(send, known[worker], timeout_s))
        except CallFailed as failed:
            raise failed.error from failed

    def each(self, name: str, request: bytes, timeout_s: float) -> dict[str, bytes | KVStoreError]:
        """Sends a request to every worker in parallel; returns by address what each answered, or why it did not."""
        self.endpoints.check()
        began_s = self._clock.monotonic_s()
        asked: list[tuple[Endpoint, Any]] = []
        answers: dict[str, bytes | KVStoreError] = {}
        for endpoint in self.endpoints.every():
            endpoint.use()
            try:
                asked.append((endpoint, endpoint.stub(name).future(request, timeout=timeout_s)))
            except ValueError:
                endpoint.leave()  # its channel is already closed
        for endpoint, answer in asked:
            try:
                answers[endpoint.address] = self.at(endpoint, answer.result, began_s=began_s)
            except CallFailed as failed:
                answers[endpoint.address] = failed.error
            finally:
                endpoint.leave()
        return answers

    # Namespaces

    def within(self, namespace: Namespace, call: Callable[[], T]) -> T:
        """Makes a call about a namespace; if a worker does not know it (a new root), opens it at all and repeats."""
        try:
            return call()
        except UnknownNamespace:
            self.counters.add(ClientCount.NAMESPACES_REOPENED)
        # At all workers: the call goes to the one that does not know it, and the others do nothing.
        opened = self.each("OpenNamespace", opening(namespace), self.limits.pin_s)
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
        self.endpoints.owner.check()
        began_s = self._clock.monotonic_s() if began_s is None else began_s
        try:
            with endpoint.calling(), tracing.request(), tracing.span("kvstore.attempt", worker=endpoint.address):
                return send()
        except grpc.RpcError as error:
            failed = _failure_of(error, endpoint.address, self._clock.monotonic_s() - began_s)
        except CallFailed as refused:
            failed = refused
        except (LinkLate, grpc.FutureCancelledError) as late:
            said = str(late) or "it took nothing for too long"
            failed = CallFailed(Unavailable(f"worker {endpoint.address}: {said}"), False, False)
        except KVStoreError as error:
            if self.endpoints.is_closed:
                raise StoreClosed from error
            raise
        except ValueError:
            # What gRPC says of a closed channel.
            failed = CallFailed(Unavailable(f"the connection to worker {endpoint.address} was closed"), False, True)
        if self.endpoints.is_closed:
            raise StoreClosed from failed.error  # connections and threads end under a call
        if isinstance(failed.error, Draining) or not (failed.answered or isinstance(failed.error, Busy)):
            self.endpoints.set_aside(endpoint, str(failed.error))  # it takes no calls at the moment
        raise failed


def _failure_of(error: grpc.RpcError, address: str, within_s: float) -> CallFailed:
    """Returns the meaning of a gRPC error. Every error that a call raises has ``code`` and the other members."""
    trailers: Any = error.trailing_metadata() or ()
    log.debug("client.call_failed worker=%s code=%s said=%s", address, error.code().name, error.details())
    return failure(error.code(), error.details() or "", trailers, address, within_s)


def opening(namespace: Namespace) -> bytes:
    """Returns the request that claims a namespace."""
    return sealed(pb.OpenNamespaceRequest(namespace=namespace_message(namespace)))
