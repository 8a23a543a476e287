"""The real vLLM on a CPU: time to first token and processor time, without a store, with ours, and with vLLM's own tier.

    python -m benchmarks serving [--only prompts] [--ways none,async,fs] [--tokens 4096] [--rounds 5]
    python -m benchmarks serving --only chats [--chat-ways none,async,fs] [--held 0.5] [--rounds 5]

Needs the engine's environment (``make engines-test ENGINES=vllm`` makes it). Each way is one engine, and all of them
live at once; a round asks each in turn for a prompt that is new (cold) and then for the prompt of the round before
(warm), which no cache of the engine has any more. Hypothesis: storing costs a few hundredths of a cold request, and a
warm one is about a tenth of it. The GPU is the better place to compute, so a CPU flatters the ratio of a warm request
and hides what storing costs.

For chats each way is two servers. All chats begin with one system prompt; the turns of a chat alternate between the
servers, so a server needs what the other one computed last. The servers of all ways live at once; a round plays new
chats through each way in turn. A chatter alternates between two chats, so that a reader gives the server some time, but
the servers are never without work. Prompts and answers are token ids, so that answers can be compared exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.load import WrongBytes
from benchmarks.harness.options import Options, names_of, show_progress
from benchmarks.harness.result import Cell, Result, Table
from benchmarks.harness.worker_pool import WorkerFailed
from tests.engines.vllm.engines import (
    BLOCK_TOKENS,
    PYTHON,
    Engine,
    Server,
    counters,
    full_blocks,
    make_model,
    prompt,
    running_engine,
    running_worker,
    transfer,
)
from tests.kit.etcd import running_etcd
from tests.kit.ports import free_port

ANSWER_S = 300.0


@dataclass(frozen=True)
class Reply:
    """An answer. ``cached_tokens``: how much of the prompt the server had or loaded."""

    tokens: list[int]
    first_token_s: float
    cached_tokens: int


def ask(url: str, prompt: list[int], count: int) -> Reply:
    """A greedy answer of ``count`` tokens. Raises OSError."""
    said: list[int] = []
    first_token_s, cached = 0.0, 0
    asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    began_s = time.perf_counter()
    for part in _events(url, _request(prompt, count, asked)):
        new = [token for choice in part["choices"] for token in choice["token_ids"]]
        if new and not said:
            first_token_s = time.perf_counter() - began_s
        said += new
        if part.get("usage"):
            cached = part["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Reply(said, first_token_s, cached)


def best_two(url: str, prompt: list[int]) -> dict[int, float]:
    """The log-probabilities of the two tokens that are likeliest to come next."""
    with _opened(url, _request(prompt, 1, {"logprobs": 2, "return_tokens_as_token_ids": True})) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]["top_logprobs"][0]
    return {int(name.removeprefix("token_id:")): value for name, value in found.items()}


def _request(prompt: list[int], count: int, more: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


def _events(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a streamed answer, as they come."""
    with _opened(url, request) as answer:
        for line in answer:
            said = line.decode().removeprefix("data: ").strip()
            if said and said != "[DONE]":
                yield json.loads(said)


def _opened(url: str, request: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(request).encode(), headers)
    return urllib.request.urlopen(asked, timeout=ANSWER_S)


# A round of chats, and the figures that follow from it


SERVERS = 2


@dataclass(frozen=True)
class Sizes:
    """A round. ``held``: the share of its chats that one server's memory holds, beside the system prompt."""

    held: float = 0.5
    chats: int = 8
    chatters: int = 4
    turns: int = 4
    system_tokens: int = 1024
    asked_tokens: int = 128
    answered_tokens: int = 32

    @property
    def own_tokens(self) -> int:
        """Tokens of a chat, without the system prompt."""
        return self.turns * (self.asked_tokens + self.answered_tokens)

    @property
    def longest_tokens(self) -> int:
        """Tokens of a whole chat."""
        return self.system_tokens + self.own_tokens

    @property
    def blocks(self) -> int:
        """Blocks of one server's memory: at least those that all chatters need at once."""
        shared, each = -(-self.system_tokens // BLOCK_TOKENS), -(-self.own_tokens // BLOCK_TOKENS)
        return shared + max(self.chatters, round(self.held * self.chats)) * (each + 1)


SIZES_QUICK = Sizes(chats=4, chatters=2, turns=3, system_tokens=256, asked_tokens=64, answered_tokens=16)


@dataclass(frozen=True)
class Turn:
    """One request of a chat, and its answer."""

    prompt: list[int]
    reply: Reply


Chat = list[Turn]


@dataclass
class Played:
    """A round of one way. CPU: of both servers, until they have stored what they store."""

    sizes: Sizes
    chats: list[Chat]
    wall_s: float
    cpu_s: float
    loaded_tokens: float

    @property
    def turns(self) -> list[Turn]:
        """All turns."""
        return [turn for chat in self.chats for turn in chat]

    @property
    def first_token_s(self) -> float:
        """The median of the turns after the first."""
        return median(turn.reply.first_token_s for chat in self.chats for turn in chat[1:])

    @property
    def request_cpu_s(self) -> float:
        """CPU seconds of a request."""
        return self.cpu_s / len(self.turns)

    @property
    def requests_per_s(self) -> float:
        """Answers a second, of both servers."""
        return len(self.turns) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens answered a second."""
        return sum(len(turn.reply.tokens) for turn in self.turns) / self.wall_s

    @property
    def asked_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(turn.prompt) for turn in self.turns)

    @property
    def computed(self) -> float:
        """The share of them that the servers computed."""
        return 1 - sum(turn.reply.cached_tokens for turn in self.turns) / self.asked_tokens

    @property
    def loaded(self) -> float:
        """The share of them that came from a store."""
        return self.loaded_tokens / self.asked_tokens

    @property
    def needed(self) -> float:
        """The share of them that servers with one unlimited memory compute if their first requests come at once."""
        computed = 0
        for number, chat in enumerate(self.chats):
            known = self.sizes.system_tokens if number >= SERVERS else 0
            for turn in chat:
                computed += len(turn.prompt) - min(known, len(turn.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                known = len(turn.prompt) + len(turn.reply.tokens) - 1  # the last token's KV was not computed
        return computed / self.asked_tokens


# How vLLM is started for each way to keep KV


SHAPE = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
}
SMALL = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
}
"""The tiny model of the tests, with room for more tokens."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def token_bytes(shape: dict[str, int]) -> int:
    """KV of one token in float32, in bytes."""
    return 2 * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def cpu_s(process: int) -> float:
    """Processor time of a process so far, user's and system's."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return TICK_S * (int(fields[11]) + int(fields[12]))


def settings_of(name: str, root: Path, prompt_bytes: int, connect: str = "") -> dict[str, Any]:
    """Returns vLLM's arguments for a way."""
    if name == "none":
        return {"enable_prefix_caching": False}
    if name in ("tier", "fs"):
        ours = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm_tier", "root": str(root)}
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.engines.vllm.cpu_tiering",
                "cpu_bytes_to_use": prompt_bytes * 5 // 4,  # what came before comes from the tier
                "secondary_tiers": [ours if name == "tier" else {"type": "fs", "root_dir": str(root)}],
            },
        }
        return {"kv_transfer_config": config}
    place: dict[str, Any] = {"connect": connect} if connect else {"root": str(root), "max_bytes": None}
    return {"kv_transfer_config": transfer(place)}


# Chats through two servers


CHAT_WAYS = ("none", "async", "tier", "fs")
CHAT_DEFAULT = ("none", "async", "fs")
CHAT_ABOUT = {
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
                chat.append(Turn(asked, ask(url, asked, sizes.answered_tokens)))
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
                raise WorkerFailed(f"{self.name}: the servers are busy {RESTED_S:.0f} s after the last answer")
            before_s = now_s

    def _cpu_s(self) -> float:
        return sum(cpu_s(process) for server in self.servers for process in server.processes())

    def _loaded_tokens(self) -> float:
        name = "vllm:external_prefix_cache_hits_total"
        return sum(counters(server.url).get(name, 0.0) for server in self.servers)


@contextmanager
def running_servers(names: Sequence[str], folder: Path, shape: dict[str, int], sizes: Sizes) -> Iterator[list[Pair]]:
    """The servers of each way, which start together."""
    memory_bytes = sizes.blocks * BLOCK_TOKENS * token_bytes(shape)
    options = ["--max-model-len", str(sizes.longest_tokens), "--num-gpu-blocks-override", str(sizes.blocks)]
    options += ["--enable-prompt-tokens-details"]
    with ExitStack() as undo:
        model = make_model(folder, "chatting", 7, **shape)
        pairs = []
        show_progress(f"serving: starting {SERVERS} servers for each of {', '.join(names)}")
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
class ChatRounds:
    """The figures of each round, and the answers that differ from those of the first way."""

    played: list[dict[str, Played]] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)


def measured_chats(pairs: Sequence[Pair], sizes: Sizes, rounds: int) -> ChatRounds:
    """Each way in turns; the first round is not counted, but its answers are compared."""
    found = ChatRounds(differing={pair.name: [] for pair in pairs})
    for number in range(rounds + 1):
        show_progress(f"serving: chats, round {number} of {rounds}")
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
                likely = best_two(first.servers[0].url, one.prompt + one.reply.tokens[:at])
                top, second = sorted(likely.values(), reverse=True)
                tie = "its two best tokens" if other.reply.tokens[at] in likely else "NOT OF ITS TWO BEST, which"
                found.append(f"turn {turn}, token {at}: {tie} are {top - second:.2g} apart")
                break
    return found


def _chat_table(names: Sequence[str], rounds: ChatRounds) -> Table:
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
        *(f"chats, {name}: {CHAT_ABOUT[name]}" for name in names),
    ]


def _median(rounds: ChatRounds, name: str, figure: str) -> float:
    return float(median(getattr(each[name], figure) for each in rounds.played))


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of chats."""
    parser.add_argument(
        "--chat-ways",
        type=names_of(CHAT_WAYS),
        help=f"for chats: some of {','.join(CHAT_WAYS)} (default: {','.join(CHAT_DEFAULT)})",
    )
    parser.add_argument(
        "--held", type=float, help="for chats: the share of a round's chats that a server's memory holds (default: 0.5)"
    )


def run_chats(options: Options, arguments: argparse.Namespace | None = None) -> tuple[list[str], list[Table]]:
    """Conditions, and the table."""
    names = (arguments and arguments.chat_ways) or list(CHAT_DEFAULT)
    sizes = SIZES_QUICK if options.quick else Sizes()
    if arguments and arguments.held:
        sizes = replace(sizes, held=arguments.held)
    shape = SMALL if options.quick else SHAPE
    with options.folder() as folder, running_servers(names, folder, shape, sizes) as pairs:
        rounds = measured_chats(pairs, sizes, options.rounds)
    return _conditions(names, sizes), [_chat_table(names, rounds)]


# Single prompts


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
                raise WorkerFailed(f"{self.name}: {found} of {count} blocks were stored in {STORED_S:.0f} s")
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
            show_progress(f"serving: starting {name}")
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
    add_chat_arguments(parser)


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """The tables of single prompts, and of chats."""
    about = machine.describe()
    if not PYTHON.exists():
        return Result("serving", HYPOTHESIS, (), about, [], ["vLLM is not installed: make engines-test ENGINES=vllm"])
    only = arguments and arguments.only
    conditions, tables = [machine.file_system(options.directory)], list[Table]()
    for name, measure in (("prompts", _prompts), ("chats", run_chats)):
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
    first = _first_tokens(names, tokens, cold, warm)
    return conditions, [first, _table("Cold", names, cold), _table("Warm", names, warm)]


Rounds = list[dict[str, Took]]


def measured(ways: list[Way], tokens: int, rounds: int) -> tuple[Rounds, Rounds]:
    """Cold and warm requests of each way, in turns; the first round is not counted."""
    cold, warm = Rounds(), Rounds()
    prompts = [prompt(seed, tokens + 1) for seed in range(1, rounds + 2)]
    for number, asked in enumerate(prompts):
        order = ways[:: 1 if number % 2 else -1]
        show_progress(f"serving: round {number} of {rounds}")
        stored = (number + 1) * (tokens // BLOCK_TOKENS)
        cold.append({way.name: way.cold(asked, stored) for way in order})
        warm.append({way.name: way.warm(prompts[max(0, number - 1)], stored) for way in order})
    return cold[1:], warm[1:]


def _first_tokens(names: list[str], tokens: int, cold: Rounds, warm: Rounds) -> Table:
    """Medians of both kinds of requests, for a picture."""
    rows: list[list[Cell]] = [
        [name, *(median(each[name].first_token_s for each in rounds) for rounds in (cold, warm))] for name in names
    ]
    return Table(f"Time to first token of {tokens:,} tokens", ("way", "new prompt s", "stored prompt s"), rows)


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


if __name__ == "__main__":
    from benchmarks.cli import main

    sys.exit(main(["serving", *sys.argv[1:]]))
