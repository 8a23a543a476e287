"""A whole replay: its callers as threads, in this process or in several, and the verdict over what they saw.

With one caller requests keep the order of the trace, and every hit is compared.  With several their order is
undefined: then bytes are compared all the same, each chunk must have been written exactly once, and at the end every
prompt must be there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.replay.content import Content, replay_layout
from kvstore.replay.lane import Lane, Tally
from kvstore.replay.oracle import expect
from kvstore.replay.report import Report
from kvstore.replay.trace import BLOCK_TOKENS, Request

PROCESSES_MAX = 256
THREADS_MAX = 256

OpenStore = Callable[[], Store]
"""Opens the store; for several processes something that can be pickled, such as a partial of a module's function."""
Progress = Callable[[int], object]
"""Called with how many requests were served since it was last called."""


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
        """Callers at once."""
        return self.processes * self.threads


def replay(
    requests: Sequence[Request], open_store: OpenStore, plan: Plan, progress: Progress = lambda count: None
) -> Report:
    """Replays ``requests``; the namespace must hold none of them, so that expected hits are exact.

    Raises InvalidRequest where it does, and what the store raised where it could not go on.
    """
    expected = expect(requests)
    content = Content(replay_layout(plan.bytes_per_token), plan.seed)
    with open_store() as store:
        cache = store.namespace(plan.namespace, content.layout)
        for request in {each.hash_ids[0]: each for each in requests if each.full_blocks}.values():
            if cache.match(content.tokens(request)[:BLOCK_TOKENS]):
                raise InvalidRequest(
                    f"namespace {plan.namespace!r} holds chunks of this trace already, so its hits cannot be told from "
                    f"new ones: give another --namespace, or kvstore clear it"
                )
        start_s = time.perf_counter()
        if plan.processes > 1:
            from kvstore.replay.spawn import run_processes  # multiprocessing only where it is used

            tally = run_processes(requests, open_store, plan, progress)
        else:
            hits = expected.hits if plan.lanes == 1 else None
            tally = run_threads(lambda: Lane(cache, content, hits), requests, plan.threads, progress)
        seconds = time.perf_counter() - start_s
        if plan.lanes > 1:
            finder = Lane(cache, content, None)
            for request in requests:
                finder.find(request)
            tally.add(finder.tally)
    tokens_expected = expected.blocks * BLOCK_TOKENS if plan.lanes == 1 else None
    return Report(tally, plan.lanes, expected.chunks_unique, tokens_expected, seconds)


def run_threads(lane: Callable[[], Lane], requests: Sequence[Request], threads: int, progress: Progress) -> Tally:
    """Serves ``requests`` by that many callers, each taking every n-th. Raises the first error of any of them."""
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
