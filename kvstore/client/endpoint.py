"""One worker as a client sees it: its channel, how busy it is, and whether it is set aside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kvstore import tracing
from kvstore.bounded import CLOSE_S, within
from kvstore.client.bulk.links import Bulk, Links
from kvstore.client.bulk.shortage import Shortage
from kvstore.client.credentials import PLAIN, Credentials
from kvstore.client.limits import ClientLimits
from kvstore.errors import InvalidRequest
from kvstore.wire.limits import CHANNEL_OPTIONS, method

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""``HealthCheckResponse{status: SERVING}``. Two bytes, so that a client needs no package for them."""


def check_address(address: str) -> str:
    """An address as ``host:port``, ``[v6]:port`` or ``unix:path``. Raises InvalidRequest."""
    if not isinstance(address, str):
        raise InvalidRequest(f"worker {address!r} is a {type(address).__name__}: expected text such as 10.0.0.7:7070")
    text = address.strip()
    if text.startswith("unix:") and len(text) > len("unix:"):
        return text
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    odd = any(character in host for character in "/@?# ") or (":" in host and not is_bracketed)
    if not colon or not host or odd or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise InvalidRequest(
            f"worker {address!r}: expected host:port, such as 10.0.0.7:7070 or [::1]:7070, or unix:path"
        )
    return text


class Endpoint:
    """One worker. Its channel is closed when nobody uses it any more after ``retire``. Thread-safe."""

    def __init__(
        self,
        address: str,
        bulk: Bulk,
        limits: ClientLimits,
        credentials: Credentials = PLAIN,
        shortage: Shortage | None = None,
    ) -> None:
        """Raises InvalidRequest where the files of ``credentials`` are wrong, or not to be used with this address."""
        credentials.check(address)
        self.address = address
        self.bulk = Links(address, bulk, limits, self._open_bulk, credentials, shortage)
        """The ways past gRPC."""
        self.connection_version = credentials.connection_version
        """Of the certificate that its connections are made with: after another one this endpoint is to be replaced."""
        self._credentials = credentials
        self._channel: grpc.Channel = credentials.channel(address, CHANNEL_OPTIONS)
        self._stubs: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self.calls = 0
        """Calls in progress."""
        self.aside: str | None = None
        """Why no call is sent there at the moment; None while it lives."""
        self.probe_at_s = 0.0
        self.probe_pause_s = 0.0

    def unary(self, name: str) -> Any:
        """A call with one message each way, as bytes."""
        return self._stub(method(name), "unary_unary")

    def stream_out(self, name: str) -> Any:
        """A call that sends a stream."""
        return self._stub(method(name), "stream_unary")

    def stream_in(self, name: str) -> Any:
        """A call that is answered by a stream."""
        return self._stub(method(name), "unary_stream")

    def probe(self, timeout_s: float) -> Any:
        """Asks how it is; a future of the answer."""
        return self._stub(HEALTH_CHECK, "unary_unary").future(b"", timeout=timeout_s)

    def metadata(self) -> tracing.Metadata:
        """What goes with every call to this worker."""
        return tracing.metadata() + self._credentials.metadata

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around one call."""
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
        """Keeps the channel open until ``leave``, also after ``retire``: for a hold."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """The end of ``use``."""
        with self._lock:
            self._users -= 1
            over = self._retired and not self._users
        if over:
            self.close()

    def retire(self) -> None:
        """No longer wanted; closes once nobody uses it. Idempotent."""
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

    def _stub(self, path: str, kind: str) -> Any:
        stub = self._stubs.get(path)
        if stub is None:
            stub = self._stubs[path] = _Saying(getattr(self._channel, kind)(path), self.metadata)
        return stub


class _Saying:
    """A call of gRPC's that says for which request it is made, and whatever else goes with every call."""

    __slots__ = ("_call", "_metadata")

    def __init__(self, call: Any, metadata: Callable[[], tracing.Metadata]) -> None:
        self._call = call
        self._metadata = metadata

    def __call__(self, message: Any, *, timeout: float) -> Any:
        return self._call(message, timeout=timeout, metadata=self._metadata())

    def future(self, message: Any, *, timeout: float) -> Any:
        """The same, not waited for."""
        return self._call.future(message, timeout=timeout, metadata=self._metadata())
