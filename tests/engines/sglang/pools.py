"""Small host pools with the memory of each of SGLang's layouts, and its own factory for our backend.

Real pools and controllers are in ``rank.py``. These have the same shapes, page order and addresses, and some are odder
than any of SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, PAGES, LAYERS, HEADS, DIM = 8, 24, 6, 2, 16
SIZE = PAGE * PAGES


class HostPool:
    """Pages of ``PAGE`` tokens; ``kv_buffer`` begins with K and V."""

    storage_format_tag: str | None = None
    dcp_size, dcp_rank = 1, 0

    def __init__(self, layout: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout, self.dtype = layout, dtype
        self.page_size, self.page_num, self.size, self.layer_num = PAGE, PAGES, SIZE, LAYERS
        self.head_num, self.head_dim = HEADS, DIM
        dims: dict[str, tuple[int, ...]] = {
            "layer_first": (LAYERS, SIZE, HEADS, DIM),
            "page_first": (SIZE, LAYERS, HEADS, DIM),
            "page_first_direct": (PAGES, LAYERS, PAGE, HEADS, DIM),
            "page_head": (PAGES, HEADS, PAGE, LAYERS, DIM),
        }
        self.kv_buffer = torch.zeros((2, *dims[layout]), dtype=dtype)
        self.size_per_token = self.kv_buffer.nbytes // SIZE

    def page(self, index: int) -> torch.Tensor:
        """The page that begins with token ``index``, as a view."""
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + PAGE]
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + PAGE]
        return self.kv_buffer[:, index // PAGE : index // PAGE + 1]

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        return self.page(int(index)).flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.page(0)).flatten()

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        page = self.page(int(index))
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % PAGE == 0
        addresses: list[int] = []
        planes = [self.kv_buffer[0], self.kv_buffer[1]]
        size = 0
        for index in indices[::PAGE].tolist():
            if self.layout == "layer_first":
                runs = [plane[layer, index : index + PAGE] for layer in range(self.layer_num) for plane in planes]
            elif self.layout == "page_first":
                runs = [plane[index : index + PAGE] for plane in planes]
            else:
                runs = [plane[index // PAGE] for plane in planes]
            assert all(run.is_contiguous() for run in runs)
            addresses += [run.data_ptr() for run in runs]
            size = runs[0].nbytes
        return addresses, [size] * len(addresses)


class OddPool(HostPool):
    """A pool of a layout nobody knows, whose flat pages have V before K."""

    def __init__(self) -> None:
        super().__init__("page_first")
        self.layout = "odd"

    def page(self, index: int) -> torch.Tensor:
        return self.kv_buffer[:, index : index + PAGE].flip(0)

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        at = int(index)
        self.kv_buffer[:, at : at + PAGE] = data_page.reshape(self.page(at).shape).flip(0)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        runs = [self.kv_buffer[part, at : at + PAGE] for at in indices[::PAGE].tolist() for part in range(2)]
        return [run.data_ptr() for run in runs], [run.nbytes for run in runs]


def indices(pages: list[int]) -> torch.Tensor:
    """The host indices of the tokens of these pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def fill(pool: Any, page: int, seed: int) -> None:
    """Writes values by ``seed`` into a page, through its memory as the pool tells it."""
    generator = torch.Generator().manual_seed(seed)
    view = pool.page(page * PAGE)
    view.copy_(torch.randn(view.shape, generator=generator).to(pool.dtype))


def same(left: Any, left_page: int, right: Any, right_page: int) -> bool:
    """True if two pages are equal bit for bit."""
    a, b = left.page(left_page * PAGE), right.page(right_page * PAGE)
    return bool(torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)))


def config(extra: dict[str, Any] | None = None, **told: Any) -> HiCacheStorageConfig:
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "org/model",
    }
    names = {
        "backend_name": "kvstore",
        "module_path": "kvstore.connectors.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
    }
    return HiCacheStorageConfig(**{**fields, **told}, extra_config={**names, **(extra or {})})


@contextmanager
def backend(pool: Any, extra: dict[str, Any], **told: Any) -> Iterator[Any]:
    """Our backend, made by SGLang's factory and registered as its controller does; closed at the end."""
    made = StorageBackendFactory.create_backend("dynamic", config(extra, **told), pool)
    try:
        made.register_mem_pool_host(pool)
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()
