"""Worker processes that put and get at the same moment, as the engines of a cluster do."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks.harness.load import FileMover, Load, Mover, WrongBytes, mover
from benchmarks.harness.machine import Taken, timed
from benchmarks.harness.paths import PLAIN, Way
from kvstore.errors import KVStoreError

START_S = 180.0
CALL_S = 600.0
STOP_S = 20.0
MIX_FIRST = 1 << 16
"""The number of the first call of a mix: no other call has it."""
MIX_FREE_MIN_BYTES = 1 << 30
MIX_START_S = 1.0
"""Time for each worker to store what its first gets read."""
HEAD_START_S = 0.02
"""Time from the order to the start, so that all processes have received it."""


class WorkerFailed(Exception):
    """A worker process ended, did not answer in time, or could not reach the store."""


@dataclass(frozen=True)
class Singles:
    """Seconds of each call that moved one chunk."""

    put_s: list[float]
    get_s: list[float]


@dataclass(frozen=True)
class Mixed:
    """Seconds of each call of a mix, by one worker."""

    put_s: list[float]
    get_s: list[float]

    @property
    def busy_s(self) -> float:
        """Time in calls; preparing and comparing bytes is not part of it."""
        return sum(self.put_s) + sum(self.get_s)


class WorkerPool:
    """Processes that carry out orders together. Made by ``worker_pool``."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def prepare(self, call: int) -> None:
        """Makes each process prepare its puts."""
        self._all("prepare", call)

    def put(self) -> list[Taken]:
        """All put at once; what each took by its own clock."""
        return self._taken("put")

    def get(self) -> list[Taken]:
        """All get at once."""
        return self._taken("get")

    def forget(self) -> None:
        """Each overwrites the memory that it reads into."""
        self._all("forget", None)

    def verify(self) -> None:
        """Makes each process compare every byte of its last get with its put. Raises WrongBytes."""
        self._all("verify", None)

    def singles(self, count: int) -> list[Singles]:
        """Each puts and gets ``count`` prompts of one chunk, all at once."""
        return list(self._all("singles", count))

    def mix(self, seconds: float, read_share: float, root: Path) -> list[Mixed]:
        """Each puts and gets whole loads at random for ``seconds``, ``read_share`` of them gets."""
        argument = (time.monotonic() + MIX_START_S, seconds, read_share, str(root))
        return list(self._all("mix", argument, CALL_S + seconds))

    def _taken(self, order: str) -> list[Taken]:
        return list(self._all(order, time.monotonic() + HEAD_START_S))

    def _all(self, order: str, argument: Any, timeout_s: float = CALL_S) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((order, argument))
        return [_answer(pipe, timeout_s) for pipe in self._pipes]


@contextmanager
def worker_pool(way: Way, loads: Sequence[Load]) -> Iterator[WorkerPool]:
    """One process for each load, with the store open; gone afterwards. Raises WorkerFailed."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    members: list[SpawnProcess] = []
    try:
        for load in loads:
            ours, theirs = context.Pipe()
            member = context.Process(target=serve, args=(theirs, way, load), daemon=True)
            member.start()
            theirs.close()
            pipes.append(ours)
            members.append(member)
        for pipe in pipes:
            _answer(pipe, START_S)
        yield WorkerPool(pipes)
    finally:
        for pipe in pipes:
            pipe.close()  # which ends the member
        deadline_s = time.monotonic() + STOP_S
        for member in members:
            member.join(max(0.1, deadline_s - time.monotonic()))
            if member.is_alive():
                member.kill()
                member.join()


def serve(pipe: Connection, way: Way, load: Load) -> None:
    """The life of one member."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the pipe ends this process
    try:
        with moving(way, load) as moves:
            pipe.send(None)
            while True:
                order, argument = pipe.recv()
                try:
                    pipe.send(_obey(moves, order, argument))
                except (WrongBytes, KVStoreError) as error:
                    pipe.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the run is over, or its process is gone
    except KVStoreError as error:
        pipe.send(error)


@contextmanager
def moving(way: Way, load: Load) -> Iterator[Mover]:
    """The load, ready to be moved that way."""
    if way.path == PLAIN:
        with closing(FileMover(Path(way.root) / PLAIN, load)) as moves:
            yield moves
        return
    with way.open() as store:
        yield mover(store, load)


def _obey(moves: Mover, order: str, argument: Any) -> Any:
    match order:
        case "prepare":
            return moves.prepare(argument)
        case "put" | "get":
            time.sleep(max(0.0, argument - time.monotonic()))
            return timed(moves.put if order == "put" else moves.get)
        case "forget":
            return moves.forget()
        case "verify":
            return moves.verify()
        case "singles":
            return _singles(moves, argument)
        case "mix":
            return _mix(moves, *argument)
    raise AssertionError(order)


def _singles(moves: Mover, count: int) -> Singles:
    found = Singles([], [])
    for number in range(count):
        moves.prepare_one(number)
        found.put_s.append(timed(moves.put_one).wall_s)
        found.get_s.append(timed(moves.get_one).wall_s)
    return found


def _mix(moves: Mover, start_s: float, seconds: float, read_share: float, folder: str) -> Mixed:
    """Calls for some time, or until the file system is nearly full. Raises WrongBytes."""
    found, choose, stored = Mixed([], []), random.Random(1), MIX_FIRST
    moves.prepare(stored)
    moves.put()
    time.sleep(max(0.0, start_s - time.monotonic()))
    while time.monotonic() < start_s + seconds and shutil.disk_usage(folder).free >= MIX_FREE_MIN_BYTES:
        if choose.random() < read_share:
            moves.prepare(choose.randint(MIX_FIRST, stored))
            moves.forget()
            found.get_s.append(timed(moves.get).wall_s)
            moves.verify()
            continue
        stored += 1
        moves.prepare(stored)
        found.put_s.append(timed(moves.put).wall_s)
    return found


def _answer(pipe: Connection, timeout_s: float) -> Any:
    try:
        if not pipe.poll(timeout_s):
            raise WorkerFailed(f"a worker process did not answer within {timeout_s:g} s")
        answer = pipe.recv()
    except (EOFError, OSError) as cause:
        raise WorkerFailed("a worker process ended; its messages are above") from cause
    if isinstance(answer, WrongBytes):
        raise answer
    if isinstance(answer, Exception):
        raise WorkerFailed(f"{type(answer).__name__}: {answer}") from answer
    return answer
