"""The caches of the trace replay: none finds more than the optimum, and leaf-first ones keep chains whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.policies import Blocks, Cache, Column, Lru, Optimum, Sweeping
from kvstore_gc.policy import Order
from tests.kit.cases import for_each

LEAF_FIRST: dict[str, Callable[[Blocks, int], Cache]] = {
    "lru": Lru,
    "ours": partial(Sweeping, order=Order.USES, high=1.0, low=0.9),
}


def traffic(seed: int) -> tuple[Blocks, list[Column]]:
    """Returns prompts that begin like earlier ones and continue differently."""
    rnd = random.Random(seed)
    parents: list[int] = []
    depths: list[int] = []
    chains: list[Column] = []
    for _ in range(300):
        old = rnd.choice(chains[-40:]).tolist() if chains and rnd.random() < 0.7 else []
        chain = old[: rnd.randint(0, len(old))]
        for _ in range(rnd.randint(1, 6)):
            parents.append(chain[-1] if chain else -1)
            depths.append(len(chain))
            chain.append(len(parents) - 1)
        chains.append(np.array(chain, np.int64))
    return Blocks(np.array(parents), np.array(depths), np.full(len(parents), 35)), chains


def found(cache: Cache, chains: list[Column]) -> int:
    return sum(cache.request(10.0 * number, chain) for number, chain in enumerate(chains))


@for_each("seed", range(5))
@for_each("share", [0.05, 0.2, 0.5])
def test_no_policy_finds_more_than_the_optimum(seed: int, share: float) -> None:
    blocks, chains = traffic(seed)
    capacity = int(share * len(blocks))
    most = found(Optimum(blocks, capacity, chains), chains)
    for name, make in LEAF_FIRST.items():
        assert 0 < found(make(blocks, capacity), chains) <= most, name


@for_each("name", LEAF_FIRST)
def test_leaf_first_keeps_every_block_reachable(name: str) -> None:
    blocks, chains = traffic(1)
    cache = LEAF_FIRST[name](blocks, len(blocks) // 5)
    for number, chain in enumerate(chains):
        cache.request(10.0 * number, chain)
        there = cache.present()
        assert all(int(blocks.parents[block]) in there or blocks.parents[block] < 0 for block in there)
