"""Workers and clients for the tests of bulk connections, and a client that speaks the protocol itself."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import DataConnection, WorkerMemory
from kvstore.transport.channel import NONCE_BYTES, Channel, FrameKind, Grant, dial_tcp, dial_unix, encode_head
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.patience import stretched
from tests.kit.stores import same as same
from tests.kit.wire import raw_stub
from tests.kit.workers import WAIT_S, Served

MEDIUM = Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=64)
"""128 KiB a chunk."""
WAYS = ("shared", "tcp", "grpc")


def tokens_and_kv(
    chunks: int, seed: int = 0, layout: Layout = MEDIUM
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float16]]:
    """Returns a prompt of this many chunks, different for each seed, and its KV."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1 << 31, chunks * layout.chunk_tokens)
    shape = layout.shape(len(tokens))
    kv = random.integers(0, 1 << 16, shape, dtype=np.uint16).view(np.float16)
    return tokens, kv


def hasty() -> ClientLimits:
    """Limits for calls to a worker that does not answer, beside some that it answers."""
    limits = ClientLimits(read_s=1.0, write_s=2.0, match_s=1.0, probe_s=0.5)
    return stretched(limits, "read_s", "write_s", "match_s", "probe_s")


def offered(served: Served) -> pb.OpenBulkResponse:
    """A grant, and where to take it."""
    with raw_stub(served) as stub:
        answer: pb.OpenBulkResponse = stub.OpenBulk(pb.OpenBulkRequest(version=1), timeout=WAIT_S)
        return answer


def dialled(served: Served, way: str) -> socket.socket:
    """A connection without a greeting."""
    assert served.worker.service.bulk is not None
    if way == "shared":
        return dial_unix(served.worker.service.bulk.unix_path, WAIT_S)
    return dial_tcp("127.0.0.1", served.worker.service.bulk.tcp_port, WAIT_S)


@contextmanager
def greeted(served: Served, way: str) -> Iterator[Channel]:
    """A connection that proved its grant."""
    answer = offered(served)
    channel = Channel(dialled(served, way), WAIT_S)
    try:
        grant, nonce = Grant(answer.grant, answer.secret), os.urandom(NONCE_BYTES)
        channel.send(FrameKind.HELLO, 0, [grant.hello(nonce)])
        _, proof = channel.receive_frame(FrameKind.WELCOME)
        assert grant.is_welcome(nonce, proof)
        for fd in channel.take_files(1 if way == "shared" else 0):
            os.close(fd)
        yield channel
    finally:
        channel.close()


def linked(channel: Channel, memory: WorkerMemory | None = None) -> DataConnection:
    """The client's end of a connection whose other end a test speaks for."""
    return DataConnection(channel, "worker", False, None, memory, 0)


def send_head(channel: Channel, kind: FrameKind, request: int, length: int) -> None:
    """Begins a frame whose ``length`` bytes follow by ``send_bytes``, or never come."""
    channel.send_bytes([memoryview(encode_head(kind, request, length))])


def is_closed(sock: socket.socket) -> bool:
    """True if the peer closes the connection, soon."""
    sock.settimeout(WAIT_S)
    try:
        while sock.recv(65_536):
            pass
    except ConnectionError:
        pass
    return True


def is_cut_off(channel: Channel) -> bool:
    """True if the worker closes this connection, soon."""
    with socket.socket(fileno=os.dup(channel.fileno())) as sock:
        return is_closed(sock)


def bulk_files_of(pid: int) -> list[str]:
    """The chunk files and shared memory that a process has open."""
    if pid == os.getpid():
        gc.collect()  # errors that tests looked at keep frames, and frames keep memory
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(entry))
    return [name for name in found if "/chunks/" in name or "memfd:kvstore" in name]


def shared_memory(size_bytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
