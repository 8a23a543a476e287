"""The paths to a store: in this process, or through a worker over gRPC messages, shared memory or a TCP socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.client.pool import Bulk
from kvstore.client.store import Store
from kvstore.core.process import Program, kvstore_command
from kvstore.core.write_mode import DurabilityName, WriteModeName
from kvstore.errors import KVStoreError
from kvstore.meta.embedded_etcd import EmbeddedEtcd

IN_PROCESS = "in-process"
BULK = {"grpc": "gRPC messages", "shared": "shared memory", "tcp": "TCP socket"}
"""The client's names of the ways to a worker."""
PATHS = (IN_PROCESS, *BULK)
PLAIN = "plain"
"""No store at all, but a file for each chunk: the baseline of ``throughput``."""
PROBE = Layout(1, 1, 16, "int8", 64)
STOP_S = 10.0
SETTLE_S = 10.0
IDLE_S = 0.1


@dataclass(frozen=True)
class Way:
    """The way to the store at ``root``; sent to other processes, which open it for themselves."""

    path: str
    root: str
    worker: str = ""
    durability: DurabilityName = "none"
    write: WriteModeName | None = None
    """The write mode of puts; None: the worker's own."""

    def open(self) -> Store:
        """The store. Raises what ``kvstore.open`` and ``kvstore.connect`` do."""
        if self.path == IN_PROCESS:
            return kvstore.open(self.root, durability=self.durability)
        return kvstore.connect(self.worker, bulk=Bulk.of(self.path), write=self.write)

    def why_not(self) -> str | None:
        """Why this way cannot be gone, or is not the way that bytes go; None where all is well."""
        tokens = np.arange(PROBE.chunk_tokens, dtype=np.uint32)
        try:
            with self.open() as store:
                cache = store.namespace("probe", PROBE)
                cache.put(tokens, np.zeros(PROBE.shape(len(tokens)), np.int8))
                cache.get(tokens)
                went = store.stats()
        except KVStoreError as error:
            return f"{self.path}: {error}"
        if self.path != IN_PROCESS and not (went[f"client_puts_{self.path}"] and went[f"client_gets_{self.path}"]):
            return f"{self.path}: bytes went another way"
        return None


@dataclass(frozen=True)
class Served:
    """A worker that serves a root."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100  # USER_HZ is 100 on every Linux that runs Python

    def settle(self) -> None:
        """Waits until it has nothing left to do, such as writing acknowledged chunks, or for ``SETTLE_S``."""
        used_s, ends_s = -1.0, time.monotonic() + SETTLE_S
        while used_s != (used_s := self.cpu_s()) and time.monotonic() < ends_s:
            time.sleep(IDLE_S)


@contextmanager
def served(folder: Path, root: Path, durability: DurabilityName = "none", memory_bytes: int = 0) -> Iterator[Served]:
    """Starts a worker on ``root`` with its own etcd, as a user would; its files are in ``folder``.

    ``memory_bytes`` is the shared memory for hot chunks.
    """
    with EmbeddedEtcd(folder / "etcd") as etcd:
        command = kvstore_command(
            "worker",
            "--root",
            str(root),
            "--etcd",
            etcd.endpoints,
            "--listen",
            "127.0.0.1:0",
            "--drain",
            "2s",
            "--durability",
            durability,
            *(("--memory", f"{memory_bytes >> 20}MiB") if memory_bytes else ()),
        )
        worker = Program("worker", command, messages=folder / "worker.log")
        try:
            worker.start()
            address = worker.wait_ready()["grpc"]
            assert worker.pid is not None
            yield Served(address, worker.pid)
        finally:
            worker.stop(STOP_S)


@contextmanager
def reached(path: str, folder: Path) -> Iterator[Callable[[], Store]]:
    """An opener of the store on ``folder / "root"`` by a path, with a worker if the path needs one."""
    way = Way(path, str(folder / "root"))
    if path == IN_PROCESS:
        yield way.open
        return
    with served(folder, folder / "root") as worker:
        yield replace(way, worker=worker.address).open
