"""SGLang's hierarchical cache: the store as its storage, by its ``dynamic`` backend.

SGLang calls from its own threads, so calls wait for the store, each at most for its timeout. Every failure is a miss,
or a page that was not stored.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar

import sglang
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
from kvstore.connectors.settings import LateStore, StoreSettings, text
from kvstore.connectors.sglang_moves import Moves
from kvstore.connectors.sglang_pages import PagePool
from kvstore.connectors.trouble import Trouble
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")


LAUNCHED_WITH = (
    *("model_path", "revision", "dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "load_format"),
    *("model_impl", "json_model_override_args", "dsv4_attn_backend"),
    *(f"speculative_draft_model_{name}" for name in ("path", "revision", "quantization")),
)
"""Arguments of SGLang's launch that change KV. SGLang does not pass them to a storage backend."""
_CHOSEN_BY = re.compile("SGLANG_.*(KV|DSV4|MAMBA|INDEX)")
"""Names of environment variables by which SGLang chooses the order of a page's bytes, which its pools do not tell:
``SGLANG_DSV4_KV_LAYOUT``, ``SGLANG_USE_HND_KVCACHE``, ``SGLANG_AITER_KV_CACHE_LAYOUT`` and others. Some of these names
say nothing of KV: engines that differ in one share nothing, which is safe."""
_DRAFTS = (str(PoolName.DRAFT), str(PoolName.DRAFT_SWA))


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """The storage backend. ``StoreSettings`` lists our keys, which stand beside SGLang's own. Thread-safe.

    Engines share pages if their model, weights, SGLang version, parallelism, rank, type and memory layout are equal;
    all tensor-parallel ranks share MLA pages. Raises InvalidRequest for settings that make no sense, and what
    ``kvstore.open`` raises.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        ours = {key: each for key, each in extra.items() if key in StoreSettings.names()}
        settings = StoreSettings.of(ours, "the extra config")
        self._config = storage_config
        self._kv: PagePool | None = None
        self._pools: dict[str, PagePool] = {}
        self._cache: Cache | None = None
        self._trouble = Trouble(log, "sglang.call_failed")
        self._read, self._written = Moves(), Moves()
        self._store = LateStore(settings)

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
        told = "tp rank=all" if is_replicated else f"tp rank={self._config.tp_rank}"
        size = _parts_in_all(self._config, pool)
        if not size or is_replicated:
            return PagePool(name, pool, told, in_place=in_place)
        if name != str(PoolName.KV):
            return PagePool(name, pool, f"{told} of {self._config.tp_size}", in_place=in_place)
        mine = size // self._config.tp_size
        first = self._config.tp_rank * mine
        return PagePool(name, pool, f"tp parts={size}", in_place=in_place, parts=range(first, first + mine))

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

        hits = self._read.timed(sum(pool.sizes), lambda: self._or_miss(read, [False] * len(keys)))
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
                self._blocks().blocks.match(pool.names(before))  # a use of what SGLang has itself, as of the rest
            return self._blocks().blocks.match(pool.names(keys))

        return self._or_miss(look, 0) // count

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
        pools = [anchor, *(self._pools[str(each.name)] for each in transfers)]
        names = [pool.names(keys) for pool in pools]
        found = self._or_miss(
            lambda: self._blocks().blocks.present([name for each in names for name in each]),
            [False] * sum(map(len, names)),
        )
        present, start = [], 0
        for pool, each in zip(pools, names, strict=True):
            present.append(pool.whole(found[start : start + len(each)]))
            start += len(each)
        kv_pages = _leading(present[0])
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer, pages in zip(transfers, present[1:], strict=True):
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                fits = [*range(1, min(kv_pages, _leading(pages)) + 1)]
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
            prefetch_pgs=read,
            backup_pgs=written,
            prefetch_bandwidth=read_rates,
            backup_bandwidth=write_rates,
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

        return self._read.timed(sum(pool.sizes), lambda: self._or_miss(read, miss))

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

        return self._written.timed(sum(pool.sizes), lambda: self._or_miss(write, [False] * len(keys)))

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
        if parts := _parts_in_all(self._config, pool):
            attributes["tp"] = f"parts of {parts}"
        launched = _launched_with()
        chosen = {name: value for name, value in os.environ.items() if _CHOSEN_BY.match(name)}
        told = text(repr(sorted((launched | chosen).items())))
        attributes["launched with"] = blake2b(told, digest_size=16).hexdigest()
        # SGLang adds the pool's own page format to the model's name.
        tag, model = getattr(pool, "storage_format_tag", None), config.model_name or ""
        path = launched.get("model_path") or (model.removesuffix(f"-{tag}") if tag else model)
        return self._store.model("sglang", model, attributes, path)

    def _or_miss(self, call: Callable[[], T], miss: T) -> T:
        """Returns the call's result, or ``miss`` if the store could not answer."""
        try:
            result = call()
        except KVStoreError as error:
            self._trouble.failed(error)
            return miss
        self._trouble.went_well()
        return result


def _parts_in_all(config: HiCacheStorageConfig, pool: Any) -> int:
    """Returns SGLang's ``tp_lcm_size``, the parts in which all ranks store the model's heads; 0 if there are none."""
    is_split = config.tp_lcm_size and getattr(pool, "layout", "") == "page_head"
    return int(config.tp_lcm_size) if is_split and not config.is_mla_model else 0


def _launched_with() -> dict[str, str]:
    """Returns the launch arguments of this SGLang process; empty if there are none, as in tests of storage."""
    try:
        given = runtime_context.get_server_args()
    except (ValueError, AttributeError):
        return {}
    return {name: str(getattr(given, name, None)) for name in LAUNCHED_WITH}


def _leading(pages: Sequence[bool]) -> int:
    return next((at for at, present in enumerate(pages) if not present), len(pages))


def _before(extra_info: Any) -> list[str]:
    """The pages of the prompt before those of a call, if SGLang was told to say them."""
    return getattr(extra_info, "prefix_keys", None) or []
