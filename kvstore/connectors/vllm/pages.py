"""Blocks in the engine's KV tensors: copied out to host memory and back, on a CPU or a GPU.

A block in the store is the pages of all layers of its groups, one after the other, each in its order in memory; the
namespace says which order that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidRequest

Rows = npt.NDArray[np.uint8]
"""Host memory of shape ``(blocks, block_bytes)``."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""The types in which pages are moved, the widest first: torch copies rows item by item."""


class Copy:
    """Blocks being copied from the device to the host; ``rows`` waits until they are there."""

    def __init__(self, host: Any, arrived: Any = None) -> None:
        self._host = host
        self._arrived = arrived

    def rows(self) -> Rows:
        """Waits; returns the complete blocks."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: Rows = self._host.numpy()
        return rows


class Pages:
    """The pages of one cluster: for each of its groups the memory of its layers by name, blocks first.

    A layer has one tensor, or several, as recurrent ones do. A block has one number in each group. Each of the
    ``parts`` of a block, in its order, has some of the heads of all layers.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], block_count: int, parts: int = 1) -> None:
        self.layers: dict[str, list[int]] = {}
        """The views of each layer, by name."""
        self._groups: list[int] = []
        """The group of each view."""
        views: list[Any] = []
        for part in range(parts):
            for group, layers in enumerate(groups):
                for name, memory in layers.items():
                    tensors = memory if isinstance(memory, list | tuple) else [memory]
                    first = len(views)
                    views += [_page_view(name, _heads(tensor, part, parts), block_count) for tensor in tensors]
                    self.layers.setdefault(name, []).extend(range(first, len(views)))
                    self._groups += [group] * len(tensors)
        self._parts = parts
        self._word = next(word for word in WORDS if all(_is_made_of(word, view) for view in views))
        self._views = [view.view(self._word) for view in views]
        ends = np.cumsum([view.shape[1] for view in self._views]).tolist()
        self._spans = [slice(end - view.shape[1], end) for view, end in zip(self._views, ends, strict=True)]
        self.block_bytes: int = ends[-1] * self._word.itemsize
        self._device = self._views[0].device
        self._is_cuda = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if self._is_cuda else None

    def host(self, count: int) -> Any:
        """Allocates host memory for ``count`` blocks; its ``.numpy()`` is ``Rows``."""
        return self.rows_of(self.memory(count * self.block_bytes), count)

    def parts(self, rows: Rows) -> list[list[Rows]]:
        """Returns the bytes of each part of these blocks, one array a block."""
        return [list(part) for part in np.split(rows, self._parts, axis=1)]

    def memory(self, size_bytes: int) -> Any:
        """Allocates host memory that any group may use again and again."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def rows_of(self, memory: Any, count: int) -> Any:
        """Returns the start of such memory as ``count`` blocks of this group."""
        return memory[: count * self.block_bytes].view(count, self.block_bytes)

    def copy_out(self, blocks: Sequence[Sequence[int]]) -> Copy:
        """Begins to copy blocks to the host, in order with the engine's work: its next step may change them."""
        numbers = self._numbers(blocks)
        gathered = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=self._device)
        words = gathered.view(self._word)
        for view, span, group in zip(self._views, self._spans, self._groups, strict=True):
            torch.index_select(view, 0, numbers[group], out=words[:, span])
        if not self._is_cuda:
            return Copy(gathered.cpu())
        host = self.host(len(blocks))
        host.copy_(gathered, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Copy(host, arrived)

    def scatter_layer(self, layer: str, blocks: Sequence[Sequence[int]], source: Any) -> None:
        """Copies one layer's pages to where the engine reads them, in order with its work."""
        numbers = self._numbers(blocks)
        for index in self.layers[layer]:
            words = source.view(self._word)[:, self._spans[index]]
            self._views[index].index_copy_(0, numbers[self._groups[index]], words.to(self._device))

    def now(self) -> Any:
        """Marks a moment in the engine's work that a later ``write`` must follow; call it on the engine's thread."""
        if not self._is_cuda:
            return None
        moment = torch.cuda.Event()
        moment.record(torch.cuda.current_stream(self._device))
        return moment

    def write(self, source: Any, blocks: Sequence[Sequence[int]], after: Any) -> None:
        """Copies whole blocks from host memory to where the engine reads them; returns when they are there."""
        if self._side is None:
            self._write(source, blocks)
            return
        with torch.cuda.stream(self._side):
            self._side.wait_event(after)
            self._write(source, blocks)
            self._side.synchronize()

    def _write(self, source: Any, blocks: Sequence[Sequence[int]]) -> None:
        on_device = source.to(self._device)
        for layer in self.layers:
            self.scatter_layer(layer, blocks, on_device)

    def _numbers(self, blocks: Sequence[Sequence[int]]) -> Any:
        """Returns the numbers of the blocks on the device, one row per group."""
        # Pinned: a copy of pageable memory would wait for all work of the engine in progress.
        numbers = torch.tensor(list(zip(*blocks, strict=True)), dtype=torch.int64, pin_memory=self._is_cuda)
        return numbers.to(self._device, non_blocking=True)


def _heads(tensor: Any, part: int, parts: int) -> Any:
    """Returns a part of a layer's heads, which vLLM keeps in the second dimension."""
    return tensor if parts == 1 else tensor.chunk(parts, 1)[part]


def _page_view(name: str, tensor: Any, block_count: int) -> Any:
    """Views the tensor's memory as ``(block_count, page_bytes)``, without a copy."""
    if tensor.dim() < 2 or tensor.shape[0] % block_count:
        raise InvalidRequest(
            f"KV of {name} has the shape {tuple(tensor.shape)}: expected {block_count} blocks, or a multiple, first; "
            "kvstore supports vLLM 0.32 and newer"
        )
    per_block = tensor.shape[0] // block_count  # an attention kernel may use smaller blocks than the cache
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True), reverse=True)
    if per_block > 1:
        inner.insert(0, (tensor.stride(0), per_block))
    expected = 1
    for stride, size in reversed(inner):
        if size > 1 and stride != expected:
            raise InvalidRequest(
                f"KV of {name} has the strides {tensor.stride()} for the shape {tuple(tensor.shape)}: the pages of one "
                "block do not lie together in memory; start vLLM with another KV cache layout"
            )
        expected *= size
    item = tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return raw.as_strided(
        (block_count, expected * item), (tensor.stride(0) * per_block * item, 1), tensor.storage_offset() * item
    )


def _is_made_of(word: torch.dtype, view: Any) -> bool:
    """True if a page view of bytes can be one of these words."""
    starts = (view.data_ptr(), view.storage_offset(), view.stride(0))
    return view.shape[1] % word.itemsize == 0 and all(start % word.itemsize == 0 for start in starts)
