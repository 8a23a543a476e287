"""KV between the memory of GPUs and the store, layer by layer through pinned memory, beside the work of both.

Pinned memory takes long to get, so a few layers' worth of it is used in turn; torch keeps it for the next prompt.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kvstore.client import Hold
from kvstore.connectors.transformers.kept import Kept
from kvstore.errors import HoldBroken
from kvstore.layout import Layout

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 1 << 30
"""The largest prefix that is read at once."""
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

    def array_of(pinned: Any) -> Any:
        return pinned.view(torch.uint8).numpy().view(layout.numpy_dtype).reshape(*pinned.shape[:-1], *heads)

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
    for layer, pinned in layers:
        device = kept.devices[layer]
        rows = pinned.to(device, non_blocking=True)
        sent.append(_event(torch.cuda.current_stream(device)))
        yield rows
        if len(sent) == at_once:
            sent.popleft().synchronize()
    while sent:
        sent.popleft().synchronize()


class Leaving:
    """KV on its way to ``rows`` on the host, of shape (layers, 2, tokens, width), while the model computes."""

    def __init__(self, rows: Any, kept: Kept) -> None:
        self._rows = rows
        self._ring = [_pinned(rows.shape[1:], kept.dtype) for _ in range(LAYERS)]
        self._streams = {device: torch.cuda.Stream(device) for device in set(kept.devices)}
        self._on_the_way = deque[tuple[Any, int, slice, Any]]()
        self._turn = 0

    def add(self, layer: int, place: slice, k: Any, v: Any) -> None:
        """Begins to copy what a layer computed for these tokens, K and V of shape (tokens, width)."""
        if len(self._on_the_way) == LAYERS:
            self._arrive()
        pinned = self._ring[self._turn % LAYERS]
        self._turn += 1
        stream = self._streams[k.device]
        stream.wait_stream(torch.cuda.current_stream(k.device))
        with torch.cuda.stream(stream):
            for half, tensor in zip(pinned, (k, v), strict=True):
                half[: len(tensor)].copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
        self._on_the_way.append((_event(stream), layer, place, pinned))

    def finish(self) -> None:
        """Waits until all of it is in ``rows``."""
        while self._on_the_way:
            self._arrive()

    def _arrive(self) -> None:
        event, layer, place, pinned = self._on_the_way.popleft()
        event.synchronize()
        into = self._rows[layer, :, place]
        into.copy_(pinned[:, : into.shape[1]])


def _pinned(shape: Any, dtype: Any) -> Any:
    """Returns pinned memory, or ordinary memory if the system has none left to pin: copies then wait, as they must."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.warning("prefill.not_pinned %s", error)
        return torch.empty(shape, dtype=dtype, device="cpu")


def _event(stream: Any) -> Any:
    """Records an event that a thread waits for without keeping a core busy."""
    return stream.record_event(torch.cuda.Event(blocking=True))
