"""The real vLLM on a CPU: time to first token and processor time, without a store, with ours, and with vLLM's own tier.

    python -m benchmarks serving [--only prompts] [--ways none,async,fs] [--tokens 4096] [--rounds 5]

Needs the engine's environment (``make engines-test ENGINES=vllm`` makes it). Each way is one engine, and all of them
live at once; a round asks each in turn for a prompt that is new (cold) and then for the prompt of the round before
(warm), which no cache of the engine has any more. Hypothesis: storing costs a few hundredths of a cold request, and a
warm one is about a tenth of it. The GPU is the better place to compute, so a CPU flatters the ratio of a warm request
and hides what storing costs. Chats through two servers are in turns.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import machine, turns
from benchmarks.contents import WrongBytes
from benchmarks.crew import CrewFailed
from benchmarks.options import Options, told
from benchmarks.result import Cell, Result, Table
from benchmarks.vllm_ways import SHAPE, SMALL, TICK_S, cpu_s, settings_of, token_bytes
from tests.engines.vllm.engines import (
    BLOCK_TOKENS,
    PYTHON,
    Engine,
    full_blocks,
    make_model,
    prompt,
    running_engine,
    running_worker,
)
from tests.kit.etcd import running_etcd

HYPOTHESIS = "storing costs a few hundredths of a cold request, and a warm one takes about a tenth of it"
WAYS = ("none", "async", "worker", "tier", "fs")
QUICK = ("none", "async")
ABOUT = {
    "none": "vLLM without a store, and without a prefix cache",
    "async": "the connector: a request waits aside for its KV",
    "worker": "the connector through a worker that has the KV in memory",
    "tier": "vLLM's offloading with our secondary tier",
    "fs": "vLLM's offloading with its own tier of files",
}
STORED_S = 300.0


@dataclass(frozen=True)
class Took:
    """One request, and what followed until all of it was stored."""

    first_token_s: float
    cpu_s: float


@dataclass
class Way:
    """One engine and its store."""

    name: str
    engine: Engine
    root: Path
    processes: tuple[int, ...]

    def cold(self, tokens: list[int], stored: int) -> Took:
        """A prompt that nobody has seen; ``stored`` is how many blocks the root has in the end."""
        took, cached = self._timed(tokens, stored)
        if cached:
            raise WrongBytes(f"{self.name}: {cached} tokens of a new prompt were found")
        return took

    def warm(self, tokens: list[int], stored: int) -> Took:
        """A prompt that was stored, asked of an engine that has forgotten it."""
        self.engine.forget()
        took, cached = self._timed(tokens, stored)
        if self.name != "none" and cached != full_blocks(tokens):
            raise WrongBytes(f"{self.name}: {cached} of {full_blocks(tokens)} stored tokens were loaded")
        return took

    def _timed(self, tokens: list[int], stored: int) -> tuple[Took, int]:
        before_s = self._cpu_s()
        answer = self.engine.generate(tokens, tokens=1)
        if self.name != "none":
            self.engine.generate(prompt(0, BLOCK_TOKENS // 2), tokens=2)  # vLLM stores in the steps that follow
            self._wait_stored(stored)
        return Took(answer.seconds, max(TICK_S, self._cpu_s() - before_s)), answer.cached[0]

    def _wait_stored(self, count: int) -> None:
        ends_s = time.monotonic() + STORED_S
        folder = self.root if self.name == "fs" else self.root / "chunks"
        while (found := sum(map(_is_block, folder.rglob("*")))) < count:
            if time.monotonic() > ends_s:
                raise CrewFailed(f"{self.name}: {found} of {count} blocks were stored in {STORED_S:.0f} s")
            time.sleep(0.01)

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self.processes))


def _is_block(path: Path) -> bool:
    """True for a whole file of KV, which is at least a block of the smaller model."""
    try:
        return path.suffix != ".tmp" and path.stat().st_size >= BLOCK_TOKENS * token_bytes(SMALL)
    except FileNotFoundError:
        return False  # renamed meanwhile


@contextmanager
def running(names: list[str], folder: Path, shape: dict[str, int], tokens: int) -> Iterator[list[Way]]:
    """An engine for each way."""
    prompt_bytes = tokens * token_bytes(shape)
    with ExitStack() as parts:
        model = make_model(folder, "model", 7, **shape)
        ways = []
        for name in names:
            told(f"serving: starting {name}")
            root, connect, processes = folder / name, "", list[int]()
            if name == "worker":
                etcd = parts.enter_context(running_etcd(folder / "etcd"))
                options = ("--memory", str(prompt_bytes * 6))
                connect, worker = parts.enter_context(running_worker(root, etcd.endpoints, *options))
                processes.append(worker.pid)
            settings = {
                "model": str(model),
                "max_model_len": tokens + 2 * BLOCK_TOKENS,
                **settings_of(name, root, prompt_bytes, connect),
            }
            engine = parts.enter_context(running_engine(folder, settings))
            ways.append(Way(name, engine, root, (engine.child.pid, *processes)))
        yield ways


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark alone."""
    parser.add_argument("--ways", type=_names, help=f"some of {','.join(WAYS)} (default: all; with --quick {QUICK})")
    parser.add_argument("--tokens", type=int, help="tokens of a prompt (default: 4096; with --quick 1024)")
    parser.add_argument(
        "--only", choices=("prompts", "chats"), help="engines with single prompts, or servers with chats"
    )
    turns.add_arguments(parser)


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """The tables of single prompts, and of chats."""
    about = machine.describe()
    if not PYTHON.exists():
        return Result("serving", HYPOTHESIS, (), about, [], ["vLLM is not installed: make engines-test ENGINES=vllm"])
    only = arguments and arguments.only
    conditions, tables = [machine.file_system(options.directory)], list[Table]()
    for name, measure in (("prompts", _prompts), ("chats", turns.run)):
        if only in (None, name):
            more, found = measure(options, arguments)
            conditions += more
            tables += found
    return Result("serving", HYPOTHESIS, tuple(conditions), about, tables)


def _prompts(options: Options, arguments: argparse.Namespace | None) -> tuple[list[str], list[Table]]:
    """Conditions, and the tables of cold and warm prompts."""
    names = list((arguments and arguments.ways) or (QUICK if options.quick else WAYS))
    tokens = (arguments and arguments.tokens) or (1024 if options.quick else 4096)
    shape = SMALL if options.quick else SHAPE
    with options.folder() as folder, running(names, folder, shape, tokens) as ways:
        cold, warm = measured(ways, tokens, options.rounds)
    size = f"{tokens:,} tokens, {tokens * token_bytes(shape) / 1e6:.0f} MB of KV in blocks of {BLOCK_TOKENS} tokens"
    conditions = [
        f"{size}, float32, {shape['num_hidden_layers']} layers",
        "engines in one process each, one thread to compute; CPU s: the engine's and its worker's, until all is stored",
        *(f"{name}: {ABOUT[name]}" for name in names),
    ]
    return conditions, [_table("Cold", names, cold), _table("Warm", names, warm)]


Rounds = list[dict[str, Took]]


def measured(ways: list[Way], tokens: int, rounds: int) -> tuple[Rounds, Rounds]:
    """Cold and warm requests of each way, in turns; the first round is not counted."""
    cold, warm = Rounds(), Rounds()
    prompts = [prompt(seed, tokens + 1) for seed in range(1, rounds + 2)]
    for number, asked in enumerate(prompts):
        order = ways[:: 1 if number % 2 else -1]
        told(f"serving: round {number} of {rounds}")
        stored = (number + 1) * (tokens // BLOCK_TOKENS)
        cold.append({way.name: way.cold(asked, stored) for way in order})
        warm.append({way.name: way.warm(prompts[max(0, number - 1)], stored) for way in order})
    return cold[1:], warm[1:]


def _table(title: str, names: list[str], rounds: Rounds) -> Table:
    """Medians, and ratios to the first way of each round."""
    rows: list[list[Cell]] = []
    for name in names:
        row: list[Cell] = [name]
        for figure in ("first_token_s", "cpu_s"):
            ratios = [getattr(each[name], figure) / getattr(each[names[0]], figure) for each in rounds]
            row += [
                median(getattr(each[name], figure) for each in rounds),
                median(ratios),
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        rows.append(row)
    columns = ("way", "first token s", f"of {names[0]}", "range", "CPU s", f"CPU of {names[0]}", "range of CPU")
    return Table(
        title, columns, rows, f"warm requests are compared with warm ones of {names[0]}" if title == "Warm" else ""
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(WAYS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: expected some of {', '.join(WAYS)}")
    return names
