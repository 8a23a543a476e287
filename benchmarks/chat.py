"""Concurrent chatters with whole conversations, some of which use the store: prefix_vLLM's chat benchmark, emulated.

Each message sends the conversation so far; a chatter waits for the answer before writing again. Lengths are drawn from
log-normal distributions with the medians of public chat logs (tens of tokens asked, about a hundred answered), not from
a log.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.emulated import CHUNK_TOKENS, Answer, Engine, Prompt, Settings, verify
from benchmarks.models import QWEN_7B
from benchmarks.options import Options
from benchmarks.result import Cell, Plot, Table
from benchmarks.rounds import percentile
from kvstore.client.cache import Cache
from kvstore.client.store import Store

SYSTEM_TOKENS = 512
ASKED_MEDIAN, ASKED_SIGMA, ASKED_MAX = 40, 1.0, 192
ANSWERED_MEDIAN, ANSWERED_SIGMA, ANSWERED_MAX = 60, 0.7, 160
TURNS = 5
WINDOW_TOKENS = SYSTEM_TOKENS + TURNS * (ASKED_MAX + ANSWERED_MAX)
PREFIXED = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Turn:
    """One message: everything said so far, and the same with the answer."""

    prompt: Prompt
    window: Prompt

    @property
    def output_tokens(self) -> int:
        """Length of the answer."""
        return len(self.window.tokens) - len(self.prompt.tokens)


@dataclass(frozen=True)
class Conversation:
    """One after the other. ``prefixed``: its KV is looked for in the store and kept there."""

    turns: list[Turn]
    prefixed: bool


def run(options: Options, opener: Callable[[], Store]) -> Table:
    """A row for each number of chatters and share of conversations that use the store."""
    chatters = (8,) if options.quick else (1, 2, 4, 8, 16, 32)
    rows: list[list[Cell]] = []
    for count in chatters:
        for share in PREFIXED:
            talks = conversations(max(4, count if options.quick else 2 * count), share, seed=count)
            with opener() as store:
                cache = store.namespace("chat", QWEN_7B.layout(CHUNK_TOKENS))
                settings = Settings(QWEN_7B, WINDOW_TOKENS, count, "behind")
                rows.append([count, share, *_chat(settings, cache, talks, count)])
                last = [talk.turns[-1].window for talk in talks if talk.prefixed]
                verify(cache, QWEN_7B, last, WINDOW_TOKENS)
                cache.clear()
    return Table(
        "Chat (emulated)",
        (
            "chatters",
            "prefixed",
            "mean latency s",
            "p99 latency s",
            "mean time to first byte s",
            "messages/s",
            "tokens from the store",
        ),
        rows,
        f"{QWEN_7B.name}, {TURNS} messages a conversation, a system prompt of {SYSTEM_TOKENS} tokens that all share; "
        "prefixed: share of conversations that use the store; nothing is kept in the engine between messages",
        Plot(
            "chatters" if len(chatters) > 1 else "prefixed",
            ("mean time to first byte s",),
            "prefixed" if len(chatters) > 1 else None,
            "s",
        ),
    )


def conversations(count: int, share: float, seed: int) -> list[Conversation]:
    """Conversations, equal for every share; those that use the store are spread evenly."""
    random = np.random.default_rng(seed)
    system = random.integers(0, 1 << 32, SYSTEM_TOKENS, np.uint32)
    talks = []
    for number in range(count):
        said, turns = system, []
        for _ in range(TURNS):
            asked = _length(random, ASKED_MEDIAN, ASKED_SIGMA, ASKED_MAX)
            answered = _length(random, ANSWERED_MEDIAN, ANSWERED_SIGMA, ANSWERED_MAX)
            said = np.concatenate([said, random.integers(0, 1 << 32, asked, np.uint32)])
            heard = np.concatenate([said, random.integers(0, 1 << 32, answered, np.uint32)])
            turns.append(Turn(Prompt.of(said), Prompt.of(heard)))
            said = heard
        talks.append(Conversation(turns, int((number + 1) * share) > int(number * share)))
    return talks


def _chat(settings: Settings, cache: Cache, talks: list[Conversation], chatters: int) -> list[Cell]:
    """Latency, time to first byte, rate and hits of all messages."""
    engine = Engine(settings, cache)

    def talk_through(talk: Conversation) -> list[Answer]:
        return [
            engine.serve(turn.prompt, turn.output_tokens, window=turn.window, use_store=talk.prefixed)
            for turn in talk.turns
        ]

    try:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(chatters, "bench-chatter") as pool:
            answers = [answer for each in pool.map(talk_through, talks) for answer in each]
        taken_s = time.perf_counter() - began_s
    finally:
        engine.close()
    latencies = [answer.latency_s for answer in answers]
    hits = sum(answer.from_store for answer in answers)
    return [
        statistics.mean(latencies),
        percentile(latencies, 0.99),
        statistics.mean(answer.first_byte_s for answer in answers),
        len(answers) / taken_s,
        hits / (hits + sum(answer.computed for answer in answers)),
    ]


def _length(random: np.random.Generator, median: int, sigma: float, most: int) -> int:
    return int(min(most, max(4, random.lognormal(np.log(median), sigma))))
