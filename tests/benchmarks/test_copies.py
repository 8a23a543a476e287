"""The memcpy table: every operation of every path, verified, as multiples of a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from benchmarks import copies
from benchmarks.contents import WrongBytes
from benchmarks.copies import BLOCK_TOKENS, OPERATIONS, WAYS, Pool, one_round
from benchmarks.paths import IN_PROCESS
from kvstore.client.blocks import BlockCache
from kvstore.client.cache import Cache
from tests.benchmarks.sizes import TINY, tiny_options

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


def test_in_this_process_all_but_deferring_is_measured(pool: Pool, tmp_root: Path) -> None:
    found = run_round(pool, tmp_root)
    assert found.keys() == OPERATIONS.keys() - {"set behind", "put behind"}
    assert min(found.values()) > 0


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


def test_a_block_that_is_not_there_is_noticed(pool: Pool, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCache, "get", lambda self, keys, buffers: [False] * len(keys))
    with pytest.raises(WrongBytes, match="blocks read: 0 of 64"):
        run_round(pool, tmp_root)


@pytest.mark.slow
def test_the_table_has_a_row_for_each_path(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "QUICK_MODELS", (TINY,))
    monkeypatch.setattr(copies, "QUICK_TOKENS", TOKENS)
    result = copies.run(tiny_options(tmp_root))
    table, shares = result.tables
    assert shares.column("path") == list(copies.OVER_TCP)
    assert all(isinstance(share, float) and share > 0 for share in shares.column("read"))
    assert table.column("path") == list(WAYS)
    assert table.column("put behind")[0] is None and None not in table.column("put behind")[2:-1]
    assert table.column("path")[0] == IN_PROCESS and table.column("view")[0] is not None
    assert list(tmp_root.iterdir()) == []
