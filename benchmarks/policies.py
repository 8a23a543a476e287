"""Cache policies compared: production traces through each, as token hit ratios.

Hypothesis: ranking by the time since the last use, halved for every second quantum of use, finds more than LRU does at
most capacities, as a collector can do it: in sweeps, from what a directory listing shows.  A trace has one JSON object
per line with ``timestamp`` (ms), ``input_length`` and ``hash_ids`` of blocks of 512 tokens, as published by Mooncake
(conversation and synthetic).  Part blocks are not stored and never found.  Capacities are shares of all different
blocks of the trace.  No cache state, no timing: the figures are the same on every machine.

    python -m benchmarks.policies TRACE [TRACE ...] [--capacities 0.05 0.1 ...] [--halves] [--json]

``PATH:PRESET`` says what the writers of a trace hint (``chat``, ``rag`` ...); ``--mixed`` replays all traces together
in one store, where alone such hints can matter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.caches import Blocks, Cache, Column, Fifo, Lfu, Lru, Optimum, S3Fifo, Sieve, Sweeping
from kvstore.errors import InvalidRequest
from kvstore.hints import Hints, checked_preset
from kvstore.replay.trace import BLOCK_TOKENS, load_trace
from kvstore_gc.policy import Order

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


def main() -> int:
    """Prints the tables; 0 when it ran."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE[:PRESET]")
    parser.add_argument(
        "--capacities", type=float, nargs="+", default=CAPACITIES, help="shares of all different blocks"
    )
    parser.add_argument("--halves", action="store_true", help="each half of a trace by time, instead of the whole")
    parser.add_argument("--mixed", action="store_true", help="all traces together in one store")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
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
        ("LFU", "per insert", lambda capacity: Lfu(blocks, capacity)),
    ]
    for name, kind in (("FIFO", Fifo), ("SIEVE", Sieve), ("S3-FIFO", S3Fifo)):
        found.append((name, "per insert, leaf-first", partial(kind, blocks, leaf_first=True)))
        found.append((name, "per insert, plain", partial(kind, blocks, leaf_first=False)))
    ways: list[tuple[str, dict[str, float]]] = [
        ("per insert (1 %)", PER_INSERT),
        ("ahead of need (5 % free)", SWEPT),
    ]
    for how, settings in ways:
        for order in (Order.LRU, Order.USES):
            found.append((f"ours, {order.value}", how, partial(_sweeping, blocks, order, settings, False)))
        if hinted:
            found.append(("ours, uses and hints", how, partial(_sweeping, blocks, Order.USES, settings, True)))
    return found


def _sweeping(blocks: Blocks, order: Order, settings: dict[str, float], hinted: bool, capacity: int) -> Cache:
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


if __name__ == "__main__":
    sys.exit(main())
