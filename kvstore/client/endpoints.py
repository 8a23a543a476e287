"""The workers that a call may go to, best first: those that live, the one that has the prompt before the others.

A worker that does not answer is set aside and probed at growing intervals until it answers SERVING.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.client.limits import ClientLimits
from kvstore.client.pool import PLAIN, Bulk, Credentials, Links
from kvstore.client.routing import Marking, Spreading
from kvstore.core import tracing
from kvstore.core.clock import Clock
from kvstore.core.executor import CLOSE_S, Decision, Loop, Owner, within
from kvstore.core.metrics import ClientCount, Counts
from kvstore.core.validate import brief, kind_of
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, StoreClosed, Unavailable
from kvstore.transport.limits import CHANNEL_OPTIONS, method
from kvstore.transport.messages import sealed

# One worker as a client sees it: its channel, how busy it is, and whether it is set aside.


HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""``HealthCheckResponse{status: SERVING}``: two bytes, so that a client needs no health package."""


def addresses_in(text: str) -> list[str]:
    """Returns the addresses of a text that has several with commas; what is no text is left to ``check_address``."""
    return text.split(",") if isinstance(text, str) else [text]


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
        """Returns the answer to a call of SHORT_CALLS: over a bulk connection, or else over gRPC.

        Raises what gRPC raises, BulkRefused, LinkLate.
        """
        ends_s = time.monotonic() + timeout_s
        answer = self.bulk.call(name, message, timeout_s)
        if answer is None:
            answer = self._stub(name, "unary_unary")(sealed(message), timeout=ends_s - time.monotonic())
        return answer

    def unary(self, name: str) -> Any:
        """Returns a call with one message each way, as bytes."""
        return self._stub(name, "unary_unary")

    def stream_out(self, name: str) -> Any:
        """Returns a call that sends a stream."""
        return self._stub(name, "stream_unary")

    def stream_in(self, name: str) -> Any:
        """Returns a call that receives a stream."""
        return self._stub(name, "unary_stream")

    def probe(self, timeout_s: float) -> Any:
        """Asks for the worker's health; returns a future of the answer."""
        return self._stub(HEALTH_CHECK, "unary_unary").future(b"", timeout=timeout_s)

    def metadata(self) -> tracing.Metadata:
        """Returns the metadata of every call to this worker."""
        return tracing.metadata() + self._credentials.metadata + self._account

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
        answer: bytes = self.unary("OpenBulk")(request, timeout=timeout_s)
        return answer

    def _stub(self, name: str, kind: str) -> Any:
        """Returns a call by its name in our services, or by its whole path in another one."""
        stub = self._stubs.get(name)
        if stub is None:
            path = name if name.startswith("/") else method(name)
            stub = self._stubs[name] = _Saying(getattr(self._channel, kind)(path), self.metadata)
        return stub


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


log = logging.getLogger(__name__)

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
                raise Unavailable(self._why_none(every))
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

    def none_known(self) -> Unavailable:
        """Returns the error where no worker is known at all, with the reason."""
        return Unavailable(self._why_none([]))

    def _why_none(self, every: list[Endpoint]) -> str:
        if not every:
            return self._trouble or "no worker is known: start one (none was given)"
        reasons = "; ".join(
            each.aside if each.aside and each.address in each.aside else f"{each.address}: {each.aside}"
            for each in every[:3]
        )
        return f"no worker answers, of {len(every)} ({reasons}): check that they run; calls go through once one does"

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
            why = _health_of(answer)
            endpoint.leave()
            if why is None:
                self._bring_back(endpoint)
            elif endpoint.aside is None:
                self.set_aside(endpoint, why)
            with self._changed:
                endpoint.probe_at_s = self._clock.monotonic_s() + endpoint.probe_pause_s
                endpoint.probe_pause_s = min(2 * endpoint.probe_pause_s, self._limits.probe_pause_s_max)

    def _bring_back(self, endpoint: Endpoint) -> None:
        with self._changed:
            was_aside, endpoint.aside = endpoint.aside, None
        if was_aside is not None:
            log.info("client.back worker=%s", endpoint.address)


def _health_of(answer: Any) -> str | None:
    """Returns None if the worker serves, else why not."""
    try:
        status = answer.result()
    except grpc.RpcError as error:
        # A worker without the health service still serves.
        return None if error.code() is grpc.StatusCode.UNIMPLEMENTED else "it did not answer when asked for its health"
    except grpc.FutureCancelledError:
        return "it was not asked for its health: the client is being closed"
    return None if status == SERVING else "it reports NOT_SERVING (draining, or its root hangs)"
