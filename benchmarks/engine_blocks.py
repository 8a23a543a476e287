"""Engine-hashed blocks under collection: what a store gives an engine that has a cache of its own.

    python -m benchmarks.engine_blocks [TRACE ...] [--capacities 0.1 0.25 0.5] [--engine 0.05]

Replays traces of blocks (as ``benchmarks.policies``), and one of agents: 43 turns each, with forks. An engine has an
LRU of its own and asks the store for the rest of a prompt. Hypothesis: with a block's place in its prompt in its stamp,
and look-ups of whole prompts that count as uses, collection in sweeps finds at least 97 % of what an LRU over chains
does that evicts block by block, and keeps no block whose first ones are gone. Second: agents whose forks are superseded
once the agent returns to what it forked from find more; if each request superseded what it left, they would find less.
The figures are counted: the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.caches import Blocks, Column, Lru
from benchmarks.policies import SWEPT, Replay, read
from benchmarks.result import Cell, Table, markdown
from kvstore.connectors.common import Abandoned, Branch, Sessions
from kvstore.errors import InvalidRequest
from kvstore.hints import PRIORITY_DEFAULT
from kvstore.recency import QUANTUM_S, USES_MAX
from kvstore_gc.policy import Order, Uses, ranks

CAPACITIES = (0.1, 0.25, 0.5)
ENGINE_SHARE = 0.05
AGENTS, TURNS, SYSTEMS, SYSTEM_BLOCKS, FORK_CHANCE, FORK_TURNS = 120, 43, 6, 8, 0.12, 5
FORK_PRIORITY = 10
"""That of ``preset=\"batch\"``."""
COLUMNS = (
    "trace",
    "capacity %",
    "LRU over chains: hits %",
    "depths and look-ups: hits %",
    "of LRU %",
    "neither: hits %",
    "of LRU %",
    "unreachable blocks",
    "neither: unreachable blocks",
    "and abandoned branches first: hits %",
    "of LRU %",
    "all that is left first: hits %",
)


class Swept:
    """The store: blocks with their stamps, swept by the rank of ``kvstore_gc.policy`` when it is over ``high``."""

    def __init__(self, blocks: Blocks, capacity: int, *, has_depths: bool, renews_looked_up: bool) -> None:
        self._depths = blocks.depths if has_depths else np.zeros_like(blocks.depths)
        self._parents = blocks.parents
        self._priorities = blocks.priorities
        self._renews_looked_up = renews_looked_up
        self._capacity = capacity
        self._present = np.zeros(len(blocks), np.bool_)
        self._last_s = np.zeros(len(blocks), np.int64)
        self._uses = np.zeros(len(blocks), np.int64)
        self._superseded = np.zeros(len(blocks), np.int64)
        self._ties = np.random.default_rng(0).integers(0, 1 << 20, len(blocks))
        self.unreachable = 0
        """The most kept blocks, after a sweep, that have an ancestor which is not kept."""

    def request(self, now_s: float, chain: Column, resident: int) -> int:
        """Returns the blocks found behind those that the engine has. What is missing is put, as far as it has room."""
        present = self._present[chain]
        stop = resident + _leading(present[resident:])
        quantum_s = int(now_s) // QUANTUM_S * QUANTUM_S
        read = chain[resident:stop]
        self._use(read, quantum_s)
        if self._renews_looked_up:
            self._use(chain[: _leading(present)], quantum_s)
        new = chain[~present]
        if len(new):
            new = new[: max(0, self._capacity - int(self._present.sum()))]
            self._present[new], self._last_s[new], self._uses[new], self._superseded[new] = True, quantum_s, 0, 0
            self._sweep(now_s)
        return stop - resident

    def supersede(self, blocks: Column) -> None:
        """Lets blocks of an abandoned branch go first, until their next use."""
        self._superseded[blocks], self._uses[blocks] = 1, 0

    def _use(self, blocks: Column, quantum_s: int) -> None:
        self._superseded[blocks] = 0
        stale = blocks[self._last_s[blocks] < quantum_s]
        self._uses[stale] = np.minimum(self._uses[stale] + 1, USES_MAX)
        self._last_s[stale] = quantum_s

    def _sweep(self, now_s: float) -> None:
        there = np.flatnonzero(self._present)
        excess = len(there) - int(SWEPT["low"] * self._capacity)
        if len(there) <= SWEPT["high"] * self._capacity or excess <= 0:
            return
        none = np.zeros(len(there), np.int64)
        columns = (self._last_s, self._depths, self._uses, self._priorities)
        last_s, depths, used, priorities = (each[there] for each in columns)
        uses = Uses(last_s, depths, used, priorities, none, self._superseded[there])
        worth = ranks(uses, self._ties[there], now_s, Order.USES)
        self._present[there[np.argpartition(worth, excess - 1)[:excess]]] = False
        reachable = np.zeros(len(self._present), np.bool_)
        for block in range(len(self._present)):  # parents have lower numbers
            parent = self._parents[block]
            reachable[block] = self._present[block] and (parent < 0 or reachable[parent])
        self.unreachable = max(self.unreachable, int((self._present & ~reachable).sum()))


@dataclass(frozen=True)
class Found:
    """The blocks that an engine did not compute, as a share of all, and the most that were kept in vain."""

    hits: float
    unreachable: int = 0


def swept(
    replay: Replay, capacity: int, engine_blocks: int, *, is_chained: bool, sessions: bool = False, leaves: bool = False
) -> Found:
    """Replays through an engine and a store that is collected.

    ``sessions``: the engine supersedes what sessions have abandoned; ``leaves``: all else of the session of a request.
    """
    engine = Lru(replay.blocks, engine_blocks)
    store = Swept(replay.blocks, capacity, has_depths=is_chained, renews_looked_up=is_chained)
    known, names, found = Sessions(), replay.sessions if sessions else None, 0
    for at, (now_s, chain) in enumerate(zip(replay.times_s, replay.chains, strict=True)):
        resident = engine.request(now_s, chain)
        found += resident + store.request(now_s, chain, resident)
        if names is not None:
            branch = Branch(chain.tolist(), len(chain), now_s)
            for each in known.ended(names[at], branch, True if leaves else None):
                store.supersede(chain_of(each))
    return Found(found / sum(map(len, replay.chains)), store.unreachable)


def chain_of(branch: Abandoned) -> Column:
    """Returns the blocks of the abandoned part of a branch."""
    return np.array([branch.names[at] for at in range(branch.first, len(branch.names))], np.int64)


def ideal(replay: Replay, capacity: int, engine_blocks: int) -> Found:
    """Replays through an engine and an LRU of the same room as the store holds between two sweeps, at most."""
    engine, store = Lru(replay.blocks, engine_blocks), Lru(replay.blocks, int(SWEPT["high"] * capacity))
    found = 0
    for now_s, chain in zip(replay.times_s, replay.chains, strict=True):
        found += max(engine.request(now_s, chain), store.request(now_s, chain))
    return Found(found / sum(map(len, replay.chains)))


def agents(seed: int = 1, fork_priority: int = PRIORITY_DEFAULT) -> Replay:
    """Agents in turns of 1 to 8 new blocks behind a shared system prompt; some turns fork an earlier state.

    A fork is abandoned after some turns. ``fork_priority`` is what its requests say that its blocks are worth.
    """
    chance = np.random.default_rng(seed)
    parents: list[int] = []
    depths: list[int] = []
    priorities: list[int] = []

    def grown(chain: list[int], count: int, priority: int = PRIORITY_DEFAULT) -> list[int]:
        chain = list(chain)
        for _ in range(count):
            parents.append(chain[-1] if chain else -1)
            depths.append(len(chain))
            priorities.append(priority)
            chain.append(len(parents) - 1)
        return chain

    systems = [grown([], SYSTEM_BLOCKS) for _ in range(SYSTEMS)]
    timed: list[tuple[float, list[int], str]] = []
    for agent in range(AGENTS):
        now_s = float(chance.uniform(0, 3600))
        states = [systems[agent % SYSTEMS]]
        turns = int(chance.normal(TURNS, 8))
        while len(states) < turns:
            now_s += float(chance.exponential(40.0))
            states.append(grown(states[-1], int(chance.integers(1, 9))))
            timed.append((now_s, states[-1], f"agent {agent}"))
            if chance.random() < FORK_CHANCE:
                branch = states[int(chance.integers(len(states)))]
                for _ in range(FORK_TURNS):
                    now_s += float(chance.exponential(15.0))
                    branch = grown(branch, int(chance.integers(1, 5)), fork_priority)
                    timed.append((now_s, branch, f"agent {agent}"))
    timed.sort(key=lambda one: one[0])
    blocks = Blocks(np.array(parents), np.array(depths), np.array(priorities))
    chains = [np.array(chain, np.int64) for _, chain, _ in timed]
    title = "agents" if fork_priority == PRIORITY_DEFAULT else f"agents, forks of priority {fork_priority}"
    times_s, sessions = [now_s for now_s, _, _ in timed], [session for _, _, session in timed]
    return Replay(title, blocks, times_s, chains, sum(map(len, chains)), sessions)


def rows(replay: Replay, capacities: Sequence[float], engine_share: float) -> list[list[Cell]]:
    """One row for each capacity."""
    engine_blocks = max(1, int(engine_share * len(replay.blocks)))
    made: list[list[Cell]] = []
    for share in capacities:
        capacity = int(share * len(replay.blocks))
        best = ideal(replay, capacity, engine_blocks)
        chained, plain = (swept(replay, capacity, engine_blocks, is_chained=which) for which in (True, False))
        figures = [f"{100 * best.hits:.1f}"]
        for each in (chained, plain):
            figures += [f"{100 * each.hits:.2f}", f"{100 * each.hits / best.hits:.1f}" if best.hits else "-"]
        row: list[Cell] = [replay.title, 100 * share, *figures, chained.unreachable, plain.unreachable]
        if replay.sessions is None:
            made.append([*row, None, None, None])
            continue
        guessed, told = (
            swept(replay, capacity, engine_blocks, is_chained=True, sessions=True, leaves=leaves).hits
            for leaves in (False, True)
        )
        made.append([*row, f"{100 * guessed:.2f}", f"{100 * guessed / best.hits:.1f}", f"{100 * told:.2f}"])
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_blocks", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--capacities", type=float, nargs="+", default=CAPACITIES, help="shares of all blocks")
    parser.add_argument("--engine", type=float, default=ENGINE_SHARE, help="room of the engine's cache, same unit")
    asked = parser.parse_args(arguments)
    try:
        replays = [*(read([each], 0.0, 1.0) for each in asked.traces), agents(), agents(fork_priority=FORK_PRIORITY)]
    except InvalidRequest as error:
        print(f"benchmarks.engine_blocks: {error}", file=sys.stderr)
        return 2
    made = [row for replay in replays for row in rows(replay, asked.capacities, asked.engine)]
    print(markdown(Table("Engine-hashed blocks", COLUMNS, made)))
    return 0


def _leading(there: np.ndarray) -> int:
    return len(there) if there.all() else int(there.argmin())


if __name__ == "__main__":
    sys.exit(main())
