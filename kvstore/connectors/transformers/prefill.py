"""Prefill of one prompt: stored chunks are loaded, the others computed and stored."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.client import Cache, Hold, Store
from kvstore.connectors.transformers.cache_spec import (
    CHUNK_TOKENS,
    TokenShape,
    check_cache,
    check_prompt,
    checked,
    model_cache,
    not_a_store,
    run,
)
from kvstore.core.buffers import aligned
from kvstore.core.layout import Layout
from kvstore.errors import HoldBroken, Overloaded, PermissionDenied, RootMismatch, SessionLost, Unavailable

# KV moves between GPU memory and the store layer by layer, through pinned memory, while both keep working.
#
# Pinned memory takes long to get, so a few layers' worth of it is used in turn; torch keeps it for the next prompt.


log = logging.getLogger(__name__)

AT_ONCE_BYTES = 1 << 30
"""The most KV that is pinned at a time; a longer prefix is moved layer by layer."""
LAYERS = 4
"""Two are read, or one is computed, while two are on the bus."""


def has_gpu(kept: TokenShape) -> bool:
    """True if all of the KV is in memory of GPUs."""
    return all(device.type == "cuda" for device in kept.devices)


def arriving(held: Hold, layout: Layout, kept: TokenShape) -> Iterator[Any]:
    """Yields K and V of each layer, of shape (2, tokens, width), on its device.

    A short prefix is read in one call, because a separate read of a layer costs as much as some MiB. Raises HoldBroken.
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


def _moved(layers: Iterable[tuple[int, Any]], kept: TokenShape, at_once: int) -> Iterator[Any]:
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


class OffloadStream:
    """KV that a model computes, on its way to host memory.

    That of a GPU goes straight there if it is short enough to be pinned, and else by way of pinned memory, a few layers
    at a time.
    """

    def __init__(self, tokens: int, kept: TokenShape) -> None:
        shape = (len(kept.devices), 2, tokens, kept.row // 2)
        self._rows = host_memory(shape, kept, AT_ONCE_BYTES)
        self._streams = {each: torch.cuda.Stream(each) for each in set(kept.devices)} if has_gpu(kept) else {}
        is_long = self._streams and math.prod(shape) * kept.dtype.itemsize > AT_ONCE_BYTES
        self._ring = [_pinned(shape[1:], kept.dtype) for _ in range(LAYERS)] if is_long else []
        self._on_the_way = deque[tuple[Any, Any, Any]]()
        self._turn = 0

    def add(self, layer: int, k: Any, v: Any) -> None:
        """Begins to copy what a layer computed, K and V of shape (tokens, width)."""
        into = self._rows[layer]
        if not self._streams:
            into[0].copy_(k)
            into[1].copy_(v)
            return
        if len(self._on_the_way) == LAYERS:
            self._arrive()
        first = self._ring[self._turn % LAYERS] if self._ring else into
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


def host_memory(shape: Any, kept: TokenShape, pinned_max: int) -> Any:
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


GO_ON = (Unavailable, Overloaded, SessionLost, PermissionDenied, RootMismatch)
"""Errors of the store after which the prompt is computed as if there were no store."""


def prefill_with_store(
    model: Any,
    input_ids: Any,
    store: Store | Cache,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    fingerprint: str = "",
    tenant: str = "",
    attributes: Mapping[str, str] | None = None,
) -> DynamicCache:
    """Returns the KV of a prompt's full chunks, for ``model.generate(input_ids, past_key_values=...)`` to continue.

    ``input_ids`` is an integer tensor of shape (1, tokens). Stored chunks are loaded; the chunks behind them are
    computed and stored. At least one token, and at most ``chunk_tokens``, is left for ``generate`` to compute.

    ``store`` comes from ``kvstore.open`` or ``kvstore.connect``. It may also be a cache made by ``model_cache``, which
    then takes the place of the keyword arguments, which are described there. This returns once the store has the KV; a
    store with ``memory`` and ``write="behind"`` has it as soon as it is copied.

    Missing chunks are computed in one run, so the result depends on what the store has by rounding.

    Raises InvalidRequest, with the reason, for a model or prompt that cannot be served. A store that fails, is full or
    does not answer within its limits is not an error: everything is computed, and a warning is logged.
    """
    if not isinstance(store, Store | Cache):
        raise not_a_store(store)
    kept = checked(model)
    check_prompt(model, input_ids)
    chunk_tokens = (store.layout if isinstance(store, Cache) else kept.layout(chunk_tokens)).chunk_tokens
    cache: Cache | None = None
    if isinstance(store, Cache):
        cache = store
        check_cache(model, kept, cache.namespace)
    else:
        try:
            cache = model_cache(
                model, store, chunk_tokens=chunk_tokens, fingerprint=fingerprint, tenant=tenant, attributes=attributes
            )
        except GO_ON as error:
            log.warning("prefill.without_store %s", error)
    end = (input_ids.shape[1] - 1) // chunk_tokens * chunk_tokens
    prefix, tokens = input_ids[:, :end], input_ids[0, :end].cpu().numpy()
    past, loaded = DynamicCache(config=model.config), 0
    if cache is not None:
        loaded = _load(cache, kept, tokens, past)
    if loaded < end:
        computed = _compute(model, kept, prefix, past, loaded)
        if cache is not None:
            _put(cache, tokens, computed.rows(), loaded)
    log.debug("prefill.done tokens=%d loaded=%d computed=%d", input_ids.shape[1], loaded, end - loaded)
    return past


def _load(cache: Cache, kept: TokenShape, tokens: Any, past: Any) -> int:
    """Fills ``past`` with the stored part of ``tokens``; returns its length."""
    count, layers = 0, list[Any]()
    with suppress(*GO_ON):
        count, layers = load_rows(cache, kept, tokens)
    for layer in range(len(layers)):
        (k, v), layers[layer] = layers[layer], None
        if kept.k != kept.v:
            width = kept.k[0] * kept.k[1]
            k, v = torch.cat((k, v), 1).split((width, kept.row - width), 1)
        past.update(_heads(k, kept.k), _heads(v, kept.v), layer)
    return count


def load_rows(cache: Cache, kept: TokenShape, tokens: Any) -> tuple[int, list[Any]]:
    """Returns the number of stored tokens, and K and V of each layer, of shape (2, tokens, width), on its device."""
    return _load_layers(cache, kept, tokens) if has_gpu(kept) else _load_whole(cache, kept, tokens)


def _load_layers(cache: Cache, kept: TokenShape, tokens: Any) -> tuple[int, list[Any]]:
    """Reads each layer while the one before is on the bus."""
    try:
        with cache.hold(tokens) as held:
            return held.tokens, list(arriving(held, cache.layout, kept)) if held.tokens else []
    except (HoldBroken, Overloaded) as error:
        log.debug("prefill.not_by_layers %s", error)
    return _load_whole(cache, kept, tokens)


def _load_whole(cache: Cache, kept: TokenShape, tokens: Any) -> tuple[int, list[Any]]:
    count, array = cache.get(tokens)
    if not count:
        return 0, []
    # Through bytes: numpy and torch have no bfloat16 in common.
    rows = torch.from_numpy(array.view("u1")).view(kept.dtype).reshape(len(kept.devices), 2, count, -1)
    return count, [rows[layer].to(device) for layer, device in enumerate(kept.devices)]


def _compute(model: Any, kept: TokenShape, prefix: Any, past: Any, start: int) -> OffloadStream:
    """Runs the model on ``prefix`` from ``start``; returns its KV on the way to the host."""
    leaving = OffloadStream(prefix.shape[1] - start, kept)

    def take(layer: int, k: Any, v: Any) -> None:
        k, v = _rows(k), _rows(v)
        if kept.k != kept.v:
            k, v = torch.cat((k, v), 1).split(kept.row // 2, 1)
        leaving.add(layer, k, v)

    run(model, prefix[:, start:], past, take)
    return leaving


def _put(cache: Cache, tokens: Any, rows: Any, start: int) -> None:
    """Stores what was computed."""
    layout = cache.layout
    array = rows.view(torch.uint8).numpy().view(layout.numpy_dtype)
    try:
        result = cache.put(tokens, array.reshape(layout.shape(rows.shape[2])), prefix=start)
    except GO_ON as error:
        log.warning("prefill.not_stored %s", error)
        return
    if result.tokens_present < len(tokens):
        log.warning(
            "prefill.not_stored tokens_present=%d tokens=%d reason=%s",
            result.tokens_present,
            len(tokens),
            result.reason,
        )


def _heads(rows: Any, shape: tuple[int, int]) -> Any:
    """Reshapes (tokens, heads * dim) to the cache's (1, heads, tokens, dim)."""
    return rows.reshape(len(rows), *shape).transpose(0, 1)[None].contiguous()


def _rows(tensor: Any) -> Any:
    """Reshapes the cache's (1, heads, tokens, dim) to the stored (tokens, heads * dim)."""
    return tensor[0].transpose(0, 1).flatten(1)
