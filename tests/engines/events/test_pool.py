"""``kvstore events`` beside real etcd, nodes and collectors: Dynamo's indexer lists what can be read, whatever happens.

Each act says how long the index had entries too many, or too few.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cache_calls
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.cache import Cache
from kvstore.core.buffers import token_array
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from tests.cli.conftest import Running, serving
from tests.engines.events.indexer import BLOCK_TOKENS, Indexer
from tests.kit.collecting import GC, bounded_to
from tests.kit.etcd import running_etcd
from tests.kit.patience import PATIENCE_S
from tests.kit.ports import free_port

LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=BLOCK_TOKENS)
POOL = 100
BLOCKS = 8
SEEDS = 210


@pytest.fixture(scope="module")
def etcd(module_root: Path) -> Iterator[str]:
    with running_etcd(module_root / "etcd") as server:
        yield server.endpoints


@cache_calls
def prompt(seed: int) -> list[int]:
    """A prompt of some blocks."""
    found: list[int] = np.random.default_rng(seed).integers(0, 50_000, BLOCKS * BLOCK_TOKENS).tolist()
    return found


def store(cache: Cache, *seeds: int) -> None:
    for seed in seeds:
        cache.put(prompt(seed), np.zeros(LAYOUT.shape(BLOCKS * BLOCK_TOKENS), np.int8))


def files(root: Path) -> list[Path]:
    """The chunk files of the root."""
    return [each for each in (root / "chunks").glob("*/*") if places.parse_chunk(each.name)]


def readable(root: Path, cache: Cache) -> set[int]:
    """Blocks that the root lists together with all blocks before them, as events name them."""
    there = {each.name.partition(".")[0] for each in files(root)}
    found: set[int] = set()
    for seed in range(SEEDS):
        names = [address.hex() for address in ChunkKeys.of(cache.namespace, token_array(prompt(seed))).addresses]
        found |= {int(name[16:], 16) for name in takewhile(there.__contains__, names)}
    return found


class Comparison:
    """The index beside the root."""

    def __init__(self, root: Path, indexer: Indexer, cache: Cache) -> None:
        self._root = root
        self._indexer = indexer
        self._cache = cache

    def right_again(self, what: str, holds: Callable[[], bool] = lambda: True) -> None:
        """Returns once the index is the root's listing, and prints for how long it was not."""
        began_s = time.monotonic()
        many_s = few_s = 0.0
        while True:
            found, there = self._indexer.blocks().get(POOL, Counter()), readable(self._root, self._cache)
            passed_s = time.monotonic() - began_s
            many_s = passed_s if set(found) - there else many_s
            few_s = passed_s if there - set(found) else few_s
            if set(found) == there == readable(self._root, self._cache) and holds():
                break
            assert passed_s < PATIENCE_S, (what, len(found), len(there))
            time.sleep(0.02)
        print(f"{what:48} blocks {len(there):4}  too many for {many_s:5.2f} s, too few for {few_s:5.2f} s")


@contextmanager
def publishing(root: Path, etcd: str, ports: list[int]) -> Iterator[Running]:
    words = ("--publish", f"tcp://*:{ports[0]}", "--replay", f"tcp://*:{ports[1]}")
    with serving(root.parent, "events", "--root", str(root), "--etcd", etcd, *words) as running:
        yield running


def collect(root: Path, etcd: str, max_bytes: int) -> None:
    words = ("--root", str(root), "--etcd", etcd, "--once", *bounded_to(max_bytes))
    subprocess.run([*GC, *words], check=True, timeout=PATIENCE_S, capture_output=True)


@pytest.mark.smoke
def test_the_index_is_the_listing_of_the_root_again_after_everything(
    tmp_root: Path, etcd: str, indexer: Indexer
) -> None:
    root, ports = tmp_root / "root", [free_port(), free_port()]
    with kvstore.open(root, etcd=etcd) as opened:
        cache = opened.namespace("tiny", LAYOUT)
        same = Comparison(root, indexer, cache)
        store(cache, *range(20))
        with publishing(root, etcd, ports) as first:
            indexer.register(POOL, *ports)
            same.right_again("registered after 20 prompts were stored")
            assert indexer.tokens(prompt(3)) == {POOL: BLOCKS * BLOCK_TOKENS}
            store(cache, *range(20, 40))
            same.right_again("20 more prompts stored")
            collect(root, etcd, sum(each.stat().st_size for each in files(root)) // 4)
            assert 0 < len(files(root)) <= 80
            same.right_again("collection at a quarter of the room")
            with kvstore.open(root, etcd=etcd) as other:
                store(other.namespace("tiny", LAYOUT), *range(60, 80))
            same.right_again("another node stored and left")
            damaged = files(root)[0]
            damaged.write_bytes(b"\0" * damaged.stat().st_size)
            for seed in range(80):
                cache.get(prompt(seed))
            assert not damaged.exists()
            same.right_again("a damaged file was set aside")
            first.end(signal.SIGKILL)
            store(cache, *range(100, 110))
            collect(root, etcd, sum(each.stat().st_size for each in files(root)) // 2)
        with publishing(root, etcd, ports) as second:
            same.right_again("the publisher was killed, and another began")
            cache.clear()
            same.right_again("the namespace was cleared", lambda: not files(root))
            store(cache, *range(200, 210))
            same.right_again("stored after the clear", lambda: len(files(root)) == 10 * BLOCKS)
            second.end()
