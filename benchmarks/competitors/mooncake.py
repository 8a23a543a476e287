"""Mooncake store: a master of its own, one client that also provides the memory, buffers registered once."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.competitors.contender import Bytes, Contender, Memory, Workload, expect

START_S = 30.0
BUFFER_BYTES = 64 << 20


class Mooncake(Contender):
    """``batch_put_from`` and ``batch_get_into`` over TCP, as for another host's memory."""

    by_memcpy = False

    def __init__(self, workload: Workload, memory: Memory, folder: Path, threads: int) -> None:
        super().__init__(workload, memory, folder, threads)
        os.environ["MC_STORE_MEMCPY"] = str(int(self.by_memcpy))
        package: Any = importlib.import_module("mooncake")
        port, metrics_port = _free_port(), _free_port()
        program = Path(package.__file__).parent / "mooncake_master"
        self._master = subprocess.Popen(
            [program, f"-rpc_port={port}", f"-metrics_port={metrics_port}", "-rpc_address=127.0.0.1", "-logtostderr"],
            stdin=subprocess.DEVNULL,
        )
        self.servers = [self._master.pid]
        try:
            _await_port(port, self._master)
            self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
            # Room for the prompt as its allocator rounds it, below the share at which it evicts.
            room_bytes = 2 * workload.size_bytes + BUFFER_BYTES
            code = self._store.setup(
                "127.0.0.1", "P2PHANDSHAKE", room_bytes, BUFFER_BYTES, "tcp", "", f"127.0.0.1:{port}"
            )
            expect(int(code), 0, "as the code of setup")
            for half in (memory.source, memory.target):
                expect(int(self._store.register_buffer(half.ctypes.data, half.nbytes)), 0, "as the code of registering")
        except BaseException:
            self._master.kill()
            raise
        self._keys: list[str] = []

    def prepare(self, turn: int) -> None:
        self._keys = [key.hex() for key in self.workload.keys(turn)]

    def put(self, turn: int) -> None:
        done = self._store.batch_put_from(self._keys, self._places(self.memory.source), self._sizes())
        expect(sum(code == 0 for code in done), self.workload.chunk_count, "objects stored")

    def get(self, turn: int) -> None:
        read = self._store.batch_get_into(self._keys, self._places(self.memory.target), self._sizes())
        expect(sum(read), self.workload.size_bytes, "bytes read")

    def clear(self) -> None:
        self._store.remove_all(True)

    def close(self) -> None:
        self._store.close()
        self._master.terminate()
        self._master.wait(START_S)

    def _places(self, half: Bytes) -> list[int]:
        start = half.ctypes.data
        return list(range(start, start + half.nbytes, self.workload.chunk_bytes))

    def _sizes(self) -> list[int]:
        return [self.workload.chunk_bytes] * self.workload.chunk_count


class MooncakeOwnMemory(Mooncake):
    """Mooncake by memcpy, as for the client's own memory."""

    by_memcpy = True


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("mooncake_master did not start: is libibverbs1 installed?") from None
            time.sleep(0.05)
