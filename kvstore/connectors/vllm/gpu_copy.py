"""Copies between KV pages of a GPU and the memory of the host."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from kvstore.connectors.vllm.page_kernel import PageKernel


# The bus of a GPU: blocks cross it while the engine computes, by way of device memory in which pages lie together.
#
# One large copy takes a fraction of the time of many small ones. Those to and from pinned memory have streams of
# their own, so that the engine's stream waits for none of them: it only gathers the pages that leave.


PART_BYTES = 64 << 20
"""Size of one copy over the bus, and of one put: large enough for the speed of the bus."""
OUTWARD_PARTS = 8
"""Parts on their way to the host: behind so many the engine's stream waits for the bus."""
INWARD_PARTS = 3
FULL_S = 10.0
"""Pause after the device had no memory for a part."""


class CopyBuffer:
    """Device memory for one copy, and the event after which it may be used again."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.free = _event()

    def rows(self, like: Any) -> Any:
        """Returns its start as bytes of the shape of ``like``."""
        return self._memory[: like.numel()].view(like.shape)


class Parts:
    """Parts that are used in turn. They are allocated when they are first needed, and kept."""

    def __init__(self, device: Any, size_bytes: int, count_max: int) -> None:
        self._device = device
        self._size_bytes = size_bytes
        self._count_max = count_max
        self._parts: deque[CopyBuffer] = deque()
        self._full_until_s = 0.0

    def take(self) -> CopyBuffer:
        """Returns the next part, for which the current stream waits. Raises Overloaded if there is none at all."""
        if not self._parts or (len(self._parts) < self._count_max and not self._parts[0].free.query()):
            self._grow()
        if not self._parts:
            raise Overloaded(
                f"the GPU has no {self._size_bytes >> 20} MiB to spare for KV on its way: leave the engine less"
            )
        part = self._parts.popleft()
        self._parts.append(part)
        torch.cuda.current_stream(self._device).wait_event(part.free)
        return part

    def _grow(self) -> None:
        """Adds a part, unless the device had no memory for one just now: each try empties torch's own cache."""
        if time.monotonic() < self._full_until_s:
            return
        try:
            self._parts.appendleft(CopyBuffer(torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device)))
        except torch.OutOfMemoryError:
            self._full_until_s = time.monotonic() + FULL_S


class Bus:
    """Both directions. Blocks go out on the engine's thread, and come in on any thread."""

    def __init__(self, device: Any, part_bytes: int) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        # With priority: the engine's kernels fill the device, and a scatter behind all of them would hold up the bus.
        self._scatters = torch.cuda.Stream(device, priority=-1)
        self.outward = Parts(device, part_bytes, OUTWARD_PARTS)
        """Parts to gather in, on the current stream."""
        self._inward = Parts(device, part_bytes, INWARD_PARTS)
        self._lock = threading.Lock()

    def now(self) -> Any:
        """Marks a moment in the work of the current stream."""
        moment = _event()
        moment.record(torch.cuda.current_stream(self._device))
        return moment

    def send(self, part: CopyBuffer, host: Any) -> Any:
        """Begins to copy what the current stream gathers in ``part`` to pinned memory; returns the event of its end."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(part.rows(host), non_blocking=True)
            part.free = _event()
            part.free.record()
        return part.free

    @contextmanager
    def inward(self, source: Any, after: Any) -> Iterator[Any]:
        """Copies pinned memory to the device, and gives it to scatter from, behind the moment ``after``.

        Raises Overloaded if there is no memory for it.
        """
        with self._lock:
            with torch.cuda.stream(self._in):
                part = self._inward.take()
                part.rows(source).copy_(source, non_blocking=True)
            self._scatters.wait_stream(self._in)
            with torch.cuda.stream(self._scatters):
                self._scatters.wait_event(after)
                yield part.rows(source)
                part.free.record()

    def wait(self) -> None:
        """Waits until all that came in is where it belongs."""
        self._scatters.record_event(_event()).synchronize()


def _event() -> Any:
    """Returns an event that a thread waits for without keeping a core busy."""
    return torch.cuda.Event(blocking=True)


# Blocks in the engine's KV tensors: copied out to host memory and back, on a CPU or a GPU.
#
# A block in the store is the pages of all layers of its groups, one after the other, each in its order in memory; the
# namespace says which order that is.


log = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint8]
"""Host memory of shape ``(blocks, block_bytes)``."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""The types in which pages are moved, the widest first: torch copies rows item by item."""


class Copy:
    """Blocks being copied from the device to the host; ``rows`` waits until they are there."""

    def __init__(self, host: Any, arrived: Any = None) -> None:
        self.host = host
        self._arrived = arrived

    def rows(self) -> Rows:
        """Waits; returns the complete blocks."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: Rows = self.host.numpy()
        return rows


class Pages:
    """The pages of one cluster: for each of its groups the memory of its layers by name, blocks first.

    A layer has one tensor, or several, as recurrent ones do. A block has one number in each group. Each of the
    ``parts`` of a block, in its order, has some of the heads of all layers.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], block_count: int, parts: int = 1) -> None:
        self._groups: list[int] = []
        """The group of each view."""
        views: list[Any] = []
        for part in range(parts):
            for group, layers in enumerate(groups):
                for name, memory in layers.items():
                    tensors = memory if isinstance(memory, list | tuple) else [memory]
                    if parts > 1:  # vLLM keeps the heads of a layer in the second dimension
                        tensors = [tensor.chunk(parts, 1)[part] for tensor in tensors]
                    views += [_page_view(name, tensor, block_count) for tensor in tensors]
                    self._groups += [group] * len(tensors)
        if not views:
            raise InvalidRequest(
                "a pipeline stage has no layer of one kind of KV: give each stage layers of every kind, with "
                "VLLM_PP_LAYER_PARTITION, or start without this connector"
            )
        self._parts = parts
        self._word = next(word for word in WORDS if all(_is_made_of(word, view) for view in views))
        self._views = [view.view(self._word) for view in views]
        ends = np.cumsum([view.shape[1] for view in self._views]).tolist()
        self._spans = [slice(end - view.shape[1], end) for view, end in zip(self._views, ends, strict=True)]
        self.block_bytes: int = ends[-1] * self._word.itemsize
        self._device = self._views[0].device
        self._bus: Bus | None = None
        self._kernel: PageKernel | None = None
        if self._device.type == "cuda":
            self._bus = Bus(self._device, max(PART_BYTES, self.block_bytes))
            self._warm_up()

    def host(self, count: int) -> Any:
        """Allocates host memory for ``count`` blocks; its ``.numpy()`` is ``Rows``."""
        return self.rows_of(self.memory(count * self.block_bytes), count)

    def parts(self, rows: Rows) -> list[list[Rows]]:
        """Returns the bytes of each part of these blocks, one array a block."""
        return [list(part) for part in np.split(rows, self._parts, axis=1)]

    def memory(self, size_bytes: int) -> Any:
        """Allocates host memory that any group may use again and again."""
        # The device is said: an engine may have made another one the default.
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._bus is not None)

    def rows_of(self, memory: Any, count: int) -> Any:
        """Returns the start of such memory as ``count`` blocks of this group."""
        return memory[: count * self.block_bytes].view(count, self.block_bytes)

    def copy_out(self, blocks: Sequence[Sequence[int]]) -> Copy:
        """Begins to copy blocks to the host, in order with the engine's work: its next step may change them.

        Raises Overloaded if the device has no memory to spare.
        """
        numbers = self._numbers(blocks)
        if self._bus is None:
            rows = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=self._device)
            self._gather(numbers, rows)
            return Copy(rows.cpu())
        host, arrived = self.host(len(blocks)), None
        for part in self._at_once(len(blocks)):
            staged = self._bus.outward.take()
            self._gather(numbers[:, part], staged.rows(host[part]))
            arrived = self._bus.send(staged, host[part])
        return Copy(host, arrived)

    def now(self) -> Any:
        """Marks a moment in the engine's work that a later ``write`` must follow; call it on the engine's thread."""
        return None if self._bus is None else self._bus.now()

    def write(self, source: Any, blocks: Sequence[Sequence[int]], after: Any) -> None:
        """Copies whole blocks from host memory to where the engine reads them; returns when they are there.

        Raises Overloaded if the device has no memory to spare.
        """
        if self._bus is None:
            self._scatter(self._numbers(blocks), source.to(self._device))
            return
        try:
            for part in self._at_once(len(blocks)):
                with self._bus.inward(source[part], after) as staged:
                    self._scatter(self._numbers(blocks[part]), staged)
        finally:
            self._bus.wait()

    def _at_once(self, count: int) -> Iterator[slice]:
        """Yields the blocks of each copy over the bus."""
        size = max(1, PART_BYTES // self.block_bytes)
        yield from (slice(start, min(start + size, count)) for start in range(0, count, size))

    def _gather(self, numbers: Any, rows: Any) -> None:
        words = rows.view(self._word)
        if self._kernel is not None:
            self._kernel.gather(numbers, words)
            return
        for view, span, group in zip(self._views, self._spans, self._groups, strict=True):
            torch.index_select(view, 0, numbers[group], out=words[:, span])

    def _scatter(self, numbers: Any, rows: Any) -> None:
        words = rows.view(self._word)
        if self._kernel is not None:
            self._kernel.scatter(numbers, words)
            return
        for view, span, group in zip(self._views, self._spans, self._groups, strict=True):
            view.index_copy_(0, numbers[group], words[:, span])

    def _warm_up(self) -> None:
        """Compiles the kernel, and takes device memory, before the engine's first step: a block there and back."""
        with suppress(ImportError):
            from kvstore.connectors.vllm.page_kernel import PageKernel

            self._kernel = PageKernel(self._views, self._spans, self._groups)
        block = [(0,) * (1 + max(self._groups))]
        try:
            copy = self.copy_out(block)
            copy.rows()
            self.write(copy.host, block, self.now())
        except Overloaded as error:
            log.warning("kvstore: nothing is stored or loaded until there is memory: %s", error)
        except Exception as error:
            if self._kernel is None:
                raise
            # Triton compiles with the host's C compiler, which may be missing: torch moves the pages as well.
            log.warning("kvstore: pages are moved layer by layer, as the kernel does not run here: %s", error)
            self._kernel = None

    def _numbers(self, blocks: Sequence[Sequence[int]]) -> Any:
        """Returns the numbers of the blocks on the device, one row per group."""
        # Pinned: a copy of pageable memory would wait for all work of the engine in progress.
        each, is_pinned = list(zip(*blocks, strict=True)), self._bus is not None
        numbers = torch.tensor(each, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        return numbers.to(self._device, non_blocking=True)


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
