"""How prompts spread over workers: hits in their memory, and how busy the busiest is.

Hypothesis: to send each prompt where its prefix is, with a bound on load, finds at least as much in memory as to choose
by the first chunk alone, and no worker gets more than 1.25 times the mean. Traces are those of ``benchmarks.policies``,
and made-up chats over system prompts whose use follows Zipf's law. Each worker's memory is an LRU cache of blocks, all
together a share of the different blocks. With several clients each knows only what went through it, and a chat goes
through any of them. No timing: the figures are the same on every machine.

    python -m benchmarks spreading [TRACE ...] [--workers 2 4 8] [--clients 1 4] [--memory 0.3] [--requests N]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstore.client.routing import Marks, Spreading, depths, weight
from kvstore.errors import InvalidRequest
from kvstore.replay.trace import load_trace

Blocks = Sequence[int]
Choose = Callable[[Marks, Sequence[str]], str]


class Memory:
    """The blocks in one worker's memory; the longest unused goes first, the end of a prompt before its beginning."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def serve(self, prompt: Blocks) -> int:
        """Serves a prompt, and keeps it; returns how many leading blocks were there."""
        hits = next((at for at, block in enumerate(prompt) if block not in self._blocks), len(prompt))
        for block in reversed(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)
        return hits


@dataclass(frozen=True)
class Outcome:
    """One replay."""

    hit_share: float
    """The share of all blocks that the worker had in memory."""
    busiest_blocks: float
    """Blocks of the busiest worker, in multiples of the mean."""
    busiest_calls: float


def by_first_chunk(marks: Marks, workers: Sequence[str]) -> str:
    """The rule to compare with."""
    return max(workers, key=lambda each: weight(marks[0], each))


def replay(prompts: Sequence[Blocks], workers: int, memory: float, choices: Sequence[Choose]) -> Outcome:
    """Sends the prompts in order; the clients, one for each of ``choices``, take turns."""
    different = len({block for prompt in prompts for block in prompt})
    memories = {f"10.0.0.{at}:8100": Memory(max(1, int(different * memory / workers))) for at in range(workers)}
    names, hits = list(memories), 0
    blocks, calls = Counter[str](), Counter[str]()
    for number, prompt in enumerate(prompts):
        worker = choices[number % len(choices)](marks_of_blocks(prompt), names)
        hits += memories[worker].serve(prompt)
        blocks[worker] += len(prompt)
        calls[worker] += 1
    mean = blocks.total() / workers
    return Outcome(hits / blocks.total(), max(blocks.values()) / mean, max(calls.values()) * workers / len(prompts))


def marks_of_blocks(prompt: Blocks) -> Marks:
    """Marks of a prompt that is known by its blocks."""
    absorbed, done, marks = xxhash.xxh3_64(), 0, list[int]()
    for depth in depths(len(prompt)):
        for block in prompt[done:depth]:
            absorbed.update(block.to_bytes(8, "little"))
        marks.append(absorbed.intdigest())
        done = depth
    return marks


def zipf_chats(count: int, systems: int = 20, seed: int = 1) -> list[Blocks]:
    """Chats of growing prompts: a new one begins with one of ``systems`` system prompts, the n-th 1/n as often."""
    chance, chats, prompts = random.Random(seed), list[list[int]](), list[Blocks]()
    fresh = 1_000_000
    shares = [1 / (at + 1) for at in range(systems)]
    for _ in range(count):
        if chats and chance.random() < 0.6:
            chat = chats.pop(chance.randrange(len(chats)))
        else:
            (system,) = chance.choices(range(systems), shares)
            chat = [1_000 * system + at for at in range(4 + system % 5)]
        added = chance.randrange(1, 6)
        chat = [*chat, *range(fresh, fresh + added)]
        fresh += added
        chats = [*chats[-399:], chat]
        prompts.append(chat)
    return prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks spreading")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="a trace, as JSON lines")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8], help="numbers of workers (2 4 8)")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4], help="numbers of clients (1 4)")
    parser.add_argument("--memory", type=float, default=0.3, help="memory as a share of the different blocks (0.3)")
    parser.add_argument("--requests", type=int, default=4_000, help="requests of each trace, at most (4000)")
    asked = parser.parse_args(arguments)
    try:
        loads: dict[str, Sequence[Blocks]] = {
            path.stem: [each.hash_ids for each in load_trace(path, asked.requests)] for path in asked.traces
        }
    except InvalidRequest as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    loads["system prompts by Zipf"] = zipf_chats(asked.requests)
    print(
        "| load | workers | rule | hits in memory | busiest, of the mean: blocks | calls |\n|---|---|---|---|---|---|"
    )
    for name, prompts in loads.items():
        for workers in asked.workers:
            rules: dict[str, Sequence[Choose]] = {"first chunk": [by_first_chunk]}
            for clients in asked.clients:
                rules[f"spread, {clients} client{'s' * (clients > 1)}"] = [Spreading().chosen for _ in range(clients)]
            for rule, choices in rules.items():
                found = replay(prompts, workers, asked.memory, choices)
                row = f"{found.hit_share:.1%} | {found.busiest_blocks:.2f} | {found.busiest_calls:.2f}"
                print(f"| {name} | {workers} | {rule} | {row} |", flush=True)
    return 0
