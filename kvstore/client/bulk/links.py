"""The bulk connections to one worker: made at first use, kept open, used by one call at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import Message

from kvstore.client.bulk.arena import ARENA_BYTES_MIN, Arena
from kvstore.client.bulk.dialling import Dialled, Dialler
from kvstore.client.bulk.way import Bulk
from kvstore.client.credentials import PLAIN, Credentials
from kvstore.client.limits import ClientLimits
from kvstore.counts import ClientCount
from kvstore.errors import InvalidRequest
from kvstore.node.counters import Counts
from kvstore.root.posix import MEMORY_FILE_SYSTEMS, file_system_type
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.bulk.channel import LinkBroken
from kvstore.wire.bulk.frames import SHORT_CALLS, Head, Kind, Mode, encode_arena, encode_request
from kvstore.wire.messages import parse, traced
from kvstore.wire.statuses import Failure, failure

log = logging.getLogger(__name__)

AHEAD_S = 60.0
"""Time before another attempt to make a connection for short calls alone."""
CALLS_MIN = 2
"""A client that makes fewer short calls needs no connection for them."""
NUMBER_MAX = 1 << 31
"""Requests per connection, before it is replaced: request numbers must not run out."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class BulkRefused(Exception):
    """A worker refused a request on a bulk connection; carries the error to raise."""

    def __init__(self, failed: Failure) -> None:
        super().__init__(str(failed.error))
        self.failed = failed


class Link:
    """One connection and its arena. Used by one call at a time."""

    def __init__(self, dialled: Dialled, address: str) -> None:
        self.channel = dialled.channel
        self.hands_files = dialled.hands_files
        self.memory = dialled.memory
        """The worker's memory, mapped; None if it has none or is on another host."""
        self.arena: Arena | None = None
        self.arena_bytes = 0
        """Bytes reserved for the arena, which may not exist yet (``Links.reserve_arena``)."""
        self.address = address
        self._ledger = dialled.ledger
        self._number = 0
        self._never_blocks: dict[int, bool] = {}
        self.credentials_version = dialled.credentials_version
        """Version of the credentials with which this connection was made."""

    @property
    def is_shared(self) -> bool:
        """True if the worker is on this host and shares memory and files with it."""
        return self.channel.is_unix

    @property
    def mode(self) -> Mode:
        """The best mode for reads on this connection."""
        if self.memory is not None:
            return Mode.SLOTS
        return Mode.FILES if self.hands_files else Mode.STREAM

    @property
    def is_usable(self) -> bool:
        """True if another request can be sent."""
        return self.channel.alive and self._number < NUMBER_MAX

    def next_number(self) -> int:
        """Returns the number for a new request."""
        self._number += 1
        return self._number

    def call(self, name: str, message: Message, timeout_s: float) -> bytes | BulkRefused:
        """Makes a call of SHORT_CALLS; returns its answer, or its refusal, after which the connection goes on."""
        self.channel.limit(timeout_s, timeout_s)
        said = encode_request(timeout_s, SHORT_CALLS.index(name), traced(message))
        self.channel.send(Kind.CALL, self.next_number(), [said])
        head = self.channel.receive_head()
        self.channel.expect(head, Kind.ANSWER, Kind.REFUSED)
        payload = self.channel.receive(head.length)
        return self._refusal_in(payload) if head.kind is Kind.REFUSED else payload

    def receive(self, *kinds: Kind) -> tuple[Head, bytes]:
        """The next frame, one of ``kinds``. Raises BulkRefused where the worker refuses."""
        head = self.receive_head(*kinds)
        return head, self.channel.receive(head.length)

    def receive_head(self, *kinds: Kind) -> Head:
        """The head of the next frame, one of ``kinds``. Raises BulkRefused where the worker refuses."""
        head = self.channel.receive_head()
        if head.kind is Kind.REFUSED:  # the worker closes the connection after it
            refused = self._refusal_in(self.channel.receive(head.length))
            self.channel.alive = False
            raise refused
        self.channel.expect(head, *kinds)
        return head

    def _refusal_in(self, payload: bytes) -> BulkRefused:
        """Returns the error that a REFUSED frame carries."""
        refusal = parse(pb.BulkRefusal, payload)
        code = _CODES.get(refusal.code, grpc.StatusCode.UNKNOWN)
        return BulkRefused(failure(code, refusal.message, list(refusal.trailers.items()), self.address))

    def share(self, size_bytes: int, reserve: Callable[[int], int]) -> None:
        """Makes an arena that holds ``size_bytes`` twice, or as much as can be had.

        ``reserve(bytes)`` returns how many of those bytes the arena may have.
        """
        arena, ledger = self.arena, self._ledger
        if ledger is None or (arena is not None and arena.size_bytes >= size_bytes):
            return
        # Twice, so that a run finds room in the ring while those before it are being written.
        size = arena.size_bytes if arena else 0
        wanted = reserve(max(ARENA_BYTES_MIN, 2 << (size_bytes - 1).bit_length()))
        if wanted <= size:
            return
        try:
            new = Arena(wanted, ledger)
        except (OSError, MemoryError):
            reserve(size)
            return
        if arena is not None:
            arena.close()
        self.arena = new
        self.channel.send(Kind.ARENA, 0, [encode_arena(wanted)], [new.fd])

    def never_blocks(self, fd: int) -> bool:
        """True if reading this file never waits for a device."""
        device = os.fstat(fd).st_dev
        known = self._never_blocks.get(device)
        if known is None:
            known = self._never_blocks[device] = file_system_type(f"/proc/self/fd/{fd}") in MEMORY_FILE_SYSTEMS
        return known

    def close(self) -> None:
        """Closes connection and arena. Idempotent."""
        self.channel.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self.memory = None  # views hold their own reference to the mapping


class Links:
    """The connections to one worker. Thread-safe. ``ask`` makes the gRPC call OpenBulk: request, seconds -> answer."""

    def __init__(
        self,
        address: str,
        bulk: Bulk,
        limits: ClientLimits,
        ask: Callable[[bytes, float], bytes],
        credentials: Credentials = PLAIN,
        counters: Counts[ClientCount] | None = None,
    ) -> None:
        self._address = address
        self._counters = counters or Counts(ClientCount)
        self._links_max = limits.bulk_links_max
        self._credentials = credentials
        self._bulk = bulk
        self._limits = limits
        self._dialler = Dialler(address, bulk, limits.probe_s, ask, credentials)
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        # Weak: one that an interrupt (Ctrl-C) took from its user must not count for ever.
        self._open: weakref.WeakSet[Link] = weakref.WeakSet()
        self._dialling = 0
        self._pid = os.getpid()
        self._calls = 0
        """Short calls that were made."""
        self._calling: weakref.WeakSet[Link] = weakref.WeakSet()
        """The connections that short calls use now."""
        self._ahead_at_s = 0.0
        self._retry_at_s = 0.0
        self._closed = False

    @contextmanager
    def link(self, timeout_s: float) -> Iterator[Link | None]:
        """Yields a connection for one call; None if the bytes have to go over gRPC.

        Raises NoBulkPath if another path is required and there is none, NoAnswer, and what gRPC raises.
        """
        link = self._take(timeout_s)
        try:
            yield link
        except BaseException:
            if link is not None:
                link.channel.alive = False  # the call stopped in the middle of a request
            raise
        finally:
            if link is not None:
                self._give(link)

    def call(self, name: str, message: Message, timeout_s: float) -> bytes | None:
        """Makes a call of SHORT_CALLS; None if no connection is at hand, or it breaks.

        It waits for no connection, and half of them are left to bytes. A client that goes on asking, and moves no
        bytes, gets one in the background. Raises BulkRefused, LinkLate.
        """
        link = self._take_at_hand()
        if link is None:
            return None
        try:
            answer = link.call(name, message, timeout_s)
        except (LinkBroken, InvalidRequest) as error:
            link.channel.alive = False
            log.info("client.bulk_broken worker=%s why=%s", self._address, error)
            self._counters.add(ClientCount.BULK_BROKEN)
            return None
        except BaseException:
            link.channel.alive = False  # it stopped in the middle
            raise
        finally:
            with self._lock:
                self._calling.discard(link)
            self._give(link)
        if isinstance(answer, BulkRefused):
            raise answer
        return answer

    def reserve_arena(self, link: Link, size_bytes: int) -> int:
        """Returns how many of ``size_bytes`` the arena of a connection may have, beside the arenas of the worker's
        other connections, and reserves them for it.
        """
        with self._lock:
            used = sum(each.arena_bytes for each in self._open if each is not link)
            link.arena_bytes = max(0, min(size_bytes, self._limits.arena_bytes_max - used))
            return link.arena_bytes

    def close(self) -> None:
        """Closes all connections; calls in progress fail. Idempotent."""
        if self._pid != os.getpid():
            return  # they belong to our parent
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = set(self._open) - set(idle)
            self._open.clear()
        self._dialler.close()
        for link in idle:
            link.close()
        for link in busy:
            link.channel.cut()

    def _take_at_hand(self) -> Link | None:
        if self._pid != os.getpid():
            return None
        with self._lock:
            self._calls += 1
            fit = [link for link in self._idle if link.is_shared]
            if not fit and not self._open and not self._dialling:
                self._begin_ahead()
            if not fit or len(self._calling) > (self._links_max - 1) // 2:
                return None
            link = next((each for each in reversed(fit) if each.arena is None), fit[-1])
            self._idle.remove(link)
            self._calling.add(link)
        if link.channel.is_quiet() and link.credentials_version == self._credentials.version:
            return link
        with self._lock:
            self._calling.discard(link)
        self._drop(link)
        return None

    def _begin_ahead(self) -> None:
        """Makes a connection in the background; called with the lock."""
        now_s = time.monotonic()
        if self._calls < CALLS_MIN or now_s < self._ahead_at_s or self._closed:
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
            link = self._made(self._dialler.dial_here())
        except Exception as error:  # noqa: BLE001  # calls go over gRPC
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
                link = self._made(self._dialler.dial(timeout_s))
            finally:
                with self._lock:
                    self._dialling -= 1
                    if link is not None:
                        self._open.add(link)
            if link is None:
                self._retry_at_s = time.monotonic() + self._limits.bulk_retry_s
        if link is None and not (is_full or self._closed):
            self._dialler.check()
        return link

    def _made(self, dialled: Dialled | None) -> Link | None:
        return Link(dialled, self._address) if dialled is not None else None

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
