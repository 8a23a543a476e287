"""Prefill of one prompt: stored chunks are loaded, the others computed and stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.client import Cache, Store
from kvstore.connectors.transformers.device import Leaving, arriving, has_gpu
from kvstore.connectors.transformers.kept import Kept, check_prompt, run
from kvstore.connectors.transformers.namespace import CHUNK_TOKENS, check_cache, checked, model_cache, not_a_store
from kvstore.connectors.transformers.storing import Storing
from kvstore.errors import HoldBroken, InvalidRequest, Overloaded, PermissionDenied, SessionLost, Unavailable

GO_ON = (Unavailable, Overloaded, SessionLost, PermissionDenied)
"""Errors of the store after which the prompt is computed as if there were no store."""

log = logging.getLogger(__name__)


def prefill_with_store(
    model: Any,
    input_ids: Any,
    store: Store | Cache | Storing,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    fingerprint: str = "",
    tenant: str = "",
    attributes: Mapping[str, str] | None = None,
    piece_tokens: int | None = None,
) -> DynamicCache:
    """Returns the KV of a prompt's full chunks, for ``model.generate(input_ids, past_key_values=...)`` to continue.

    ``input_ids`` is an integer tensor of shape (1, tokens). Stored chunks are loaded; the chunks behind them are
    computed and stored. At least one token, and at most ``chunk_tokens``, is left for ``generate`` to compute.

    ``store`` comes from ``kvstore.open`` or ``kvstore.connect``. It may also be a cache made by ``model_cache``, which
    then takes the place of the keyword arguments up to ``attributes``; they are described there. With a ``Storing``
    around either, this returns once all is computed; otherwise once the store has it.

    Missing chunks are computed in one run, or ``piece_tokens`` at a time, a multiple of ``chunk_tokens``. With
    ``piece_tokens=chunk_tokens`` every chunk is computed in a run of the same shape, so the result does not depend on
    what the store has, to the last bit; in one run it does, by rounding.

    Raises InvalidRequest, with the reason, for a model or prompt that cannot be served. A store that fails, is full or
    does not answer within its limits is not an error: everything is computed, and a warning is logged.
    """
    storing, store = (store, store.store) if isinstance(store, Storing) else (None, store)
    if not isinstance(store, Store | Cache):
        raise not_a_store(store)
    kept = checked(model)
    check_prompt(model, input_ids)
    chunk_tokens = (store.layout if isinstance(store, Cache) else kept.layout(chunk_tokens)).chunk_tokens
    _check_pieces(piece_tokens, chunk_tokens)
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
    prefix, tokens = input_ids[:, :end], input_ids[0, :end].to("cpu", copy=True).numpy()
    past, loaded = DynamicCache(config=model.config), 0
    if cache is not None:
        loaded = _load(cache, kept, tokens, past)
    if loaded < end:
        computed = _compute(model, kept, prefix, past, loaded, piece_tokens or end)
        if cache is not None:
            put = partial(_put, cache, tokens, computed, loaded)
            if storing is None or not storing.submit(put, computed.size_bytes):
                put()
    log.debug("prefill.done tokens=%d loaded=%d computed=%d", input_ids.shape[1], loaded, end - loaded)
    return past


def _check_pieces(piece_tokens: Any, chunk_tokens: int) -> None:
    if piece_tokens is not None and (
        not isinstance(piece_tokens, int) or piece_tokens < 1 or piece_tokens % chunk_tokens
    ):
        raise InvalidRequest(f"piece_tokens={piece_tokens!r}: expected a multiple of chunk_tokens ({chunk_tokens})")


def _load(cache: Cache, kept: Kept, tokens: Any, past: Any) -> int:
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


def load_rows(cache: Cache, kept: Kept, tokens: Any) -> tuple[int, list[Any]]:
    """Returns the number of stored tokens, and K and V of each layer, of shape (2, tokens, width), on its device."""
    return _load_layers(cache, kept, tokens) if has_gpu(kept) else _load_whole(cache, kept, tokens)


def _load_layers(cache: Cache, kept: Kept, tokens: Any) -> tuple[int, list[Any]]:
    """Reads each layer while the one before is on the bus."""
    try:
        with cache.hold(tokens) as held:
            return held.tokens, list(arriving(held, cache.layout, kept)) if held.tokens else []
    except (HoldBroken, Overloaded) as error:
        log.debug("prefill.not_by_layers %s", error)
    return _load_whole(cache, kept, tokens)


def _load_whole(cache: Cache, kept: Kept, tokens: Any) -> tuple[int, list[Any]]:
    count, array = cache.get(tokens)
    if not count:
        return 0, []
    # Through bytes: numpy and torch have no bfloat16 in common.
    rows = torch.from_numpy(array.view("u1")).view(kept.dtype).reshape(len(kept.devices), 2, count, -1)
    return count, [rows[layer].to(device) for layer, device in enumerate(kept.devices)]


def _compute(model: Any, kept: Kept, prefix: Any, past: Any, start: int, piece_tokens: int) -> Leaving:
    """Runs the model on ``prefix`` from ``start``; returns its KV on the way to the host."""
    leaving = Leaving(prefix.shape[1] - start, kept)
    at = start

    def take(layer: int, k: Any, v: Any) -> None:
        k, v = _rows(k), _rows(v)
        if kept.k != kept.v:
            k, v = torch.cat((k, v), 1).split(kept.row // 2, 1)
        leaving.add(layer, slice(at - start, at - start + len(k)), k, v)

    while at < prefix.shape[1]:
        # Up to the next multiple of a piece, so that its borders do not depend on what was loaded.
        until = min((at // piece_tokens + 1) * piece_tokens, prefix.shape[1])
        run(model, prefix[:, at:until], past, take)
        at = until
    return leaving


def _put(cache: Cache, tokens: Any, leaving: Leaving, start: int) -> None:
    """Stores what was computed. ``tokens`` must be a copy: the caller may use its prompt's memory again meanwhile."""
    layout, rows = cache.layout, leaving.rows()
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
