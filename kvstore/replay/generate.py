"""Traces with the statistics of the published ones, from a seed, for when no trace is available.

People and agents talk in turns. Each turn's prompt is the conversation so far and something new, behind a shared system
prompt. How long conversations go on decides which share of all blocks is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.replay.trace import BLOCK_TOKENS, TraceRequest

LIVE_MAX = 64
"""Number of concurrent conversations."""
BLOCKS_MAX = 250


@dataclass(frozen=True, slots=True)
class TrafficKind:
    """A kind of traffic. ``turns`` is the mean number of requests of a conversation; lengths are medians in tokens."""

    turns: float
    system_prompts: int
    system_tokens: int
    first_tokens: int
    next_tokens: int
    output_tokens: int
    spread: float
    interval_ms: float


KINDS = {
    # About 37 % of all blocks are repeats, prompts of 12,000 tokens on average: people and long documents.
    "conversation": TrafficKind(1.6, 1, 512, 5000, 2600, 340, 1.05, 294.0),
    # About 64 %: agents that call tools many times, with one of a few long system prompts.
    "agents": TrafficKind(2.2, 24, 4096, 4500, 2600, 150, 0.9, 256.0),
}


class _Conversation:
    """A conversation so far: the system prompt's blocks, full blocks since, and the number of tokens."""

    def __init__(self, ids: list[int], tokens: int) -> None:
        self.ids = ids
        self.tokens = tokens


def generate(requests: int, *, seed: int = 0, kind: str = "conversation") -> list[TraceRequest]:
    """Returns ``requests`` requests of one ``kind`` (conversation, agents). Equal arguments give equal traces.

    Raises InvalidRequest for an unknown kind or no requests.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"trace kind {kind!r}: expected one of {', '.join(KINDS)}")
    if requests < 1:
        raise InvalidRequest(f"{requests} requests: expected 1 or more")
    return list(_requests(requests, np.random.Generator(np.random.PCG64(seed)), KINDS[kind]))


def _requests(count: int, random: np.random.Generator, kind: TrafficKind) -> Iterator[TraceRequest]:
    fresh = iter(range(1 << 62))
    system = [[next(fresh) for _ in range(kind.system_tokens // BLOCK_TOKENS)] for _ in range(kind.system_prompts)]
    live: list[_Conversation] = []
    timestamp = 0.0
    for number in range(count):
        timestamp += random.exponential(kind.interval_ms)
        go_on = bool(live) and random.random() < 1 - 1 / kind.turns
        if go_on:
            speaker = live[int(random.integers(len(live)))]
            new = _length(random, kind.next_tokens, kind.spread)
        else:
            ids = list(system[int(random.integers(len(system)))])
            speaker = _Conversation(ids, len(ids) * BLOCK_TOKENS)
            new = _length(random, kind.first_tokens, kind.spread)
            live.append(speaker)
            if len(live) > LIVE_MAX:
                live.pop(int(random.integers(len(live) - 1)))
        speaker.tokens = min(speaker.tokens + new, BLOCKS_MAX * BLOCK_TOKENS)
        # Full blocks stay; a part block becomes another block once it has grown.
        while len(speaker.ids) < speaker.tokens // BLOCK_TOKENS:
            speaker.ids.append(next(fresh))
        part = [next(fresh)] if speaker.tokens % BLOCK_TOKENS else []
        output = _length(random, kind.output_tokens, 0.5)
        yield TraceRequest(number, int(timestamp), speaker.tokens, output, (*speaker.ids, *part))
        speaker.tokens += output
        if speaker.tokens >= BLOCKS_MAX * BLOCK_TOKENS:
            live.remove(speaker)


def _length(random: np.random.Generator, median: int, spread: float) -> int:
    return max(1, int(random.lognormal(float(np.log(median)), spread)))
