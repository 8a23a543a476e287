"""Compares what a hit needs, and where it ends, with vLLM's own classes; prints the number of cases, or what differs.

No engine is started: the groups are those that vLLM makes, the blocks that are present are random ones.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstore.connectors.vllm.blocks import GroupKind, Tail, last_boundary
from kvstore.connectors.vllm.namespaces import KVTopology

SIZE = 16
SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
STATE = {"shapes": ((4, 8),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}


def shape_of(specs: Sequence[KVCacheSpec]) -> KVTopology:
    """Our view of a model with these groups."""
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate"),
        parallel_config=parallel,
        speculative_config=None,
        cache_config=SimpleNamespace(hash_block_size=None),
    )
    return KVTopology(config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]))


def check_skipped(source: random.Random) -> None:
    """A manager frees the same blocks before a boundary that we do not ask for."""
    reach = source.randrange(1, 100)
    for spec in (
        FullAttentionSpec(SIZE, **SHAPE),
        SlidingWindowSpec(SIZE, sliding_window=reach, **SHAPE),
        ChunkedLocalAttentionSpec(SIZE, attention_chunk_size=reach, **SHAPE),
        MambaSpec(SIZE, **STATE),
    ):
        pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=SIZE)
        manager = get_manager_for_kv_cache_spec(
            kv_cache_spec=spec,
            max_in_flight_tokens=64,
            max_model_len=1024,
            block_pool=pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=SIZE,
        )
        [cluster] = shape_of([spec]).clusters
        for boundary in range(SIZE, 40 * SIZE, SIZE):
            assert cluster.first_block(boundary) == manager.get_num_skipped_tokens(boundary) // SIZE, (spec, boundary)


def check_hit(source: random.Random) -> None:
    """vLLM's own search over the same blocks ends at the same boundary."""
    window = SlidingWindowSpec(SIZE, sliding_window=source.randrange(2, 100), **SHAPE)
    specs: list[KVCacheSpec] = [
        FullAttentionSpec(SIZE, **SHAPE),
        *source.choice([[window] * 2, [MambaSpec(SIZE, **STATE)]]),
    ]
    count = source.randrange(1, 40)
    hashes = [BlockHash(index.to_bytes(32, "big")) for index in range(count)]
    full = source.randrange(count + 1)
    # Of two groups of one kind both are there or neither, as in one file.
    there = {index for index in range(count) if source.random() < source.choice([0.3, 0.9])}
    exists = {(0, bytes(hashes[index])) for index in range(full)}
    exists |= {(group, bytes(hashes[index])) for group in range(1, len(specs)) for index in there}
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    theirs = MooncakeStoreCoordinator(groups, SIZE, SIZE)
    _, tokens = theirs.find_longest_cache_hit(hashes, count * SIZE, ExternalCachedBlockPool(SIZE, exists))
    clusters = shape_of(specs).clusters
    assert [cluster.kind is GroupKind.FULL for cluster in clusters] == [True, False]
    tails = [Tail(clusters[1], [bytes(each) for each in hashes])]
    ours = last_boundary(tails, SIZE, 0, full, lambda keys: [(1, key) in exists for key in keys])
    assert ours * SIZE == tokens, (specs[1:], full, sorted(there), ours, tokens)


if __name__ == "__main__":
    rounds = int(sys.argv[1])
    for seed in range(rounds):
        check_skipped(random.Random(seed))
        check_hit(random.Random(seed))
    print(f"same {rounds}")
