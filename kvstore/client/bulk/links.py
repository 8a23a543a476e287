"""The bulk connections to one worker: negotiated over gRPC at first use, kept open, used by one call at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from kvstore.client.bulk.arena import Ledger
from kvstore.client.bulk.link import Link
from kvstore.client.bulk.memory import WorkerMemory
from kvstore.client.bulk.shortage import Shortage, links_max
from kvstore.client.bulk.way import Bulk
from kvstore.client.credentials import PLAIN, Credentials
from kvstore.client.limits import ClientLimits
from kvstore.counts import ClientCount, Counts
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import Channel, LinkBroken, LinkLate
from kvstore.wire.bulk.frames import VERSION, Kind, decode_arena
from kvstore.wire.bulk.grants import NONCE_BYTES, PROOF_BYTES, Grant, boot_id
from kvstore.wire.bulk.sockets import dial_tcp, dial_unix

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Time before a worker that offered only gRPC is asked again."""
AHEAD_S = 60.0
"""Time before another attempt to make a connection for short calls alone."""
CALLS_MIN = 2
"""A client that makes fewer short calls needs no connection for them."""


class NoBulkPath(InvalidRequest):
    """No worker can be reached on the requested path (``bulk=``). Choose another, or ``auto``."""


class NoAnswer(Unavailable):
    """The worker offers the requested path but does not answer on it. Nothing was sent: try another worker."""


class _NotOffered(Unavailable):
    """The worker does not offer this path, or not to this client."""


class Links:
    """The connections to one worker. Thread-safe. ``ask`` makes the gRPC call OpenBulk: request, seconds -> answer."""

    def __init__(
        self,
        address: str,
        bulk: Bulk,
        limits: ClientLimits,
        ask: Callable[[bytes, float], bytes],
        credentials: Credentials = PLAIN,
        shortage: Shortage | None = None,
    ) -> None:
        self._address = address
        self._shortage = shortage or Shortage(Counts(ClientCount))
        self._links_max = links_max(limits.bulk_links_max)
        self._credentials = credentials
        self._bulk = bulk
        self._limits = limits
        self._ask = ask
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        # Weak: one that an interrupt (Ctrl-C) took from its user must not count for ever.
        self._open: weakref.WeakSet[Link] = weakref.WeakSet()
        self._dialling = 0
        self._pid = os.getpid()
        self._memory: WorkerMemory | None = None
        self._calls = 0
        """Short calls that were made."""
        self._calling = 0
        """Short calls that use a connection now."""
        self._ahead_at_s = 0.0
        self._retry_at_s = 0.0
        self._why_not = ""
        self._worked = False
        """True once a connection worked on a path that the worker still offers."""
        self._is_silent = False
        """True if the worker offered a path at the last dial and did not answer on it."""
        self._warned = False
        self._closed = False

    @contextmanager
    def link(self, timeout_s: float) -> Iterator[Link | None]:
        """Yields a connection for one call; None if the bytes have to go over gRPC.

        Raises NoBulkPath if another path is required and there is none, NoAnswer, and what gRPC raises.
        """
        link = self._take(timeout_s)
        try:
            yield link
        except BaseException as error:
            if link is not None:
                link.channel.alive = False  # the call stopped in the middle of a request
            self._shortage.note(error)
            raise
        finally:
            if link is not None:
                self._give(link)

    @contextmanager
    def link_at_hand(self) -> Iterator[Link | None]:
        """Yields an idle connection to a worker on this host, for a short call; None if there is none.

        It waits for nothing. Half of the connections are left to bytes. A client that goes on asking, and moves no
        bytes, gets its connection in the background.
        """
        link = self._take_at_hand()
        try:
            yield link
        except BaseException:
            if link is not None:
                link.channel.alive = False  # the call stopped in the middle
            raise
        finally:
            if link is not None:
                with self._lock:
                    self._calling -= 1
                self._give(link)

    def reserve_arena(self, link: Link, size_bytes: int) -> int:
        """Returns how many of ``size_bytes`` the arena of a connection may have, beside the arenas of the worker's
        other connections, and reserves them for it.
        """
        with self._lock:
            used = sum(each.arena_bytes for each in self._open if each is not link)
            link.arena_bytes = max(0, min(size_bytes, self._limits.arena_bytes_max - used))
            return link.arena_bytes

    def broke(self, error: KVStoreError) -> None:
        """Notes that a call goes on over gRPC because its connection broke."""
        if not self._shortage.note(error):
            log.info("client.bulk_broken worker=%s why=%s", self._address, error)
        self._shortage.counters.add(ClientCount.BULK_BROKEN)

    def close(self) -> None:
        """Closes all connections; calls in progress fail. Idempotent."""
        if self._pid != os.getpid():
            return  # they belong to our parent
        with self._lock:
            self._closed = True
            memory, self._memory = self._memory, None
            idle, self._idle = self._idle, []
            busy = set(self._open) - set(idle)
            self._open.clear()
        if memory is not None:
            memory.close()
        for link in idle:
            link.close()
        for link in busy:
            link.channel.cut()

    def _take_at_hand(self) -> Link | None:
        if self._bulk in (Bulk.GRPC, Bulk.TCP) or self._pid != os.getpid():
            return None
        with self._lock:
            self._calls += 1
            fit = [link for link in self._idle if link.is_shared]
            if not fit and not self._open and not self._dialling:
                self._begin_ahead()
            if not fit or self._calling > (self._links_max - 1) // 2:
                return None
            link = next((each for each in reversed(fit) if each.arena is None), fit[-1])
            self._idle.remove(link)
            self._calling += 1
        if link.channel.is_quiet() and link.credentials_version == self._credentials.version:
            return link
        self._drop(link)
        with self._lock:
            self._calling -= 1
        return None

    def _begin_ahead(self) -> None:
        """Makes a connection in the background; called with the lock."""
        now_s = time.monotonic()
        if self._calls < CALLS_MIN or now_s < self._ahead_at_s or self._closed or self._shortage.is_on:
            return
        self._ahead_at_s = now_s + AHEAD_S
        self._dialling += 1
        try:
            threading.Thread(target=self._dial_ahead, name="kvstore-dial", daemon=True).start()
        except RuntimeError:  # no more threads
            self._dialling -= 1

    def _dial_ahead(self) -> None:
        link: Link | None = None
        try:
            answer = self._offer(self._limits.probe_s)
            link = self._dial_shared(answer) if answer is not None else None
        except Exception as error:  # noqa: BLE001  # calls go over gRPC
            self._shortage.note(error)
            log.debug("client.no_connection_ahead worker=%s why=%s", self._address, error)
        with self._lock:
            self._dialling -= 1
            if link is not None:
                self._open.add(link)
        if link is not None:
            self._give(link)

    def _take(self, timeout_s: float) -> Link | None:
        if self._bulk is Bulk.GRPC:
            return None
        if self._pid != os.getpid():
            raise InvalidRequest(
                "this store was connected before a fork, and a forked child must not use its parent's "
                "connections: connect in the child, and start the child by spawn"
            )
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
                is_full = link is None and len(self._open) + self._dialling >= self._links_max
                dials = not (link or is_full or self._closed) and time.monotonic() >= self._retry_at_s
                self._dialling += dials
            if link is None:
                break
            if link.channel.is_quiet() and link.credentials_version == self._credentials.version:
                return link
            # The worker went away or was restarted, or knows this connection by a token that was renewed since.
            self._drop(link)
        if dials:
            try:
                link = self._dial(timeout_s)
            finally:
                with self._lock:
                    self._dialling -= 1
                    if link is not None:
                        self._open.add(link)
                        self._worked = True
            if link is None:
                self._retry_at_s = time.monotonic() + RETRY_S
        if link is None and not (is_full or self._closed):
            self._check_auto()
        return link

    def _check_auto(self) -> None:
        """Raises NoBulkPath if the required path is not offered, NoAnswer if it is offered and nobody answers."""
        if self._shortage.is_on:
            return  # the shortage is in this process: the worker is reachable
        if self._bulk is not Bulk.AUTO and (self._worked or self._is_silent):
            raise NoAnswer(f"worker {self._address} does not answer over {self._bulk.value}: {self._why_not}")
        if self._bulk is not Bulk.AUTO:
            raise NoBulkPath(
                f"bulk={self._bulk.value!r}: worker {self._address} cannot be reached that way "
                f"({self._why_not}): choose another, or bulk='auto'"
            )

    def _give(self, link: Link) -> None:
        with self._lock:
            if link.is_usable and not self._closed:
                self._idle.append(link)
                return
        self._drop(link)

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._open.discard(link)
        link.close()

    def _dial(self, timeout_s: float) -> Link | None:
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
                link = dial(answer)
            except _NotOffered as error:
                reasons[way] = str(error)
                if self._bulk is not Bulk.AUTO:
                    self._worked = False
                    break
            except (LinkBroken, LinkLate, TimeoutError) as error:
                reasons[way] = str(error)
                silent, answer = not self._shortage.note(error), None  # its grant is used up
                if self._bulk is not Bulk.AUTO:
                    break
            except (OSError, KVStoreError, ValueError) as error:
                self._shortage.note(error)
                reasons[way] = str(error)
                if self._bulk is not Bulk.AUTO:
                    answer = None
            else:
                self._warned = False
                return link
        self._no_link("; ".join(f"{way.value}: {why}" for way, why in reasons.items()), silent=silent)
        return None

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
            return pb.OpenBulkResponse.FromString(self._ask(request, min(timeout_s, self._limits.probe_s)))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return None

    def _dial_shared(self, answer: pb.OpenBulkResponse) -> Link:
        if not answer.unix_path:
            raise _NotOffered("the worker offers no unix socket")
        if answer.boot_id != boot_id() or not answer.boot_id:
            raise _NotOffered("it is on another host")
        channel = Channel(dial_unix(answer.unix_path, self._limits.probe_s), self._limits.probe_s)
        return self._greeted(channel, answer)

    def _dial_tcp(self, answer: pb.OpenBulkResponse) -> Link:
        if not answer.tcp_port or self._address.startswith("unix:"):
            raise _NotOffered("the worker offers no port")
        host = self._address.rpartition(":")[0]
        sock = self._credentials.wrapped(dial_tcp(host, answer.tcp_port, self._limits.probe_s), self._address)
        return self._greeted(Channel(sock, self._limits.probe_s), answer)

    def _greeted(self, channel: Channel, answer: pb.OpenBulkResponse) -> Link:
        """Proves, on both ends, knowledge of the secret that only gRPC carried."""
        version = self._credentials.version
        try:
            channel.limit(self._limits.probe_s, self._limits.probe_s)
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
        link = Link(channel, answer.files and channel.is_unix, ledger, memory, self._address, self._shortage)
        link.credentials_version = version
        return link

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
            self._shortage.note(error)
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
