"""The interface of contenders, the list of all, and the workload: the KV of one prompt in memory that all share.

Runs in the competitors' environments too: numpy and the standard library alone.
"""

from __future__ import annotations

import importlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PAGE_WORDS = 512
"""Words of 8 bytes in a page of memory."""


@dataclass(frozen=True)
class Workload:
    """A prompt of ``chunk_count`` chunks; ``tensor_bytes`` is K (or V) of one token in one layer."""

    name: str
    layers: int
    tensor_bytes: int
    chunk_tokens: int
    chunk_count: int
    long_prompt: bool = False
    """A prompt of many small tensors, where what a store does for each token counts; not all contenders take part."""

    @property
    def token_bytes(self) -> int:
        """KV of one token, all layers."""
        return self.layers * 2 * self.tensor_bytes

    @property
    def chunk_bytes(self) -> int:
        """KV of one chunk."""
        return self.chunk_tokens * self.token_bytes

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.chunk_count * self.chunk_tokens

    @property
    def size_bytes(self) -> int:
        """KV of the prompt."""
        return self.chunk_count * self.chunk_bytes

    def prompt(self, turn: int) -> list[int]:
        """The token ids of one turn, 0 <= id < 2**31: another prompt each turn, which no contender knows."""
        found: list[int] = np.random.default_rng(turn).integers(0, 1 << 31, self.tokens).tolist()
        return found

    def keys(self, turn: int) -> list[bytes]:
        """A key of 16 bytes for each chunk, for contenders that know keys, not tokens."""
        return [turn.to_bytes(8, "big") + index.to_bytes(8, "big") for index in range(self.chunk_count)]


class Memory:
    """The shared mapping: ``source`` is what to store, ``target`` where reads go, each of the prompt's size."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self._mapping = mmap.mmap(descriptor, 2 * size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        both = np.frombuffer(self._mapping, np.uint8)
        self.source: Bytes = both[:size_bytes]
        self.target: Bytes = both[size_bytes:]

    @classmethod
    def of(cls, size_bytes: int) -> Memory:
        """New memory with random content. Its descriptor is for the children; ``close`` closes it."""
        descriptor = os.memfd_create("kvstore-peers")
        os.ftruncate(descriptor, 2 * size_bytes)
        memory = cls(descriptor, size_bytes)
        memory.source[:] = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
        return memory

    def renew(self, turn: int) -> None:
        """Makes every page of the source another one than in any other turn."""
        words = self.source.view(np.uint64)[::PAGE_WORDS]
        words[:] = (np.uint64(turn) << np.uint64(32)) + np.arange(len(words), dtype=np.uint64)

    def wipe(self) -> None:
        """Clears the memory that reads fill."""
        self.target[:] = 0xA5

    def is_right(self) -> bool:
        """True if the target holds the source's bytes."""
        return np.array_equal(self.source.view(np.uint64), self.target.view(np.uint64))

    def pieces(self, array: Bytes, piece_bytes: int) -> list[memoryview]:
        """One half of it in contiguous pieces."""
        return [array[at : at + piece_bytes].data for at in range(0, len(array), piece_bytes)]

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with the last array on it."""
        os.close(self.descriptor)


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


_OF = "benchmarks.competitors"
_WORKER = "the worker has its default threads, independent of --threads"
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
        Entry("memcpy", "memcpy", f"{_OF}.own:Copies", note="chunk by chunk; no store at all"),
        Entry("files", "plain files", f"{_OF}.own:Files", note="writev, readv; no names, checks or order"),
        Entry(
            "vineyard",
            "Vineyard file mode",
            f"{_OF}.others:Vineyard",
            "vineyard",
            long_prompts=True,
            note="a sync for each file; always as many threads as cores; its lists are made outside the clock",
        ),
        Entry(
            "vineyard-lists",
            "Vineyard file mode, lists",
            f"{_OF}.others:VineyardLists",
            "vineyard",
            long_prompts=True,
            note="its lists are made in each call",
        ),
        Entry("lmcache-fs", "LMCache fs", f"{_OF}.others:Fs", "lmcache", note="does not verify"),
        Entry(
            "lmcache-fs-native", "LMCache fs_native", f"{_OF}.others:FsNative", "lmcache", note="C++; does not verify"
        ),
        Entry(
            "lmcache-cpu",
            "LMCache local CPU",
            f"{_OF}.others:LocalCpu",
            "lmcache",
            note="memory of the engine's process: gone with it",
        ),
        Entry(
            "mooncake",
            "Mooncake store, TCP",
            f"{_OF}.others:Mooncake",
            "mooncake",
            note="memory of the cluster; batch_put_from, batch_get_into, registered buffers",
        ),
        Entry(
            "mooncake-memcpy",
            "Mooncake store, own memory",
            f"{_OF}.others:MooncakeOwnMemory",
            "mooncake",
            note="memory of the same process: gone with it",
        ),
        Entry("redis", "Redis", f"{_OF}.others:Redis", "redis", note="unix socket, hiredis, one connection a thread"),
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
