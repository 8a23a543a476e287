"""SGLang's hierarchical cache: the store as its storage, by its ``dynamic`` backend.

SGLang calls from its own threads, so calls wait for the store, each at most for its timeout. Every failure is a miss,
or a page that was not stored.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import sglang
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore.client import Cache
from kvstore.connectors.common import (
    EngineSettings,
    LazyStore,
    RateLimitedLog,
    block_key,
    leading,
    local_folder,
    match,
    model_fingerprint,
    present,
    text,
    weights_fingerprint,
)
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable

# What calls of SGLang moved, and how fast, for its own metrics.


CALLS_MAX = 1024
"""Calls whose figures are kept; SGLang asks for them only with ``--enable-metrics``."""
GIB = 1 << 30


class TransferStats:
    """Pages and GiB/s of each call since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)

    def timed(self, page_bytes: int, call: Callable[[], list[bool]]) -> list[bool]:
        """Returns the call's result, which says of each page whether it was moved."""
        began_s = time.perf_counter()
        moved = call()
        if count := sum(moved):
            self._calls.append((count, count * page_bytes / GIB / (time.perf_counter() - began_s)))
        return moved

    def take(self) -> tuple[list[int], list[float]]:
        """Takes out the pages of each call, and its GiB/s, while other threads may add some."""
        taken = [self._calls.popleft() for _ in range(len(self._calls))]
        return [pages for pages, _ in taken], [rate for _, rate in taken]


# Pages of SGLang's host pools as blocks: the memory and the key of each block.
#
# A page that lies in a few runs of memory (K and V in the page-first layouts) is one block per run, read and written
# in place. In ``layer_first`` it is one block that is copied together. SGLang's generic calls have flat pages instead;
# whether their bytes are in the order of the runs depends on the pool, so they are pages of their own.


RUNS_MAX = 4
"""Runs of memory in a page that are separate blocks: K, V, and what some layouts add."""

_FACTS = (
    *("layout", "dtype", "store_dtype", "page_size", "logical_page_size", "layer_num", "target_layer_num"),
    *("start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "size_per_token", "storage_format_tag", "dcp_size", "dcp_rank"),
)


_STATE_FACTS = ("temporal_dtype", "temporal_state_shape", "conv_dtype", "conv_state_shapes")
"""Facts of pools of Mamba states: two types of one size make pages of one size."""


class PagePool:
    """One host pool. Pools of one name with equal facts and equal ``scope`` have interchangeable pages.

    ``in_place`` says which calls SGLang makes. A pool that has its pages only as memory, or only flat, has those in any
    case. Raises InvalidRequest for a pool that has neither.
    """

    def __init__(self, name: str, pool: Any, scope: str, *, in_place: bool) -> None:
        self.name = name
        self.pool = pool
        # A group of pools passes on only some of what its first pool knows.
        entry = getattr(pool, "anchor_entry", None)
        facts_of = pool if entry is None else entry.host_pool
        stated = [*_FACTS, *(fact for fact in _STATE_FACTS if hasattr(facts_of, fact))]
        facts = "\n".join(f"{fact}={getattr(facts_of, fact, None)}" for fact in stated)
        if states := getattr(facts_of, "slot_state_device_tensors", ()):
            facts += f"\nbeside={[(str(state.dtype), tuple(state.shape[1:])) for state in states]}"
        self.page_size = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)
        self._is_flat = False
        runs = self._runs(torch.arange(self.page_size))
        flat_bytes = None if in_place and runs is not None else _flat_bytes(pool)
        self._is_flat = flat_bytes is not None
        if flat_bytes is not None:
            sizes = [flat_bytes]
        elif runs is not None:
            sizes = runs[1]
        else:
            raise InvalidRequest(f"pages of pool {name} ({type(pool).__name__}) can be read neither in place nor flat")
        self._has_bytes = any(sizes)
        if not self._has_bytes:
            sizes = [1]  # DeepSeek-V4's anchor has page numbers alone: a byte says that the page is stored
        is_by_layer = getattr(facts_of, "layout", "") == "layer_first" and len(sizes) > 1
        self._is_gathered = len(sizes) > RUNS_MAX or is_by_layer
        self._run_count = len(sizes)
        self.sizes = (sum(sizes),) if self._is_gathered else tuple(sizes)
        """Sizes of the blocks of one page."""
        identity = f"{name}\n{scope}\npool={type(facts_of).__name__}\n{facts}\nflat={self._is_flat}"
        self._marks = [(identity.encode(), str(number).encode()) for number in range(len(self.sizes))]
        """The parts of a block's key that distinguish it from the other blocks of its page."""

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the keys of the pages' blocks, page by page."""
        return [block_key(identity, text(key), number) for key in keys for identity, number in self._marks]

    def whole(self, blocks: Sequence[bool]) -> list[bool]:
        """Returns, for each page, whether all of its blocks are good."""
        count = len(self.sizes)
        return [all(blocks[start : start + count]) for start in range(0, len(blocks), count)]

    def fits(self, pages: int, indices: torch.Tensor | None) -> bool:
        """True if ``indices`` name this many pages, each in one run: only its first index is read later."""
        if indices is None or int(indices.numel()) != pages * self.page_size:
            return False
        rows = indices.reshape(pages, self.page_size)
        return bool((rows >= 0).all()) and bool((rows[:, 1:] - rows[:, :-1] == 1).all())

    def to_write(self, indices: torch.Tensor) -> list[memoryview]:
        """Returns the bytes of the pages' blocks: the pool's own memory, or a copy if a page has too many runs."""
        found = self._runs(indices)
        if found is None:
            return [each for index in self._first(indices) for each in self.cut(self.pool.get_data_page(index))]
        runs = _memory(*found)
        if not self._is_gathered:
            return runs
        blocks = []
        for page in self._by_page(runs):
            block = np.concatenate([np.frombuffer(run, np.uint8) for run in page])
            blocks.append(block.data)
        return blocks

    def to_read(self, indices: torch.Tensor) -> list[memoryview]:
        """Returns memory for the pages' blocks; call ``filled`` once they are read."""
        found = self._runs(indices)
        if found is None:
            return [
                each
                for _ in self._first(indices)
                for each in self.cut(self.pool.get_dummy_flat_data_page(), copy=False)
            ]
        if not self._is_gathered:
            return _memory(*found)
        return [np.empty(self.sizes[0], np.uint8).data for _ in self._first(indices)]

    def filled(self, indices: torch.Tensor, blocks: list[memoryview], good: list[bool]) -> None:
        """Copies the good pages to their places, unless they were read in place."""
        if not self._has_bytes:
            return
        found = self._runs(indices)
        if found is not None and not self._is_gathered:
            return
        if found is None:
            dtype = self.pool.get_dummy_flat_data_page().dtype
            for index, block, hit in zip(self._first(indices), blocks, good, strict=True):
                if hit:
                    self.pool.set_from_flat_data_page(index, torch.frombuffer(block, dtype=torch.uint8).view(dtype))
            return
        for page, block, hit in zip(self._by_page(_memory(*found)), blocks, good, strict=True):
            start = 0
            for run in page if hit else ():
                run[:] = block[start : start + len(run)]
                start += len(run)

    def cut(self, page: torch.Tensor, copy: bool = True) -> list[memoryview]:
        """Cuts a flat page into blocks. Raises InvalidRequest for another size, or if it is not contiguous."""
        if not self._has_bytes:
            return [memoryview(bytearray(1))]
        if not self._is_flat:
            raise InvalidRequest(f"pages of pool {self.name} are stored in place: leave interface_v1 set")
        if not page.is_contiguous():
            if not copy:
                raise InvalidRequest("the page to read into is not contiguous")
            page = page.contiguous()
        memory = memoryview(page.detach().reshape(-1).view(torch.uint8).numpy())
        if len(memory) != sum(self.sizes):
            raise InvalidRequest(f"the page has {len(memory)} bytes: those of pool {self.name} have {sum(self.sizes)}")
        blocks, start = [], 0
        for size in self.sizes:
            blocks.append(memory[start : start + size])
            start += size
        return blocks

    def _runs(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        """Returns addresses and sizes of the runs of memory, page by page, as the pool reports them."""
        if self._is_flat:
            return None
        try:
            found = self.pool.get_page_buffer_meta(indices)
        except (AttributeError, NotImplementedError, ValueError):
            return None  # this layout has flat pages only
        return found if found is None else (found[0], found[1])

    def _by_page(self, runs: list[memoryview]) -> list[list[memoryview]]:
        count = self._run_count
        return [runs[start : start + count] for start in range(0, len(runs), count)]

    def _first(self, indices: torch.Tensor) -> list[int]:
        return [int(each) for each in indices[:: self.page_size].tolist()]


def _flat_bytes(pool: Any) -> int | None:
    """Returns the size of a flat page; None if the pool has none."""
    try:
        page = pool.get_dummy_flat_data_page()
    except (AttributeError, NotImplementedError):
        return None
    return int(page.numel() * page.element_size())


def _memory(addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """Returns the memory at these addresses; the pool keeps it alive."""
    return [
        memoryview(_bytes_type(size).from_address(address)).cast("B")
        for address, size in zip(addresses, sizes, strict=True)
    ]


@cache
def _bytes_type(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Returns the array type of a size. Cached, because ctypes keeps every array type it ever made."""
    return ctypes.c_ubyte * size


log = logging.getLogger(__name__)

T = TypeVar("T")


LAUNCHED_WITH = (
    *("model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "load_format"),
    *("model_impl", "json_model_override_args", "dsv4_attn_backend", "modelopt_quant", "model_loader_extra_config"),
    "decrypted_config_file",
    *(f"speculative_draft_model_{name}" for name in ("path", "revision", "quantization")),
)
"""Arguments of SGLang's launch that change KV. SGLang does not pass them to a storage backend."""
_CHOSEN_BY = re.compile("SGLANG_.*(KV|DSV4|MAMBA|INDEX)")
"""Names of environment variables by which SGLang chooses the order of a page's bytes, which its pools do not report:
``SGLANG_DSV4_KV_LAYOUT``, ``SGLANG_USE_HND_KVCACHE``, ``SGLANG_AITER_KV_CACHE_LAYOUT`` and others. Some of these names
say nothing of KV: engines that differ in one share nothing, which is safe."""
_DRAFTS = (str(PoolName.DRAFT), str(PoolName.DRAFT_SWA))


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """The storage backend. Its extra configuration has the keys of ``EngineSettings`` and SGLang's own. Thread-safe.

    Engines share pages if their model, weights, SGLang version, parallelism, rank, type and memory layout are equal;
    all tensor-parallel ranks share MLA pages. Raises InvalidRequest for invalid settings, and what ``kvstore.open``
    raises.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        ours = {key: each for key, each in extra.items() if key in EngineSettings.names()}
        settings = EngineSettings.of(ours, "the extra config")
        self._config = storage_config
        self._kv: PagePool | None = None
        self._pools: dict[str, PagePool] = {}
        self._cache: Cache | None = None
        self._trouble = RateLimitedLog(log, "sglang.call_failed")
        self._read, self._written = TransferStats(), TransferStats()
        self._store = LazyStore(settings)

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        in_place = bool((self._config.extra_config or {}).get("interface_v1"))
        self._kv = self._pool(str(PoolName.KV), mem_pool_host, in_place=in_place)
        self._pools.setdefault(self._kv.name, self._kv)
        with suppress(Unavailable):
            self._blocks()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        pool = self._pool(str(host_pool_name), host_pool, in_place=True)
        self._pools[pool.name] = pool

    def _pool(self, name: str, pool: Any, *, in_place: bool) -> PagePool:
        # The first rank stores MLA pages for all ranks. The state of Mamba layers, and a draft's K and V by heads, are
        # each rank's own.
        is_by_heads = name in _DRAFTS and hasattr(pool, "head_num")
        is_replicated = self._config.is_mla_model and name != str(PoolName.MAMBA) and not is_by_heads
        scope = "tp rank=all" if is_replicated else f"tp rank={self._config.tp_rank}"
        return PagePool(name, pool, scope, in_place=in_place)

    # One page

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Reads a page into ``target_location``, or into a new flat tensor if none is given; None is a miss."""
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value if value is not None else target_location])

    # Pages that SGLang copies

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        pool = self._anchor()
        given = list(target_locations) if target_locations is not None else [None] * len(keys)
        pages = [each if each is not None else pool.pool.get_dummy_flat_data_page() for each in given]

        def read() -> list[bool]:
            buffers = [block for page in pages for block in pool.cut(page, copy=False)]
            return pool.whole(self._blocks().blocks.get(pool.names(keys), buffers))

        hits = self._read.timed(sum(pool.sizes), lambda: self._trouble.or_miss(read, [False] * len(keys)))
        return [page if hit else None for page, hit in zip(pages, hits, strict=True)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pool = self._anchor()
        pages = values if values is not None else target_locations
        if pages is None or len(pages) != len(keys) or any(each is None for each in pages):
            return False
        return all(self._put(pool, keys, lambda: [block for page in pages for block in pool.cut(page)]))

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Returns the number of leading pages in the store."""
        pool = self._anchor()
        count = len(pool.sizes)

        def look() -> int:
            if before := _before(extra_info):
                match(self._blocks().blocks, pool.names(before))  # a use of what SGLang has itself, as of the rest
            return match(self._blocks().blocks, pool.names(keys))

        return self._trouble.or_miss(look, 0) // count

    # Pages in place (``interface_v1``)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._get_in_place(self._anchor(), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._set_in_place(self._anchor(), keys, host_indices, extra_info)

    # Pages of several pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Returns the hits of each pool, and the lengths at which all pools could be restored."""
        anchor = self._anchor()
        transfers = [
            each
            for each in pool_transfers or []
            # Never decides over a hit, and a pool that is not reported has no verdict.
            if each.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
        ]
        # Not the pool that is registered under the anchor's name: SGLang may store flat pages, which that one lacks.
        pools = [anchor, *(self._pools[str(each.name)] for each in transfers)]
        names = [pool.names(keys) for pool in pools]
        found = self._trouble.or_miss(
            lambda: present(self._blocks().blocks, [name for each in names for name in each]),
            [False] * sum(map(len, names)),
        )
        whole, start = [], 0
        for pool, each in zip(pools, names, strict=True):
            whole.append(pool.whole(found[start : start + len(each)]))
            start += len(each)
        kv_pages = leading(whole[0])
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer, pages in zip(transfers, whole[1:], strict=True):
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                fits = [*range(1, min(kv_pages, leading(pages)) + 1)]
            else:
                tail = max(1, len(transfer.keys or ()))
                fits = [end for end in range(1, kv_pages + 1) if all(pages[max(0, end - tail) : end])]
            if fits:
                hits[transfer.name] = max(fits)
            restorable = [length for length in restorable if length in fits]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            each.name: self._get_in_place(self._pools[str(each.name)], each.keys or [], each.host_indices)
            for each in transfers
        }

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            each.name: self._set_in_place(self._pools[str(each.name)], each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    # Figures

    def get_stats(self) -> Any:
        """Returns SGLang's ``StorageMetrics``: pages and GiB/s of each call since it last asked."""
        # Not at the top: SGLang has imported it when it asks, and it needs the engine's other packages.
        from sglang.srt.observability.metrics_collector import StorageMetrics

        (read, read_rates), (written, write_rates) = self._read.take(), self._written.take()
        return StorageMetrics(
            prefetch_pgs=read, backup_pgs=written, prefetch_bandwidth=read_rates, backup_bandwidth=write_rates
        )

    # Closing

    def clear(self) -> bool:
        """Deletes the pages of this model and rank."""
        try:
            self._blocks().clear()
        except KVStoreError as error:
            log.warning("sglang.clear_failed why=%s", error)
            return False
        return True

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        self._store.close()

    def _get_in_place(self, pool: PagePool, keys: Sequence[str], indices: Any) -> list[bool]:
        miss = [False] * len(keys)
        if not pool.fits(len(keys), indices):
            log.error("sglang.indices_mismatch pool=%s pages=%d", pool.name, len(keys))
            return miss

        def read() -> list[bool]:
            buffers = pool.to_read(indices)
            hits = pool.whole(self._blocks().blocks.get(pool.names(keys), buffers))
            pool.filled(indices, buffers, hits)
            return hits

        return self._read.timed(sum(pool.sizes), lambda: self._trouble.or_miss(read, miss))

    def _set_in_place(self, pool: PagePool, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        if not pool.fits(len(keys), indices):
            log.error("sglang.indices_mismatch pool=%s pages=%d", pool.name, len(keys))
            return [False] * len(keys)
        return self._put(pool, keys, lambda: pool.to_write(indices), len(_before(extra_info)))

    def _put(
        self, pool: PagePool, keys: Sequence[str], buffers: Callable[[], list[memoryview]], pages_before: int = 0
    ) -> list[bool]:
        def write() -> list[bool]:
            first = pages_before * len(pool.sizes)
            return pool.whole(self._blocks().blocks.put(pool.names(keys), buffers(), first=first))

        return self._written.timed(sum(pool.sizes), lambda: self._trouble.or_miss(write, [False] * len(keys)))

    def _anchor(self) -> PagePool:
        if self._kv is None:
            raise InvalidRequest("no host pool is registered: SGLang calls register_mem_pool_host first")
        return self._kv

    def _blocks(self) -> Cache:
        """Returns the cache of this model and rank, opened when it is first needed and the store answers."""
        if self._cache is None:
            self._cache = self._namespace()
        return self._cache

    def _namespace(self) -> Cache:
        config, pool = self._config, self._anchor().pool
        ranks = {"tp": (config.tp_rank, config.tp_size), "pp": (config.pp_rank, config.pp_size)}
        ranks |= {"cp": (config.attn_cp_rank, config.attn_cp_size), "dcp": (config.dcp_rank, config.dcp_size)}
        if config.is_mla_model:
            ranks["tp"] = (0, 1 if config.dcp_size == 1 else config.tp_size)  # every rank holds the same
        attributes = {
            "engine": f"sglang {sglang.__version__}",
            "layout": str(getattr(pool, "layout", "")),
            "dtype": str(getattr(pool, "dtype", "")),
            "page tokens": str(self._anchor().page_size),
            **{axis: f"{rank} of {size}" for axis, (rank, size) in ranks.items()},
        }
        launched = _launched_with()
        chosen = {name: value for name, value in os.environ.items() if _CHOSEN_BY.match(name)}
        settings = text(repr(sorted((launched | chosen).items())))
        attributes["launched with"] = blake2b(settings, digest_size=16).hexdigest()
        # SGLang adds the pool's own page format to the model's name.
        tag, model = getattr(pool, "storage_format_tag", None), config.model_name or ""
        path = launched.get("model_path") or (model.removesuffix(f"-{tag}") if tag else model)
        return self._store.model("sglang", model, attributes, path)


def _launched_with() -> dict[str, str]:
    """Returns the launch arguments of this SGLang process; empty if there are none, as in tests of storage."""
    try:
        given = runtime_context.get_server_args()
    except (ValueError, AttributeError):
        return {}
    scales = getattr(given, "quantization_param_path", None)
    content = {"scales": weights_fingerprint(scales)} if scales else {}
    return {name: str(getattr(given, name, None)) for name in LAUNCHED_WITH} | content | _adapters()


def _adapters() -> dict[str, str]:
    """Returns the content of the adapters given at launch: page keys contain only their names and paths.

    Raises InvalidRequest for one that is neither a folder nor in the Hugging Face cache.
    """
    try:
        adapters = [each.lora_path for each in runtime_context.get_lora().lora_paths or ()]
    except (ValueError, AttributeError):
        return {}
    return (
        {"lora_paths": repr([(path, model_fingerprint(local_folder(path))) for path in adapters])} if adapters else {}
    )


def _before(extra_info: Any) -> list[str]:
    """Returns the prompt's pages before those of a call, if SGLang is configured to pass them."""
    return getattr(extra_info, "prefix_keys", None) or []
