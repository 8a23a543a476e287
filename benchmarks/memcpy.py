"""The table of remote_kv_cache: setting and getting 16-token blocks, in multiples of a naive block copy.

Five models' blocks, 8,192 tokens of each (with --quick 4,096 of two), in tasks of 64 random blocks as there; the copy
(``to[t] = from[f]``) is measured in the same process and in turn with everything else.  Every byte is compared outside
the clock.

    python -m benchmarks memcpy [--model NAME,...] [--path NAME,...]
"""

from __future__ import annotations

import argparse
import hashlib
import operator
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

import kvstore
from benchmarks.harness import machine
from benchmarks.harness.baselines import Loopback
from benchmarks.harness.load import (
    BLOCK_MODELS,
    LLAMA_8B,
    MODELS,
    QWEN_7B,
    Bytes,
    Model,
    WrongBytes,
    check_count,
    check_equal,
    poison,
    random_bytes,
    stamp_blocks,
)
from benchmarks.harness.machine import timed
from benchmarks.harness.options import Options, names_of, show_progress
from benchmarks.harness.paths import BULK, IN_PROCESS, PATHS, Served, Way, served
from benchmarks.harness.result import Cell, Plot, Result, Table
from kvstore.client.cache import Cache
from kvstore.core.buffers import KvArray
from kvstore.engine.settings import MEMORY_BYTES_MIN

HYPOTHESIS = (
    "through shared memory a put is acknowledged after 1.3 copies and a get takes 1.2; over TCP a put behind takes "
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
MEMORY_TCP = "memory-tcp"
"""A socket to the same one."""
KEEPING = {MEMORY: "shared", MEMORY_TCP: "tcp"}
LOOPBACK = "loopback"
"""No store at all: the prompt's bytes from one process to another."""
OVER_TCP = ("tcp", MEMORY_TCP)
BESIDE = {"put": "put", "put behind": "put", "read": "read", "streamed": "read"}
"""The operations that are compared with the bare connection."""
MEMORY_SHARE = 3
"""Memory of a worker that keeps chunks, in prompts: one is put while the one before is still being written behind."""
MAPPING = (IN_PROCESS, "shared", MEMORY)
"""The paths on which a view is not a copy."""
WAYS = (*PATHS, *KEEPING, LOOPBACK)
Turn = Callable[[], dict[str, float]]
"""One round of one path: seconds of each operation that it has, verified."""
Caches = list[Cache]
"""One that waits until a put is stored, and where there is one, one that does not."""
OPERATIONS = {
    "set": "set: 64 blocks a call, stored when it returns",
    "set behind": "set behind: 64 blocks a call, acknowledged before they are stored",
    "get": "get: 64 blocks a call, into random places",
    "put": "put: one prompt in one call, stored when it returns",
    "put behind": "put behind: one prompt in one call, acknowledged before it is stored",
    "read": "read: one prompt in one call, into given memory",
    "streamed": "streamed: one prompt, layer by layer, into given memory, each handed out while the next are read",
    "view": "view: the prompt's chunks mapped and verified, nothing copied",
}
"""Every column and what is timed. The first three are the published table's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The choice of rows."""
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
    skipped: list[str] = []
    about = machine.describe()
    measured: list[Measured] = []
    for model in models:
        show_progress(f"memcpy: {model.name}")
        with options.folder() as folder:
            measured.append(measure(model, tokens, paths, folder, options.rounds, skipped))
    rows = [row for each in measured for row in each.rows()]
    kept = [name for at, name in enumerate(OPERATIONS) if any(row[3 + at] is not None for row in rows)]
    columns = ("model", "path", "copy s", *OPERATIONS)
    tables = [
        Table(
            "Multiples of a naive block copy",
            columns,
            rows,
            "; ".join(OPERATIONS[name] for name in kept),
            Plot("path", ("put", "read"), series="model", unit="copies"),
        )
    ]
    if shares := [row for each in measured for row in each.shares()]:
        tables.append(
            Table(
                "Shares of bare loopback",
                ("model", "path", *BESIDE),
                shares,
                "; ".join(
                    f"{name}: speed, relative to the {base} of the row loopback" for name, base in BESIDE.items()
                ),
            )
        )
    conditions = (
        f"{tokens:,} tokens in blocks of {BLOCK_TOKENS}, {TASK_BLOCKS} random blocks a task; no fsync",
        f"warm page cache on {machine.file_system(options.directory)}; medians of {options.rounds} rounds' ratios",
        "loopback: the same bytes from one process to another by one TCP connection, nothing named, verified or kept",
    )
    return Result("memcpy", HYPOTHESIS, conditions, about, tables, list(dict.fromkeys(skipped)))


@dataclass
class Measured:
    """The figures of one model."""

    model: Model
    copies_s: list[float] = field(default_factory=list)
    ratios: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By path and operation, of each round: multiples of the copy."""

    def rows(self) -> Iterator[list[Cell]]:
        """For each path the medians of its operations."""
        for path, found in self.ratios.items():
            medians = (statistics.median(found[name]) if name in found else None for name in OPERATIONS)
            yield [self.model.name, path, statistics.median(self.copies_s), *medians]

    def shares(self) -> Iterator[list[Cell]]:
        """For each path over TCP how fast it is beside bare loopback, as the median of the rounds."""
        bare = self.ratios.get(LOOPBACK)
        for path in OVER_TCP:
            if bare is None or path not in self.ratios:
                continue
            found = self.ratios[path]
            row: list[Cell] = [self.model.name, path]
            for name, base in BESIDE.items():  # a put behind needs a worker with memory
                ratios = map(operator.truediv, bare[base], found.get(name, []))
                row.append(statistics.median(ratios) if name in found else None)
            yield row


def measure(model: Model, tokens: int, paths: Sequence[str], folder: Path, rounds: int, skipped: list[str]) -> Measured:
    """All paths with one model, in ``folder``. Raises WrongBytes."""
    pool, found = Pool(model, tokens), Measured(model)
    with ExitStack() as undo:
        turns = _turns(pool, paths, folder, skipped, undo)
        for number in range(rounds + 1):
            pool.shuffle(number)
            copied_s = timed(pool.copy).wall_s
            for path in list(turns)[:: 1 if number % 2 else -1]:
                for name, taken_s in turns[path]().items():
                    if number:
                        found.ratios.setdefault(path, {}).setdefault(name, []).append(taken_s / copied_s)
            if number:
                found.copies_s.append(copied_s)
    found.ratios = {path: found.ratios[path] for path in turns}
    return found


def _turns(pool: Pool, paths: Sequence[str], folder: Path, skipped: list[str], undo: ExitStack) -> dict[str, Turn]:
    """A round of each path that is possible."""
    root, hot = folder / "root", folder / "hot"
    for each in (root, hot):
        undo.callback(shutil.rmtree, each, ignore_errors=True)
    worker: Served | None = None
    keeping: Served | None = None
    if set(paths) & set(BULK):
        worker = undo.enter_context(served(folder, root))
    if set(paths) & set(KEEPING):
        hot.mkdir()
        memory_bytes = max(MEMORY_BYTES_MIN, MEMORY_SHARE * pool.source.nbytes)
        keeping = undo.enter_context(served(hot, hot / "root", memory_bytes=memory_bytes))
    owner = undo.enter_context(kvstore.open(str(root)))
    turns: dict[str, Turn] = {}
    for path in paths:
        if path == LOOPBACK:
            turns[path] = partial(_loop, pool, undo.enter_context(closing(Loopback(pool.source.nbytes))))
            continue
        keeps = path in KEEPING
        behind = keeping if keeps else worker
        way = Way(KEEPING.get(path, path), str(root), behind.address if behind else "")
        if reason := way.why_not():
            skipped.append(reason)
            continue
        ways = [way, replace(way, write="behind")] if keeps else [way]
        stores = [undo.enter_context(each.open()) for each in ways]
        caches = [store.namespace("memcpy", pool.layout) for store in stores]
        # Only its worker can clear memory.
        clear = caches[0].clear if keeps else owner.namespace("memcpy", pool.layout).clear
        settle = behind.settle if behind is not None and path != IN_PROCESS else _nothing
        turns[path] = partial(one_round, pool, path, caches, clear, settle)
    return turns


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
        """This memory as the KV of one prompt."""
        return rows.reshape(-1).view(self.layout.numpy_dtype).reshape(self.layout.shape(len(self.tokens)))


def _nothing() -> None:
    pass


def one_round(
    pool: Pool, path: str, caches: Caches, clear: Callable[[], object], settle: Callable[[], None] = _nothing
) -> dict[str, float]:
    """Seconds of each operation that this path has, verified. ``settle`` waits until the worker has nothing to do."""
    found: dict[str, float] = {}
    cache = caches[0]
    puts = list(zip(("", " behind"), caches, strict=False))  # last the one after which memory has what is read

    def take(name: str, work: Callable[[], object]) -> None:
        found[name] = timed(work).wall_s

    def fresh() -> None:
        clear()
        poison(pool.target)

    for kind, way in puts:
        fresh()
        take("set" + kind, partial(_set, pool, way))
        _settle(lambda: cache.blocks.match(pool.keys) == pool.count)
        settle()
    take("get", partial(_get, pool, cache))
    _check_scattered(pool)
    kv, out = pool.as_prompt(pool.source), pool.as_prompt(pool.target)
    for kind, way in puts:
        fresh()
        take("put" + kind, partial(way.put, pool.tokens, kv))
        _settle(lambda: cache.match(pool.tokens) == len(pool.tokens))
        settle()
    read: list[int] = []
    take("read", lambda: read.append(cache.get(pool.tokens, out)))
    check_count(read[-1], len(pool.tokens), "tokens read")
    check_equal(out, kv, "read")
    layers: list[tuple[int, KvArray, KvArray]] = []
    with cache.hold(pool.tokens) as hold:
        take("streamed", lambda: layers.extend(hold.layers(list(out))))
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


def _loop(pool: Pool, loopback: Loopback) -> dict[str, float]:
    poison(pool.target)
    found = {"put": timed(lambda: loopback.put(pool.source)).wall_s}
    found["read"] = timed(lambda: loopback.read(pool.target)).wall_s
    check_equal(pool.target, pool.source, "loopback")
    return found


def _settle(stored: Callable[[], bool]) -> None:
    """Waits, outside the clock, until acknowledged chunks are stored. Raises WrongBytes if they never are."""
    deadline_s = time.monotonic() + SETTLE_S
    while not stored():
        if time.monotonic() > deadline_s:
            raise WrongBytes(f"what was put was not there {SETTLE_S:g} s later")
        time.sleep(0.01)


def _check_scattered(pool: Pool) -> None:
    for froms, tos in pool.tasks:
        for f, t in zip(froms, tos, strict=True):
            check_equal(pool.target[t], pool.source[f], "get")
