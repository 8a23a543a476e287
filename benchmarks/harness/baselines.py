"""The baselines of a path: fio in the same minute, bare loopback, and a page cache that is emptied for cold figures.

Loopback moves bare bytes between two processes, into existing memory: nothing is named, verified or kept.  The other
process is this module as a program; it receives bytes, and sends them back on request.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness.load import Bytes, poison
from benchmarks.harness.machine import GIB
from kvstore.core.buffers import aligned

Kind = Literal["write", "read"]
KINDS: tuple[Kind, Kind] = ("write", "read")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Job:
    """One run: ``jobs`` processes, each with a file of its own, or one for each block, of ``block_bytes``."""

    folder: Path
    block_bytes: int
    size_bytes: int
    jobs: int
    direct: bool = False
    cold: bool = False
    fsync: bool = False
    file_each: bool = False

    def run(self, kind: Kind) -> Figure:
        """Writes anew (whatever was there is deleted just before), or reads what was written."""
        options = [f"--rw={kind}"]
        if kind == "write":
            self.folder.mkdir(exist_ok=True)
            self.delete()
            options += ["--fdatasync=1"] if self.fsync else []
        return _figure(self._run(options), kind)

    def run_mix(self, seconds: float, read_share: float) -> dict[Kind, Figure]:
        """Reads and writes random blocks for some time, ``read_share`` of them reads."""
        self.folder.mkdir(exist_ok=True)
        options = ["--rw=randrw", f"--rwmixread={round(100 * read_share)}", "--time_based", f"--runtime={seconds:g}"]
        found = self._run(options)
        return {kind: _figure(found, kind) for kind in KINDS if found[kind]["io_bytes"]}

    def _run(self, options: list[str]) -> dict[str, Any]:
        blocks = max(1, self.size_bytes // self.jobs // self.block_bytes)
        command = [
            "fio",
            "--name=j",
            f"--directory={self.folder}",
            "--ioengine=psync",
            f"--bs={self.block_bytes}",
            f"--size={blocks * self.block_bytes}",
            f"--numjobs={self.jobs}",
            "--group_reporting",
            "--output-format=json",
            "--fallocate=none",
            f"--direct={int(self.direct)}",
            f"--invalidate={int(self.cold)}",
        ]
        if self.file_each:
            command += [f"--nrfiles={blocks}", "--openfiles=1", "--file_service_type=sequential"]
        ran = subprocess.run(command + options, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        # Warnings may stand before the JSON.
        found: dict[str, Any] = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0]
        return found

    def delete(self) -> None:
        """Deletes fio's files."""
        for old in self.folder.iterdir():
            old.unlink()


@dataclass(frozen=True)
class Figure:
    """Aggregate GiB/s (all bytes by the longest job's time), processor seconds per GiB, milliseconds per block."""

    gib_per_s: float
    cpu_s_per_gib: float
    p50_ms: float
    p99_ms: float


def _figure(found: dict[str, Any], kind: Kind) -> Figure:
    moved = found[kind]
    cpu_s = (found["usr_cpu"] + found["sys_cpu"]) / 100 * found["job_runtime"] / 1e3
    shares = moved["clat_ns"].get("percentile", {})
    return Figure(
        moved["bw_bytes"] / GIB,
        cpu_s / (moved["io_bytes"] / GIB),
        shares.get("50.000000", 0) / 1e6,
        shares.get("99.000000", 0) / 1e6,
    )


TAKE, GIVE, DONE = b"t", b"g", b"d"
PATIENCE_S = 60.0


class Loopback:
    """The other process and the connection to it. ``size_bytes`` are moved by each call."""

    def __init__(self, size_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE_S)
            command = [
                sys.executable,
                "-m",
                "benchmarks.harness.baselines",
                str(listener.getsockname()[1]),
                str(size_bytes),
            ]
            self._other = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for this process alone
            self._socket = _set(listener.accept()[0])
            self._socket.settimeout(PATIENCE_S)

    def put(self, source: Bytes) -> None:
        """Sends it; returns when the other process has all of it."""
        self._socket.sendall(TAKE)
        self._socket.sendall(source.reshape(-1).data)
        if self._socket.recv(1) != DONE:
            raise ConnectionError("the other end of the loopback went away")

    def read(self, target: Bytes) -> None:
        """Reads what was put last into ``target``."""
        self._socket.sendall(GIVE)
        _receive(self._socket, target)

    def close(self) -> None:
        """Ends the other process."""
        self._socket.close()
        try:
            self._other.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._other.kill()
            self._other.wait()


def _set(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    return sock


def _receive(sock: socket.socket, memory: Bytes) -> None:
    left = memory.reshape(-1).data
    while len(left):
        count = sock.recv_into(left)
        if not count:
            raise ConnectionError("the other end of the loopback went away")
        left = left[count:]


def main() -> None:
    """Serves one connection until it is closed, however long it is between two calls."""
    port, size_bytes = map(int, sys.argv[1:])
    memory = np.frombuffer(aligned(size_bytes), np.uint8)
    poison(memory)
    with suppress(ConnectionError), _set(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) as sock:
        while asked := sock.recv(1):
            if asked == TAKE:
                _receive(sock, memory)
                sock.sendall(DONE)
            else:
                sock.sendall(memory.data)


LOOKS_MAX = 64
TRIES = 20
PAUSE_S = 0.1


def evict(folder: Path) -> None:
    """Writes back and drops every file below ``folder`` from the page cache. Needs no privileges."""
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def emptied(folder: Path, share_max: float) -> float:
    """Evicts until at most ``share_max`` is cached; what another core has not put on its lists yet stays at first.

    Returns the share that is cached in the end.
    """
    share = 1.0
    for _ in range(TRIES):
        evict(folder)
        share = cached_share(folder)
        if share <= share_max:
            break
        time.sleep(PAUSE_S)
    return share


def cached_share(folder: Path) -> float:
    """The share of some files below ``folder`` whose middle can be read without the device."""
    found = files(folder)
    looked = found[:: max(1, len(found) // LOOKS_MAX)]
    return sum(_is_cached(path) for path in looked) / max(1, len(looked))


def can_be_cold(folder: Path) -> bool:
    """True if dropping takes effect on this file system; not in memory, which has nothing below the cache."""
    probe = folder / "cold-probe"
    probe.write_bytes(bytes(1 << 20))
    try:
        evict(folder)
        return not _is_cached(probe)
    except OSError:
        return False
    finally:
        probe.unlink()


def touch(folder: Path, size_bytes: int) -> None:
    """Writes so much to a file and deletes it: the first touch of memory is slow in a virtual machine."""
    block = bytes(8 << 20)
    with (folder / "touched").open("wb") as file:
        for _ in range(min(size_bytes, shutil.disk_usage(folder).free // 2) // len(block)):
            file.write(block)
    (folder / "touched").unlink()


def files(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names]


def _is_cached(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return False
        raise
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
