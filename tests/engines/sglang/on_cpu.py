"""SGLang's own cache controllers, host pools and metrics, imported on a machine without a GPU.

They are the code of the installed package. It cannot run whole here: packages that it pins are CUDA builds, and the
configurations of its models need some of these (torchvision). So before anything is imported:

- ``sglang.srt.configs`` and ``sglang.srt.layers.quantization``: without their ``__init__``, which imports every model's
  configuration and every kernel. Their modules are the real ones.
- ``configs.model_config`` and ``configs.hybrid_arch``: empty. The modules here import three functions of a model's
  configuration from them, which they call only when there is a model.

Copies between host and device are kernels, so the device pools here are memory that nothing reads.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

MODELS = {
    "sglang.srt.configs.model_config": ("get_dsa_mtp_topk_width", "is_deepseek_dsa"),
    "sglang.srt.configs.hybrid_arch": ("mambaish_config",),
}
"""Modules about models, with the functions that are imported from them."""


def _without_init(name: str) -> None:
    """Makes a package whose modules can be imported, without running its ``__init__``."""
    above, _, last = name.rpartition(".")
    package = ModuleType(name)
    package.__path__ = [f"{path}/{last}" for path in importlib.import_module(above).__path__]
    sys.modules[name] = package


def _nothing(*_: object) -> None:
    raise AssertionError("there is no model")


_without_init("sglang.srt.configs")
for _name, _functions in MODELS.items():
    _module = ModuleType(_name)
    for _function in _functions:
        setattr(_module, _function, _nothing)
    sys.modules[_name] = _module
_without_init("sglang.srt.layers.quantization")

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.observability.metrics_collector import StorageMetricsCollector  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

__all__ = [
    "CacheRequestHandle",
    "DSAIndexerPoolHost",
    "DSATokenToKVPool",
    "DeepSeekV4PagedHostPool",
    "HiCacheController",
    "HostPoolGroup",
    "HybridCacheController",
    "LogicalHostPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "MLATokenToKVPoolHost",
    "MambaPoolHost",
    "MambaStateBufferInfo",
    "PagedTokenToKVPoolAllocator",
    "PoolEntry",
    "StorageMetricsCollector",
    "cache_controller",
    "get_mha_host_pool_cls",
    "get_parallel",
    "get_storage_hash_str",
    "host_memory_budget_scope",
]
