"""Workers for tests, in this process or in a separate one, and the raw calls of a foreign client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.client.limits import ClientLimits
from kvstore.client.local import LocalTransport
from kvstore.client.pool import Bulk
from kvstore.client.store import Store
from kvstore.core.clock import Clock
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.settings import NO_TIERS, Limits, TierSettings
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.server import Worker
from tests.kit.patience import PATIENCE_S, is_stopped
from tests.kit.patience import eventually as eventually
from tests.kit.stores import member_on

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
