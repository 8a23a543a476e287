"""The replay of engine-hashed blocks: what places and look-ups give, and what it counts as unreachable."""

from __future__ import annotations

import numpy as np

from benchmarks.caches import Blocks
from benchmarks.engine_blocks import Swept, agents, swept
from benchmarks.policies import Replay
from kvstore.hints import PRIORITY_DEFAULT


def chains(count: int, length: int, rounds: int) -> Replay:
    """Prompts of their own blocks, asked for one after the other."""
    parents = [at - 1 if at % length else -1 for at in range(count * length)]
    depths = [at % length for at in range(count * length)]
    blocks = Blocks(np.array(parents), np.array(depths), np.full(count * length, PRIORITY_DEFAULT))
    asked = [np.arange(at * length, (at + 1) * length) for _ in range(rounds) for at in range(count)]
    return Replay("chains", blocks, [60.0 * at for at in range(len(asked))], asked, sum(map(len, asked)))


def test_no_kept_block_lacks_its_first_ones() -> None:
    replay = agents()
    capacity, engine = len(replay.blocks) // 4, len(replay.blocks) // 20
    aged = swept(replay, capacity, engine, is_chained=True)
    superseded = swept(replay, capacity, engine, is_chained=True, sessions=True)
    assert aged.unreachable == superseded.unreachable == 0
    assert superseded.hits > aged.hits, "abandoned forks make room for what is used again"
    assert swept(replay, capacity, engine, is_chained=False).unreachable > 0


def test_a_block_without_its_parent_is_counted() -> None:
    replay = chains(1, 4, 1)
    store = Swept(replay.blocks, 2, has_depths=False, renews_looked_up=False)
    store._present[:] = [False, True, True, True]
    store._sweep(0.0)
    assert store.unreachable == int(store._present.sum()) > 0
