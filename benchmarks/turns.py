"""Chats through two real vLLM servers on a CPU: without a store, with ours, and with vLLM's own tier of files.

    python -m benchmarks serving --only chats [--chat-ways none,async,fs] [--held 0.5] [--rounds 5]

Separate from serving.py, whose engines answer one request at a time. Here each way is two servers, and all chats begin
with one system prompt. The turns of a chat go to the servers in turn, so a server needs what the other one computed
last. The servers of all ways live at once; a round plays new chats through each way in turn. A chatter alternates
between two chats: who reads an answer gives the server some time, but the servers are never without work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks import streams
from benchmarks.contents import WrongBytes
from benchmarks.crew import CrewFailed
from benchmarks.options import Options, names_of, told
from benchmarks.played import QUICK, SERVERS, Chat, Played, Sizes, Turn
from benchmarks.result import Cell, Table
from benchmarks.vllm_ways import SHAPE, SMALL, cpu_s, settings_of, token_bytes
from tests.engines.vllm.engines import BLOCK_TOKENS, Server, counters, make_model, prompt
from tests.kit.ports import free_port

WAYS = ("none", "async", "tier", "fs")
DEFAULT = ("none", "async", "fs")
ABOUT = {
    "none": "vLLM with its own prefix cache",
    "async": "the same and the connector, one root for both servers",
    "tier": "the same and vLLM's offloading, with our secondary tier below",
    "fs": "the same and vLLM's offloading, with its own tier of files in one folder for both servers",
}
REST_S = 0.5
RESTED_S = 120.0
REST_CPU = 0.05
"""Servers that take less of a core than this are at rest: their logs and clocks."""


@dataclass
class Pair:
    """The servers of one way."""

    name: str
    servers: Sequence[Server]

    def play(self, sizes: Sizes, seed: int) -> Played:
        """A round of chats that nobody has seen."""
        system = prompt(seed, sizes.system_tokens)
        loaded, before_s, began_s = self._loaded_tokens(), self._cpu_s(), time.perf_counter()
        with ThreadPoolExecutor(sizes.chatters, "bench-chatter") as pool:
            shares = [range(first, sizes.chats, sizes.chatters) for first in range(sizes.chatters)]
            played = pool.map(lambda share: self._chatter(sizes, system, seed, share), shares)
            chats = {number: chat for each in played for number, chat in each.items()}
        wall_s = time.perf_counter() - began_s
        self._rest()
        loaded = self._loaded_tokens() - loaded
        if self.name != "none" and not loaded:
            raise WrongBytes(f"{self.name}: nothing came from the store")
        return Played(sizes, [chats[number] for number in range(sizes.chats)], wall_s, self._cpu_s() - before_s, loaded)

    def _chatter(self, sizes: Sizes, system: list[int], seed: int, numbers: Sequence[int]) -> dict[int, Chat]:
        """Goes through the turns of some chats, one chat after the other in each turn."""
        chats: dict[int, Chat] = {number: [] for number in numbers}
        for turn in range(sizes.turns):
            for number, chat in chats.items():
                said = chat[-1].prompt + chat[-1].reply.tokens if chat else system
                asked = said + prompt(1_000_000 * seed + 1_000 * number + turn, sizes.asked_tokens)
                url = self.servers[(number + turn) % SERVERS].url
                chat.append(Turn(asked, streams.ask(url, asked, sizes.answered_tokens)))
        return chats

    def _rest(self) -> None:
        """Returns when the servers do nothing: they store behind the answers."""
        ends_s, before_s = time.monotonic() + RESTED_S, self._cpu_s()
        while True:
            time.sleep(REST_S)
            now_s = self._cpu_s()
            if now_s - before_s <= REST_S * REST_CPU:
                return
            if time.monotonic() > ends_s:
                raise CrewFailed(f"{self.name}: the servers are busy {RESTED_S:.0f} s after the last answer")
            before_s = now_s

    def _cpu_s(self) -> float:
        return sum(cpu_s(process) for server in self.servers for process in server.processes())

    def _loaded_tokens(self) -> float:
        name = "vllm:external_prefix_cache_hits_total"
        return sum(counters(server.url).get(name, 0.0) for server in self.servers)


@contextmanager
def running(names: Sequence[str], folder: Path, shape: dict[str, int], sizes: Sizes) -> Iterator[list[Pair]]:
    """The servers of each way, which start together."""
    memory_bytes = sizes.blocks * BLOCK_TOKENS * token_bytes(shape)
    options = ["--max-model-len", str(sizes.longest_tokens), "--num-gpu-blocks-override", str(sizes.blocks)]
    options += ["--enable-prompt-tokens-details"]
    with ExitStack() as undo:
        model = make_model(folder, "chatting", 7, **shape)
        pairs = []
        told(f"serving: starting {SERVERS} servers for each of {', '.join(names)}")
        for name in names:
            config = settings_of(name, folder / f"chats-{name}", memory_bytes).get("kv_transfer_config")
            servers = []
            for _ in range(SERVERS):
                servers.append(Server(folder, model, *options, config=config, port=free_port()))
                undo.callback(servers[-1].kill)
            pairs.append(Pair(name, servers))
        for pair in pairs:
            for server in pair.servers:
                server.wait_ready()
        yield pairs


@dataclass
class Rounds:
    """The figures of each round, and the answers that differ from those of the first way."""

    played: list[dict[str, Played]] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)


def measured(pairs: Sequence[Pair], sizes: Sizes, rounds: int) -> Rounds:
    """Each way in turns; the first round is not counted, but its answers are compared."""
    found = Rounds(differing={pair.name: [] for pair in pairs})
    for number in range(rounds + 1):
        told(f"serving: chats, round {number} of {rounds}")
        order = pairs[:: 1 if number % 2 else -1]
        played = {pair.name: pair.play(sizes, 1 + number) for pair in order}
        for pair in pairs[1:]:
            found.differing[pair.name] += differing(pairs[0], played[pairs[0].name], played[pair.name])
        found.played.append(played)
    del found.played[0]
    return found


def differing(first: Pair, expected: Played, played: Played) -> list[str]:
    """The first answer of each chat that is another; the turns behind it have other prompts."""
    found = []
    for mine, others in zip(expected.chats, played.chats, strict=True):
        for turn, (one, other) in enumerate(zip(mine, others, strict=True)):
            if one.reply.tokens != other.reply.tokens:
                pairs = enumerate(zip(one.reply.tokens, other.reply.tokens, strict=True))
                at = next(at for at, (a, b) in pairs if a != b)
                likely = streams.best_two(first.servers[0].url, one.prompt + one.reply.tokens[:at])
                top, second = sorted(likely.values(), reverse=True)
                tie = "its two best tokens" if other.reply.tokens[at] in likely else "NOT OF ITS TWO BEST, which"
                found.append(f"turn {turn}, token {at}: {tie} are {top - second:.2g} apart")
                break
    return found


def _table(names: Sequence[str], rounds: Rounds) -> Table:
    """Medians of the rounds, and ratios to the first way of each."""
    rows: list[list[Cell]] = []
    for name in names:
        row: list[Cell] = [name]
        for figure in ("first_token_s", "request_cpu_s"):
            ratios = [getattr(each[name], figure) / getattr(each[names[0]], figure) for each in rounds.played]
            row += [_median(rounds, name, figure), median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"]
        row += [_median(rounds, name, figure) for figure in ("requests_per_s", "tokens_per_s")]
        row += [100 * _median(rounds, name, figure) for figure in ("computed", "loaded")]
        rows.append([*row, len(rounds.differing[name])])
    columns = ["way", "first token s", f"of {names[0]}", "range", "CPU s a request", f"CPU of {names[0]}"]
    columns += ["range of CPU", "requests/s", "tokens/s", "computed %", "loaded %", "other answers"]
    share = 100 * median(each[names[0]].needed for each in rounds.played)
    notes = [f"with one unlimited memory for both servers {share:.1f} % would be computed, the system prompt twice"]
    notes += [f"{name}: {line}" for name, lines in rounds.differing.items() for line in lines]
    return Table("Chats", tuple(columns), rows, "; ".join(notes))


def _conditions(names: Sequence[str], sizes: Sizes) -> list[str]:
    size = (
        f"{sizes.system_tokens} tokens for all, {sizes.asked_tokens} asked and {sizes.answered_tokens} answered a turn"
    )
    servers = f"chats: {SERVERS} OpenAI servers for each way, with {sizes.blocks} blocks of {BLOCK_TOKENS} tokens each"
    return [
        f"chats: {sizes.chats} of {sizes.turns} turns, {sizes.chatters} at a time; a system prompt of {size}",
        f"{servers}; first token: of turns after the first; CPU s: of the servers' processes until they rest",
        *(f"chats, {name}: {ABOUT[name]}" for name in names),
    ]


def _median(rounds: Rounds, name: str, figure: str) -> float:
    return float(median(getattr(each[name], figure) for each in rounds.played))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of chats."""
    parser.add_argument(
        "--chat-ways", type=names_of(WAYS), help=f"for chats: some of {','.join(WAYS)} (default: {','.join(DEFAULT)})"
    )
    parser.add_argument(
        "--held", type=float, help="for chats: the share of a round's chats that a server's memory holds (default: 0.5)"
    )


def run(options: Options, arguments: argparse.Namespace | None = None) -> tuple[list[str], list[Table]]:
    """Conditions, and the table."""
    names = (arguments and arguments.chat_ways) or list(DEFAULT)
    sizes = QUICK if options.quick else Sizes()
    if arguments and arguments.held:
        sizes = replace(sizes, held=arguments.held)
    shape = SMALL if options.quick else SHAPE
    with options.folder() as folder, running(names, folder, shape, sizes) as pairs:
        rounds = measured(pairs, sizes, options.rounds)
    return _conditions(names, sizes), [_table(names, rounds)]
