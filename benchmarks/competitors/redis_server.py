"""Redis: a server of its own without persistence, over a unix socket, each thread with a connection."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.competitors.contender import Contender, Lanes, Memory, Workload, expect

START_S = 20.0
READ_BYTES = 1 << 20


class Redis(Contender):
    """SET and GET by redis-py; the result of GET is copied to the engine's memory."""

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is not installed: apt-get install redis-server")
        redis: Any = importlib.import_module("redis")
        place = folder / "socket"
        self._server = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", str(place), "--save", "", "--dir", str(folder)],
            stdin=subprocess.DEVNULL,
        )
        self.servers = [self._server.pid]
        # Its default reads 64 KiB at a time, which is slower with values as large as these.
        pool = redis.ConnectionPool(
            connection_class=redis.UnixDomainSocketConnection,
            path=str(place),
            max_connections=threads,
            socket_read_size=READ_BYTES,
        )
        self._client: Any = redis.Redis.from_pool(pool)
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self._client.ping()
                break
            except redis.ConnectionError:
                if self._server.poll() is not None or time.monotonic() > deadline_s:
                    self._server.kill()
                    raise
                time.sleep(0.05)
        self._lanes = Lanes(threads)
        self._source = memory.pieces(memory.source, workload.chunk_bytes)
        self._target = memory.target.reshape(workload.chunk_count, workload.chunk_bytes)
        self._keys: list[bytes] = []

    def prepare(self, turn: int) -> None:
        self._keys = self.workload.keys(turn)

    def put(self, turn: int) -> None:
        def store(lot: Iterable[int]) -> None:
            for index in lot:
                self._client.set(self._keys[index], self._source[index])

        self._lanes.each(store, self.workload.chunk_count)

    def get(self, turn: int) -> None:
        def load(lot: Iterable[int]) -> None:
            for index in lot:
                value = self._client.get(self._keys[index])
                expect(len(value or b""), self.workload.chunk_bytes, "bytes read")
                self._target[index] = np.frombuffer(value, np.uint8)

        self._lanes.each(load, self.workload.chunk_count)

    def clear(self) -> None:
        self._client.flushall()

    def close(self) -> None:
        self._lanes.close()
        self._client.close()
        self._server.terminate()
        self._server.wait(START_S)
