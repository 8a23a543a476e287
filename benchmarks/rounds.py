"""Time and processor time of pieces of work, and their summary over several rounds.

Other load disturbs a machine for seconds at a time. So contenders are measured in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Taken:
    """Seconds on the clock, and of all processor cores together in this process."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Taken:
    """The cost of one call."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - began_s
    return Taken(wall_s, time.process_time() - cpu_s)


def in_turns(works: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1) -> list[dict[str, T]]:
    """Calls each work once a round, in alternating order; each returns its figure. The first rounds are not counted."""
    counted = []
    for number in range(rounds + warm_up):
        names = list(works)[:: 1 if number % 2 else -1]
        found = {name: works[name]() for name in names}
        if number >= warm_up:
            counted.append(found)
    return counted


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
