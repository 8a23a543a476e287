"""SGLang's real controller of models with several pools (the v2 calls): windows, states, indexers, DeepSeek-V4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tests.engines.sglang.rank import (
    PAGE,
    Rank,
    compressed_pools,
    derived,
    device_pool,
    holds,
    host_pool,
    mamba_pool,
    page_keys,
    sparse_pools,
    trailing,
)
from tests.kit.stores import chunk_files, flip

PROMPT = list(range(100, 100 + 6 * PAGE))
WINDOW = 2
"""Pages of the sliding window."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def windowed(root: Path, layout: str, calls: int) -> Rank:
    """A rank of a model that mixes full attention and sliding windows, with empty pools."""
    device = device_pool()
    pools = {PoolName.KV: host_pool(device, layout), PoolName.SWA: host_pool(device_pool(heads=1), layout)}
    return Rank(pools, {"root": str(root), "interface_v1": calls}, device)


def recurrent(root: Path, states: Any = None, kind: str = "mha", **told: Any) -> Rank:
    """A rank of a model that mixes attention and Mamba layers, with empty pools."""
    device = device_pool(kind)
    pools = {PoolName.KV: host_pool(device, "page_first"), PoolName.MAMBA: states or mamba_pool()}
    return Rank(pools, {"root": str(root)}, device, **told)


def back_up(rank: Rank, name: PoolName, tokens: list[int], first: int, pages: int) -> int:
    """Stores a prompt from page ``first`` on, and of the other pool what belongs to its last pages."""
    keys = page_keys(tokens)[-pages:]
    indices = rank.fill(name, keys)
    transfer = PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    stored = rank.back_up(tokens, first, [transfer])
    rank.pools[name].free(indices)
    return stored


def prefetch(rank: Rank, name: PoolName, tokens: list[int], pages: int) -> tuple[int, int]:
    """Prefetches a prompt with the last pages of another pool: its tokens and those pages, all bytes compared."""
    operation = rank.ask(tokens, [trailing(name, pages)])
    if not operation.storage_hit_count:
        return 0, 0
    rank.read(operation)
    count, hits = rank.results(operation)
    keys, (transfer,) = page_keys(tokens)[: count // PAGE], operation.pool_transfers
    assert holds(rank.kv, operation.host_indices[:count], keys), "wrong bytes"
    pool, found = rank.pools[name], hits.get(str(name.value), 0)
    assert holds(pool, transfer.host_indices[: found * pool.page_size], keys[-pages:][:found]), "wrong bytes"
    rank.kv.free(operation.host_indices)
    pool.free(transfer.host_indices)
    return count, found


@pytest.mark.parametrize("calls", [0, 1], ids=["generic", "in place"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_come_back_with_the_prefix_that_ends_in_them(tmp_root: Path, layout: str, calls: int) -> None:
    with windowed(tmp_root, layout, calls) as rank:
        assert back_up(rank, PoolName.SWA, PROMPT[: 3 * PAGE], 0, WINDOW) == 3 * PAGE
        assert back_up(rank, PoolName.SWA, PROMPT, 3, WINDOW) == 3 * PAGE
    with windowed(tmp_root, layout, calls) as rank:
        assert prefetch(rank, PoolName.SWA, PROMPT, WINDOW) == (6 * PAGE, WINDOW)
        assert prefetch(rank, PoolName.SWA, PROMPT[: 3 * PAGE], WINDOW) == (3 * PAGE, WINDOW)
        assert prefetch(rank, PoolName.SWA, PROMPT[: 5 * PAGE], WINDOW) == (3 * PAGE, WINDOW), "no window ends there"
        assert prefetch(rank, PoolName.SWA, PROMPT[: 2 * PAGE], WINDOW) == (0, 0)


@pytest.mark.parametrize("kind", [{"convolutions": 1}, {"convolutions": 3}, {"sides": 2}], ids=str)
def test_states_come_back_with_the_prefix_that_ends_at_them(tmp_root: Path, kind: dict[str, int]) -> None:
    """States with side states have no addresses, so their pages are copied."""
    states = [mamba_pool(**kind) for _ in range(2)]
    with recurrent(tmp_root, states[0]) as rank:
        assert back_up(rank, PoolName.MAMBA, PROMPT[: 4 * PAGE], 0, 1) == 4 * PAGE
        assert rank.back_up(PROMPT, 4) == 2 * PAGE, "a branch without a state"
    with recurrent(tmp_root, states[1]) as rank:
        assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (4 * PAGE, 1)
        assert prefetch(rank, PoolName.MAMBA, PROMPT[: 3 * PAGE], 1) == (0, 0)


def test_a_damaged_state_is_a_miss_and_the_prefix_is_not_found_again(tmp_root: Path) -> None:
    with recurrent(tmp_root) as rank:
        assert rank.back_up(PROMPT) == 6 * PAGE
        before = set(chunk_files(tmp_root))
        back_up(rank, PoolName.MAMBA, PROMPT, 6, 1)
        victim = min(set(chunk_files(tmp_root)) - before)
        flip(victim, -3)
        assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (6 * PAGE, 0)
        assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (0, 0)
        back_up(rank, PoolName.MAMBA, PROMPT, 6, 1)
        assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (6 * PAGE, 1)


@pytest.mark.parametrize(
    "kinds",
    [
        ({"states": torch.float16}, {"states": torch.bfloat16}),
        ({"sides": 1, "beside": torch.int64}, {"sides": 1, "beside": torch.float64}),
    ],
    ids=["states", "side states"],
)
def test_states_of_another_type_and_the_same_size_are_a_miss(
    tmp_root: Path, kinds: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """SGLang takes the type of the states from its environment (SGLANG_MAMBA_SSM_DTYPE)."""
    with recurrent(tmp_root, mamba_pool(**kinds[0])) as rank:
        back_up(rank, PoolName.MAMBA, PROMPT, 0, 1)
        assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (6 * PAGE, 1)
    with recurrent(tmp_root, mamba_pool(**kinds[1])) as rank:
        assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (0, 0)


def test_ranks_share_latent_attention_and_keep_their_own_states(tmp_root: Path) -> None:
    """The first rank alone stores MLA pages; each rank stores its Mamba states."""
    for number in range(2):
        with recurrent(tmp_root, kind="mla", tp_rank=number, tp_size=2) as rank:
            if number:
                assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (0, 0), "the first rank's states are not its own"
            assert back_up(rank, PoolName.MAMBA, PROMPT, 0, 1) == 6 * PAGE
            assert prefetch(rank, PoolName.MAMBA, PROMPT, 1) == (6 * PAGE, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_indexers_keys_come_back_with_the_latent_pages(tmp_root: Path, layout: str) -> None:
    def rank() -> Rank:
        device, latent, indexer = sparse_pools(layout)
        return Rank({PoolName.KV: latent, PoolName.INDEXER: indexer}, {"root": str(tmp_root)}, device)

    with rank() as writer:
        assert writer.back_up(PROMPT[: 3 * PAGE], 0, [derived(PoolName.INDEXER)]) == 3 * PAGE
        assert writer.back_up(PROMPT, 3) == 3 * PAGE, "pages without keys of an indexer"
    with rank() as reader:
        operation = reader.ask(PROMPT, [derived(PoolName.INDEXER)])
        assert operation.storage_hit_count == 3 * PAGE
        reader.read(operation)
        assert reader.results(operation)[0] == 3 * PAGE
        for pool in reader.pools.values():
            assert holds(pool, operation.host_indices, page_keys(PROMPT)[:3])


@pytest.mark.parametrize("calls", [0, 1], ids=["generic", "in place"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_deepseek_v4_come_back_although_its_anchor_has_no_bytes(
    tmp_root: Path, layout: str, calls: int
) -> None:
    c4 = PoolName.DEEPSEEK_V4_C4

    def rank() -> Rank:
        anchor, rows = compressed_pools(layout)
        return Rank({PoolName.KV: anchor, c4: rows}, {"root": str(tmp_root), "interface_v1": calls})

    with rank() as writer:
        assert writer.ask(PROMPT, [derived(c4)]).storage_hit_count == 0
        assert writer.back_up(PROMPT, 0, [derived(c4)]) == len(PROMPT)
    with rank() as reader:
        operation = reader.ask([*PROMPT[: 4 * PAGE], *[7] * PAGE], [derived(c4)])
        assert operation.storage_hit_count == 4 * PAGE
        reader.read(operation)
        assert reader.results(operation)[0] == 4 * PAGE
        assert holds(reader.pools[c4], operation.host_indices, page_keys(PROMPT)[:4])


def test_a_draft_by_heads_of_a_latent_model_is_each_ranks_own(tmp_root: Path) -> None:
    """SGLang lets the first rank alone store it, so others have a miss and not that rank's heads."""

    def rank(number: int, ranks: int) -> Rank:
        device = device_pool("mla")
        pools = {PoolName.KV: host_pool(device, "page_first"), PoolName.DRAFT: host_pool(device_pool(), "page_first")}
        return Rank(pools, {"root": str(tmp_root)}, device, tp_rank=number, tp_size=ranks)

    draft = PoolName.DRAFT
    for number in range(2):
        with rank(number, 2) as several:
            several.back_up(PROMPT, 0, [derived(draft)])
            assert several.ask(PROMPT).storage_hit_count == len(PROMPT), "the latent pages are all ranks'"
            assert several.ask(PROMPT, [derived(draft)]).storage_hit_count == (0 if number else len(PROMPT))
    for is_stored in (False, True):
        with rank(0, 1) as alone:
            if not is_stored:
                alone.back_up(PROMPT, 0, [derived(draft)])
                continue
            operation = alone.ask(PROMPT, [derived(draft)])
            assert operation.storage_hit_count == len(PROMPT)
            alone.read(operation)
            assert alone.results(operation)[0] == len(PROMPT)
            assert holds(alone.pools[draft], operation.host_indices, page_keys(PROMPT))
