"""Pages of SGLang's host pools as blocks: the memory and the key of each block.

A page that lies in a few runs of memory (K and V in the page-first layouts) is one block per run, read and written in
place. In ``layer_first`` it is one block that is copied together, in the order of SGLang's flat page. So SGLang's
generic calls and its zero-copy calls find each other's pages if both are known to mean the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvstore.connectors.settings import block_key, text
from kvstore.errors import InvalidRequest

RUNS_MAX = 4
"""Runs of memory in a page that are separate blocks: K, V, and what some layouts add."""

_K_THEN_V = ("page_first", "page_first_direct", "page_head")

_FACTS = (
    *("layout", "dtype", "store_dtype", "page_size", "logical_page_size", "layer_num", "target_layer_num"),
    *("start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "size_per_token", "storage_format_tag", "dcp_size", "dcp_rank"),
)


_STATE_FACTS = ("temporal_dtype", "temporal_state_shape", "conv_dtype", "conv_state_shapes")
"""Facts of pools of Mamba states: two types of one size make pages of one size."""

_BY_HEADS = ("head_num", "size_per_token")
"""The facts that count a rank's heads."""


class PagePool:
    """One host pool. ``told`` is what must be equal, beside the pool's own facts, for its pages to be interchangeable.

    ``in_place`` says which calls SGLang makes when it is unknown whether a flat page has the bytes of its runs in
    order. ``parts`` are the numbers of the parts of the model's heads that this pool has, if each is to be stored by
    itself (``tp_lcm_size``). Raises InvalidRequest for a pool whose pages are available neither as memory nor flat, or
    not in such parts.
    """

    def __init__(self, name: str, pool: Any, told: str, *, in_place: bool, parts: Sequence[int] = ()) -> None:
        self.name = name
        self._is_flat = False
        self.pool = pool
        self._parts = len(parts) or 1
        # A group of pools passes on only some of what its first pool knows.
        entry = getattr(pool, "anchor_entry", None)
        facts_of = pool if entry is None else entry.host_pool
        stated = [*_FACTS, *(fact for fact in _STATE_FACTS if hasattr(facts_of, fact))]
        facts = "\n".join(f"{fact}={self._fact(facts_of, fact)}" for fact in stated)
        if beside := getattr(facts_of, "slot_state_device_tensors", ()):
            facts += f"\nbeside={[(str(state.dtype), tuple(state.shape[1:])) for state in beside]}"
        told = f"{name}\n{told}\npool={type(facts_of).__name__}\n{facts}"
        self.page_size = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)
        layout = getattr(facts_of, "layout", "")
        runs = self._runs(torch.arange(self.page_size))
        if self._parts > 1 and (runs is None or not in_place):
            raise InvalidRequest(f"tp_lcm_size: pool {name} is not divided by heads in place; set interface_v1 to 1")
        self._is_alike = runs is None or _is_alike(layout, runs[1], getattr(facts_of, "layer_num", 0))
        if not self._is_alike and not in_place:
            self._is_flat, runs = True, None
        sizes = runs[1] if runs is not None else [_size_of_flat(pool, name)]
        self._has_bytes = any(sizes)
        if not self._has_bytes:
            sizes = [1]  # DeepSeek-V4's anchor has page numbers alone: a byte says that the page is stored
        self._is_gathered = len(sizes) > RUNS_MAX * self._parts or (layout == "layer_first" and len(sizes) > 1)
        self.sizes = (sum(sizes),) if self._is_gathered else tuple(sizes)
        """Sizes of the blocks of one page."""
        self._order = [*range(len(sizes))]
        if self._is_gathered and self._is_alike and len(sizes) == 2 * getattr(facts_of, "layer_num", 0):
            # SGLang lists K0 V0 K1 V1, and flattens to K0 K1 .. V0 V1.
            self._order = [*range(0, len(sizes), 2), *range(1, len(sizes), 2)]
        told = f"{told}\nflat={self._is_flat}"
        each = len(self.sizes) // self._parts
        self._marks = [
            ((f"{told}\npart={part}" if parts else told).encode(), str(number).encode())
            for part in parts or [0]
            for number in range(each)
        ]
        """The parts of its key that tell each block of a page from the others."""

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the keys of the pages' blocks, page by page."""
        return [block_key(told, text(key), number) for key in keys for told, number in self._marks]

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
        if not self._is_alike and not self._is_flat:
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
            if self._parts > 1:
                found = self.pool.get_split_heads_page_buffer_meta(indices, self._parts)
            else:
                found = self.pool.get_page_buffer_meta(indices)
        except (AttributeError, NotImplementedError, ValueError):
            return None  # this layout has flat pages only
        return found if found is None else (found[0], found[1])

    def _fact(self, pool: Any, fact: str) -> Any:
        """Returns a fact about the pool, or about one part of it."""
        found = getattr(pool, fact, None)
        return found // self._parts if self._parts > 1 and fact in _BY_HEADS and found else found

    def _by_page(self, runs: list[memoryview]) -> list[list[memoryview]]:
        count = len(self._order)
        return [[runs[start + at] for at in self._order] for start in range(0, len(runs), count)]

    def _first(self, indices: torch.Tensor) -> list[int]:
        return [int(each) for each in indices[:: self.page_size].tolist()]


def _is_alike(layout: str, sizes: Sequence[int], layers: int) -> bool:
    """True if a flat page is known to have the bytes of the runs, in their order or by K and V."""
    if layout == "layer_first":
        return len(set(sizes)) == 1 and len(sizes) in (layers, 2 * layers)
    return len(sizes) == 1 or (len(sizes) == 2 and sizes[0] == sizes[1] and layout in _K_THEN_V)


def _size_of_flat(pool: Any, name: str) -> int:
    try:
        page = pool.get_dummy_flat_data_page()
    except (AttributeError, NotImplementedError) as cause:
        raise InvalidRequest(
            f"pages of pool {name} ({type(pool).__name__}) can be read neither in place nor flat: {cause}"
        ) from cause
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
