"""Prefill of one prompt: stored chunks are loaded, the others computed and stored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.client import Cache, Store
from kvstore.connectors.transformers.coming import Coming
from kvstore.connectors.transformers.device import Leaving, arriving, has_gpu
from kvstore.connectors.transformers.kept import Kept, check_prompt, run
from kvstore.connectors.transformers.namespace import CHUNK_TOKENS, check_cache, checked, model_cache
from kvstore.errors import HoldBroken, InvalidRequest, Overloaded, PermissionDenied, SessionLost, Unavailable

GO_ON = (Unavailable, Overloaded, SessionLost, PermissionDenied)
"""Errors of the store after which the prompt is computed as if there were no store."""

log = logging.getLogger(__name__)


def prefill_with_store(
    model: Any,
    input_ids: Any,
    store: Store | Cache,
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
    then takes the place of the keyword arguments up to ``attributes``; they are described there.

    Missing chunks are computed in one run, or ``piece_tokens`` at a time, a multiple of ``chunk_tokens``. With
    ``piece_tokens=chunk_tokens`` every chunk is computed in a run of the same shape, so the result does not depend on
    what the store has, to the last bit; in one run it does, by rounding.

    Raises InvalidRequest, with the reason, for a model or prompt that cannot be served. A store that fails, is full or
    does not answer within its limits is not an error: everything is computed, and a warning is logged.
    """
    if not isinstance(store, Store | Cache):
        raise InvalidRequest(
            f"store is a {type(store).__name__}: expected what kvstore.open or kvstore.connect returns"
        )
    kept = checked(model)
    check_prompt(model, input_ids)
    layout = store.layout if isinstance(store, Cache) else kept.layout(chunk_tokens)
    chunk_tokens = layout.chunk_tokens
    if piece_tokens is not None and (
        not isinstance(piece_tokens, int) or piece_tokens < 1 or piece_tokens % chunk_tokens
    ):
        raise InvalidRequest(f"piece_tokens={piece_tokens!r}: expected a multiple of chunk_tokens ({chunk_tokens})")
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
    prefix = input_ids[:, :end]
    past, loaded, computed = _prefilled(model, kept, cache, prefix, piece_tokens or end)
    if cache is not None and loaded < end:
        _store(cache, prefix, computed, loaded)
    log.debug("prefill.done tokens=%d loaded=%d computed=%d", input_ids.shape[1], loaded, end - loaded)
    return past


def _prefilled(
    model: Any, kept: Kept, cache: Cache | None, prefix: Any, piece_tokens: int
) -> tuple[DynamicCache, int, Any]:
    """Returns the KV of ``prefix``, how many of its tokens were loaded, and the KV of the others on the host."""

    def behind(loaded: int, layers: Iterable[Any]) -> tuple[DynamicCache, int, Any]:
        past = DynamicCache(config=model.config)
        coming = Coming(past, kept, layers)
        return past, loaded, _compute(model, kept, prefix, past, coming, loaded, piece_tokens)

    tokens = prefix[0].cpu().numpy()
    with suppress(*GO_ON):
        if cache is not None and has_gpu(kept):
            try:
                with cache.hold(tokens) as held:
                    return behind(held.tokens, arriving(held, cache.layout, kept) if held.tokens else ())
            except (HoldBroken, Overloaded) as error:
                log.debug("prefill.not_by_layers %s", error)
        if cache is not None:
            return behind(*_whole(cache, kept, tokens))
    return behind(0, ())


def _whole(cache: Cache, kept: Kept, tokens: Any) -> tuple[int, Iterable[Any]]:
    """Returns the number of stored tokens, and K and V of each layer, once all are read."""
    count, array = cache.get(tokens)
    if not count:
        return 0, ()
    # Through bytes: numpy and torch have no bfloat16 in common.
    rows = torch.from_numpy(array.view("u1")).view(kept.dtype).reshape(len(kept.devices), 2, count, -1)
    return count, (rows[layer].to(device) for layer, device in enumerate(kept.devices))


def _compute(model: Any, kept: Kept, prefix: Any, past: Any, coming: Coming, start: int, piece_tokens: int) -> Any:
    """Runs the model on ``prefix`` from ``start``; returns KV on the host, of shape (layers, 2, tokens, width).

    Layers before ``start`` may come meanwhile. Raises HoldBroken if one cannot.
    """
    shape = (len(kept.devices), 2, prefix.shape[1] - start, kept.row // 2)
    rows = torch.empty(shape, dtype=kept.dtype, device="cpu")
    if start == prefix.shape[1]:
        coming.finish()
        return rows
    leaving = Leaving(rows, kept) if has_gpu(kept) else None
    at = start

    def take(layer: int, k: Any, v: Any) -> None:
        coming.reach(layer)
        k, v = _rows(k), _rows(v)
        if kept.k != kept.v:
            k, v = torch.cat((k, v), 1).split(kept.row // 2, 1)
        place = slice(at - start, at - start + len(k))
        if leaving is not None:
            leaving.add(layer, place, k, v)
            return
        rows[layer, 0, place].copy_(k)
        rows[layer, 1, place].copy_(v)

    coming.begin()
    while at < prefix.shape[1]:
        # Up to the next multiple of a piece, so that its borders do not depend on what was loaded.
        until = min((at // piece_tokens + 1) * piece_tokens, prefix.shape[1])
        run(model, prefix[:, at:until], past, take)
        at = until
    if leaving is not None:
        leaving.finish()
    return rows


def _store(cache: Cache, prefix: Any, rows: Any, start: int) -> None:
    layout = cache.layout
    array = rows.view(torch.uint8).numpy().view(layout.numpy_dtype)
    try:
        cache.put(prefix[0].cpu().numpy(), array.reshape(layout.shape(rows.shape[2])), prefix=start)
    except GO_ON as error:
        log.warning("prefill.not_stored %s", error)


def _rows(tensor: Any) -> Any:
    """Reshapes the cache's (1, heads, tokens, dim) to the stored (tokens, heads * dim)."""
    return tensor[0].transpose(0, 1).flatten(1)
