"""Segments: the time to find those of a prompt, embedded and through a worker, and to rotate their keys.

python -m benchmarks segments [--tokens 10000] [--rounds 51] [--save FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np

from benchmarks.harness.load import WrongBytes
from benchmarks.harness.machine import describe, in_turns, percentile, timed
from benchmarks.harness.paths import IN_PROCESS, reached
from benchmarks.harness.result import Cell, Result, Table, markdown, save
from kvstore import Layout
from kvstore.client import Store
from kvstore.core.address import TokenArray
from kvstore.segments import Rope, Style
from kvstore.segments.rope import TYPES, rotate_planes

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=64)
DOCUMENTS = 200
DOCUMENT_TOKENS = 640
SYSTEM_TOKENS, QUESTION_TOKENS = 100, 32
KEYS_SHAPE = (32, 2048, 8, 128)
"""K of 2,048 tokens in the shape of Llama-3.1-8B: more than caches hold."""


HYPOTHESIS = (
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


def main(arguments: Sequence[str] | None = None) -> int:
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
        save(Result("segments", HYPOTHESIS, (), machine, tables, [], time.monotonic() - began_s), asked.save)
    return 0
