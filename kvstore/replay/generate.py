"""Traces with the statistics of the published one of conversations, from a seed, for when no trace is available.

People talk in turns. Each turn's prompt is the conversation so far and something new, behind a shared system prompt of
one block. How long conversations go on decides which share of all blocks is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.replay.trace import BLOCK_TOKENS, TraceRequest

LIVE_MAX = 64
"""Number of concurrent conversations."""
BLOCKS_MAX = 250


# With these values about 37 % of all blocks are repeats, and prompts have 12,000 tokens on average.
TURNS = 1.6
"""Mean number of requests of a conversation."""
FIRST_TOKENS, NEXT_TOKENS, OUTPUT_TOKENS = 5000, 2600, 340
"""Median lengths: what the first and each later turn adds to the prompt, and the answer."""
SPREAD = 1.05
INTERVAL_MS = 294.0


class _Conversation:
    """A conversation so far: the system prompt's blocks, full blocks since, and the number of tokens."""

    def __init__(self, ids: list[int], tokens: int) -> None:
        self.ids = ids
        self.tokens = tokens


def generate(requests: int, *, seed: int = 0) -> list[TraceRequest]:
    """Returns this many requests. Equal arguments give equal traces."""
    return list(_requests(requests, np.random.Generator(np.random.PCG64(seed))))


def _requests(count: int, random: np.random.Generator) -> Iterator[TraceRequest]:
    fresh = iter(range(1 << 62))
    system = next(fresh)
    live: list[_Conversation] = []
    timestamp = 0.0
    for number in range(count):
        timestamp += random.exponential(INTERVAL_MS)
        go_on = bool(live) and random.random() < 1 - 1 / TURNS
        if go_on:
            speaker = live[int(random.integers(len(live)))]
            new = _length(random, NEXT_TOKENS, SPREAD)
        else:
            speaker = _Conversation([system], BLOCK_TOKENS)
            new = _length(random, FIRST_TOKENS, SPREAD)
            live.append(speaker)
            if len(live) > LIVE_MAX:
                live.pop(int(random.integers(len(live) - 1)))
        speaker.tokens = min(speaker.tokens + new, BLOCKS_MAX * BLOCK_TOKENS)
        # Full blocks stay; a part block becomes another block once it has grown.
        while len(speaker.ids) < speaker.tokens // BLOCK_TOKENS:
            speaker.ids.append(next(fresh))
        part = [next(fresh)] if speaker.tokens % BLOCK_TOKENS else []
        output = _length(random, OUTPUT_TOKENS, 0.5)
        yield TraceRequest(number, int(timestamp), speaker.tokens, output, (*speaker.ids, *part))
        speaker.tokens += output
        if speaker.tokens >= BLOCKS_MAX * BLOCK_TOKENS:
            live.remove(speaker)


def _length(random: np.random.Generator, median: int, spread: float) -> int:
    return max(1, int(random.lognormal(float(np.log(median)), spread)))
