"""Many short texts behind one instruction that stays in the engine: prefix_vLLM's analytics benchmark, emulated.

The prefix is resident after the first request, so the store has nothing to give; what is measured is that it does not
get in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.emulated import CHUNK_TOKENS, Answer, Engine, Prompt, Settings, closed_loop, verify
from benchmarks.models import QWEN_7B
from benchmarks.options import Options
from benchmarks.result import Cell, Table
from benchmarks.rounds import MIB
from kvstore.client.cache import Cache
from kvstore.client.store import Store

TAIL_TOKENS = (30, 60)
OUTPUT_TOKENS = 2
CLIENTS = 4


def run(options: Options, opener: Callable[[], Store]) -> Table:
    """A row for each length of the instruction."""
    count = 120 if options.quick else 200
    rows: list[list[Cell]] = []
    for prefix in (512,) if options.quick else (64, 512, 2048, 4096):
        prompts = _prompts(count, prefix)
        longest = prefix + TAIL_TOKENS[1]
        settings = Settings(QWEN_7B, longest, CLIENTS, "behind", resident_tokens=64 * longest)
        without_s, _ = _serve(settings, None, prompts)
        with opener() as store:
            cache = store.namespace("analytics", QWEN_7B.layout(CHUNK_TOKENS))
            before = store.stats()
            with_s, answers = _serve(settings, cache, prompts)
            after = store.stats()
            verify(cache, QWEN_7B, prompts[:1], longest)
            cache.clear()
        written = (after["bytes_written"] - before["bytes_written"]) / MIB
        read = (after["bytes_read"] - before["bytes_read"]) / MIB
        resident = sum(answer.resident for answer in answers) / sum(len(prompt.tokens) for prompt in prompts)
        rows.append([prefix, count / without_s, count / with_s, without_s / with_s, resident, written, read])
    return Table(
        "Analytics behind a shared, resident prefix (emulated)",
        ("prefix tokens", "no store QPS", "QPS", "with / without", "resident tokens", "written MiB", "read MiB"),
        rows,
        f"{QWEN_7B.name}, {count} texts of {TAIL_TOKENS[0]} to {TAIL_TOKENS[1]} tokens, {OUTPUT_TOKENS} output tokens, "
        f"{CLIENTS} at once",
    )


def _serve(settings: Settings, cache: Cache | None, prompts: list[Prompt]) -> tuple[float, list[Answer]]:
    engine = Engine(settings, cache)
    try:
        first = engine.serve(prompts[0], OUTPUT_TOKENS)
        work = [partial(engine.serve, prompt, OUTPUT_TOKENS) for prompt in prompts[1:]]
        answers, taken_s = closed_loop(work, CLIENTS)
        return first.latency_s + taken_s, [first, *answers]
    finally:
        engine.close()


def _prompts(count: int, prefix_tokens: int) -> list[Prompt]:
    random = np.random.default_rng(prefix_tokens)
    prefix = random.integers(0, 1 << 32, prefix_tokens, np.uint32)
    tails = (random.integers(0, 1 << 32, random.integers(*TAIL_TOKENS), np.uint32) for _ in range(count))
    return [Prompt.of(np.concatenate([prefix, tail])) for tail in tails]
