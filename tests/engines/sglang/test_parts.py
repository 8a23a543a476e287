"""SGLang's ``tp_lcm_size``: engines of several tensor-parallel sizes share pages, cut by heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.pools import HEADS, HostPool, backend, fill, indices, same


def rank_of_two(pool: HostPool, rank: int) -> HostPool:
    """The pool of a rank with half of the heads of ``pool``, and their content."""
    half = HostPool("page_head", heads=HEADS // 2)
    half.kv_buffer.copy_(pool.kv_buffer[:, :, rank * HEADS // 2 : (rank + 1) * HEADS // 2])
    return half


@pytest.mark.parametrize("writers", [1, 2])
def test_engines_of_one_and_two_ranks_share_pages_by_heads(tmp_root: Path, writers: int) -> None:
    whole, keys = HostPool("page_head"), [f"{number:064x}" for number in range(3)]
    for page in range(3):
        fill(whole, page, page)
    pools = {1: [whole], 2: [rank_of_two(whole, rank) for rank in range(2)]}

    def told(size: int, rank: int) -> dict[str, Any]:
        return {"tp_size": size, "tp_rank": rank, "tp_lcm_size": 2, "should_split_heads": size < 2}

    for rank, pool in enumerate(pools[writers]):
        with backend(pool, {"root": str(tmp_root)}, **told(writers, rank)) as hicache:
            assert hicache.batch_set_v1(keys, indices([0, 1, 2])) == [True] * 3
    readers = 3 - writers
    for rank, pool in enumerate(pools[readers]):
        with backend(pool, {"root": str(tmp_root)}, **told(readers, rank)) as hicache:
            assert hicache.batch_exists(keys) == 3
            assert hicache.batch_get_v1(keys, indices([5, 6, 7])) == [True] * 3
            assert all(same(pool, page, pool, 5 + page) for page in range(3))
    with backend(whole, {"root": str(tmp_root)}) as hicache:
        assert hicache.batch_exists(keys) == 0, "an engine without parts shares none"
    alone = {"tp_size": 2, "tp_rank": 1, "tp_lcm_size": 4, "should_split_heads": True}
    other = HostPool("page_head")
    with backend(other, {"root": str(tmp_root)}, **alone) as hicache:
        assert hicache.batch_exists(keys) == 0, "parts of four are others than parts of two"


def test_half_a_page_is_none(tmp_root: Path) -> None:
    whole, keys = HostPool("page_head"), ["a" * 64]
    fill(whole, 0, 1)
    with backend(rank_of_two(whole, 0), {"root": str(tmp_root)}, tp_size=2, tp_lcm_size=2) as hicache:
        assert hicache.batch_set_v1(keys, indices([0])) == [True]
    with backend(whole, {"root": str(tmp_root)}, tp_lcm_size=2, should_split_heads=True) as hicache:
        assert hicache.batch_exists(keys) == 0
        assert hicache.batch_get_v1(keys, indices([3])) == [False]
