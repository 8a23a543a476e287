"""The callers of a replay: their number, and the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.replay.content import replay_layout
from kvstore.replay.lane import Lane, Tally
from kvstore.replay.trace import Request

PROCESSES_MAX = 256
THREADS_MAX = 256

OpenStore = Callable[[], Store]
"""Opens the store; for several processes it must be picklable, such as a partial of a module's function."""
Progress = Callable[[int], object]
"""Called with the number of requests served since the last call."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The namespace and the callers of a replay. Raises InvalidRequest for values out of range."""

    namespace: str
    bytes_per_token: int = 64
    processes: int = 1
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        replay_layout(self.bytes_per_token)
        for name, value, most in (("processes", self.processes, PROCESSES_MAX), ("threads", self.threads, THREADS_MAX)):
            if not 1 <= value <= most:
                raise InvalidRequest(f"{name}={value}: expected 1 to {most}")

    @property
    def lanes(self) -> int:
        """Number of callers at once."""
        return self.processes * self.threads


def run_threads(lane: Callable[[], Lane], requests: Sequence[Request], threads: int, progress: Progress) -> Tally:
    """Serves ``requests`` by this many callers, each taking every n-th. Raises the first error of any of them."""
    total, failures = Tally(), []
    lock, stop = threading.Lock(), threading.Event()

    def done() -> bool:
        with lock:
            progress(1)
        return not stop.is_set()

    def work(number: int) -> None:
        one = lane()
        try:
            one.run(requests[number::threads], done)
        except BaseException as failure:  # noqa: BLE001 - raised again below, in the caller's thread
            stop.set()
            with lock:
                failures.append(failure)
        with lock:
            total.add(one.tally)

    if threads == 1:
        work(0)
    else:
        workers = [
            threading.Thread(target=work, args=(number,), name="replay", daemon=True) for number in range(threads)
        ]
        for each in workers:
            each.start()
        try:
            for each in workers:
                each.join()
        finally:
            stop.set()
    if failures:
        raise failures[0]
    return total
