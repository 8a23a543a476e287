"""Engine-hashed blocks under eviction, and segments.

``engine-blocks`` replays traces of blocks (as ``policies``), and one of agents: 43 turns each, with forks. An engine
has an LRU of its own and asks the store for the rest of a prompt. Hypothesis: with a block's place in its prompt in its
stamp, and look-ups of whole prompts that count as uses, collection in sweeps finds at least 97 % of what an LRU over
chains does that evicts block by block, and keeps no block whose first ones were deleted. Second: agents whose forks are
superseded once the agent returns to what it forked from find more; if each request superseded what it left, they would
find less. The figures are counted: the same on every machine.

``segments`` measures the time to find those of a prompt, embedded and through a worker, and to rotate their keys.

    python -m benchmarks engine-blocks [TRACE ...] [--capacities 0.1 0.25 0.5] [--engine 0.05]
    python -m benchmarks segments [--tokens 10000] [--rounds 51] [--save FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np

from benchmarks.harness.load import WrongBytes
from benchmarks.harness.machine import describe, in_turns, percentile, timed
from benchmarks.harness.paths import IN_PROCESS, reached
from benchmarks.harness.result import Cell, Result, Table, markdown, save
from benchmarks.policies import SWEPT, Blocks, Column, Lru, Replay, read
from kvstore import Layout
from kvstore.client import Store
from kvstore.connectors.common import Abandoned, Branch, Sessions
from kvstore.errors import InvalidRequest
from kvstore.hints import PRIORITY_DEFAULT
from kvstore.recency import QUANTUM_S, USES_MAX
from kvstore.segments import Rope, Style
from kvstore.segments.rotation import TYPES, rotate_planes
from kvstore.tokens import TokenArray
from kvstore_gc.policy import Order, Uses, ranks

CAPACITIES = (0.1, 0.25, 0.5)
ENGINE_SHARE = 0.05
AGENTS, TURNS, SYSTEMS, SYSTEM_BLOCKS, FORK_CHANCE, FORK_TURNS = 120, 43, 6, 8, 0.12, 5
FORK_PRIORITY = 10
"""That of ``preset=\"batch\"``."""
BLOCK_COLUMNS = (
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


def blocks_main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine-blocks")
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--capacities", type=float, nargs="+", default=CAPACITIES, help="shares of all blocks")
    parser.add_argument("--engine", type=float, default=ENGINE_SHARE, help="room of the engine's cache, same unit")
    asked = parser.parse_args(arguments)
    try:
        replays = [*(read([each], 0.0, 1.0) for each in asked.traces), agents(), agents(fork_priority=FORK_PRIORITY)]
    except InvalidRequest as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    made = [row for replay in replays for row in rows(replay, asked.capacities, asked.engine)]
    print(markdown(Table("Engine-hashed blocks", BLOCK_COLUMNS, made)))
    return 0


def _leading(there: np.ndarray) -> int:
    return len(there) if there.all() else int(there.argmin())


# Segments


LAYOUT = Layout(layers=1, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=64)
DOCUMENTS = 200
DOCUMENT_TOKENS = 640
SYSTEM_TOKENS, QUESTION_TOKENS = 100, 32
KEYS_SHAPE = (32, 2048, 8, 128)
"""K of 2,048 tokens in the shape of Llama-3.1-8B: more than caches hold."""


SEGMENTS_HYPOTHESIS = (
    "segments of a prompt of 10,000 tokens are found within 2 ms, boundaries given or not, in process and through a "
    "worker; keys are rotated at 8 GB/s a core where memcpy does as much"
)


def documents() -> list[TokenArray]:
    """Documents of random tokens."""
    chance = np.random.default_rng(1)
    return [chance.integers(3, 50_000, DOCUMENT_TOKENS, np.uint32) for _ in range(DOCUMENTS)]


def prompt_of(stored: Sequence[TokenArray], tokens: int, seed: int) -> tuple[TokenArray, list[int]]:
    """A system prompt, as many documents as fit, in any order, a question; and where each document and it begin."""
    chance = np.random.default_rng(seed)
    chosen = [stored[at] for at in chance.permutation(len(stored))]
    chosen = chosen[: (tokens - SYSTEM_TOKENS - QUESTION_TOKENS) // DOCUMENT_TOKENS]
    starts = [SYSTEM_TOKENS + at * DOCUMENT_TOKENS for at in range(len(chosen) + 1)]
    system, question = (
        chance.integers(50_000, 60_000, size, np.uint32) for size in (SYSTEM_TOKENS, tokens - starts[-1])
    )
    return np.concatenate([system, *chosen, question]), starts


def found_in(store: Store, tokens: int, rounds: int) -> list[tuple[str, float, float]]:
    """Medians and 99th percentiles of looking, in ms, with boundaries and without, for prompts not seen before."""
    segments = store.namespace("m", LAYOUT).segments(Rope(10_000.0, 16))
    stored = documents()
    for each in stored:
        segments.put(each, np.zeros(LAYOUT.shape(len(each)), np.float16))
    rows = []
    for way in ("boundaries", "any offset"):
        times = []
        for number in range(rounds + 5):
            prompt, starts = prompt_of(stored, tokens, number)
            began_s = time.perf_counter()
            matches = segments.find(prompt, starts if way == "boundaries" else None, after=64)
            times.append((time.perf_counter() - began_s) * 1e3)
            if (count := sum(map(len, matches))) < (expected := starts[-1] - SYSTEM_TOKENS):
                raise WrongBytes(f"{count} tokens of {expected} were found, {way}")
        rows.append((way, median(times[5:]), percentile(times[5:], 0.99)))
    return rows


def find_table(tokens: int, rounds: int) -> Table:
    """Searches in process and through a worker."""
    rows: list[list[Cell]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for place, path in (("in process", IN_PROCESS), ("through a worker", "shared"), ("over gRPC alone", "grpc")):
            (here := Path(folder, path)).mkdir()
            with reached(path, here) as opened, opened() as store:
                rows += [[place, way, middle, slow] for way, middle, slow in found_in(store, tokens, rounds)]
    title = f"find in a prompt of {tokens:,} tokens, {DOCUMENTS} documents of {DOCUMENT_TOKENS} tokens stored"
    return Table(title, ("", "", "median ms", "p99 ms"), rows)


def rotation_table(rounds: int) -> Table:
    """Keys rotated in place beside a copy of as many bytes, one core."""
    rows: list[list[Cell]] = []
    for dtype in TYPES:
        for style in Style:
            keys = np.random.default_rng(0).standard_normal(KEYS_SHAPE, np.float32).astype(dtype)
            other, rope = np.empty_like(keys), Rope(500_000.0, 128, style)
            works: dict[str, Callable[[], object]] = {
                "rotated": partial(rotate_planes, rope, keys, 1000),
                "copied": partial(np.copyto, other.view(np.uint8), keys.view(np.uint8)),
            }
            taken = in_turns({name: partial(timed, work) for name, work in works.items()}, rounds)
            rate = {name: keys.nbytes / 1e9 / median(each[name].cpu_s for each in taken) for name in works}
            ratio = median(each["copied"].cpu_s / each["rotated"].cpu_s for each in taken)
            name = "bfloat16" if dtype == ml_dtypes.bfloat16 else dtype.name
            rows.append([name, style.value, rate["rotated"], rate["copied"], ratio])
    title = f"K of shape {KEYS_SHAPE} rotated in place, GB/s of CPU time"
    return Table(title, ("type", "style", "rotated", "memcpy", "of memcpy"), rows)


def segments_main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks segments")
    parser.add_argument("--tokens", type=int, default=10_000, help="length of prompts (10000)")
    parser.add_argument("--rounds", type=int, default=51, help="prompts, and rounds of rotation (51)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the raw figures there, as JSON")
    asked = parser.parse_args(arguments)
    if asked.tokens < (least := SYSTEM_TOKENS + DOCUMENT_TOKENS + QUESTION_TOKENS):
        parser.error(f"--tokens {asked.tokens}: a prompt with one document has {least}")
    began_s, machine = time.monotonic(), describe()
    tables = [find_table(asked.tokens, asked.rounds), rotation_table(asked.rounds)]
    for table in tables:
        print(f"{table.title}\n\n{markdown(table)}\n")
    if asked.save:
        save(Result("segments", SEGMENTS_HYPOTHESIS, (), machine, tables, [], time.monotonic() - began_s), asked.save)
    return 0
