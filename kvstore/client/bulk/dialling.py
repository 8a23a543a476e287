"""Makes bulk connections to one worker: negotiated over gRPC, on the shortest path that works, proved at both ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvstore.client.bulk.arena import Ledger
from kvstore.client.bulk.memory import WorkerMemory
from kvstore.client.bulk.way import Bulk
from kvstore.client.credentials import Credentials
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel, LinkBroken, LinkLate
from kvstore.wire.bulk.frames import VERSION, Kind, decode_arena
from kvstore.wire.bulk.grants import NONCE_BYTES, PROOF_BYTES, Grant, boot_id
from kvstore.wire.bulk.sockets import dial_tcp, dial_unix

log = logging.getLogger(__name__)


class NoBulkPath(InvalidRequest):
    """No worker can be reached on the requested path (``bulk=``). Choose another, or ``auto``."""


class NoAnswer(Unavailable):
    """The worker offers the requested path but does not answer on it. Nothing was sent: try another worker."""


class _NotOffered(Unavailable):
    """The worker does not offer this path, or not to this client."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection that both ends have proved."""

    channel: Channel
    hands_files: bool
    """True if the worker gives the files of its root."""
    ledger: Ledger | None
    memory: WorkerMemory | None
    """The worker's memory, mapped; None if it has none, or is on another host."""
    credentials_version: int


class Dialler:
    """Makes connections to one worker. Thread-safe. ``ask`` makes the gRPC call OpenBulk: request, seconds -> answer.

    No step takes longer than ``step_s``.
    """

    def __init__(
        self,
        address: str,
        bulk: Bulk,
        step_s: float,
        ask: Callable[[bytes, float], bytes],
        credentials: Credentials,
    ) -> None:
        self._address = address
        self._bulk = bulk
        self._step_s = step_s
        self._ask = ask
        self._credentials = credentials
        self._lock = threading.Lock()
        self._memory: WorkerMemory | None = None
        self._closed = False
        self._why_not = ""
        self._worked = False
        """True once a connection worked on a path that the worker still offers."""
        self._is_silent = False
        """True if the worker offered a path at the last dial and did not answer on it."""
        self._warned = False

    def dial(self, timeout_s: float) -> Dialled | None:
        """Dials the worker on the shortest path that works; returns None, and logs why, if none does."""
        ways = [(Bulk.SHARED, self._dial_shared), (Bulk.TCP, self._dial_tcp)]
        if self._bulk is not Bulk.AUTO:
            # Twice: the offer may come from a worker that died after it. Asking again finds that out.
            ways = [each for each in ways if each[0] is self._bulk] * 2
        answer: pb.OpenBulkResponse | None = None
        reasons: dict[Bulk, str] = {}
        silent = False
        for way, dial in ways:
            if answer is None and (answer := self._offer(timeout_s)) is None:
                self._worked = False
                self._no_link("the worker does not know the bulk protocol", silent=False)
                return None
            try:
                dialled = dial(answer)
            except _NotOffered as error:
                reasons[way] = str(error)
                if self._bulk is not Bulk.AUTO:
                    self._worked = False
                    break
            except (LinkBroken, LinkLate, TimeoutError) as error:
                reasons[way] = str(error)
                silent, answer = True, None  # its grant is used up
                if self._bulk is not Bulk.AUTO:
                    break
            except (OSError, KVStoreError, ValueError) as error:
                reasons[way] = str(error)
                if self._bulk is not Bulk.AUTO:
                    answer = None
            else:
                self._warned, self._worked = False, True
                return dialled
        self._no_link("; ".join(f"{way.value}: {why}" for way, why in reasons.items()), silent=silent)
        return None

    def dial_here(self) -> Dialled | None:
        """Dials the worker if it is on this host. Raises what goes wrong."""
        answer = self._offer(self._step_s)
        return self._dial_shared(answer) if answer is not None else None

    def check(self) -> None:
        """Raises NoBulkPath if the required path is not offered, NoAnswer if it is offered and nobody answers."""
        if self._bulk is not Bulk.AUTO and (self._worked or self._is_silent):
            raise NoAnswer(f"worker {self._address} does not answer over {self._bulk.value}: {self._why_not}")
        if self._bulk is not Bulk.AUTO:
            raise NoBulkPath(
                f"bulk={self._bulk.value!r}: worker {self._address} cannot be reached that way "
                f"({self._why_not}): choose another, or bulk='auto'"
            )

    def close(self) -> None:
        """Lets go of the worker's memory. Idempotent."""
        with self._lock:
            self._closed = True
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _no_link(self, why: str, *, silent: bool) -> None:
        """Notes and logs why there is no connection. A silent worker is logged as a warning, once until it answers."""
        self._why_not, self._is_silent = why, silent
        level = logging.WARNING if silent and not self._warned else logging.INFO
        self._warned |= silent
        log.log(level, "client.no_bulk worker=%s why=%s", self._address, why)

    def _offer(self, timeout_s: float) -> pb.OpenBulkResponse | None:
        """Asks the worker for its offer with a fresh grant; None if it does not know this call."""
        request = pb.OpenBulkRequest(version=VERSION).SerializeToString()
        try:
            return pb.OpenBulkResponse.FromString(self._ask(request, min(timeout_s, self._step_s)))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return None

    def _dial_shared(self, answer: pb.OpenBulkResponse) -> Dialled:
        if not answer.unix_path:
            raise _NotOffered("the worker offers no unix socket")
        if answer.boot_id != boot_id() or not answer.boot_id:
            raise _NotOffered("it is on another host")
        channel = Channel(dial_unix(answer.unix_path, self._step_s), self._step_s)
        return self._greeted(channel, answer)

    def _dial_tcp(self, answer: pb.OpenBulkResponse) -> Dialled:
        if not answer.tcp_port or self._address.startswith("unix:"):
            raise _NotOffered("the worker offers no port")
        host = self._address.rpartition(":")[0]
        sock = self._credentials.wrapped(dial_tcp(host, answer.tcp_port, self._step_s), self._address)
        return self._greeted(Channel(sock, self._step_s), answer)

    def _greeted(self, channel: Channel, answer: pb.OpenBulkResponse) -> Dialled:
        """Proves, on both ends, knowledge of the secret that only gRPC carried."""
        version = self._credentials.version
        try:
            channel.limit(self._step_s, self._step_s)
            grant, nonce = Grant(answer.grant, answer.secret), os.urandom(NONCE_BYTES)
            channel.send(Kind.HELLO, 0, [grant.hello(nonce)])
            head, proof = channel.receive_frame(Kind.WELCOME)
            if head.length != PROOF_BYTES or not grant.is_welcome(nonce, proof):
                raise _NotOffered("another program listens there, not the worker")
            ledger = Ledger(channel.take_files(1)[0]) if channel.is_unix else None
            memory = self._mapped(channel, answer) if channel.is_unix and answer.memory else None
        except BaseException:
            channel.close()
            raise
        return Dialled(channel, answer.files and channel.is_unix, ledger, memory, version)

    def _mapped(self, channel: Channel, answer: pb.OpenBulkResponse) -> WorkerMemory | None:
        """Maps the worker's memory, once for all connections; None if it cannot be mapped here."""
        known = self._memory
        if known is not None and known.id == answer.memory:
            return known
        channel.send(Kind.MAP, 0)
        size_bytes = decode_arena(channel.receive_frame(Kind.MEMORY)[1])
        fd = channel.take_files(1)[0]
        try:
            memory = WorkerMemory(fd, size_bytes, answer.memory)
        except Unavailable as error:
            log.info("client.no_memory worker=%s why=%s", self._address, error)
            return None
        with self._lock:
            # Another connection may have been made at the same time: keep one mapping.
            left: WorkerMemory | None = memory
            if not self._closed and (self._memory is None or self._memory.id != answer.memory):
                left, self._memory = self._memory, memory
            used = self._memory
        if left is not None:
            left.close()
        return used
