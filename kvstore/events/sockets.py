"""ZeroMQ sockets as vLLM's publisher has them: PUB for batches, ROUTER for those who ask for what they missed.

Frames of a batch are topic, number (8 bytes, big-endian) and payload. A request is an empty frame and the number to
begin at, and may name a topic; its answer is an empty frame, number and payload for each batch, and -1 at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.events.stream import END, Batch

SEND_MAX = 10_000
"""Batches that wait for a slow subscriber; the next ones it misses."""
REPLAY_SEND_MAX = 64
REQUESTS_MAX = 64
"""Requests taken in one turn."""
MESSAGE_BYTES_MAX = 4_096
"""The largest request that is read."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Files for CURVE: our certificate with its secret key, and a folder of the public keys that may connect."""

    certificate: str
    clients: str


@dataclass(frozen=True, slots=True)
class Request:
    """A subscriber asks for batches from a number on; of all topics if ``topic`` is None."""

    client: bytes
    seq: int
    topic: str | None


class Sockets:
    """Both sockets, bound. Used by one thread.

    Raises InvalidRequest for an endpoint or a key that makes no sense, Unavailable for one that is in use.
    """

    def __init__(self, publish: str, replay: str | None, curve: Curve | None = None) -> None:
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._open: list[zmq.Socket[bytes]] = []
        try:
            if curve is not None:
                self._authenticator = _authenticator(self._context, curve)
            self._pub = self._bound(zmq.PUB, publish, SEND_MAX, curve)
            self._router = None if replay is None else self._bound(zmq.ROUTER, replay, REPLAY_SEND_MAX, curve)
            if self._router is not None:
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self.close()
            raise
        self.publish = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where subscribers connect to, with the port that was chosen."""
        self.replay = "" if self._router is None else self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, topic: str, batch: Batch) -> None:
        """Publishes a batch. Never waits."""
        self._pub.send_multipart((topic.encode(), batch.seq.to_bytes(8, "big"), batch.payload))

    def requests(self, wait_s: float) -> Iterator[Request]:
        """Yields requests for replay; waits up to ``wait_s`` for the first."""
        if self._router is None:
            self._pub.poll(int(wait_s * 1000), zmq.POLLERR)
            return
        if not self._router.poll(int(wait_s * 1000)):
            return
        for _ in range(REQUESTS_MAX):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request = _request(frames)
            if request is not None:
                yield request

    def reply(self, client: bytes, batches: Iterable[Batch]) -> int:
        """Sends batches until the client takes no more for now; returns how many. Raises Gone if it went away."""
        assert self._router is not None
        sent = 0
        for batch in batches:
            try:
                self._router.send_multipart((client, b"", batch.seq.to_bytes(8, "big"), batch.payload), zmq.NOBLOCK)
            except zmq.Again:
                return sent
            except zmq.ZMQError as gone:
                raise Gone(str(gone)) from gone
            sent += 1
        return sent

    def close(self) -> None:
        """Closes both. Idempotent."""
        for socket in self._open:
            socket.close(linger=200)
        self._open = []
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()

    def _bound(self, kind: int, endpoint: str, send_max: int, curve: Curve | None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._open.append(socket)
        socket.setsockopt(zmq.SNDHWM, send_max)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        if curve is not None:
            public, secret = _certificate(curve.certificate)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as cause:
            if cause.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                raise Unavailable(f"cannot listen on {endpoint}: {cause}; choose another port, 0 is any") from cause
            raise InvalidRequest(f"{endpoint}: {cause}; expected tcp://ADDRESS:PORT or ipc://PATH") from cause
        return socket


class Gone(Exception):
    """The client of a replay went away."""


def ended() -> Batch:
    """The end of a replay."""
    return Batch(END, b"")


def _request(frames: list[bytes]) -> Request | None:
    """Parses a request; None for anything else."""
    if not 3 <= len(frames) <= 4 or frames[1] or len(frames[2]) != 8:
        return None
    topic = None if len(frames) == 3 else frames[3].decode(errors="replace")
    return Request(frames[0], int.from_bytes(frames[2], "big"), topic)


def _authenticator(context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> ThreadAuthenticator:
    if not Path(curve.clients).is_dir():
        raise InvalidRequest(f"{curve.clients} is no folder: expected one of public keys that may subscribe")
    found = ThreadAuthenticator(context)
    found.start()
    found.configure_curve(domain="*", location=curve.clients)
    return found


def _certificate(path: str) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as cause:
        raise InvalidRequest(f"{path}: {cause}: expected a certificate of zmq.auth.create_certificates") from cause
    if secret is None:
        raise InvalidRequest(f"{path} has no secret key: give the file that ends in .key_secret")
    return public, secret
