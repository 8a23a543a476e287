"""Cache policies compared: production traces through each, as token hit ratios.

Hypothesis: ranking by the time since the last use, halved for every second quantum of use, finds more than LRU does at
most capacities, as a collector can do it: in sweeps, from what a directory listing shows.  A trace has one JSON object
per line with ``timestamp`` (ms), ``input_length`` and ``hash_ids`` of blocks of 512 tokens, as published by Mooncake
(conversation and synthetic).  Part blocks are not stored and never found.  Capacities are shares of all different
blocks of the trace.  No cache state, no timing: the figures are the same on every machine.

    python -m benchmarks policies TRACE [TRACE ...] [--capacities 0.05 0.1 ...] [--halves] [--json]

``PATH:PRESET`` says what the writers of a trace hint (``chat``, ``rag`` ...); ``--mixed`` replays all traces together
in one store, where alone such hints can matter.

Every cache has ``request(now_s, chain)``, which returns the leading blocks of the chain that it had; afterwards it has
the whole chain, as far as there is space. A block counts as found only if all before it were.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.recency import PRIORITY_DEFAULT, QUANTUM_S, USES_MAX, Hints, checked_preset
from kvstore.errors import InvalidRequest
from kvstore.replay.trace import BLOCK_TOKENS, load_trace
from kvstore_gc.policy import EvictionOrder, Uses, ranks

NEVER = 1 << 40
Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """All blocks of a trace, numbered from 0: of each its parent (-1: none), its depth, and its writer's priority."""

    parents: Column
    depths: Column
    priorities: Column

    def __len__(self) -> int:
        return len(self.parents)


class Cache(Protocol):
    def request(self, now_s: float, chain: Column) -> int: ...

    def present(self) -> set[int]: ...


class Lru:
    """Least recently used. Touched from leaf to root, so it is leaf-first as it stands."""

    def __init__(self, blocks: Blocks, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def request(self, now_s: float, chain: Column) -> int:
        blocks = chain.tolist()
        found = _leading(blocks, self._order)
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block)
        while len(self._order) > self._capacity:
            self._order.popitem(last=False)
        return found

    def present(self) -> set[int]:
        return set(self._order)


class Optimum:
    """Evicts what is needed again last, and may refuse a newcomer: Belady's MIN with bypass.

    Exact for blocks of one size.  A parent is needed again no later than its child, so with ties broken by depth it is
    leaf-first, and no policy, leaf-first or not, finds more.
    """

    def __init__(self, blocks: Blocks, capacity: int, chains: list[Column]) -> None:
        self._blocks = blocks
        self._capacity = capacity
        self._next: list[list[int]] = []
        needed = np.full(len(blocks), NEVER)
        for number in range(len(chains) - 1, -1, -1):
            self._next.append(needed[chains[number]].tolist())
            needed[chains[number]] = number
        self._present: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def request(self, now_s: float, chain: Column) -> int:
        blocks = chain.tolist()
        found = _leading(blocks, self._present)
        for depth, (block, needed) in enumerate(zip(blocks, self._next.pop(), strict=True)):
            self._present[block] = needed
            heapq.heappush(self._heap, (-needed, -depth, block))
        while len(self._present) > self._capacity:
            needed, _, block = heapq.heappop(self._heap)
            if self._present.get(block) == -needed:
                del self._present[block]
        return found

    def present(self) -> set[int]:
        return set(self._present)


class Sweeping:
    """Ours: knows of each block what its mtime tells, and evicts by the rank of ``kvstore_gc.policy``.

    It sweeps as soon as more than ``high`` is taken, down to ``low``.  What finds no room is not stored.
    """

    def __init__(
        self,
        blocks: Blocks,
        capacity: int,
        order: EvictionOrder,
        *,
        high: float,
        low: float,
        hinted: bool = False,
    ) -> None:
        self._blocks = blocks
        self._capacity = capacity
        self._order = order
        self._high_count = int(high * capacity)
        self._low_count = int(low * capacity)
        self._room = capacity if high < 1 else len(blocks)
        self._present = np.zeros(len(blocks), np.bool_)
        self._last_s = np.zeros(len(blocks), np.int64)
        self._uses = np.zeros(len(blocks), np.int64)
        self._priorities = blocks.priorities if hinted else np.full(len(blocks), PRIORITY_DEFAULT)
        self._ties = np.random.default_rng(0).integers(0, 1 << 20, len(blocks))
        self._used = 0

    def request(self, now_s: float, chain: Column) -> int:
        present = self._present[chain]
        found = len(chain) if present.all() else int(present.argmin())
        quantum_s = int(now_s) // QUANTUM_S * QUANTUM_S
        stale = chain[:found][self._last_s[chain[:found]] < quantum_s]
        self._uses[stale] = np.minimum(self._uses[stale] + 1, USES_MAX)
        self._last_s[stale] = quantum_s
        new = chain[found:][: max(0, self._room - self._used)]
        self._present[new], self._last_s[new], self._uses[new] = True, quantum_s, 0
        self._used += len(new)
        self._sweep(now_s)
        return found

    def present(self) -> set[int]:
        return set(np.flatnonzero(self._present).tolist())

    def _sweep(self, now_s: float) -> None:
        excess = self._used - self._low_count
        if self._used <= self._high_count or excess <= 0:
            return
        there = np.flatnonzero(self._present)
        none = np.zeros(len(there), np.int64)
        uses = Uses(self._last_s[there], self._blocks.depths[there], self._uses[there], self._priorities[there], none)
        worth = ranks(uses, self._ties[there], now_s, self._order)
        self._present[there[np.argpartition(worth, excess - 1)[:excess]]] = False
        self._used -= excess


def _leading(blocks: list[int], present: Container[int]) -> int:
    """The number of leading blocks that are there."""
    for count, block in enumerate(blocks):
        if block not in present:
            return count
    return len(blocks)


# The replay


CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
PER_INSERT = {"high": 1.0, "low": 0.99}
"""The smallest sweeps: as soon as it is full, one per cent."""
SWEPT = {"high": 0.95, "low": 0.94}
"""As the collector does: it keeps a twentieth free, in small batches."""


@dataclass(frozen=True)
class Replay:
    """One trace, or several in one store: chains of block numbers in order of time."""

    title: str
    blocks: Blocks
    times_s: list[float]
    chains: list[Column]
    tokens: int
    sessions: list[str] | None = None
    """The session of each prompt, if the trace has any."""


@dataclass(frozen=True)
class Row:
    """One policy's token hit ratios, one for each capacity."""

    trace: str
    policy: str
    how: str
    ratios: list[float]


def main(given: Sequence[str] | None = None) -> int:
    """Prints the tables; 0 when it ran."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE[:PRESET]")
    parser.add_argument(
        "--capacities", type=float, nargs="+", default=CAPACITIES, help="shares of all different blocks"
    )
    parser.add_argument("--halves", action="store_true", help="each half of a trace by time, instead of the whole")
    parser.add_argument("--mixed", action="store_true", help="all traces together in one store")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args(given)
    parts = ((0.0, 0.5), (0.5, 1.0)) if arguments.halves else ((0.0, 1.0),)
    groups = [arguments.traces] if arguments.mixed else [[one] for one in arguments.traces]
    try:
        replays = [read(group, *part) for group in groups for part in parts]
    except InvalidRequest as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for replay in replays for row in measure(replay, arguments.capacities, arguments.mixed)]
    if arguments.json:
        print(json.dumps({"capacities": list(arguments.capacities), "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        for replay in replays:
            show(replay, arguments.capacities, [row for row in rows if row.trace == replay.title])
    return 0


def read(sources: Sequence[str], begin: float, end: float) -> Replay:
    """Traces as one replay, from ``begin`` to ``end`` as shares of their time. Raises InvalidRequest."""
    numbers: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    depths: list[int] = []
    priorities: list[int] = []
    timed: list[tuple[float, Column]] = []
    tokens = 0
    for place, source in enumerate(sources):
        path, _, preset = source.partition(":")
        priority = Hints.of(preset=checked_preset(preset) if preset else None).priority
        requests = load_trace(path)
        last_ms = requests[-1].timestamp_ms
        for request in requests:
            if not begin * last_ms <= request.timestamp_ms < end * last_ms + (end == 1):
                continue
            chain, parent = [], -1
            for depth, hash_id in enumerate(request.hash_ids[: request.full_blocks]):
                number = numbers.setdefault((place, hash_id), len(numbers))
                if number == len(parents):
                    parents.append(parent)
                    depths.append(depth)
                    priorities.append(priority)
                chain.append(number)
                parent = number
            tokens += request.input_length
            if chain:
                timed.append((request.timestamp_ms / 1000, np.array(chain, np.int64)))
    timed.sort(key=lambda one: one[0])
    part = "" if (begin, end) == (0, 1) else f", {begin:.0%} to {end:.0%} of its time"
    return Replay(
        " + ".join(Path(source.partition(":")[0]).stem for source in sources) + part,
        Blocks(np.array(parents), np.array(depths), np.array(priorities)),
        [time_s for time_s, _ in timed],
        [chain for _, chain in timed],
        tokens,
    )


def measure(replay: Replay, capacities: Sequence[float], hinted: bool) -> list[Row]:
    """Every policy at every capacity."""
    return [
        Row(
            replay.title,
            policy,
            how,
            [hit_ratio(replay, make(max(1, int(share * len(replay.blocks))))) for share in capacities],
        )
        for policy, how, make in policies(replay, hinted)
    ]


def policies(replay: Replay, hinted: bool) -> list[tuple[str, str, Callable[[int], Cache]]]:
    """Name, way of evicting, and how to make it for a capacity in blocks."""
    blocks = replay.blocks
    found: list[tuple[str, str, Callable[[int], Cache]]] = [
        ("optimum", "per insert", lambda capacity: Optimum(blocks, capacity, replay.chains)),
        ("LRU", "per insert", lambda capacity: Lru(blocks, capacity)),
    ]
    ways: list[tuple[str, dict[str, float]]] = [
        ("per insert (1 %)", PER_INSERT),
        ("ahead of need (5 % free)", SWEPT),
    ]
    for how, settings in ways:
        for order in (EvictionOrder.LRU, EvictionOrder.USES):
            found.append((f"ours, {order.value}", how, partial(_sweeping, blocks, order, settings, False)))
        if hinted:
            found.append(("ours, uses and hints", how, partial(_sweeping, blocks, EvictionOrder.USES, settings, True)))
    return found


def _sweeping(blocks: Blocks, order: EvictionOrder, settings: dict[str, float], hinted: bool, capacity: int) -> Cache:
    return Sweeping(blocks, capacity, order, high=settings["high"], low=settings["low"], hinted=hinted)


def hit_ratio(replay: Replay, cache: Cache) -> float:
    """Tokens found, as a share of all tokens of all prompts."""
    found = sum(cache.request(now_s, chain) for now_s, chain in zip(replay.times_s, replay.chains, strict=True))
    return found * BLOCK_TOKENS / replay.tokens


def show(replay: Replay, capacities: Sequence[float], rows: Sequence[Row]) -> None:
    """A markdown table."""
    print(f"**{replay.title}**: {len(replay.chains)} prompts, {len(replay.blocks)} different full blocks\n")
    print("| policy | evicts | " + " | ".join(f"{share:.0%}" for share in capacities) + " |")
    print("|---|---|" + "---:|" * len(capacities))
    for row in rows:
        print(f"| {row.policy} | {row.how} | " + " | ".join(f"{100 * ratio:.1f}" for ratio in row.ratios) + " |")
    print()
