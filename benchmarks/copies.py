"""The table of remote_kv_cache: setting and getting 16-token blocks, in multiples of a naive block copy.

Five models' blocks, 8,192 tokens of each (with --quick 4,096 of two), in tasks of 64 random blocks as there; the copy
(``to[t] = from[f]``) is measured in the same process and in turn with everything else.  Every byte is compared outside
the clock.

    python -m benchmarks memcpy [--model NAME,...] [--path NAME,...]
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import kvstore
from benchmarks import machine
from benchmarks.contents import (
    Bytes,
    WrongBytes,
    check_count,
    check_equal,
    poison,
    random_bytes,
    stamp_blocks,
)
from benchmarks.models import BLOCK_MODELS, LLAMA_8B, MODELS, QWEN_7B, Model
from benchmarks.options import Options, names_of, told
from benchmarks.paths import IN_PROCESS, PATHS, Way, served
from benchmarks.result import Cell, Plot, Result, Table
from benchmarks.rounds import timed
from kvstore.client.arrays import KvArray
from kvstore.client.cache import Cache
from kvstore.node.settings import MEMORY_BYTES_MIN

HYPOTHESIS = (
    "through shared memory a put is acknowledged after 1.3 copies and a get takes 1.2; over TCP a deferred put takes "
    "2.2 and a streamed get 2.0; a verified mapped view takes half a copy (published for remote_kv_cache, in memory: "
    "set 3.1-4.2, deferred 2.2-3.2, get 5.9-7.7, streamed get 2.0-2.6)"
)
BLOCK_TOKENS = 16
TASK_BLOCKS = 64
TOKENS, QUICK_TOKENS = 8_192, 4_096
QUICK_MODELS = (QWEN_7B, LLAMA_8B)
SETTLE_S = 30.0
MEMORY = "memory"
"""Shared memory to a worker that keeps chunks in memory, on a root of its own."""
MEMORY_SHARE = 3
"""Its size, in prompts: one is put while the one before is still being written behind."""
DEFERRING = ("shared", "tcp", MEMORY)
MAPPING = (IN_PROCESS, "shared", MEMORY)
"""Where a view is not a copy."""
WAYS = (*PATHS, MEMORY)
Caches = list[Cache]
"""One that waits until a put is stored, and where there is one, one that does not."""
OPERATIONS = {
    "set": "set: 64 blocks a call, stored when it returns",
    "set deferred": "set deferred: 64 blocks a call, acknowledged before they are stored",
    "get": "get: 64 blocks a call, into random places",
    "put": "put: one prompt in one call, stored when it returns",
    "put deferred": "put deferred: one prompt in one call, acknowledged before it is stored",
    "read": "read: one prompt in one call, into given memory",
    "streamed": "streamed: one prompt, layer by layer, each handed out while the next is read",
    "view": "view: the prompt's chunks mapped and verified, nothing copied",
}
"""Every column and what is timed. The first three are the published table's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    names = [model.name for model in BLOCK_MODELS]
    parser.add_argument("--model", type=names_of(names), metavar="NAME,...", help=", ".join(names))
    parser.add_argument("--path", type=names_of(WAYS), metavar="NAME,...", help=", ".join(WAYS))


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """One row for each model and path."""
    models: Sequence[Model] = QUICK_MODELS if options.quick else BLOCK_MODELS
    if arguments is not None and arguments.model:
        models = [MODELS[name] for name in arguments.model]
    paths = (arguments and arguments.path) or WAYS
    tokens = QUICK_TOKENS if options.quick else TOKENS
    rows: list[list[Cell]] = []
    skipped: list[str] = []
    about = machine.describe()
    for model in models:
        told(f"memcpy: {model.name}")
        with options.folder() as folder:
            rows += measure(model, tokens, paths, folder, options.rounds, skipped)
    kept = [name for at, name in enumerate(OPERATIONS) if any(row[3 + at] is not None for row in rows)]
    columns = ("model", "path", "copy s", *OPERATIONS)
    table = Table(
        "Multiples of a naive block copy", columns, rows,
        "; ".join(OPERATIONS[name] for name in kept),
        Plot("path", ("put", "read"), series="model", unit="copies"),
    )  # fmt: skip
    conditions = (
        f"{tokens:,} tokens in blocks of {BLOCK_TOKENS}, {TASK_BLOCKS} random blocks a task; no fsync",
        f"warm page cache on {machine.file_system(options.directory)}; medians of {options.rounds} rounds' ratios",
    )
    return Result("memcpy", HYPOTHESIS, conditions, about, [table], list(dict.fromkeys(skipped)))


def measure(
    model: Model, tokens: int, paths: Sequence[str], folder: Path, rounds: int, skipped: list[str]
) -> list[list[Cell]]:
    """The rows of one model, in ``folder``. Raises WrongBytes."""
    rows: list[list[Cell]] = []
    with ExitStack() as undo:
        root = folder / "root"
        undo.callback(shutil.rmtree, root, ignore_errors=True)
        owner = undo.enter_context(kvstore.open(str(root)))
        address = memory_address = ""
        pool = Pool(model, tokens)
        if any(path not in (IN_PROCESS, MEMORY) for path in paths):
            address = undo.enter_context(served(folder, root)).address
        if MEMORY in paths:
            hot = folder / MEMORY
            undo.callback(shutil.rmtree, hot, ignore_errors=True)
            hot.mkdir()
            worker = served(hot, hot / "root", memory_bytes=max(MEMORY_BYTES_MIN, MEMORY_SHARE * pool.source.nbytes))
            memory_address = undo.enter_context(worker).address
        caches: dict[str, Caches] = {}
        for path in paths:
            way = Way("shared", "", memory_address) if path == MEMORY else Way(path, str(root), address)
            if reason := way.why_not():
                skipped.append(reason)
                continue
            ways = [way, replace(way, deferred=True)] if path in DEFERRING else [way]
            stores = [undo.enter_context(each.open()) for each in ways]
            caches[path] = [store.namespace("memcpy", model.layout(BLOCK_TOKENS)) for store in stores]
        clear = owner.namespace("memcpy", model.layout(BLOCK_TOKENS)).clear
        # What is in memory only its worker can clear.
        clears = {path: caches[path][0].clear if path == MEMORY else clear for path in caches}
        ratios: dict[str, dict[str, list[float]]] = {path: {} for path in caches}
        copies: list[float] = []
        for number in range(rounds + 1):
            pool.shuffle(number)
            copied_s = timed(pool.copy).wall_s
            for path in list(caches)[:: 1 if number % 2 else -1]:
                found = one_round(pool, path, caches[path], clears[path])
                if number:
                    for name, taken_s in found.items():
                        ratios[path].setdefault(name, []).append(taken_s / copied_s)
            if number:
                copies.append(copied_s)
        for path, found_ratios in ratios.items():
            medians = (found_ratios.get(name) for name in OPERATIONS)
            row: list[Cell] = [statistics.median(each) if each else None for each in medians]
            rows.append([model.name, path, statistics.median(copies), *row])
    return rows


class Pool:
    """Blocks to set and memory to get them into: ``blocks`` rows of one block each, and the order they are asked in."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.layout = model.layout(BLOCK_TOKENS)
        self.count = tokens // BLOCK_TOKENS
        self.source = random_bytes(self.count * self.layout.chunk_bytes, 1).reshape(self.count, -1)
        self.target = np.empty_like(self.source)
        poison(self.target)
        self.keys: list[bytes] = []
        self.tokens = np.empty(0, np.uint32)
        self.tasks: list[tuple[list[int], list[int]]] = []

    def shuffle(self, number: int) -> None:
        """Other keys, tokens, stamps and places than in any other round."""
        random = np.random.default_rng(number)
        self.keys = [hashlib.blake2b(f"{number}/{at}".encode(), digest_size=32).digest() for at in range(self.count)]
        self.tokens = random.integers(0, 1 << 32, self.count * BLOCK_TOKENS, np.uint32)
        stamp_blocks(self.source, np.uint64(number << 32) + np.arange(self.count, dtype=np.uint64))
        sources, targets = random.permutation(self.count).tolist(), random.permutation(self.count).tolist()
        steps = range(0, self.count, TASK_BLOCKS)
        self.tasks = [(sources[at : at + TASK_BLOCKS], targets[at : at + TASK_BLOCKS]) for at in steps]

    def copy(self) -> None:
        """The naive copy that all else is a multiple of."""
        source, target = self.source, self.target
        for froms, tos in self.tasks:
            for f, t in zip(froms, tos, strict=True):
                target[t, ...] = source[f, ...]

    def as_prompt(self, rows: Bytes) -> KvArray:
        """The same memory as the KV of one prompt."""
        return rows.reshape(-1).view(self.layout.numpy_dtype).reshape(self.layout.shape(len(self.tokens)))


def one_round(pool: Pool, path: str, caches: Caches, clear: Callable[[], object]) -> dict[str, float]:
    """Seconds of each operation that this path has, verified."""
    found: dict[str, float] = {}
    cache = caches[0]
    # Deferring comes first, so that what is read was stored by a put that waits; last where that keeps it in memory.
    puts = list(zip(("", " deferred"), caches, strict=False))[:: 1 if path == MEMORY else -1]

    def take(name: str, work: Callable[[], object]) -> None:
        found[name] = timed(work).wall_s

    def fresh() -> None:
        clear()
        poison(pool.target)

    for kind, way in puts:
        fresh()
        take("set" + kind, partial(_set, pool, way))
        _settle(lambda: cache.blocks.match(pool.keys) == pool.count)
    take("get", partial(_get, pool, cache))
    _check_scattered(pool)
    kv, out = pool.as_prompt(pool.source), pool.as_prompt(pool.target)
    for kind, way in puts:
        fresh()
        take("put" + kind, partial(way.put, pool.tokens, kv))
        _settle(lambda: cache.match(pool.tokens) == len(pool.tokens))
    read: list[int] = []
    take("read", lambda: read.append(cache.get(pool.tokens, out)))
    check_count(read[-1], len(pool.tokens), "tokens read")
    check_equal(out, kv, "read")
    layers: list[tuple[int, KvArray, KvArray]] = []
    with cache.hold(pool.tokens) as hold:
        take("streamed", lambda: layers.extend(hold.layers()))
        check_count(len(layers), pool.layout.layers, "layers streamed")
        for layer, k, v in layers:
            check_equal(k, kv[layer, 0], "streamed")
            check_equal(v, kv[layer, 1], "streamed")
        layers.clear()
        if path in MAPPING:
            views: list[KvArray] = []
            take("view", lambda: views.extend(hold.view()))
            check_count(len(views), pool.count, "chunks viewed")
            for at, view in enumerate(views):
                check_equal(view, kv[:, :, at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS], "view")
            views.clear()
    clear()
    return found


def _set(pool: Pool, cache: Cache) -> None:
    for froms, _ in pool.tasks:
        stored = cache.blocks.put([pool.keys[f] for f in froms], [pool.source[f] for f in froms])
        check_count(sum(stored), len(froms), "blocks set")


def _get(pool: Pool, cache: Cache) -> None:
    for froms, tos in pool.tasks:
        read = cache.blocks.get([pool.keys[f] for f in froms], [pool.target[t] for t in tos])
        check_count(sum(read), len(froms), "blocks read")


def _settle(stored: Callable[[], bool]) -> None:
    """Waits, off the clock, until what was acknowledged is stored. Raises WrongBytes where it never is."""
    deadline_s = time.monotonic() + SETTLE_S
    while not stored():
        if time.monotonic() > deadline_s:
            raise WrongBytes(f"what was put was not there {SETTLE_S:g} s later")
        time.sleep(0.01)


def _check_scattered(pool: Pool) -> None:
    for froms, tos in pool.tasks:
        for f, t in zip(froms, tos, strict=True):
            check_equal(pool.target[t], pool.source[f], "get")
