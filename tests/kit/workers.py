"""Workers for tests, in this process or in a separate one, and the raw calls of a foreign client."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

import kvstore
from kvstore import Layout
from kvstore.client.limits import ClientLimits
from kvstore.client.local import LocalTransport
from kvstore.client.pool import Bulk
from kvstore.client.store import Store
from kvstore.core.clock import Clock
from kvstore.core.namespace import Namespace
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.settings import NO_TIERS, Limits, TierSettings
from kvstore.format.header import checksum, decode
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.transport.status import ERROR_KEY
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.server import Worker
from tests.kit.images import encoded
from tests.kit.patience import PATIENCE_S, is_stopped
from tests.kit.patience import eventually as eventually
from tests.kit.stores import SMALL, kv_of, member_on

WAIT_S = PATIENCE_S
"""For what must happen soon."""


@dataclass(frozen=True)
class Served:
    """A worker and the member that it serves."""

    worker: Worker
    member: ClusterMember

    @property
    def address(self) -> str:
        return self.worker.address


@contextmanager
def serving(
    root: Root | Path | None = None,
    *,
    limits: Limits | None = None,
    worker_limits: WorkerLimits | None = None,
    listen: str = "127.0.0.1:0",
    clock: Clock | None = None,
    tiers: TierSettings = NO_TIERS,
) -> Iterator[Served]:
    """A worker on ``root`` (memory where none is given), stopped at the end."""
    opened = PosixRoot(root) if isinstance(root, Path) else root or MemoryRoot(MemoryFiles())
    member = member_on(opened, limits, clock, tiers=tiers)
    worker = Worker(member, listen, worker_limits)
    try:
        worker.start()
        yield Served(worker, member)
    finally:
        worker.stop()
        member.close()


def connected(
    *workers: Served | str,
    limits: ClientLimits | None = None,
    bulk: str | None = None,
    write: WriteMode | WriteModeName | None = None,
) -> Store:
    """A store over workers. Their counts may be as late as a busy machine makes them."""
    addresses = (each if isinstance(each, str) else each.address for each in workers)
    patient = replace(limits or ClientLimits(), stats_s=WAIT_S)
    return kvstore.connect(*addresses, limits=patient, bulk=Bulk.of(bulk), write=write)


@contextmanager
def reached(way: str, root: Root | None = None) -> Iterator[Store]:
    """A store on ``root`` (memory where none is given): "local", in this process, or by a transport of a worker."""
    root = root or MemoryRoot(MemoryFiles())
    if way == "local":
        with Store(LocalTransport(member_on(root))) as store:
            yield store
    else:
        with serving(root) as served, connected(served, bulk=way) as store:
            yield store


@contextmanager
def raw_channel(served: Served) -> Iterator[grpc.Channel]:
    """A plain channel with the defaults of gRPC."""
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@contextmanager
def raw_stub(served: Served) -> Iterator[KVStoreStub]:
    """The generated stub, all that a client in another language has."""
    with raw_channel(served) as channel:
        yield KVStoreStub(channel)


def packed(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Token ids as a foreign client packs them."""
    return struct.pack(f"<{len(tokens)}I", *map(int, tokens))


def opened(stub: KVStoreStub, layout: Layout, name: str = "m") -> bytes:
    """The digest of a namespace, opened by a foreign client."""
    message = pb.Namespace(name=name, layout=pb.Layout(**layout.to_dict()))
    digest: bytes = stub.OpenNamespace(pb.OpenNamespaceRequest(namespace=message), timeout=WAIT_S).digest
    return digest


def sections_of(kv: npt.NDArray[Any], layout: Layout) -> list[bytes]:
    """The sections of all chunks of an array, in the order of the wire, worked out the slow way."""
    found = []
    for start in range(0, kv.shape[2] - layout.chunk_tokens + 1, layout.chunk_tokens):
        for layer in kv:
            found += [plane[start : start + layout.chunk_tokens].tobytes() for plane in layer]
    return found


def images_of(wanted: KeySet, sections: Sequence[bytes]) -> list[bytes]:
    """The images of all chunks or blocks, in order, that have these sections."""
    found = []
    for index in range(len(wanted)):
        expected = wanted.expected(index)
        own = sections[index * expected.section_count :][: expected.section_count]
        found.append(encoded(expected, b"".join(own)))
    return found


def chain_of(layout: Layout, tokens: Sequence[int] | npt.NDArray[Any], name: str = "m") -> ChunkKeys:
    """The chunks of a prompt in the namespace that ``opened`` opens."""
    return ChunkKeys.of(Namespace.of(name, layout), np.asarray(tokens, np.uint32))


def put_messages(
    start: pb.PutStart, images: Sequence[bytes], first: int = 0, cut: int = 2 << 20
) -> list[pb.PutRequest]:
    """The stream of a Put of images from index ``first`` on, with ``cut`` bytes in each message."""
    return [pb.PutRequest(start=start)] + [
        pb.PutRequest(index=first + number, data=image[at : at + cut])
        for number, image in enumerate(images)
        for at in range(0, len(image), cut)
    ]


def got(messages: Iterable[pb.GetResponse]) -> tuple[int, dict[int, bytes]]:
    """The answer to a Get: the chunks found, and the sections of each image by its index, verified."""
    first, *rest = messages
    assert first.HasField("start") and not any(message.HasField("start") for message in rest)
    assert all(len(message.SerializeToString()) <= 4 << 20 for message in [first, *rest])
    images: dict[int, bytes] = {}
    for message in rest:
        images[message.index] = images.get(message.index, b"") + message.data
    found = {}
    for index, image in images.items():
        header = decode(image)
        assert len(image) == header.file_bytes
        sections = image[header.header_bytes :]
        size = header.section_bytes
        parts = [sections[at : at + size] for at in range(0, len(sections), size)]
        assert tuple(map(checksum, parts)) == header.checksums
        found[index] = sections
    return first.start.chunks, found


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, str]:
    """Status code, message and error class of a call that must fail."""
    try:
        call()
    except grpc.RpcError as error:
        trailers: Any = error.trailing_metadata() or ()
        return error.code(), error.details() or "", str(dict(trailers).get(ERROR_KEY, ""))
    raise AssertionError("the call was answered")


_PROCESS = """
import sys
from kvstore.engine.open import open_member
from kvstore.engine.settings import TierSettings
from kvstore.worker.server import Worker
member = open_member(sys.argv[1], create=True, settings=TierSettings(memory_bytes=int(sys.argv[2])))
worker = Worker(member, "127.0.0.1:0")
print(worker.start(), flush=True)
sys.stdin.read()
worker.drain(30.0)
member.close()
print("drained", flush=True)
"""


class WorkerProcess:
    """A worker in a separate process. ``address`` is where it listens."""

    def __init__(self, root: Path, memory_bytes: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(root), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.pid = self._child.pid
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().strip()
        assert self.address, "the worker did not start"

    def send(self, number: signal.Signals) -> None:
        """Returns when it is stopped, if the signal stops it: until then its threads may still answer."""
        os.kill(self._child.pid, number)
        if number is signal.SIGSTOP:
            eventually(lambda: is_stopped(self._child.pid), "it stands still")

    def drain(self) -> str:
        """Drains it, waits for its end, returns its output."""
        said, _ = self._child.communicate(timeout=WAIT_S)
        return said.strip()

    def kill(self) -> None:
        """Sends SIGKILL, even to a stopped process. Idempotent."""
        self._child.kill()
        self._child.wait(WAIT_S)


@contextmanager
def worker_process(root: Path, memory_bytes: int = 0) -> Iterator[WorkerProcess]:
    """A WorkerProcess, killed at the end."""
    child = WorkerProcess(root, memory_bytes)
    try:
        yield child
    finally:
        child.kill()


class Several:
    """Threads that do the same until told to stop; their errors are raised at the end."""

    def __init__(self, count: int, work: Callable[[int, int], None]) -> None:
        self._work = work
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads)
        if self.errors:
            raise self.errors[0]

    def _run(self, number: int) -> None:
        turn = 0
        try:
            while not self._stop.is_set():
                self._work(number, turn)
                turn += 1
        except BaseException as error:  # noqa: BLE001  # raised by stop
            self.errors.append(error)


def tokens_of(number: int, count: int) -> npt.NDArray[np.int64]:
    """``count`` tokens that no other number has."""
    return np.arange(count, dtype=np.int64) + 1000 * number


TOKENS = np.arange(4 * SMALL.chunk_tokens)
"""A prompt of four chunks."""
KV = kv_of(SMALL, TOKENS)
SECTIONS = sections_of(KV, SMALL)
IMAGES = images_of(chain_of(SMALL, TOKENS), SECTIONS)
