"""The bulk protocol (BULK.md): frames, connections with the proof of both ends, files handed over, runs of chunks.

The socket never blocks: every step waits in ``poll`` for at most ``idle_s`` and until the request's own end. So bytes
arrive in the caller's memory only while the caller is in a call of this module. Used by one thread at a time.
"""

from __future__ import annotations

import array
import ctypes
import encodings.idna  # noqa: F401 - connecting imports it, which fails once no descriptor is left
import enum
import errno
import hashlib
import hmac
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import Pieces, Planes, address_of, byte_length, skip
from kvstore.core.executor import within
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.header import checksum
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.transport.limits import REQUEST_BYTES_MAX

# Frames and their short payloads.


VERSION = 1
MAGIC = b"KV"
HEAD = struct.Struct("<2sHIQ")
HEAD_BYTES = HEAD.size
CONTROL_BYTES_MAX = 128 << 10
"""Limit of a payload that is neither a request nor bytes of chunks."""
RUN_BYTES = 8 << 20
"""Bytes of several chunks that go together, unless there is reason for more."""
RUN_BYTES_MAX = 32 << 20
"""Limit of what READY allows for several chunks in one CHUNKS frame; one chunk alone may be larger."""
FILES_MAX = 64
"""Limit of files in one FILES frame; the kernel allows 253."""
FILES_AHEAD = 2
"""FILES frames that a worker sends before the client has taken the first of them."""
NOT_LENT = (1 << 64) - 1
"""The offset in SLOTS of a chunk that is not lent."""


class FrameKind(enum.IntEnum):
    """The kinds of frames. Below 64 from client to worker, above from worker to client."""

    HELLO = 1
    ARENA = 2
    GET = 3
    TAKEN = 4
    PUT = 6
    PLACED = 7
    CHUNKS = 8
    MAP = 9
    CALL = 12

    WELCOME = 64
    SLOTS = 65
    FILES = 66
    IMAGES = 67
    END = 68
    READY = 69
    STORED = 70
    REFUSED = 71
    MEMORY = 72
    ANSWER = 77


REQUESTS = (FrameKind.GET, FrameKind.PUT, FrameKind.CALL)
BULKY = (FrameKind.IMAGES, FrameKind.CHUNKS)
SHORT_CALLS = ("MatchBlocks", "Hold", "Release")
"""The calls that a CALL can be, in the order of their numbers: those that an engine waits for before it reads."""


@dataclass(frozen=True, slots=True)
class Head:
    """The 16 bytes before each payload."""

    kind: FrameKind
    request: int
    length: int


class Mode(enum.IntEnum):
    """The most that the client of a GET takes."""

    STREAM = 0
    """Images as bytes."""
    FILES = 1
    """Also open files of chunks that are not in memory."""
    SLOTS = 2
    """Also slots of the memory that it has mapped."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The fields before the message in a request."""

    timeout_s: float
    flag: int
    """A get's mode; of a call its number; 0 for a put."""
    message: bytes


@dataclass(frozen=True, slots=True)
class LentSlots:
    """``found`` chunks are there; the image of each from index ``first`` on is at its offset in the worker's memory."""

    found: int
    first: int
    offsets: Sequence[int]
    """NOT_LENT for a chunk that comes in another frame, if at all."""


_REQUEST = struct.Struct("<dB7x")
_SPAN = struct.Struct("<II")
SPAN_BYTES = _SPAN.size
PLACED = struct.Struct("<IIQ")
"""Payload of PLACED: the first chunk and the number of a run, and where in the arena it begins."""
READY = struct.Struct("<III")
"""Payload of READY: the first chunk and the number of those to send, and the bytes that may go together."""
ARENA = struct.Struct("<Q")
"""Payload of ARENA and MEMORY: the size in bytes."""


def encode_head(kind: FrameKind, request: int, length: int) -> bytes:
    """Encodes the head of a frame."""
    return HEAD.pack(MAGIC, kind, request, length)


def decode_head(raw: bytes | bytearray | memoryview) -> Head:
    """Decodes a head. Raises InvalidRequest if it is not one, or if its payload is larger than its kind may have."""
    magic, number, request, length = HEAD.unpack(raw)
    if magic != MAGIC or number not in FrameKind._value2member_map_:
        raise InvalidRequest("the peer sent bytes that are not a frame of the bulk protocol: the connection is closed")
    kind = FrameKind(number)
    most = REQUEST_BYTES_MAX if kind in REQUESTS or kind is FrameKind.ANSWER else CONTROL_BYTES_MAX
    if kind not in BULKY and length > most:
        raise InvalidRequest(f"a {kind.name} frame claims {length} bytes: expected at most {most}")
    return Head(kind, request, length)


def encode_request(timeout_s: float, flag: int, message: bytes) -> bytes:
    """Encodes the payload of a request."""
    return _REQUEST.pack(timeout_s, flag) + message


def decode_request(payload: bytes) -> RequestHeader:
    """Decodes the payload of a request. Raises InvalidRequest."""
    if len(payload) < _REQUEST.size:
        raise InvalidRequest(f"a request has {len(payload)} bytes: expected at least {_REQUEST.size}")
    timeout_s, flag = _REQUEST.unpack_from(payload)
    if not timeout_s > 0:
        raise InvalidRequest(f"the timeout of a request is {timeout_s}: expected more than 0 seconds")
    return RequestHeader(timeout_s, flag, payload[_REQUEST.size :])


def encode_span(first: int, count: int) -> bytes:
    """Encodes the payload of FILES, which also begins that of IMAGES and CHUNKS."""
    return _SPAN.pack(first, count)


def decode_span(payload: bytes) -> tuple[int, int]:
    """Decodes the payload of ``encode_span``. Raises InvalidRequest."""
    first, count = unpacked(_SPAN, payload)
    return first, count


def encode_slots(lent: LentSlots) -> bytes:
    """Encodes the payload of SLOTS."""
    return _SPAN.pack(lent.found, lent.first) + struct.pack(f"<{len(lent.offsets)}Q", *lent.offsets)


def decode_slots(payload: bytes) -> LentSlots:
    """Decodes the payload of SLOTS. Raises InvalidRequest."""
    found, first = decode_span(payload[:SPAN_BYTES])
    count, rest = divmod(len(payload) - SPAN_BYTES, 8)
    if rest or first + count > found:
        raise InvalidRequest(f"{count} slots from chunk {first} on came, and {rest} bytes: expected those of {found}")
    return LentSlots(found, first, struct.unpack_from(f"<{count}Q", payload, SPAN_BYTES))


def unpacked(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """Unpacks a payload of exactly this structure. Raises InvalidRequest."""
    if len(payload) != layout.size:
        raise InvalidRequest(f"a frame has {len(payload)} bytes: expected {layout.size}")
    return layout.unpack(payload)


# Sockets, made at both ends here alone. TLS wraps those between hosts.


BACKLOG = 128


def listen_unix(path: str) -> socket.socket:
    """Returns a listening unix socket at ``path``, for this user alone. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_tcp(host: str, port: int) -> socket.socket:
    """Returns a listening TCP socket. The system chooses port 0; ``host`` may have brackets. Raises OSError."""
    host = host.removeprefix("[").removesuffix("]")
    host = "0.0.0.0" if host == "*" else host
    is_v6 = ":" in host
    listener = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
    listener.setblocking(False)
    return listener


def dial_unix(path: str, timeout_s: float) -> socket.socket:
    """Connects to a worker on this host. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connects to a worker, at one of its addresses, within this time. Raises OSError."""
    ends_s, host, found = time.monotonic() + timeout_s, host.removeprefix("[").removesuffix("]"), list[str]()

    def resolve(flags: int = 0) -> None:
        with suppress(OSError):
            for each in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, flags):
                found.append(socket.getnameinfo(each[4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0])

    resolve(socket.AI_NUMERICHOST)
    if not found:
        within(timeout_s, resolve)  # a name server may be silent for longer
    failed = OSError(f"no address of {host} was found in time")
    while found:
        left_s = (ends_s - time.monotonic()) / len(found)  # one that is silent leaves time for the next
        try:
            sock = socket.create_connection((found.pop(0), port), max(0.001, left_s))
            sock.settimeout(timeout_s)
            return sock
        except OSError as cause:
            failed = cause
    raise failed


# Grants: two ends that met over gRPC prove it on another connection, without sending their secret.


GRANT_BYTES = 16
SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32
HELLO = struct.Struct(f"<{GRANT_BYTES}s{NONCE_BYTES}s{PROOF_BYTES}s")
"""Payload of HELLO: grant id, nonce and proof."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to open one connection."""

    id: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> Grant:
        """Returns a grant that no other client has."""
        return cls(os.urandom(GRANT_BYTES), os.urandom(SECRET_BYTES))

    def hello(self, nonce: bytes) -> bytes:
        """Returns the client's greeting."""
        return HELLO.pack(self.id, nonce, _proof(self.secret, b"client", nonce))

    def welcome(self, nonce: bytes) -> bytes:
        """Returns the worker's answer."""
        return _proof(self.secret, b"worker", nonce)

    def is_welcome(self, nonce: bytes, payload: bytes) -> bool:
        """True if an answer comes from the worker that gave the grant."""
        return hmac.compare_digest(self.welcome(nonce), payload)

    def is_hello(self, nonce: bytes, proof: bytes) -> bool:
        """True if a greeting comes from the client that was given the grant."""
        return hmac.compare_digest(_proof(self.secret, b"client", nonce), proof)


def boot_id() -> str:
    """Returns the id of this boot of this host; empty if the system does not say.

    Raises OSError if this process has no file descriptor left to read it: that says nothing about the host.
    """
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return ""


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hashlib.blake2b(role + nonce, key=secret, digest_size=PROOF_BYTES).digest()


# Bytes of the bulk protocol over TLS, which handles one record at a time, not pieces or several buffers.


RECORD_BYTES = 1 << 14
"""Most bytes of one record."""


def send_records(sock: ssl.SSLSocket, pieces: Pieces, bytes_max: int) -> int:
    """Sends as many records as it can, at least one, and about ``bytes_max``; returns how many bytes.

    Raises SSLWantReadError or SSLWantWriteError if it can send nothing: then the same pieces must come again.
    """
    sent = 0
    while sent < bytes_max and pieces:
        try:
            count = sock.send(_record(pieces, bytes_max))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if sent:
                break
            raise
        sent += count
        pieces = skip(pieces, count)
    return sent


def receive_records(sock: ssl.SSLSocket, pieces: Pieces, bytes_max: int) -> int:
    """Fills ``pieces`` with available bytes, at least one, and about ``bytes_max``; returns how many, 0 at the end.

    Raises SSLWantReadError or SSLWantWriteError if nothing is there yet.
    """
    came = 0
    for piece in pieces:
        at = 0
        while at < len(piece) and came < bytes_max:
            try:
                count = sock.recv_into(piece[at:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if came:
                    return came
                raise
            if not count:
                return came
            at += count
            came += count
    return came


def _record(pieces: Pieces, bytes_max: int) -> bytes | memoryview:
    """Returns the first bytes, for one call. Joins small pieces: else each would be a record of its own."""
    first = next(at for at, piece in enumerate(pieces) if len(piece))
    if len(pieces[first]) >= RECORD_BYTES:
        return pieces[first][:bytes_max]
    joined: list[memoryview] = []
    left = RECORD_BYTES
    for piece in pieces[first:]:
        joined.append(piece[:left])
        left -= len(joined[-1])
        if not left:
            break
    return b"".join(joined)


IOV_MAX = os.sysconf("SC_IOV_MAX")
STEP_BYTES = 1 << 19
"""Most bytes of one system call if they are then verified in the cache, or encrypted with TLS."""
BUFFER_BYTES = 4 << 20
"""Buffer of a unix socket, which does not grow by itself as that of TCP does."""
SILENCE_S = 60
PROBE_S = 15
PROBES = 4
"""The kernel probes a TCP peer that is silent for a minute, and gives it up after another minute without an answer.
Otherwise a connection to a vanished host would stay open for hours.
"""
_FD = array.array("i").itemsize
_CUT = int(socket.MSG_CTRUNC)
"""As a plain number: that of the standard library takes two microseconds to look for."""


class LinkBroken(Unavailable):
    """The connection ended, or its peer broke the protocol."""


class LinkLate(Unavailable):
    """The peer moved nothing for too long, or the request took too long."""


class Channel:
    """Frames over a connected stream socket, which it owns; one frame may bring ``files_max`` files along."""

    def __init__(self, sock: socket.socket, idle_s: float, files_max: int = FILES_MAX) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.is_unix = sock.family == socket.AF_UNIX
        """True if files can be handed over."""
        if self.is_unix:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", SILENCE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._files_max = files_max
        self._room = socket.CMSG_SPACE(files_max * _FD) if self.is_unix else 0
        self._idle_s = idle_s
        self._ends_s = float("inf")
        self._files: list[int] = []
        self._poll = select.poll()
        self.alive = True
        """False once it is closed or has failed: then it has no use any more."""

    def fileno(self) -> int:
        """Returns the descriptor, for selectors."""
        return self._socket.fileno()

    def limit(self, idle_s: float, most_s: float) -> None:
        """Limits each step from now on to ``idle_s``, and all of them together to ``most_s``.

        Raises LinkLate if that is no time at all: no request says that it has none.
        """
        if most_s <= 0:
            raise LinkLate("no time is left for a request")
        self._idle_s = idle_s
        self._ends_s = time.monotonic() + most_s

    def is_quiet(self) -> bool:
        """True if nothing came and the peer is there: between requests it has nothing to say."""
        if not self.alive or self.has_pending:
            return False
        self._poll.register(self._socket, select.POLLIN)
        return not self._poll.poll(0)

    @property
    def has_pending(self) -> bool:
        """True if bytes have come that were not received and that no selector sees."""
        return isinstance(self._socket, ssl.SSLSocket) and bool(self._socket.pending())

    def send(
        self,
        kind: FrameKind,
        request: int,
        pieces: Sequence[bytes | bytearray | memoryview] = (),
        files: Sequence[int] = (),
    ) -> None:
        """Sends one frame, and the files with its first byte. Raises LinkBroken, LinkLate."""
        views = [memoryview(piece) for piece in pieces]
        head = encode_head(kind, request, byte_length(views))
        self.send_bytes([memoryview(head), *views], files)

    def send_bytes(self, pieces: Pieces, files: Sequence[int] = ()) -> None:
        """Sends bytes of a frame that was begun."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        left = byte_length(pieces)
        while left:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    count = send_records(self._socket, pieces, STEP_BYTES)
                else:
                    count = self._socket.sendmsg(pieces[:IOV_MAX], ancillary)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT)
                continue
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
                continue
            except OSError as cause:
                raise self.break_off(f"sending failed: {cause}") from cause
            ancillary = []
            left -= count
            if left:
                pieces = skip(pieces, count)

    def receive_head(self) -> Head:
        """Receives the head of the next frame. Raises LinkBroken also if it is not a head."""
        raw = bytearray(HEAD_BYTES)
        self._receive_small(memoryview(raw))
        try:
            return decode_head(raw)
        except InvalidRequest as cause:
            raise self.break_off(str(cause)) from cause

    def receive(self, length: int) -> bytes:
        """Receives the payload of a frame that is not bulky."""
        payload = bytearray(length)
        self._receive_small(memoryview(payload))
        return bytes(payload)

    def receive_frame(self, *kinds: FrameKind) -> tuple[Head, bytes]:
        """Receives the next frame, which must be one of ``kinds``, none of them bulky. Raises LinkBroken otherwise."""
        head = self.receive_head()
        self.expect(head, *kinds)
        return head, self.receive(head.length)

    def expect(self, head: Head, *kinds: FrameKind) -> None:
        """Raises LinkBroken unless the frame is one of ``kinds``."""
        if head.kind not in kinds:
            raise self.break_off(f"a {head.kind.name} frame came: expected {' or '.join(kind.name for kind in kinds)}")

    def receive_some(self, pieces: Pieces, bytes_max: int = STEP_BYTES) -> int:
        """Writes received bytes, at most ``bytes_max``, into ``pieces``; returns the count, at least 1."""
        while True:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    count = receive_records(self._socket, pieces, min(bytes_max, STEP_BYTES))
                else:
                    count = self._socket.recvmsg_into(_step(pieces, bytes_max))[0]
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN)
                continue
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
                continue
            except OSError as cause:
                raise self.break_off(f"receiving failed: {cause}") from cause
            if not count:
                raise self.break_off("the peer closed the connection")
            return count

    def receive_into(self, pieces: Pieces) -> None:
        """Fills ``pieces``."""
        left = byte_length(pieces)
        while left:
            count = self.receive_some(pieces, left)
            left -= count
            if left:
                pieces = skip(pieces, count)

    @property
    def moves_natively(self) -> bool:
        """True if native code may move bytes here: it does not know TLS."""
        return is_available() and not isinstance(self._socket, ssl.SSLSocket)

    def receive_by(self, step: Callable[[int], int]) -> int:
        """Calls ``step(descriptor)``, native code that receives, until it is not BLOCKED; returns its result."""
        return self._moved("receiving", step, select.POLLIN)

    def send_by(self, step: Callable[[int], int]) -> int:
        """Calls ``step(descriptor)``, native code that sends, until it is not BLOCKED; returns its result."""
        return self._moved("sending", step, select.POLLOUT)

    def take_files(self, count: int) -> list[int]:
        """Returns the files of the last frame, which the caller closes. Raises LinkBroken for another count."""
        files, self._files = self._files, []
        if len(files) != count:
            _close(files)
            raise self.break_off(f"{len(files)} files came: expected {count}")
        return files

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self.alive = False
        files, self._files = self._files, []
        _close(files)
        self._socket.close()

    def cut(self) -> None:
        """Ends the connection under a thread that uses it: that thread then fails, and closes it."""
        self.alive = False
        with suppress(OSError):
            # Not SSLSocket's shutdown: it first drops the encryption, and the other thread would go on in plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _receive_small(self, view: memoryview) -> None:
        """Fills ``view``, and takes in the files that come along."""
        if isinstance(self._socket, ssl.SSLSocket):
            while len(view):
                view = view[self.receive_some([view]) :]
            return
        while len(view):
            try:
                count, ancillary, flags, _ = self._socket.recvmsg_into(
                    [view[:CONTROL_BYTES_MAX]], self._room, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError as cause:
                raise self.break_off(f"receiving failed: {cause}") from cause
            self._take_in(ancillary, bool(flags & _CUT))
            if not count:
                raise self.break_off("the peer closed the connection")
            view = view[count:]

    def _take_in(self, ancillary: list[tuple[int, int, bytes]], is_cut: bool) -> None:
        """Keeps the files that came along. Raises LinkBroken if they are too many, or some are lost."""
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._files += array.array("i", raw[: len(raw) - len(raw) % _FD])
        if is_cut and len(self._files) < self._files_max:
            # There was room for more: the kernel found no descriptors for them.
            raise self.break_off("no file descriptors for the files that came: raise the limit (ulimit -n)")
        if is_cut or len(self._files) > self._files_max:
            raise self.break_off("more files came than a frame may have")

    def _moved(self, what: str, step: Callable[[int], int], event: int) -> int:
        while (status := step(self._socket.fileno())) == native.BLOCKED:
            self._wait(event)
        if status < 0:
            raise self.break_off(f"{what} failed: {os.strerror(-status)}")
        return status

    def _wait(self, event: int) -> None:
        left_s = min(self._idle_s, self._ends_s - time.monotonic())
        self._poll.register(self._socket, event)
        if left_s <= 0 or not self._poll.poll(left_s * 1000):
            self.alive = False
            raise LinkLate("the peer of a bulk connection moved nothing in time")

    def break_off(self, why: str) -> LinkBroken:
        """Gives the connection up; returns the error to raise."""
        self.alive = False
        return LinkBroken(f"bulk connection: {why}")


def _step(pieces: Pieces, bytes_max: int) -> Pieces:
    """Returns the first pieces, as many bytes as one system call may take."""
    size = 0
    for count, piece in enumerate(pieces):
        size += len(piece)
        if size >= bytes_max or count + 1 == IOV_MAX:
            rest = size - bytes_max
            return [*pieces[:count], piece[: len(piece) - rest]] if rest > 0 else pieces[: count + 1]
    return pieces


def _close(files: Sequence[int]) -> None:
    for fd in files:
        with suppress(OSError):
            os.close(fd)


# The page that a worker shares with a client: how many chunks of the current put the arena may forget.


LEDGER_BYTES = 4096
COUNT_BITS = 32


def entry_value(request: int, count: int) -> int:
    """Returns the entry that says that ``count`` leading chunks of the put are released."""
    return request << COUNT_BITS | count


def released_count(entry: int, request: int) -> int:
    """Returns how many leading chunks of a put are released; 0 while the entry is still an older put's."""
    return entry & (1 << COUNT_BITS) - 1 if entry >> COUNT_BITS == request else 0


# The checksums that travel with a run: one for each plane of chunks, or each block, few enough to cost nothing.


def plane_sums(planes: Planes, first: int, count: int) -> tuple[int, ...]:
    """Returns the XXH3-64 of each plane's part of ``count`` chunks from index ``first`` on, in order."""
    return tuple(checksum(plane.data) for row in planes.strided(first, count) for plane in row)


SUM_BYTES = 8
PARTS_BYTES = 1024
"""XXH3 takes so many bytes at a time: sections of a multiple are summed alone and as a part of their plane."""


def send_run(channel: Channel, planes: Planes, first: int, count: int) -> None:
    """Sends ``count`` chunks from index ``first`` on, plane by plane, and the checksum of each plane."""
    if not channel.moves_natively:
        channel.send_bytes([plane.data for row in planes.strided(first, count) for plane in row])
        channel.send_bytes([np.array(plane_sums(planes, first, count), "<u8").view(np.uint8).data])
        return
    assert planes.covers(first, count) and planes.is_contiguous
    bases = planes.addresses()
    rows, sums = _rows(bases, planes.offset(first), count * planes.section_bytes), np.zeros(len(bases), "<u8")
    gone = ctypes.create_string_buffer(native.SENT_BYTES)
    channel.send_by(partial(native.library.kv_send, rows.ctypes.data, sums.ctypes.data, gone))
    channel.send_bytes([sums.view(np.uint8).data])


def receive_planes(channel: Channel, planes: Pieces) -> bool:
    """Fills ``planes``, or blocks; True if the checksums that follow match them."""
    size_bytes = len(planes[0])
    if channel.moves_natively and size_bytes and all(len(plane) == size_bytes for plane in planes):
        bases = np.fromiter(map(address_of, planes), np.uint64, len(planes))
        return receive_sections(channel, bases, size_bytes, 1) is not None
    channel.receive_into(planes)
    sums = np.array(list(map(checksum, planes)), "<u8")
    return channel.receive(sums.nbytes) == sums.tobytes()


def receive_sections(
    channel: Channel, bases: npt.NDArray[np.uint64], size_bytes: int, parts: int
) -> npt.NDArray[np.uint64] | None:
    """Fills sections at ``bases``, which come as planes of ``parts`` sections each, natively.

    Returns the checksums of the sections; None if those of the planes, which follow, do not match. Sections have a
    multiple of PARTS_BYTES if a plane has several.
    """
    assert parts == 1 or size_bytes % PARTS_BYTES == 0
    rows, sums = _rows(bases, 0, size_bytes), np.zeros(len(bases), "<u8")
    planes = np.zeros(len(bases) // parts, "<u8") if parts > 1 else sums
    came = ctypes.create_string_buffer(native.ROWS_BYTES)
    receive = native.library.kv_receive_rows
    channel.receive_by(partial(receive, rows.ctypes.data, parts, sums.ctypes.data, planes.ctypes.data, came))
    return sums if channel.receive(planes.nbytes) == planes.tobytes() else None


def _rows(bases: npt.NDArray[np.uint64], offset: int, size_bytes: int) -> npt.NDArray[np.void]:
    """Returns the structure for native code: ``size_bytes`` from each base on."""
    rows: npt.NDArray[np.void] = np.zeros(1, native.CHUNK)
    rows["bases"] = bases.ctypes.data
    rows["offset"] = offset
    rows["section_count"] = len(bases)
    rows["section_bytes"] = size_bytes
    return rows
