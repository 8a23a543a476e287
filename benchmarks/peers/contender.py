"""The interface of contenders, and the list of all. Runs in the peers' environments too."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.workload import Memory, Workload

OWN = "own"
"""The environment of a contender that runs in ours."""


@dataclass(frozen=True)
class Entry:
    """A contender by name: where its class is, in which environment it runs, and what to know about its figures."""

    name: str
    title: str
    place: str
    environment: str = OWN
    note: str = ""
    only_on_disk: bool = False
    """Left out where the directory is in memory."""
    long_prompts: bool = False
    """Takes part in the run with long prompts of small tensors."""


_OF = "benchmarks.peers.contenders"
_WORKER = "the worker has its default threads, whatever --threads says"
ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "kvstore",
            "kvstore",
            f"{_OF}.own:InProcess",
            note="into and from one array of the engine, strided by layer",
            long_prompts=True,
        ),
        Entry(
            "kvstore-blocks", "kvstore, blocks", f"{_OF}.own:Blocks", note="contiguous blocks under the engine's keys"
        ),
        Entry(
            "kvstore-fsync",
            "kvstore, fsync",
            f"{_OF}.own:Durable",
            note="durable before put returns",
            only_on_disk=True,
            long_prompts=True,
        ),
        Entry("kvstore-shared", "kvstore, worker, shared memory", f"{_OF}.own:Shared", note=_WORKER),
        Entry("kvstore-tcp", "kvstore, worker, TCP", f"{_OF}.own:Tcp", note=_WORKER),
        Entry(
            "kvstore-tcp-memory",
            "kvstore, worker's memory, TCP",
            f"{_OF}.own:TcpMemory",
            note=f"{_WORKER}; a put is acknowledged when the worker's memory has it, and written to the root behind",
        ),
        Entry("kvstore-grpc", "kvstore, worker, gRPC messages", f"{_OF}.own:Grpc", note=_WORKER),
        Entry("memcpy", "memcpy", f"{_OF}.plain:Copies", note="chunk by chunk; no store at all"),
        Entry("files", "plain files", f"{_OF}.plain:Files", note="writev, readv; no names, checks or order"),
        Entry(
            "vineyard",
            "Vineyard file mode",
            f"{_OF}.vineyard:Vineyard",
            "vineyard",
            long_prompts=True,
            note="a sync for each file; always as many threads as cores; its lists are made outside the clock",
        ),
        Entry(
            "vineyard-lists",
            "Vineyard file mode, lists",
            f"{_OF}.vineyard:VineyardLists",
            "vineyard",
            long_prompts=True,
            note="its lists are made in each call",
        ),
        Entry("lmcache-fs", "LMCache fs", f"{_OF}.lmcache:Fs", "lmcache", note="does not verify"),
        Entry(
            "lmcache-fs-native", "LMCache fs_native", f"{_OF}.lmcache:FsNative", "lmcache", note="C++; does not verify"
        ),
        Entry(
            "lmcache-cpu",
            "LMCache local CPU",
            f"{_OF}.lmcache:LocalCpu",
            "lmcache",
            note="memory of the engine's process: gone with it",
        ),
        Entry(
            "mooncake",
            "Mooncake store, TCP",
            f"{_OF}.mooncake:Mooncake",
            "mooncake",
            note="memory of the cluster; batch_put_from, batch_get_into, registered buffers",
        ),
        Entry(
            "mooncake-memcpy",
            "Mooncake store, own memory",
            f"{_OF}.mooncake:MooncakeOwnMemory",
            "mooncake",
            note="memory of the same process: gone with it",
        ),
        Entry(
            "redis", "Redis", f"{_OF}.redis_server:Redis", "redis", note="unix socket, hiredis, one connection a thread"
        ),
    )
}


class Contender(ABC):
    """One store under test, in a separate process. Any exception means that it failed, and why."""

    reads: tuple[str, ...] = ("get",)
    """Its ways to read, as names of methods; each leaves the bytes in ``memory.target``, ``view`` once delivered."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        self.workload = workload
        self.memory = memory
        self.folder = folder
        self.threads = threads
        self.servers: list[int] = []
        """Processes that do its work besides this one: their processor time is its own."""

    def prepare(self, turn: int) -> None:  # noqa: B027 - most have nothing to do
        """Prepares what an engine has at hand before it calls; outside the clock."""

    @abstractmethod
    def put(self, turn: int) -> None:
        """Stores ``memory.source``. Raises where anything was not stored."""

    @abstractmethod
    def get(self, turn: int) -> None:
        """Reads it into ``memory.target``. Raises where anything was missing."""

    def deliver(self) -> None:  # noqa: B027 - most have nothing to do
        """Copies, outside the clock, a read's uncopied result into ``memory.target``."""

    @abstractmethod
    def clear(self) -> None:
        """Deletes all that is stored."""

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Ends servers and threads."""


def make(place: str, workload: Workload, memory: Memory, folder: Path, threads: int) -> Contender:
    """The contender of the class at ``place`` (module:class). Raises whatever its making does."""
    module, _, name = place.partition(":")
    made: Contender = getattr(importlib.import_module(module), name)(workload, memory, folder, threads)
    return made


class Lanes:
    """Threads that share out the chunks of a call."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def each(self, work: Callable[[Iterable[int]], object], count: int) -> None:
        """Calls ``work`` with the indices below ``count``, in as many lots as there are threads."""
        lots = [range(first, count, self._threads) for first in range(min(self._threads, count))]
        for done in [self._pool.submit(work, lot) for lot in lots]:
            done.result()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def expect(found: int, wanted: int, what: str) -> None:
    """Raises RuntimeError if a contender did less than it was asked to."""
    if found != wanted:
        raise RuntimeError(f"{found} of {wanted} {what}")
