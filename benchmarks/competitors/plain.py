"""The baselines under every store: memcpy, and files without names, checks or order."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.competitors.contender import Contender, Lanes, Memory, Workload, expect


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
