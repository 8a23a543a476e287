"""The bulk connections to one worker, made at first use, kept open, used by one call at a time; and credentials."""

from __future__ import annotations

import enum
import fcntl
import logging
import mmap
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvstore.client.limits import ClientLimits
from kvstore.codec.image import ImagesIn
from kvstore.core.executor import Owner
from kvstore.core.grpc_channels import open_channel
from kvstore.core.metrics import ClientCount, Counts
from kvstore.core.tracing import Metadata
from kvstore.core.validate import brief, kind_of
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.format.header import PAGE_BYTES
from kvstore.root.posix import MEMORY_FILE_SYSTEMS, file_system_type
from kvstore.security.authentication import HEADER, TOKEN_BYTES_MAX, account_secret, proof
from kvstore.security.tls import Certificate, ClientTls, WatchedFiles, client_certificate, is_loopback, read_secret
from kvstore.tiers.arena import follow, map_arena, populate
from kvstore.transport.channel import (
    ARENA,
    LEDGER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SHORT_CALLS,
    VERSION,
    Channel,
    FrameKind,
    Grant,
    Head,
    LinkBroken,
    LinkLate,
    Mode,
    boot_id,
    dial_tcp,
    dial_unix,
    encode_request,
    released_count,
    unpacked,
)
from kvstore.transport.messages import parse, traced
from kvstore.transport.status import CallFailed, failure
from kvstore.v1 import kvstore_pb2 as pb

# A client's credentials: TLS files and a token file, reloaded when they change.


log = logging.getLogger(__name__)


class Credentials:
    """The credentials of one client, for all its connections. Thread-safe.

    Without ``tls`` and ``token_file`` connections are plain.
    """

    def __init__(self, tls: ClientTls | None = None, token_file: str | Path | None = None) -> None:
        if tls is not None and not isinstance(tls, ClientTls):
            raise InvalidRequest(f"tls is {kind_of(tls)}: expected kvstore.ClientTls")
        if token_file is not None and not isinstance(token_file, str | PathLike):
            # Only its type: it may be a token.
            raise InvalidRequest(f"token_file is {kind_of(token_file)}: expected the path of a file")
        self._tls = tls
        self._certificate: Certificate | None = client_certificate(tls) if tls is not None else None
        self._token_file = token_file
        self._watched = WatchedFiles([token_file] if token_file is not None else [])
        self._lock = threading.Lock()
        self._metadata: Metadata = ()
        self._token_version = 0
        self._is_due = True  # to be read, as after a read that failed

    def check(self, address: str) -> None:
        """Raises InvalidRequest if a file is wrong, or if a token would cross the network in the clear."""
        if self._token_file is not None and self._certificate is None and not is_loopback(address):
            raise InvalidRequest(
                f"a token for {address} would go over the network in the clear: give TLS files too "
                "(tls=, --tls-ca FILE)"
            )
        assert self.version >= 0

    @property
    def version(self) -> int:
        """Grows when anything has changed. Raises InvalidRequest if the files were never good."""
        self._read_token()
        return (self._certificate.version if self._certificate is not None else 0) + self._token_version

    @property
    def connection_version(self) -> int:
        """Grows when connections must be made again: after a new certificate, not after a new token."""
        return self._certificate.version if self._certificate is not None else 0

    @property
    def metadata(self) -> Metadata:
        """Returns the token as the metadata of a call."""
        if self._token_file is not None:
            self._read_token()
        return self._metadata

    def account(self, address: str) -> Metadata:
        """Returns the proof of our account for a worker of this host; nothing if the account has no secret."""
        if not is_loopback(address) or address.startswith("unix:"):
            return ()
        try:
            return ((HEADER, proof(account_secret(), address)),)
        except InvalidRequest as error:
            log.debug("client.no_account %s", error)  # a worker that asks for it says what to do
            return ()

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """Returns a channel to a worker; it connects at first use. Raises InvalidRequest."""
        if self._certificate is None:
            return open_channel(address, lambda: grpc.insecure_channel(address, options=options))
        name = self._name(address)
        if name is not None:
            options = [*options, ("grpc.ssl_target_name_override", name)]
        pems = self._certificate.pems
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        return open_channel(address, lambda: grpc.secure_channel(address, credentials, options=options))

    def wrapped(self, sock: socket.socket, address: str) -> socket.socket:
        """Wraps the socket of a bulk connection in TLS within its time-out; returns it as it is if calls are plain.

        Raises LinkLate or LinkBroken if the worker is silent or goes away during the handshake, otherwise Unavailable.
        """
        if self._certificate is None:
            return sock
        host = self._name(address) or address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            return self._certificate.context(server=False).wrap_socket(sock, server_hostname=host)
        except OSError as cause:  # includes SSLError
            sock.close()
            kind: type[Unavailable] = Unavailable
            if isinstance(cause, TimeoutError):
                kind = LinkLate
            elif isinstance(cause, (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                kind = LinkBroken
            raise kind(f"the TLS handshake with the bulk port of {address} failed: {cause}") from cause

    def _name(self, address: str) -> str | None:
        """Returns the name expected in the worker's certificate, if it is not the host."""
        if self._tls is not None and self._tls.server_name is not None:
            return self._tls.server_name
        return "localhost" if address.startswith("unix:") else None

    def _read_token(self) -> None:
        file = self._token_file
        # Asked in any case, so that changes count from before the first read on.
        if file is None or not (self._watched.changed() or self._is_due):
            return
        with self._lock:
            self._is_due = True
            try:
                token = read_secret(file, "token file", TOKEN_BYTES_MAX).decode(errors="replace").strip()
                if not token or not all("!" <= each <= "~" for each in token):
                    raise InvalidRequest(f"the token file {str(file)!r} holds no token: expected one of token issue")
            except KVStoreError:
                if self._metadata:
                    return  # perhaps it is just being replaced: keep the last token while it is valid
                raise
            self._is_due = False
            metadata = (("authorization", f"Bearer {token}"),)
            if metadata != self._metadata:
                self._metadata = metadata
                self._token_version += 1


PLAIN = Credentials()
"""Credentials of a client that proves nothing."""


# The path that chunk bytes take between a client and its workers.


BulkName = Literal["auto", "shared", "tcp", "grpc"]


class Bulk(enum.Enum):
    """The path of chunk bytes, where a worker can be reached on it; else they go over gRPC."""

    AUTO = "auto"
    """The shortest path that works: shared, else tcp, else grpc."""
    SHARED = "shared"
    TCP = "tcp"
    GRPC = "grpc"

    @classmethod
    def of(cls, value: Bulk | str | None) -> Bulk:
        """The path with this name; None reads KVSTORE_BULK from the environment. Raises InvalidRequest."""
        chosen = os.environ.get("KVSTORE_BULK", cls.AUTO.value) if value is None else value
        try:
            return cls(chosen)
        except ValueError as cause:
            names = ", ".join(way.value for way in cls)
            raise InvalidRequest(f"bulk={brief(chosen)} (or KVSTORE_BULK): expected one of {names}") from cause


# The arena: memory that a client shares with a worker for puts. It is a ring; the worker says which part is free.


ARENA_BYTES_MIN = 16 << 20


@dataclass(frozen=True, slots=True)
class _Region:
    start: int
    end: int
    upto: int
    """This region is free once the first ``upto`` chunks of the put are released."""


Ledger = npt.NDArray[np.uint64]
"""The worker's account of the arena: a page that the worker writes and we read."""


def map_ledger(fd: int) -> Ledger:
    """Takes over ``fd``. Raises OSError or ValueError if it is not a ledger."""
    try:
        # Sealed against shrinking: reading past a shortened file would kill us (SIGBUS).
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the ledger is not sealed against shrinking")
        return np.frombuffer(mmap.mmap(fd, LEDGER_BYTES, prot=mmap.PROT_READ), np.uint64)
    finally:
        os.close(fd)


class UploadArena:
    """A ring of ``size_bytes``. Regions are taken in order and become free in order."""

    def __init__(self, size_bytes: int, ledger: Ledger) -> None:
        """Raises OSError if there is no memory."""
        self.size_bytes = size_bytes
        self._ledger = ledger
        self.fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        with suppress(AttributeError, OSError):  # not every kernel has huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[Any] = np.frombuffer(mapped, np.uint8)
        # Pages are allocated ahead of the first put while it is copied, so no later put waits for them.
        self._closing = threading.Event()
        pages = memoryview(mapped)
        with suppress(RuntimeError):  # no more threads
            filling = partial(populate, pages, True, self._closing)
            threading.Thread(target=filling, name="kvstore-arena", daemon=True).start()
        self._request = 0
        self._regions: deque[_Region] = deque()

    def begin(self, request: int) -> None:
        """Begins a put. The worker has answered the one before, and needs nothing of it."""
        self._request = request
        self._regions.clear()

    def take(self, size_bytes: int, upto: int) -> int | None:
        """Returns the offset of a region for chunks of the put; it is free once its first ``upto`` are released.

        None if there is no room now.
        """
        while self._regions and released_count(int(self._ledger[0]), self._request) >= self._regions[0].upto:
            self._regions.popleft()
        start = self._place(size_bytes)
        if start is not None:
            self._regions.append(_Region(start, start + size_bytes, upto))
        return start

    def bytes_at(self, offset: int, size_bytes: int) -> npt.NDArray[Any]:
        """Returns the memory of a region."""
        return self._bytes[offset : offset + size_bytes]

    def close(self) -> None:
        """Closes the file; the worker keeps its own mapping of it. Idempotent."""
        self._closing.set()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._bytes = np.empty(0, np.uint8)

    def _place(self, size_bytes: int) -> int | None:
        if not self._regions:
            return 0 if size_bytes <= self.size_bytes else None
        tail, head = self._regions[0].start, self._regions[-1].end
        if head > tail:
            if head + size_bytes <= self.size_bytes:
                return head
            return 0 if size_bytes <= tail else None
        return head if head + size_bytes <= tail else None


# The memory of a worker on this host, mapped once for all connections to it, and leases on parts of it.
#
# The mapping is read-only. The worker may change a part of it once no client has a lease on it. The file is
# sealed, so the mapping outlives the worker.


class WorkerMemory:
    """The whole mapping. ``id`` is the worker's name for its memory; ``leases`` are those alive."""

    def __init__(self, fd: int, size_bytes: int, id: bytes, limits: ClientLimits) -> None:
        """Maps the file and closes ``fd``. Raises Unavailable if it cannot be mapped or could shrink."""
        self.id = id
        self._leases_max = limits.leases_max
        self.leases: set[int] = set()
        self._closing = threading.Event()
        self._unread: list[int] = [fd]
        """The file, until the first read: a client that only asks needs no pages of it."""
        try:
            self._bytes = map_arena(fd, size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def has_lease(self) -> bool:
        """True if one more lease may be kept."""
        return len(self.leases) < self._leases_max

    def close(self) -> None:
        """Stops background work. Arrays that refer to the mapping keep it alive. Idempotent."""
        self._closing.set()
        with suppress(IndexError):  # a read took it
            os.close(self._unread.pop())

    def images(self, offsets: Sequence[int], sizes_bytes: Sequence[int]) -> ImagesIn:
        """Images of these sizes at these offsets. Raises InvalidRequest where one is not all in the memory."""
        if any(offset % PAGE_BYTES for offset in offsets):
            raise InvalidRequest(f"images are said to be at {offsets}: expected multiples of {PAGE_BYTES}")
        self._follow()
        return ImagesIn(self._bytes, offsets, sizes_bytes)

    def _follow(self) -> None:
        """Maps pages ahead from the first read on."""
        try:
            fd = self._unread.pop()
        except IndexError:
            return  # done, or another thread does it
        try:
            # Without descriptors or threads the first read of each page takes longer.
            with suppress(OSError, RuntimeError):
                follow(self._bytes, fd, self._closing)
        finally:
            os.close(fd)


class ClientLease:
    """Keeps the worker from reusing leased chunks until it is closed. It is our end of a pipe.

    Closed by its user, or with the last array that refers to it. That may happen in any thread at any point, so closing
    takes no lock: it is one system call, and the kernel notifies the worker. A forked child inherits it.
    """

    __slots__ = ("_fd", "_live")

    def __init__(self, fd: int, live: set[int]) -> None:
        """Takes over ``fd``, and stays in ``live`` until it is closed."""
        self._fd = fd
        self._live = live
        live.add(fd)

    def close(self) -> None:
        """Closes our end of the pipe. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._live.discard(fd)
            with suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


class Leased:
    """Part of a worker's memory as numpy takes it: the base of arrays, which keep mapping and lease alive."""

    __slots__ = ("__array_interface__", "_alive")

    def __init__(self, part: memoryview, lease: ClientLease) -> None:
        at = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
        # Read-only: the array does not own its memory, so numpy refuses to make it writable.
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (len(part),), "data": (at, True)}
        self._alive = (part, lease)


_CODES = {code.value[0]: code for code in grpc.StatusCode}
NUMBER_MAX = 1 << 31
"""Requests on one connection, which is replaced then."""
PAUSE_S_MAX = 120.0
"""Longest pause between two attempts to connect."""


@dataclass(eq=False, repr=False)
class DataConnection:
    """One connection that both ends have proved, and its arena. Used by one call at a time."""

    channel: Channel
    address: str
    hands_files: bool
    """True if the worker gives the files of its root."""
    ledger: Ledger | None
    memory: WorkerMemory | None
    """The worker's memory, mapped; None if it has none or is on another host."""
    credentials_version: int
    """Version of the credentials with which this connection was made."""
    arena: UploadArena | None = None
    arena_bytes: int = 0
    """Bytes reserved for the arena, which may not exist yet (``Links.reserve_arena``)."""
    number: int = 0
    """The number of the last request."""
    known_devices: dict[int, bool] = field(default_factory=dict)
    """Whether reading files of a device never waits, by the device's number."""

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

    def next_number(self) -> int:
        """Returns the number for a new request."""
        self.number += 1
        return self.number

    def call(self, name: str, message: Message, timeout_s: float) -> bytes | CallFailed:
        """Makes a call of SHORT_CALLS; returns its answer, or its refusal, after which the connection goes on."""
        self.channel.limit(timeout_s, timeout_s)
        said = encode_request(timeout_s, SHORT_CALLS.index(name), traced(message))
        self.channel.send(FrameKind.CALL, self.next_number(), [said])
        head = self.channel.receive_head()
        self.channel.expect(head, FrameKind.ANSWER, FrameKind.REFUSED)
        payload = self.channel.receive(head.length)
        return self._refusal_in(payload) if head.kind is FrameKind.REFUSED else payload

    def receive(self, *kinds: FrameKind) -> tuple[Head, bytes]:
        """The next frame, one of ``kinds``. Raises CallFailed where the worker refuses."""
        head = self.receive_head(*kinds)
        return head, self.channel.receive(head.length)

    def receive_head(self, *kinds: FrameKind) -> Head:
        """The head of the next frame, one of ``kinds``. Raises CallFailed where the worker refuses."""
        head = self.channel.receive_head()
        if head.kind is FrameKind.REFUSED:  # the worker closes the connection after it
            refused = self._refusal_in(self.channel.receive(head.length))
            self.channel.alive = False
            raise refused
        self.channel.expect(head, *kinds)
        return head

    def _refusal_in(self, payload: bytes) -> CallFailed:
        """Returns the error that a REFUSED frame carries."""
        refusal = parse(pb.BulkRefusal, payload)
        code = _CODES.get(refusal.code, grpc.StatusCode.UNKNOWN)
        return failure(code, refusal.message, list(refusal.trailers.items()), self.address)

    def share(self, size_bytes: int, reserve: Callable[[int], int]) -> None:
        """Makes an arena that holds ``size_bytes`` twice, or as much as can be had.

        ``reserve(bytes)`` returns how many of those bytes the arena may have.
        """
        arena, ledger = self.arena, self.ledger
        if ledger is None or (arena is not None and arena.size_bytes >= size_bytes):
            return
        # Twice, so that a run finds room in the ring while those before it are being written.
        size = arena.size_bytes if arena else 0
        wanted = reserve(max(ARENA_BYTES_MIN, 2 << (size_bytes - 1).bit_length()))
        if wanted <= size:
            return
        try:
            new = UploadArena(wanted, ledger)
        except (OSError, MemoryError):
            reserve(size)
            return
        if arena is not None:
            arena.close()
        self.arena = new
        self.channel.send(FrameKind.ARENA, 0, [ARENA.pack(wanted)], [new.fd])

    def never_blocks(self, fd: int) -> bool:
        """True if reading this file never waits for a device."""
        device = os.fstat(fd).st_dev
        known = self.known_devices.get(device)
        if known is None:
            known = self.known_devices[device] = file_system_type(f"/proc/self/fd/{fd}") in MEMORY_FILE_SYSTEMS
        return known

    def close(self) -> None:
        """Closes connection and arena. Idempotent."""
        self.channel.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self.memory = None  # views hold their own reference to the mapping


class Links:
    """The connections to one worker. Thread-safe. ``ask`` makes the gRPC call OpenBulk: request, seconds -> answer.

    They are negotiated over gRPC, on the shortest path that works, and proved at both ends. No step of that takes
    longer than ``limits.probe_s``.
    """

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
        self._credentials = credentials
        self._bulk = bulk
        self._limits = limits
        self._ask = ask
        self._memory: WorkerMemory | None = None
        self._lock = threading.Lock()
        self._idle: list[DataConnection] = []
        self._open: set[DataConnection] = set()
        self._dialling = 0
        self._owner = Owner()
        self._retry_at_s = 0.0
        self._pause_s = 0.0
        self._closed = False

    @contextmanager
    def link(self, timeout_s: float) -> Iterator[DataConnection | None]:
        """Yields a connection for one call; None if the bytes have to go over gRPC. Raises what gRPC raises."""
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

    def note_broken(self, link: DataConnection, error: Exception) -> None:
        """Gives a connection up, and counts that."""
        link.channel.alive = False
        log.info("client.bulk_broken worker=%s why=%s", self._address, error)
        self._counters.add(ClientCount.BULK_BROKEN)

    def reserve_arena(self, link: DataConnection, size_bytes: int) -> int:
        """Reserves up to ``size_bytes`` for the arena of a connection; returns how many it may have.

        The arenas of all connections to the worker share one limit.
        """
        with self._lock:
            used = sum(each.arena_bytes for each in self._open if each is not link)
            link.arena_bytes = max(0, min(size_bytes, self._limits.arena_bytes_max - used))
            return link.arena_bytes

    def close(self) -> None:
        """Closes all connections; calls in progress fail. Idempotent."""
        if not self._owner.is_here:
            return  # they belong to our parent
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = set(self._open) - set(idle)
            self._open.clear()
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        for link in idle:
            link.close()
        for link in busy:
            link.channel.cut()

    def _take(self, timeout_s: float) -> DataConnection | None:
        if self._bulk is Bulk.GRPC:
            return None
        self._owner.check()
        version = self._credentials.version  # first: it may raise, and a link taken by then would be lost
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
                is_full = link is None and len(self._open) + self._dialling >= self._limits.bulk_links_max
                pause_s = self._pause_s  # after a failure one caller dials at a time
                dials = not (link or is_full or self._closed or (pause_s and self._dialling))
                dials = dials and time.monotonic() >= self._retry_at_s
                self._dialling += dials
            if link is None:
                break
            if link.channel.is_quiet() and link.credentials_version == version:
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
            self._pause_s = 0.0 if link else max(self._limits.bulk_retry_s, min(2 * pause_s, PAUSE_S_MAX))
            self._retry_at_s = time.monotonic() + self._pause_s
        return link

    def _give(self, link: DataConnection) -> None:
        with self._lock:
            if link.channel.alive and link.number < NUMBER_MAX and not self._closed:
                self._idle.append(link)
                return
        self._drop(link)

    def _drop(self, link: DataConnection) -> None:
        with self._lock:
            self._open.discard(link)
        link.close()

    def _dial(self, timeout_s: float) -> DataConnection | None:
        """Dials the worker on the shortest allowed path that works; returns None, and logs why, if none does."""
        answer: pb.OpenBulkResponse | None = None
        reasons: dict[Bulk, str] = {}
        for way, dial in ((Bulk.SHARED, self._dial_shared), (Bulk.TCP, self._dial_tcp)):
            if self._bulk not in (Bulk.AUTO, way):
                continue
            if answer is None and (answer := self._offer(timeout_s)) is None:
                reasons[way] = "the worker does not know the bulk protocol"
                break
            try:
                return dial(answer)
            except (LinkBroken, LinkLate, TimeoutError) as error:
                reasons[way], answer = str(error), None  # its grant is used up
            except (OSError, KVStoreError, ValueError) as error:
                reasons[way] = str(error)
        why = "; ".join(f"{way.value}: {reason}" for way, reason in reasons.items())
        log.info("client.no_bulk worker=%s why=%s", self._address, why)
        return None

    def _offer(self, timeout_s: float) -> pb.OpenBulkResponse | None:
        """Asks the worker for its offer with a fresh grant; None if it does not know this call."""
        request = pb.OpenBulkRequest(version=VERSION).SerializeToString()
        try:
            return pb.OpenBulkResponse.FromString(self._ask(request, min(timeout_s, self._limits.probe_s)))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return None

    def _dial_shared(self, answer: pb.OpenBulkResponse) -> DataConnection:
        if not answer.unix_path:
            raise Unavailable("the worker offers no unix socket")
        if answer.boot_id != boot_id() or not answer.boot_id:
            raise Unavailable("it is on another host")
        channel = Channel(dial_unix(answer.unix_path, self._limits.probe_s), self._limits.probe_s)
        return self._greeted(channel, answer)

    def _dial_tcp(self, answer: pb.OpenBulkResponse) -> DataConnection:
        if not answer.tcp_port or self._address.startswith("unix:"):
            raise Unavailable("the worker offers no port")
        host = self._address.rpartition(":")[0]
        sock = self._credentials.wrapped(dial_tcp(host, answer.tcp_port, self._limits.probe_s), self._address)
        return self._greeted(Channel(sock, self._limits.probe_s), answer)

    def _greeted(self, channel: Channel, answer: pb.OpenBulkResponse) -> DataConnection:
        """Proves, on both ends, knowledge of the secret that only gRPC carried."""
        version = self._credentials.version
        try:
            channel.limit(self._limits.probe_s, self._limits.probe_s)
            grant, nonce = Grant(answer.grant, answer.secret), os.urandom(NONCE_BYTES)
            channel.send(FrameKind.HELLO, 0, [grant.hello(nonce)])
            head, proof = channel.receive_frame(FrameKind.WELCOME)
            if head.length != PROOF_BYTES or not grant.is_welcome(nonce, proof):
                raise Unavailable("another program listens there, not the worker")
            ledger = map_ledger(channel.take_files(1)[0]) if channel.is_unix else None
            memory = self._mapped(channel, answer) if channel.is_unix and answer.memory else None
        except BaseException:
            channel.close()
            raise
        hands_files = answer.files and channel.is_unix
        return DataConnection(channel, self._address, hands_files, ledger, memory, version)

    def _mapped(self, channel: Channel, answer: pb.OpenBulkResponse) -> WorkerMemory | None:
        """Maps the worker's memory, once for all connections; None if it cannot be mapped here."""
        known = self._memory
        if known is not None and known.id == answer.memory:
            return known
        channel.send(FrameKind.MAP, 0)
        size_bytes = unpacked(ARENA, channel.receive_frame(FrameKind.MEMORY)[1])[0]
        fd = channel.take_files(1)[0]
        try:
            memory = WorkerMemory(fd, size_bytes, answer.memory, self._limits)
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
