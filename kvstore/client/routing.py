"""Which worker a prompt goes to: one that has much of it in memory, as long as all have about as much to do. Pure.

A prompt is known by its marks: hashes of its first chunk, its first two, and so on. A prefix with a share of the
traffic belongs to ten times that share of the workers, chosen by rendezvous hashing among the workers of the prefix
before it. So a rare prompt goes to one worker, whichever client sends it; a system prompt that all share goes to all,
and what follows it decides. A prompt that this client sent before goes where it was.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import xxhash

from kvstore.core.address import TokenArray
from kvstore.core.namespace import Namespace

Marks = Sequence[int]
Marking = Callable[[], Marks]
"""Returns the marks of a prompt; called only where there is a choice of workers."""

DENSE = 16
"""Every chunk up to this depth has a mark; then eight of them in each doubling of the depth."""
KNOWN_SHARE = 0.8
"""A prompt goes where it was if so much of it is known."""
GROWTH = 10.0
"""Workers of a prefix for each that its share of the traffic asks for. With many, clients that know nothing of each
other agree by what follows the prefix, however each estimates its share; with too many, each worker keeps a copy."""
BUSY_KNOWN, BUSY_NEW = 1.25, 1.18
"""A worker is too busy for a prompt that it knows, or for a new one, with more than so many times the mean."""
SPARE_CALLS, SPARE_CALLS_MAX = 6, 16
"""Calls of mean size that are no reason to call a worker busy: a few at first, more as more calls are counted."""
CALLS_PER_SPARE = 32
CALL_CHUNKS = 8
"""Fixed work of a call, in chunks, in addition to its own chunks."""
HALVING_CALLS = 2_048
"""Load and traffic count half after so many calls."""
MARKS_MAX = 65_536


def marks_of(namespace: Namespace, tokens: TokenArray) -> Marks:
    """Returns the marks of the full chunks of a prompt; those of a shorter one begin alike."""
    size, marks = namespace.layout.chunk_tokens, list[int]()
    absorbed, done = xxhash.xxh3_64(namespace.digest), 0
    for depth in depths(len(tokens) // size):
        absorbed.update(tokens[done * size : depth * size].tobytes())
        marks.append(absorbed.intdigest())
        done = depth
    return marks


def marks_of_keys(keys: Sequence[bytes]) -> Marks:
    """Returns the marks of engine-hashed blocks: a key identifies all keys before it."""
    return [xxhash.xxh3_64_intdigest(keys[depth - 1]) for depth in depths(len(keys))]


def depths(count: int) -> list[int]:
    """Returns the depths, in chunks, that have a mark."""
    found = list(range(1, min(count, DENSE) + 1))
    step, start = DENSE // 8, DENSE
    while start < count:
        found += range(start + step, min(count, 2 * start) + 1, step)
        step, start = 2 * step, 2 * start
    return found


def depth_of(marks_count: int) -> int:
    """Returns the depth of the last of so many marks."""
    if marks_count <= DENSE:
        return marks_count
    doublings, eighths = divmod(marks_count - DENSE - 1, 8)
    return (DENSE * (9 + eighths) << doublings) // 8


class _Seen(NamedTuple):
    """One mark: where its prefix was sent last, and its traffic at an epoch."""

    worker: str
    traffic: float
    epoch: int


class Spreading:
    """The choices of one client. Thread-safe. Workers are known by their addresses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by _lock, all below. The oldest marks come first.
        self._seen = OrderedDict[int, _Seen]()
        self._loads: dict[str, float] = {}
        """The work asked of each worker lately, in chunks: a long prompt is more than a short one."""
        self._calls = 0.0
        self._work = 0.0
        self._epoch = 0

    def chosen(self, marks: Marks, workers: Sequence[str], avoided: Collection[str] = ()) -> str:
        """Returns the worker for a prompt with at least one mark, and counts the call.

        Those ``avoided`` are too busy at this moment; not all of the workers are.
        """
        with self._lock:
            self._follow(workers)
            worker = self._known(marks)
            if worker is None or worker in avoided:
                worker = self._placed(marks, workers, avoided)
            self._count(marks, worker)
            return worker

    def _follow(self, workers: Sequence[str]) -> None:
        """Takes over a new list of workers. One that is new counts as busy as the others, or all would go there."""
        if self._loads.keys() != set(workers):
            mean = self._mean()
            self._loads = {each: self._loads.get(each, mean) for each in workers}

    def _known(self, marks: Marks) -> str | None:
        """Returns the worker that has most of the prompt; None if too little of it is known, or it is too busy."""
        count = next((at for at in range(len(marks), 0, -1) if marks[at - 1] in self._seen), 0)
        if not count or count < KNOWN_SHARE * len(marks):
            return None
        worker = self._seen[marks[count - 1]].worker
        load = self._loads.get(worker, math.inf)
        return worker if load <= BUSY_KNOWN * self._mean() + self._spare() else None

    def _placed(self, marks: Marks, workers: Sequence[str], avoided: Collection[str]) -> str:
        """Returns the worker for a prompt that is new here: the first of those it belongs to that is not too busy."""
        among, others = list(workers), list[str]()
        for mark in marks:
            count = max(1, math.ceil(GROWTH * len(workers) * self._traffic(mark) / max(1.0, self._calls)))
            if count < len(among) or count == 1:
                among.sort(key=lambda each: weight(mark, each), reverse=True)
                among, others = among[:count], among[count:] + others
            if count == 1:
                break
        among.sort(key=lambda each: weight(mark, each), reverse=True)
        busy = BUSY_NEW * self._mean() + self._spare()
        ranked = [each for each in among + others if each not in avoided]
        return next((each for each in ranked if self._loads[each] <= busy), ranked[0])

    def _count(self, marks: Marks, worker: str) -> None:
        for mark in marks:
            traffic = self._traffic(mark) + 1
            self._seen.pop(mark, None)
            self._seen[mark] = _Seen(worker, traffic, self._epoch)
        while len(self._seen) > MARKS_MAX:
            self._seen.popitem(last=False)
        work = CALL_CHUNKS + depth_of(len(marks))
        self._loads[worker] += work
        self._work += work
        self._calls += 1
        if self._calls >= HALVING_CALLS:
            self._epoch += 1
            self._calls, self._work = self._calls / 2, self._work / 2
            self._loads = {each: load / 2 for each, load in self._loads.items()}

    def _traffic(self, mark: int) -> float:
        """Returns how many calls had this mark lately."""
        seen = self._seen.get(mark)
        return seen.traffic * 0.5 ** (self._epoch - seen.epoch) if seen is not None else 0.0

    def _spare(self) -> float:
        spare = min(SPARE_CALLS_MAX, SPARE_CALLS + self._calls / CALLS_PER_SPARE)
        return spare * self._work / max(1.0, self._calls)

    def _mean(self) -> float:
        return sum(self._loads.values()) / max(1, len(self._loads))


def weight(mark: int, worker: str) -> int:
    """Returns how much this worker is the one for a prefix: the one with the highest number is (rendezvous hashing)."""
    return xxhash.xxh3_64_intdigest(worker.encode(), seed=mark)
