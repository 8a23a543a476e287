"""The time that ``match`` takes: by length of the prompt and size of the root; remembered, cold and in vain.

Also its cost elsewhere: etcd operations a request, counted by etcd itself, and memory of a node for each remembered
chunk.

    python -m benchmarks match [--tokens 1024,131072] [--root-chunks 0,1000000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import kvstore
from benchmarks.harness import machine
from benchmarks.harness.load import check_count
from benchmarks.harness.machine import percentile, timed
from benchmarks.harness.options import Options, counts, numbers, show_progress
from benchmarks.harness.result import Cell, Plot, Result, Table
from kvstore import Layout
from kvstore.client.cache import Cache
from kvstore.core.address import ADDRESS_BYTES, Address, TokenArray
from kvstore.engine.settings import Limits
from kvstore.format import places
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.root.identity import SHARD_BITS_DEFAULT

HYPOTHESIS = (
    "a prompt of 131,072 tokens is matched within 1.5 ms and one of 1,048,576 within 10 ms (p50, chunks of 256 tokens "
    "that the node knows), whatever the size of the root; no request costs an etcd operation"
)
NAMESPACE = "match"
LENGTHS = (1 << 10, 1 << 13, 1 << 17, 1 << 20)
ROOT_CHUNKS = (0, 10_000, 100_000, 1_000_000)
TIMES, COLD_TIMES = 31, 7
REQUESTS = 200
KV_SERVICE = 'grpc_service="etcdserverpb.KV"'
METRIC = "grpc_server_started_total"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The choice of rows."""
    parser.add_argument("--tokens", type=counts, metavar="N,...", help="lengths of prompts")
    parser.add_argument("--root-chunks", type=numbers, metavar="N,...", help="chunks of others on the root, ascending")


def run(options: Options, arguments: argparse.Namespace | None = None) -> Result:
    """All tables."""
    lengths = (arguments and arguments.tokens) or (LENGTHS[:3] if options.quick else LENGTHS)
    sizes = (arguments and arguments.root_chunks) or ((0, 100_000) if options.quick else ROOT_CHUNKS)
    about = machine.describe()
    tables = []
    for chunk_tokens in (256,) if options.quick else (256, 64):
        rows: list[list[Cell]] = []
        with options.folder() as folder:
            for size in sizes:
                show_progress(f"match: chunks of {chunk_tokens} tokens, {size:,} others on the root")
                fill(folder / "root", chunk_tokens, size)
                rows += [latency(folder / "root", chunk_tokens, length, size) for length in lengths]
        tables.append(_latency_table(chunk_tokens, rows))
    memory_tokens = 1 << (17 if options.quick else 20)
    with options.folder() as folder:
        etcd = etcd_operations(folder)
    with options.folder() as folder:
        memory = memory_per_chunk(folder / "root", memory_tokens, 64)
    conditions = (
        f"{machine.file_system(options.directory)}, in this process; tokens as a numpy array; 16 bytes of KV a token",
        f"{TIMES} calls (cold: {COLD_TIMES}); others' chunks are empty files with chunks' names, in the same folders",
    )
    return Result("match", HYPOTHESIS, conditions, about, [*tables, etcd, memory])


def _latency_table(chunk_tokens: int, rows: list[list[Cell]]) -> Table:
    return Table(
        f"Match latency, chunks of {chunk_tokens} tokens",
        (
            "root chunks",
            "prompt tokens",
            "known p50 ms",
            "known p99 ms",
            "repeated p50 ms",
            "cold p50 ms",
            "absent p50 ms",
        ),
        rows,
        "known: the node knows the chunks, not the prompt, and hashes all of it; repeated: the same prompt once more; "
        "cold: the first match of a node that has just opened the root; absent: no chunk of the prompt is stored; "
        "root chunks: those of others",
        Plot("prompt tokens", ("known p50 ms", "cold p50 ms"), "root chunks", "ms", True, True),
    )


def latency(root: Path, chunk_tokens: int, length: int, size: int) -> list[Cell]:
    """One row. Each call's answer is checked."""
    tokens, layout = _tokens(length, length), _layout(chunk_tokens)
    other = tokens ^ np.uint32(1)
    full = length // chunk_tokens * chunk_tokens
    with kvstore.open(str(root)) as store:
        cache = store.namespace(NAMESPACE, layout)
        _put(cache, tokens)
        repeated = _match_ms(cache, tokens, full, TIMES)
    with kvstore.open(str(root), limits=Limits(chains_bytes_max=1)) as store:  # remembers chunks, and no prompt
        cache = store.namespace(NAMESPACE, layout)
        cache.match(tokens)
        known = _match_ms(cache, tokens, full, TIMES)
        absent = _match_ms(cache, other, 0, TIMES)
    colds = []
    for _ in range(COLD_TIMES):
        with kvstore.open(str(root)) as store:
            colds += _match_ms(store.namespace(NAMESPACE, layout), tokens, full, 1)
    medians = (statistics.median(taken) for taken in (repeated, colds, absent))
    return [size, length, statistics.median(known), percentile(known, 0.99), *medians]


def fill(root: Path, chunk_tokens: int, size: int) -> None:
    """Brings the root to at least ``size`` chunks of others. They are never read, so they hold nothing."""
    with kvstore.open(str(root)) as store:
        namespace = store.namespace(NAMESPACE, _layout(chunk_tokens)).namespace
    random = np.random.default_rng(size)
    have = sum(1 for place, _, names in os.walk(root / places.CHUNKS) for _ in names)
    made: set[Path] = set()
    for _ in range(max(0, size - have)):
        address = Address(random.bytes(ADDRESS_BYTES))
        path = root / places.chunk(address, namespace.id, SHARD_BITS_DEFAULT)
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def etcd_operations(folder: Path) -> Table:
    """Requests on a node of a cluster, and what etcd counted meanwhile; beside the same time without requests."""
    with EmbeddedEtcd(folder / "etcd") as etcd, kvstore.open(str(folder / "root"), etcd=etcd.endpoints) as store:
        cache = store.namespace(NAMESPACE, _layout(256))
        tokens = _tokens(4096, 1)
        kv = np.zeros(cache.layout.shape(len(tokens)), np.int8)
        out = np.empty_like(kv)
        _settle(etcd.endpoints)
        began = _counted(etcd.endpoints)
        began_s = time.monotonic()
        for number in range(REQUESTS):
            prompt = tokens ^ np.uint32(number)
            cache.put(prompt, kv)
            check_count(cache.match(prompt), len(prompt), "tokens matched")
            check_count(cache.get(prompt, out), len(prompt), "tokens read")
        taken_s = time.monotonic() - began_s
        during = _counted(etcd.endpoints) - began
        began = _counted(etcd.endpoints)
        time.sleep(taken_s)
        idle = _counted(etcd.endpoints) - began
    chunks = REQUESTS * 4096 // 256
    row: list[Cell] = [3 * REQUESTS, 3 * chunks, taken_s, during, idle, max(0, during - idle) / (3 * REQUESTS)]
    return Table(
        "etcd operations",
        ("requests", "chunks", "seconds", "etcd operations meanwhile", "in as long without requests", "a request"),
        [row],
        f"put, match and get of {REQUESTS} prompts in turn; operations of etcd's KV service by its own metrics",
    )


def memory_per_chunk(root: Path, length: int, chunk_tokens: int) -> Table:
    """The memory that a node takes to remember a prompt's chunks, measured in a process of its own."""
    with kvstore.open(str(root)) as store:
        _put(store.namespace(NAMESPACE, _layout(chunk_tokens)), _tokens(length, length))
    with ExitStack() as undo:
        context = multiprocessing.get_context("spawn")
        pool = undo.enter_context(context.Pool(1, signal.signal, (signal.SIGINT, signal.SIG_IGN)))
        opened, grown, warm = pool.apply(_grown, (str(root), length, chunk_tokens))
    count = length // chunk_tokens
    return Table(
        "Memory of a node",
        ("chunks remembered", "opening MiB", "first match, bytes a chunk", "ten more, bytes a chunk"),
        [[count, opened / (1 << 20), grown / count, warm / count]],
        "growth of resident memory; the table of known chunks has a fixed size and is allocated at the opening",
    )


def _grown(root: str, length: int, chunk_tokens: int) -> tuple[int, int, int]:
    """Growth of this process: by opening the root, by the first match, by ten more."""
    tokens, layout = _tokens(length, length), _layout(chunk_tokens)
    import kvstore.client.store  # so that code does not count as memory of the store

    before = _resident_bytes()
    with kvstore.open(root) as store:
        cache = store.namespace(NAMESPACE, layout)
        opened = _resident_bytes()
        check_count(cache.match(tokens), length, "tokens matched")
        first = _resident_bytes()
        for _ in range(10):
            cache.match(tokens)
        return opened - before, first - opened, _resident_bytes() - first


def _match_ms(cache: Cache, tokens: TokenArray, expected: int, times: int) -> list[float]:
    taken, found = [], []
    for _ in range(times):
        taken.append(timed(lambda: found.append(cache.match(tokens))).wall_s * 1e3)
        check_count(found.pop(), expected, "tokens matched")
    return taken


def _put(cache: Cache, tokens: TokenArray) -> None:
    put = cache.put(tokens, np.zeros(cache.layout.shape(len(tokens)), np.int8))
    check_count(put.tokens_present, len(tokens) // cache.layout.chunk_tokens * cache.layout.chunk_tokens, "tokens put")


def _layout(chunk_tokens: int) -> Layout:
    return Layout(1, 1, 8, "int8", chunk_tokens)


def _tokens(length: int, seed: int) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 1 << 32, length, np.uint32)


def _settle(endpoints: str) -> None:
    """Waits until a new member makes no more operations in etcd."""
    last = -1
    while (now := _counted(endpoints)) != last:
        last = now
        time.sleep(1.0)


def _counted(endpoints: str) -> int:
    """Operations that etcd's KV service has been asked for."""
    with urllib.request.urlopen(f"http://{endpoints}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(METRIC) and KV_SERVICE in line)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
