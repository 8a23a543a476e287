"""kvstore by each way to it, in this process and through a worker; and the baselines: memcpy, and plain files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import kvstore
from benchmarks.competitors.contender import Contender, Lanes, Memory, Workload, expect
from benchmarks.harness.paths import Way, served
from kvstore import Layout
from kvstore.client import Cache, Store
from kvstore.client.cache import Hold
from kvstore.core.write_mode import Durability
from kvstore.engine.settings import Limits


class InProcess(Contender):
    """The root opened in this process: put and get with the engine's array, and the verified mapped view."""

    reads: tuple[str, ...] = ("get", "view")
    durability = "none"

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        # One head of int8 has the size of a tensor whatever the model: only the sizes count here.
        layout = Layout(workload.layers, 1, workload.tensor_bytes, "int8", workload.chunk_tokens)
        shape = layout.shape(workload.tokens)
        self._source = memory.source.view(np.int8).reshape(shape)
        self._target = memory.target.view(np.int8).reshape(shape)
        self._undo = ExitStack()
        try:
            self.cache: Cache = self._undo.enter_context(self.store()).namespace("peers", layout)
        except BaseException:
            self._undo.close()
            raise
        self._hold: Hold | None = None
        self._views: list[np.ndarray] = []
        self._prompt = np.empty(0, np.uint32)

    def store(self) -> Store:
        """The store, by the way under test."""
        return kvstore.open(
            str(self.folder / "root"), durability=Durability.of(self.durability), limits=Limits(width=self.threads)
        )

    def prepare(self, turn: int) -> None:
        self._prompt = np.array(self.workload.prompt(turn), np.uint32)

    def put(self, turn: int) -> None:
        result = self.cache.put(self._prompt, self._source)
        expect(result.bytes_written, self.workload.size_bytes, "bytes written")

    def get(self, turn: int) -> None:
        expect(self.cache.get(self._prompt, self._target), self.workload.tokens, "tokens read")

    def view(self, turn: int) -> None:
        self._hold = self.cache.hold(self._prompt)
        self._views = self._hold.view()
        expect(len(self._views), self.workload.chunk_count, "chunks mapped")

    def deliver(self) -> None:
        if self._hold is None:
            return
        size = self.workload.chunk_tokens
        for index, chunk in enumerate(self._views):
            self._target[:, :, index * size : (index + 1) * size] = chunk
        self._views = []
        self._hold.release()
        self._hold = None

    def clear(self) -> None:
        self.cache.clear()

    def close(self) -> None:
        self._undo.close()


class Durable(InProcess):
    """kvstore with puts that are durable before they return."""

    durability = "fsync"


class Blocks(InProcess):
    """Contiguous blocks under the engine's own keys, which is what LMCache stores."""

    reads = ("get",)

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        self._from = memory.pieces(memory.source, workload.chunk_bytes)
        self._into = memory.pieces(memory.target, workload.chunk_bytes)

    def put(self, turn: int) -> None:
        stored = self.cache.blocks.put(self.workload.keys(turn), self._from)
        expect(sum(stored), self.workload.chunk_count, "blocks stored")

    def get(self, turn: int) -> None:
        found = self.cache.blocks.get(self.workload.keys(turn), self._into)
        expect(sum(found), self.workload.chunk_count, "blocks read")


class Grpc(InProcess):
    """A worker on this host, its bulk bytes in gRPC messages."""

    reads = ("get",)
    path = "grpc"
    memory_shares = 0
    """The worker's memory, in multiples of the workload."""

    def store(self) -> Store:
        root = self.folder / "root"
        memory_bytes = self.memory_shares * self.workload.size_bytes
        worker = self._undo.enter_context(served(self.folder, root, memory_bytes=memory_bytes))
        self.servers = [worker.pid]
        return Way(self.path, str(root), worker.address).open()


class Shared(Grpc):
    """A worker on this host, its bulk bytes through shared memory."""

    path = "shared"


class Tcp(Grpc):
    """A worker on this host as if it were on another, its bulk bytes through a TCP socket."""

    path = "tcp"


class TcpMemory(Tcp):
    """The same with a worker that has memory: a put is acknowledged when the bytes are there, and written behind."""

    memory_shares = 10


class Copies(Contender):
    """Copies to separate memory and back."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        self._lanes = Lanes(threads)
        shape = (workload.chunk_count, workload.chunk_bytes)
        self._stored = np.ones(shape, np.uint8)
        self._source, self._target = memory.source.reshape(shape), memory.target.reshape(shape)

    def put(self, turn: int) -> None:
        def copy(lot: Iterable[int]) -> None:
            for index in lot:
                np.copyto(self._stored[index], self._source[index])

        self._lanes.each(copy, self.workload.chunk_count)

    def get(self, turn: int) -> None:
        def copy(lot: Iterable[int]) -> None:
            for index in lot:
                np.copyto(self._target[index], self._stored[index])

        self._lanes.each(copy, self.workload.chunk_count)

    def clear(self) -> None:
        self._stored[:, :1] = 0

    def close(self) -> None:
        self._lanes.close()


class Files(Contender):
    """A file for each chunk."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        self._lanes = Lanes(threads)
        self._source = memory.pieces(memory.source, workload.chunk_bytes)
        self._target = memory.pieces(memory.target, workload.chunk_bytes)

    def put(self, turn: int) -> None:
        def write(lot: Iterable[int]) -> None:
            for index in lot:
                file = os.open(self.folder / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                try:
                    expect(os.writev(file, [self._source[index]]), self.workload.chunk_bytes, "bytes written")
                finally:
                    os.close(file)

        self._lanes.each(write, self.workload.chunk_count)

    def get(self, turn: int) -> None:
        def read(lot: Iterable[int]) -> None:
            for index in lot:
                file = os.open(self.folder / str(index), os.O_RDONLY)
                try:
                    expect(os.readv(file, [self._target[index]]), self.workload.chunk_bytes, "bytes read")
                finally:
                    os.close(file)

        self._lanes.each(read, self.workload.chunk_count)

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def close(self) -> None:
        self._lanes.close()
