"""One rank of SGLang without its model: real host pools, and the real controller between them and our storage backend.

``Rank`` also takes the steps of SGLang's scheduler (``mem_cache/unified_radix_cache.py``), which the controller waits
for: it gives host memory to what was found, and takes the results.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from queue import Queue
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tests.engines.sglang.on_cpu import (
    CacheRequestHandle,
    DeepSeekV4PagedHostPool,
    DSAIndexerPoolHost,
    DSATokenToKVPool,
    HiCacheController,
    HostPoolGroup,
    HybridCacheController,
    LogicalHostPool,
    MambaPoolHost,
    MambaStateBufferInfo,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    get_mha_host_pool_cls,
    get_parallel,
    get_storage_hash_str,
    host_memory_budget_scope,
)
from tests.engines.sglang.pools import config
from tests.kit.patience import PATIENCE_S

PAGE, PAGES, LAYERS, HEADS, DIM = 64, 32, 3, 2, 16
SIZE = PAGE * PAGES
HOST_BYTES_MAX = 1 << 30


def device_pool(kind: str = "mha", heads: int = HEADS) -> Any:
    """The KV of the model on its device, from which SGLang takes the shape of the host pool."""
    shared: dict[str, Any] = {"page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS, "device": "cpu"}
    if kind == "mla":
        return MLATokenToKVPool(SIZE // 4, kv_lora_rank=24, qk_rope_head_dim=8, enable_memory_saver=False, **shared)
    wide = 2 * DIM if kind == "wide" else DIM  # V is wider than K
    return MHATokenToKVPool(
        SIZE // 4, head_num=heads, head_dim=DIM, v_head_dim=wide, enable_memory_saver=False, **shared
    )


def host_pool(device: Any, layout: str) -> Any:
    """A host pool of the device pool's shape, all zeros."""
    (info,) = device.get_device_pool_infos()
    shared: dict[str, Any] = {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
        "host_token_capacity": SIZE,
        "pin_memory": False,
    }
    with host_memory_budget_scope(HOST_BYTES_MAX):
        if isinstance(device, MLATokenToKVPool):
            made = MLATokenToKVPoolHost(info.buffer_info, 1, 0, PAGE, layout, target_layer_num=LAYERS, **shared)
        else:
            kind = get_mha_host_pool_cls(info.buffer_info)
            made = kind(info.buffer_info, 1, 0, PAGE, layout, **shared)
    for buffer in made.kv_buffer if isinstance(made.kv_buffer, tuple) else (made.kv_buffer,):
        buffer.zero_()
    return made


def mamba_pool(
    states: torch.dtype = torch.float32, convolutions: int = 1, sides: int = 0, beside: torch.dtype = torch.int64
) -> Any:
    """A host pool of Mamba states: one page is the state of all layers at one token."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 8, 4, 6, dtype=states),
        conv=tuple(torch.zeros(LAYERS, 8, 5 + each, 3, dtype=torch.bfloat16) for each in range(convolutions)),
        extra_checkpoint_buffers=tuple(torch.zeros(8, 3, dtype=beside) for _ in range(sides)),
    )
    with host_memory_budget_scope(HOST_BYTES_MAX):
        made = MambaPoolHost(info, 2, 0, device_capacity=8, pin_memory=False, layout="page_first")
    for buffer in made.kv_buffer:
        buffer.zero_()
    return made


def compressed_pools(layout: str) -> tuple[Any, Any]:
    """The pools of DeepSeek-V4: an anchor that has page numbers and no bytes, and one of compressed rows."""
    rows = [torch.zeros(PAGES, 96, dtype=torch.uint8) for _ in range(LAYERS)]
    with host_memory_budget_scope(HOST_BYTES_MAX):
        made = DeepSeekV4PagedHostPool(
            "c4", rows, 96, PAGES, slot_page_size=PAGE, layout=layout, pin_memory=False, page_aligned_only=True
        )
    return LogicalHostPool(SIZE, PAGE, layout), made


def sparse_pools(layout: str) -> tuple[Any, Any, Any]:
    """The device pool of a model with sparse MLA (DSA), and its host pools: the latent KV, and its indexer's keys."""
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        device = DSATokenToKVPool(
            SIZE // 4,
            PAGE,
            kv_lora_rank=24,
            dtype=torch.bfloat16,
            qk_rope_head_dim=8,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=32,
        )
    latent = host_pool(device, layout)
    (indexer,) = (each for each in device.host_pool_decls() if each.pool_name == PoolName.INDEXER)
    with host_memory_budget_scope(HOST_BYTES_MAX):
        return device, latent, DSAIndexerPoolHost(indexer, latent, pin_memory=False)


def raw(page: torch.Tensor) -> torch.Tensor:
    return page.flatten().view(torch.uint8)


def written(pool: Any, key: str) -> torch.Tensor:
    """The flat page that a test writes under a key: random bytes, other ones for each key and kind of pool."""
    page = pool.get_dummy_flat_data_page()
    seed = hashlib.sha256(f"{key}{type(pool).__name__}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
    raw(page).random_(1, 256, generator=generator)
    return page


def write(pool: Any, indices: torch.Tensor, keys: Sequence[str]) -> None:
    for index, key in zip(indices[:: pool.page_size].tolist(), keys, strict=True):
        pool.set_from_flat_data_page(index, written(pool, key))


def holds(pool: Any, indices: torch.Tensor, keys: Sequence[str]) -> bool:
    """True if each page is bit for bit what was written under its key."""
    starts = indices[:: pool.page_size].tolist()
    assert len(starts) == len(keys)
    return all(
        torch.equal(raw(pool.get_data_page(index)), raw(written(pool, key)))
        for index, key in zip(starts, keys, strict=True)
    )


def page_keys(tokens: Sequence[int]) -> list[str]:
    return list(get_storage_hash_str(list(tokens), None, page_size=PAGE))


def taken(queue: Queue[Any]) -> Any:
    """Takes a result of the controller's threads. Fails if a call of the backend never ends."""
    return queue.get(timeout=PATIENCE_S)


class Rank:
    """A controller with our backend attached, and its host pools; the first pool is the one of K and V.

    ``told`` is what SGLang knows of its ranks.
    """

    def __init__(
        self,
        pools: dict[PoolName, Any],
        extra: dict[str, Any],
        device: Any = None,
        *,
        hybrid: bool = False,
        says_prefixes: bool = False,
        **told: Any,
    ) -> None:
        self.pools = pools
        self.kv = pools[PoolName.KV]
        self._says_prefixes = says_prefixes
        device = device if device is not None else device_pool()
        allocator = PagedTokenToKVPoolAllocator(device.size, PAGE, torch.bfloat16, "cpu", device, False)
        group = HostPoolGroup(
            [
                PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV)
                for name, pool in pools.items()
            ]
        )
        is_hybrid = hybrid or len(pools) > 1
        arguments: dict[str, Any] = {"tp_group": None, "load_cache_event": threading.Event()}
        self._ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        self._ranks |= told
        with get_parallel().override(**self._ranks):
            made = HybridCacheController if is_hybrid else HiCacheController
            self.controller = made(allocator, group if is_hybrid else self.kv, PAGE, io_backend="direct", **arguments)
        self._entries = {"host_pools": group.entries} if is_hybrid else {}
        extra = config({"fingerprint": "sha256:1", **extra}).extra_config
        with get_parallel().override(**self._ranks):
            self.controller.attach_storage_backend("dynamic", 1, "org/model", extra, **self._entries)

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def fill(self, name: PoolName, keys: Sequence[str]) -> torch.Tensor:
        """Host memory with what the model computed, and its indices."""
        pool = self.pools[name]
        indices = pool.alloc(len(keys) * pool.page_size)
        write(pool, indices, keys)
        return indices

    def back_up(self, tokens: Sequence[int], first: int = 0, extra_pools: list[PoolTransfer] | None = None) -> int:
        """Stores the pages of a prompt from page ``first`` on; returns the number of tokens that are stored."""
        keys = page_keys(tokens)
        indices = self.fill(PoolName.KV, keys[first:])
        for transfer in extra_pools or []:
            if transfer.indices_from_pool == PoolName.KV:
                write(self.pools[transfer.name], indices, keys[first:])
        told: dict[str, Any] = {"extra_pools": extra_pools} if extra_pools is not None else {}
        told["prefix_keys"] = keys[:first] if self._says_prefixes else None
        self.controller.write_storage(indices, list(tokens[first * PAGE :]), keys[first:], **told)
        stored = int(taken(self.controller.ack_backup_queue).completed_tokens)
        self.pools[PoolName.KV].free(indices)
        return stored

    def ask(self, tokens: Sequence[int], extra_pools: list[PoolTransfer] | None = None) -> Any:
        """Starts a prefetch, and returns it when the backend has said how much there is."""
        prefix: list[str] | None = [] if self._says_prefixes else None
        if isinstance(self.controller, HybridCacheController):
            self.controller.prefetch(CacheRequestHandle("r", 0), list(tokens), None, prefix, extra_pools)
        else:
            self.controller.prefetch("r", list(tokens), None, prefix)
        return taken(self.controller.prefetch_hit_queue)

    def read(self, operation: Any) -> None:
        """Gives memory to what was found, and starts to read it."""
        operation.host_indices = self.kv.alloc(operation.storage_hit_count)
        for transfer in getattr(operation, "pool_transfers", None) or []:
            if transfer.indices_from_pool is None:
                pool = self.pools[transfer.name]
                pages = min(len(transfer.keys), operation.storage_hit_count // PAGE)
                transfer.host_indices = pool.alloc(pages * pool.page_size)
        self.controller.prefetch_buffer.put(operation)

    def results(self, operation: Any) -> tuple[int, dict[str, int]]:
        """Waits for the end of a prefetch: its tokens, and the pages of each other pool."""
        tokens, pages = 0, dict[str, int]()
        while True:
            ack = taken(self.controller.ack_prefetch_queue)
            assert ack.operation is operation
            tokens = ack.completed_tokens if ack.completed_tokens is not None else tokens
            pages = ack.pool_hits if ack.pool_hits is not None else pages
            if ack.completed_req:
                return tokens, pages

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Prefetches a prompt; returns the number of its tokens, whose bytes have all been compared."""
        operation = self.ask(tokens)
        if not operation.storage_hit_count:
            return 0
        self.read(operation)
        count, _ = self.results(operation)
        assert holds(self.kv, operation.host_indices[:count], page_keys(tokens)[: count // PAGE]), "wrong bytes"
        self.kv.free(operation.host_indices)
        return count

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.detach_storage_backend()


def derived(name: PoolName) -> PoolTransfer:
    """Asks for, or stores, the pages of a pool that lie at the indices of K and V."""
    return PoolTransfer(name=name, indices_from_pool=PoolName.KV)


def trailing(name: PoolName, pages: int) -> PoolTransfer:
    """Asks for the last pages of what is found, whose keys nobody knows yet (as SGLang's components do)."""
    return PoolTransfer(name=name, keys=["__placeholder__"] * pages, hit_policy=PoolHitPolicy.TRAILING_PAGES)
