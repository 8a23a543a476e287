"""A guard against slower paths: ratios to the same work without a store, against those of an earlier commit.

Ratios, not times, so that another day and a busier machine pass. A path fails when it has lost a third of its reference
ratio in each of three tries. A path with several threads is compared with plain files or copies by as many: the gain
from a second core differs from hour to hour on virtual machines. Every byte is compared outside the clock.

    python -m benchmarks.check [--update] [--reference FILE]        0: none is slower; 1: one is; 2: could not run
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from benchmarks.harness import machine
from benchmarks.harness.load import (
    LLAMA_8B,
    FileMover,
    Load,
    WrongBytes,
    check_count,
    check_equal,
    poison,
    random_bytes,
    stamp_chunks,
)
from benchmarks.harness.machine import MIB, in_turns, timed
from benchmarks.harness.options import Options, default_directory
from benchmarks.harness.paths import IN_PROCESS, PATHS, PLAIN, Way, served
from kvstore import Layout
from kvstore.client.store import Store
from kvstore.core.address import TokenArray
from kvstore.core.buffers import KvArray
from kvstore.engine.settings import Limits
from kvstore.errors import KVStoreError

REFERENCE = Path(__file__).parent / "reference.json"
LOSS = 1 / 3
TRIES = 3
ROUNDS = 9
SIZE_BYTES = 64 * MIB
CHUNK_BYTES = 2 * MIB
BLOCK_BYTES = 64 << 10
MATCH_TOKENS = 1 << 17
THREADS = Limits().width
OWN, MAPPED = MEMORIES = ("memory of this process", "memory of a worker")
MEMORY_SHARE = 6
"""Memory in the sizes of what is moved: its pages are taken before the first round ends."""
COPY, HASH = "memory copy", "hashing"
COPIES, WRITE, READ = "memory copy by several threads", "plain files written", "plain files read"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description="Has a path become slower?")
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="ratios to compare with (%(default)s)")
    parser.add_argument("--update", action="store_true", help="write the ratios found instead, medians of three tries")
    parser.add_argument("--directory", type=Path, default=default_directory(), help="(default: %(default)s)")
    parser.add_argument("--size-mib", type=int, default=SIZE_BYTES // MIB, help="moved in a call (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args(arguments)
    options = Options(asked.directory, asked.directory, asked.rounds, quick=True)
    try:
        expected = {} if asked.update else _read(asked.reference)
        tries: list[dict[str, float]] = []
        found: dict[str, float] = {}
        while len(tries) < TRIES:
            tries.append(measure(options, asked.size_mib * MIB))
            found = {name: max(each[name] for each in tries if name in each) for name in tries[-1]}
            if not asked.update and not lost(found, expected):
                break
    except (KVStoreError, OSError, ValueError, WrongBytes) as error:
        print(f"benchmarks.check: {type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, WrongBytes) else 2
    if asked.update:
        found = {name: statistics.median(each[name] for each in tries) for name in found}
        about = {"machine": machine.describe(), "ratios": {name: round(ratio, 4) for name, ratio in found.items()}}
        asked.reference.write_text(json.dumps(about, indent=1) + "\n")
    show(found, expected)
    failures = lost(found, expected)
    for line in failures:
        print(line, file=sys.stderr)
    return int(bool(failures))


def lost(found: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """A line for each path that is slower than its reference by a third, or was not measured."""
    lines = []
    for name, reference in expected.items():
        if name not in found:
            lines.append(f"{name}: not measured, and the reference has {reference:.3f}")
        elif found[name] < reference * (1 - LOSS):
            lines.append(f"{name}: {found[name]:.3f}, the reference is {reference:.3f}: slower by more than a third")
    return lines


def show(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Each ratio beside its reference."""
    print(f"{'path':<28}{'ratio':>8}{'reference':>11}   (speed, relative to files, a copy or hash in the same round)")
    for name, ratio in found.items():
        print(f"{name:<28}{ratio:>8.3f}" + (f"{expected[name]:>11.3f}" if name in expected else f"{'-':>11}"))


def measure(options: Options, size_bytes: int) -> dict[str, float]:
    """The speed of each path as a share of its base. Raises WrongBytes."""
    with options.folder() as folder, ExitStack() as undo:
        root = folder / "root"
        worker = undo.enter_context(served(folder, root))
        local = undo.enter_context(kvstore.open(str(root)))
        found = _match_ratio(local, root, options.rounds)
        found |= _block_ratios(local, size_bytes, options.rounds)
        for path in PATHS:
            way = Way(path, str(root), worker.address)
            if reason := way.why_not():
                print(f"not measured: {reason}", file=sys.stderr)
                continue
            with way.open() as store:
                ratios = _chunk_ratios(store, local, path, folder, size_bytes, options.rounds)
            found |= {f"{path} {name}": ratio for name, ratio in ratios.items()}
        return found | _memory_ratios(folder, size_bytes, options.rounds)


def _memory_ratios(folder: Path, size_bytes: int, rounds: int) -> dict[str, float]:
    """Ratios for chunks in memory: this process's own, and a worker's that it maps."""
    found: dict[str, float] = {}
    hot = folder / "hot"
    hot.mkdir()
    memory_bytes = MEMORY_SHARE * size_bytes
    with kvstore.open(str(hot / "own"), memory=memory_bytes) as own:
        ratios = _chunk_ratios(own, own, OWN, hot, size_bytes, rounds)
        found |= {f"memory {name}": ratio for name, ratio in ratios.items()}
    with served(hot, hot / "root", memory_bytes=memory_bytes) as worker:
        way = Way("shared", str(hot / "root"), worker.address)
        if reason := way.why_not():
            print(f"not measured: {reason}", file=sys.stderr)
            return found
        with way.open() as store:
            ratios = _chunk_ratios(store, store, MAPPED, hot, size_bytes, rounds)
        return found | {f"memory of a worker {name}": ratio for name, ratio in ratios.items()}


def _chunk_ratios(
    store: Store, local: Store, path: str, folder: Path, size_bytes: int, rounds: int
) -> dict[str, float]:
    """put, get, layers and, if there is one, the mapped view, against plain moves of the same bytes."""
    layout = LLAMA_8B.layout_of(CHUNK_BYTES)
    count = size_bytes // layout.kv_bytes_per_token
    kv = random_bytes(size_bytes, 5).view(layout.numpy_dtype).reshape(layout.shape(count))
    stamp_chunks(kv, layout, np.arange(count // layout.chunk_tokens, dtype=np.uint64))
    out = np.empty_like(kv)
    written, read = store.namespace(f"{path} put", layout), store.namespace(f"{path} get", layout)
    clear = local.namespace(f"{path} put", layout).clear
    tokens = _tokens(count)
    read.put(tokens, kv)

    def put() -> float:
        clear()
        taken = timed(lambda: written.put(tokens, kv)).wall_s
        poison(out)
        _check(written.get(tokens, out), out, kv, tokens)
        return taken

    def get() -> float:
        poison(out)
        counts: list[int] = []
        taken = timed(lambda: counts.append(read.get(tokens, out))).wall_s
        _check(counts[0], out, kv, tokens)
        return taken

    def view() -> float:
        views: list[KvArray] = []
        with read.hold(tokens) as hold:
            taken = timed(lambda: views.extend(hold.view())).wall_s
            size = layout.chunk_tokens
            check_count(len(views), count // size, "chunks viewed")
            for at, one in enumerate(views):
                check_equal(one, kv[:, :, at * size : (at + 1) * size], "view")
            views.clear()
        return taken

    def layers() -> float:
        came: list[tuple[int, KvArray, KvArray]] = []
        with read.hold(tokens) as hold:
            taken = timed(lambda: came.extend(hold.layers())).wall_s
        check_count(len(came), layout.layers, "layers")
        for layer, k, v in came:
            check_equal(k, kv[layer, 0], "layers")
            check_equal(v, kv[layer, 1], "layers")
        return taken

    works: dict[str, Callable[[], float]] = {"put": put, "get": get, "layers": layers}
    if path in (IN_PROCESS, *MEMORIES):
        works["view"] = view
    if path == IN_PROCESS:
        with plain_files(folder / PLAIN, layout.chunk_bytes, count // layout.chunk_tokens) as plain:
            works |= plain
            return _ratios(works, {"put": WRITE, "get": READ, "layers": READ, "view": READ}, rounds)
    if path in MEMORIES:
        with ThreadPoolExecutor(THREADS) as threads:
            works[COPIES] = lambda: timed(lambda: _copied(threads, out, kv)).wall_s
            return _ratios(works, dict.fromkeys(("put", "get", "layers", "view"), COPIES), rounds)
    works[COPY] = lambda: timed(lambda: np.copyto(out, kv)).wall_s
    return _ratios(works, dict.fromkeys(("put", "get", "layers"), COPY), rounds)


@contextmanager
def plain_files(folder: Path, chunk_bytes: int, chunks: int) -> Iterator[dict[str, Callable[[], float]]]:
    """Returns a writer that makes a new file for each chunk, and a reader of these files."""
    calls = itertools.count()
    with closing(FileMover(folder, Load(chunk_bytes, chunks, None, 1))) as files:

        def write() -> float:
            for old in folder.iterdir():
                old.unlink()
            files.prepare(next(calls))
            return timed(files.put).wall_s

        def read() -> float:
            files.forget()
            taken = timed(files.get).wall_s
            files.verify()
            return taken

        write()
        yield {WRITE: write, READ: read}


def _copied(threads: ThreadPoolExecutor, out: KvArray, kv: KvArray) -> None:
    parts = zip(np.array_split(out, THREADS), np.array_split(kv, THREADS), strict=True)
    list(threads.map(lambda part: np.copyto(*part), parts))


def _block_ratios(store: Store, size_bytes: int, rounds: int) -> dict[str, float]:
    """Small blocks that an engine hashed, against a copy of the same bytes."""
    cache = store.namespace("blocks", Layout(1, 1, 16, "int8", 16))
    count = size_bytes // 4 // BLOCK_BYTES
    blocks = random_bytes(count * BLOCK_BYTES, 6).reshape(count, BLOCK_BYTES)
    out = np.empty_like(blocks)
    keys = [hashlib.blake2b(str(at).encode(), digest_size=32).digest() for at in range(count)]

    def put() -> float:
        cache.clear()
        stored: list[bool] = []
        taken = timed(lambda: stored.extend(cache.blocks.put(keys, list(blocks)))).wall_s
        check_count(sum(stored), count, "blocks put")
        return taken

    def get() -> float:
        poison(out)
        read: list[bool] = []
        cache.blocks.put(keys, list(blocks))
        taken = timed(lambda: read.extend(cache.blocks.get(keys, list(out)))).wall_s
        check_count(sum(read), count, "blocks read")
        check_equal(out, blocks, "blocks")
        return taken

    works = {COPY: lambda: timed(lambda: np.copyto(out, blocks)).wall_s, "put": put, "get": get}
    return {
        f"64 KiB blocks {name}": ratio for name, ratio in _ratios(works, {"put": COPY, "get": COPY}, rounds).items()
    }


def _match_ratio(store: Store, root: Path, rounds: int) -> dict[str, float]:
    """Matching a long prompt whose chunks are known, against hashing its tokens."""
    layout = Layout(1, 1, 8, "int8", 256)
    tokens = _tokens(MATCH_TOKENS)
    store.namespace("match", layout).put(tokens, np.zeros(layout.shape(len(tokens)), np.int8))
    packed = tokens.tobytes()
    with kvstore.open(str(root), limits=Limits(chains_bytes_max=1)) as forgetful:  # remembers chunks, and no prompt
        cache = forgetful.namespace("match", layout)
        cache.match(tokens)

        def match() -> float:
            counts: list[int] = []
            taken = timed(lambda: counts.append(cache.match(tokens))).wall_s
            check_count(counts[0], len(tokens), "tokens matched")
            return taken

        works = {HASH: lambda: timed(lambda: hashlib.blake2b(packed).digest()).wall_s, "match": match}
        return {"match of 128k tokens": _ratios(works, {"match": HASH}, 4 * rounds)["match"]}


def _ratios(works: Mapping[str, Callable[[], float]], bases: Mapping[str, str], rounds: int) -> dict[str, float]:
    """Speeds: its base's time by each one's; the shortest of each, because a disturbance only ever makes it longer."""
    taken = in_turns(works, rounds)
    shortest = {name: min(each[name] for each in taken) for name in works}
    return {name: shortest[base] / shortest[name] for name, base in bases.items()}


def _check(count: int, out: KvArray, kv: KvArray, tokens: TokenArray) -> None:
    check_count(count, len(tokens), "tokens read")
    check_equal(out, kv, "get")


def _tokens(count: int) -> TokenArray:
    return np.random.default_rng(time.time_ns()).integers(0, 1 << 32, count, np.uint32)


def _read(path: Path) -> dict[str, float]:
    """Reads the reference. Raises ValueError if it is not one."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: python -m benchmarks.check --update writes it")
    found: Any = json.loads(path.read_text())
    try:
        return {str(name): float(ratio) for name, ratio in found["ratios"].items()}
    except (TypeError, KeyError, AttributeError) as cause:
        raise ValueError(f"{path} has no ratios: python -m benchmarks.check --update writes them") from cause


if __name__ == "__main__":
    sys.exit(main())
