"""One worker as a client sees it: its channel, how busy it is, and whether it is set aside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore import tracing
from kvstore.bounded import CLOSE_S, within
from kvstore.brief import brief, kind_of
from kvstore.client.bulk.links import Links
from kvstore.client.bulk.way import Bulk
from kvstore.client.credentials import PLAIN, Credentials
from kvstore.client.limits import ClientLimits
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.node.counters import Counts
from kvstore.wire.limits import CHANNEL_OPTIONS, method
from kvstore.wire.messages import sealed

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
    """One worker. After ``retire`` its channel is closed once nobody uses it. Thread-safe."""

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
        self._calls_past_grpc = bulk in (Bulk.AUTO, Bulk.SHARED)
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
        """Returns the answer to a call of SHORT_CALLS: over a bulk connection that is at hand, or else over gRPC.

        Raises what gRPC raises, BulkRefused, LinkLate.
        """
        ends_s = time.monotonic() + timeout_s
        answer = self.bulk.call(name, message, timeout_s) if self._calls_past_grpc else None
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
        """Closes the channel once nobody uses it. Idempotent."""
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
