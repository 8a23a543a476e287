"""Prefill over segments: KV of documents that were computed alone is reused at another place, and partly recomputed.

What comes of it is close to the KV of a full prefill, and not equal to it. So it is marked (``BlendedCache``), and
never stored. A verdict of ``kvstore blend-check`` says how close it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.client import Cache, Store
from kvstore.connectors.transformers.cache_spec import (
    BlendedCache,
    TokenShape,
    check_cache,
    check_prompt,
    checked,
    model_cache,
    not_a_store,
    refused,
)
from kvstore.connectors.transformers.decoder import Decoder, PromptKV, alone, recompute
from kvstore.connectors.transformers.prefill import GO_ON, host_memory, load_rows
from kvstore.errors import InvalidRequest
from kvstore.segments import Segments, Verdict, gate

SEGMENT_TOKENS = 64
PINNED_BYTES = 4 << 30
"""The most KV of segments that is read into pinned memory: they come whole, not by layers."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blended:
    """KV of a prompt except its last token, for ``model.generate(input_ids, past_key_values=blended.past)``."""

    past: DynamicCache
    """A ``BlendedCache`` if segments were reused; else the KV is exact."""
    computed: int
    """Tokens computed in every layer."""
    found: int
    """Tokens of segments that were reused, those recomputed in some layers or all included."""
    exact: int
    """Leading tokens that the exact cache gave."""
    work: float
    """The share of found tokens times layers that was recomputed, 0 to 1."""


def prefill_blended(
    model: Any,
    input_ids: Any,
    starts: Sequence[int] | None,
    store: Store | Cache,
    verdict: Verdict | None = None,
    *,
    segment_tokens: int = SEGMENT_TOKENS,
) -> Blended:
    """Prefills a prompt (an integer tensor of shape (1, tokens)) over what the store has of it.

    The exact prefix is loaded as ``prefill_with_store`` loads it. Behind it, segments are loaded, and recomputed as
    ``verdict`` says, by default the one that ``kvstore blend-check`` recorded. All else is computed. Nothing is stored.
    ``starts`` are the indices at which documents begin; with None, segments are looked for at any offset.

    Without a verdict that holds for these weights, no segment is used and the result is exact; so it is if the store
    fails. ``store`` may be the cache that ``model_cache`` returns. Raises InvalidRequest, with the reason, for a model
    or prompt that cannot be served.
    """
    kept = _checked(model, input_ids, store)
    decoder = Decoder(model)
    ids = input_ids[0, :-1]
    tokens = ids.cpu().numpy()
    kv = decoder.empty(len(ids))
    reused = torch.zeros(len(ids), dtype=torch.bool, device=decoder.device)
    exact, opened = 0, None
    try:
        cache = _cache_of(model, store)
        exact = _load_exact(cache, kept, tokens, kv)
        segments = cache.segments(decoder.rope(), chunk_tokens=segment_tokens)
        opened = _opening(segments, verdict)
        if opened is not None:
            _load_segments(segments, kept, tokens, starts, exact, opened, kv, reused)
    except GO_ON as error:
        log.warning("blended.without_store %s", error)
    ran = recompute(decoder, ids, kv, reused, opened, exact=exact)
    past = (BlendedCache if ran.reused else DynamicCache)(config=model.config)
    for layer, (k, v) in enumerate(zip(kv.keys, kv.values, strict=True)):
        past.update(k, v, layer)
    return Blended(past, len(ran.rows), ran.reused, exact, ran.work)


def put_segments(
    model: Any, documents: Iterable[Any], store: Store | Cache, *, segment_tokens: int = SEGMENT_TOKENS
) -> int:
    """Computes documents alone behind BOS and stores them as segments; returns how many tokens were computed.

    Each document is an integer tensor of shape (1, tokens), without BOS: as it will stand in prompts. What is stored
    already is not computed again. Only full chunks of ``segment_tokens`` are stored. Raises as ``prefill_blended``, and
    what the store raises.
    """
    bos = model.config.bos_token_id
    if not isinstance(bos, int):
        raise refused(model, "it has no BOS token, behind which segments are computed")
    count, documents = 0, list(documents)
    for document in documents:
        check_prompt(model, document)
    if not documents:
        return 0
    _checked(model, documents[0], store)
    cache, decoder = _cache_of(model, store), Decoder(model)
    segments = cache.segments(decoder.rope(), chunk_tokens=segment_tokens)
    for document in documents:
        tokens = document[0].cpu().numpy()
        full = len(tokens) // segment_tokens * segment_tokens
        if sum(map(len, segments.find(tokens[:full], starts=[0]))) == full:
            continue
        ids = torch.cat((torch.tensor([bos], device="cpu"), document[0, :full].cpu()))
        rows = torch.stack([torch.stack((k[1:], v[1:])) for k, v in alone(decoder, ids.to(decoder.device))]).cpu()
        values = rows.view(torch.uint8).numpy().view(segments.layout.numpy_dtype)
        segments.put(tokens[:full], values, required=True)
        count += full
    return count


def _opening(segments: Segments, verdict: Verdict | None) -> Verdict | None:
    """Returns the verdict that opens the gate: the one given, or the one recorded. None: compute without segments."""
    given = segments.verdict() if verdict is None else verdict
    try:
        return gate.check(given, segments.fingerprint, segments.rope.digest)
    except InvalidRequest as error:
        log.warning("blended.closed %s", error)
        return None


def _checked(model: Any, input_ids: Any, store: Store | Cache) -> TokenShape:
    """Returns what ``model`` keeps, after all checks of the arguments."""
    kept = checked(model)
    check_prompt(model, input_ids)
    if isinstance(store, Cache):
        check_cache(model, kept, store.namespace)
    elif not isinstance(store, Store):
        raise not_a_store(store)
    return kept


def _cache_of(model: Any, store: Store | Cache) -> Cache:
    """Returns the exact cache of a model. Raises what the store raises."""
    return store if isinstance(store, Cache) else model_cache(model, store)


def _load_exact(cache: Cache, kept: TokenShape, tokens: Any, kv: PromptKV) -> int:
    """Fills ``kv`` with the stored prefix; returns its number of tokens."""
    count, layers = load_rows(cache, kept, tokens)
    for layer, rows in enumerate(layers):
        kv.write(layer, slice(count), *rows.unflatten(-1, kept.k))
    return count


def _load_segments(
    segments: Segments,
    kept: TokenShape,
    tokens: Any,
    starts: Sequence[int] | None,
    exact: int,
    verdict: Verdict,
    kv: PromptKV,
    reused: Any,
) -> None:
    """Fills ``kv`` with the segments that are stored, and marks their rows in ``reused``."""
    with segments.hold(segments.find(tokens, starts, exact)) as held:
        if not held.matches:
            return
        first, end = held.matches[0].start, held.matches[-1].end
        shape = segments.layout.shape(end - first)
        rows = host_memory(shape, kept, PINNED_BYTES)
        # Through bytes: numpy and torch have no bfloat16 in common.
        got = held.read_into(rows.view(torch.uint8).numpy().view(segments.layout.numpy_dtype), verdict, first)
    for layer, host in enumerate(rows):
        loaded = host.to(kept.devices[layer], non_blocking=True)
        for match in got:
            kv.write(layer, slice(match.start, match.end), *loaded[:, match.start - first : match.end - first])
    for match in got:
        reused[match.start : match.end] = True
