"""The memcpy table: every operation of every path, verified, as multiples of a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from benchmarks.contents import WrongBytes
from benchmarks.copies import BLOCK_TOKENS, Pool, one_round
from benchmarks.paths import IN_PROCESS
from kvstore.client.cache import BlockCache, Cache
from tests.benchmarks.sizes import TINY

TOKENS = 128 * BLOCK_TOKENS


@pytest.fixture
def pool() -> Pool:
    pool = Pool(TINY, TOKENS)
    pool.shuffle(1)
    return pool


def run_round(pool: Pool, root: Path) -> dict[str, float]:
    with kvstore.open(str(root)) as store:
        cache = store.namespace("memcpy", TINY.layout(BLOCK_TOKENS))
        return one_round(pool, IN_PROCESS, [cache], cache.clear)


def test_the_copy_moves_each_block_to_its_place(pool: Pool) -> None:
    pool.copy()
    assert sorted(f for froms, _ in pool.tasks for f in froms) == list(range(pool.count))
    for froms, tos in pool.tasks:
        assert np.array_equal(pool.target[tos], pool.source[froms])


def test_wrong_bytes_of_a_prompt_are_noticed(pool: Pool, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cache.get

    def get(self: Cache, tokens: Any, out: Any = None) -> Any:
        count = real(self, tokens, out)
        out.view(np.uint8)[-1, -1, -1, -1, -1] ^= 1
        return count

    monkeypatch.setattr(Cache, "get", get)
    with pytest.raises(WrongBytes, match="read: wrong bytes"):
        run_round(pool, tmp_root)


def test_blocks_in_each_others_place_are_noticed(pool: Pool, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockCache.get
    monkeypatch.setattr(BlockCache, "get", lambda self, keys, buffers: real(self, keys, buffers[::-1]))
    with pytest.raises(WrongBytes, match="get: wrong bytes"):
        run_round(pool, tmp_root)
