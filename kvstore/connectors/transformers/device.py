"""KV between the memory of GPUs and the store, layer by layer through pinned memory, beside the work of both.

Pinned memory takes long to get, so a few layers' worth of it is used in turn; torch keeps it for the next prompt.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kvstore.buffers import aligned
from kvstore.client import Hold
from kvstore.connectors.transformers.kept import Kept
from kvstore.errors import HoldBroken
from kvstore.layout import Layout

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 1 << 30
"""The most KV that is pinned at once; a longer prefix goes by layers."""
LAYERS = 4
"""Two are read, or one is computed, while two are on the bus."""


def has_gpu(kept: Kept) -> bool:
    """True if all of the KV is in memory of GPUs."""
    return all(device.type == "cuda" for device in kept.devices)


def arriving(held: Hold, layout: Layout, kept: Kept) -> Iterator[Any]:
    """Yields K and V of each layer, of shape (2, tokens, width), on its device.

    A short prefix is read at once: a layer of its own costs as much as some MiB. Raises HoldBroken.
    """
    shape, heads = (2, held.tokens, kept.row // 2), (layout.kv_heads, layout.head_dim)

    def array_of(memory: Any) -> Any:
        return memory.view(torch.uint8).numpy().view(layout.numpy_dtype).reshape(*memory.shape[:-1], *heads)

    if layout.chunk_bytes * (held.tokens // layout.chunk_tokens) <= AT_ONCE_BYTES:
        whole = _pinned((layout.layers, *shape), kept.dtype)
        count = held.read_into(array_of(whole))
        if count < held.tokens:
            raise HoldBroken(f"a chunk behind {count} tokens was lost", count)
        yield from _moved(enumerate(whole), kept, LAYERS)
        return
    ring = [_pinned(shape, kept.dtype) for _ in range(LAYERS)]
    layers = held.layers([array_of(each) for each in ring])
    # Two layers are read ahead, where those two places back were.
    yield from _moved(((layer, ring[layer % LAYERS]) for layer, _, _ in layers), kept, LAYERS - 2)


def _moved(layers: Iterable[tuple[int, Any]], kept: Kept, at_once: int) -> Iterator[Any]:
    """Moves layers from pinned memory to their devices; asks for more once fewer than ``at_once`` are on the bus."""
    sent = deque[Any]()
    for layer, memory in layers:
        device = kept.devices[layer]
        rows = memory.to(device, non_blocking=True)
        sent.append(_event(torch.cuda.current_stream(device)))
        yield rows
        if len(sent) == at_once:
            sent.popleft().synchronize()
    while sent:
        sent.popleft().synchronize()


class Leaving:
    """KV that a model computes, on its way to host memory.

    That of a GPU goes straight there if it is short enough to be pinned, and else by way of pinned memory, a few layers
    at a time.
    """

    def __init__(self, tokens: int, kept: Kept) -> None:
        shape = (len(kept.devices), 2, tokens, kept.row // 2)
        self.size_bytes = math.prod(shape) * kept.dtype.itemsize
        self._rows = host_memory(shape, kept, AT_ONCE_BYTES)
        self._streams = {each: torch.cuda.Stream(each) for each in set(kept.devices)} if has_gpu(kept) else {}
        is_long = self._streams and self.size_bytes > AT_ONCE_BYTES
        self._ring = [_pinned(shape[1:], kept.dtype) for _ in range(LAYERS)] if is_long else []
        self._on_the_way = deque[tuple[Any, Any, Any]]()
        self._turn = 0

    def add(self, layer: int, place: slice, k: Any, v: Any) -> None:
        """Begins to copy what a layer computed for these tokens, K and V of shape (tokens, width)."""
        into = self._rows[layer, :, place]
        if not self._streams:
            into[0].copy_(k)
            into[1].copy_(v)
            return
        if len(self._on_the_way) == LAYERS:
            self._arrive()
        first = self._ring[self._turn % LAYERS][:, : len(k)] if self._ring else into
        self._turn += 1
        stream = self._streams[k.device]
        stream.wait_stream(torch.cuda.current_stream(k.device))
        with torch.cuda.stream(stream):
            for half, tensor in zip(first, (k, v), strict=True):
                half.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
        self._on_the_way.append((_event(stream), first, into))

    def rows(self) -> Any:
        """Waits until all of it is there; returns it, of shape (layers, 2, tokens, width)."""
        while self._on_the_way:
            self._arrive()
        return self._rows

    def _arrive(self) -> None:
        event, first, into = self._on_the_way.popleft()
        event.synchronize()
        if first is not into:
            into.copy_(first)


def host_memory(shape: Any, kept: Kept, pinned_max: int) -> Any:
    """Returns host memory for KV: pinned if a GPU is to read or write it, and it has at most ``pinned_max`` bytes."""
    if has_gpu(kept) and math.prod(shape) * kept.dtype.itemsize <= pinned_max:
        return _pinned(shape, kept.dtype)
    return _ordinary(shape, kept.dtype)


def _pinned(shape: Any, dtype: Any) -> Any:
    """Returns pinned memory, or ordinary memory if the system has none left to pin: copies then wait, as they must."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.warning("prefill.not_pinned %s", error)
        return _ordinary(shape, dtype)


def _ordinary(shape: Any, dtype: Any) -> Any:
    """Returns memory in huge pages where the kernel has them, as numpy asks for: new small ones take long to touch."""
    return torch.frombuffer(aligned(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def _event(stream: Any) -> Any:
    """Records an event that a thread waits for without keeping a core busy."""
    return stream.record_event(torch.cuda.Event(blocking=True))
