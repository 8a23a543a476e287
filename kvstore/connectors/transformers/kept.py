"""The KV that a model keeps of each token in its cache, and the models whose state cannot be stored.

Found by running the model on two tokens: configurations name heads and widths in many ways, and latent attention keeps
something that none of them describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.brief import kind_of
from kvstore.errors import InvalidRequest
from kvstore.layout import DType, Layout

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
GROWING_ROPE = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the whole prompt's length, once it exceeds the original length."""
ROUNDING = 0.05
"""The allowed relative error of K or V of a token when another one follows: experts group tokens."""
NOT_CAUSAL = "its attention is not causal, so that KV of a prefix depends on what follows"


class BlendedCache(DynamicCache):  # type: ignore[misc]
    """KV that is near that of a full prefill, not equal to it (``prefill_blended``). What follows is never stored."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The KV of a token in each layer: K of shape ``k`` and V of shape ``v``, (heads, dim); equal for all layers."""

    k: tuple[int, int]
    v: tuple[int, int]
    dtype: Any
    devices: tuple[Any, ...]
    """The device of each layer's KV."""

    @property
    def row(self) -> int:
        """Number of elements of K and V of one token in one layer."""
        return self.k[0] * self.k[1] + self.v[0] * self.v[1]

    def layout(self, chunk_tokens: int) -> Layout:
        """Returns the layout to store it in. K and V of different widths are one row, stored in two halves."""
        heads, dim = self.k if self.k == self.v else (1, self.row // 2)
        return Layout(len(self.devices), heads, dim, DTYPES[self.dtype], chunk_tokens)


def kept_by(model: Any) -> Kept:
    """Runs ``model`` on two tokens, twice, and returns the KV that it keeps.

    Raises InvalidRequest if that is not K and V of each token alike, or depends on what follows the token.
    """
    adds = _added(model, (0, 1))
    shapes = {(tuple(k.shape), tuple(v.shape), k.dtype, v.dtype) for k, v in adds}
    if len(shapes) != 1:
        raise refused(model, "its layers keep K and V of different shapes or types")
    k_shape, v_shape, dtype, v_dtype = shapes.pop()
    if not (len(k_shape) == len(v_shape) == 4 and k_shape[::2] == v_shape[::2] == (1, 2)) or dtype != v_dtype:
        raise refused(model, f"of two tokens it keeps {k_shape} {dtype}, {v_shape} {v_dtype}, not (1, heads, 2, dim)")
    if dtype not in DTYPES:
        raise refused(model, f"it keeps {dtype}, which the store has no type for")
    kept = Kept(k_shape[1::2], v_shape[1::2], dtype, tuple(k.device for k, _ in adds))
    if kept.row % 2:
        raise refused(model, f"K and V of a token have {kept.row} elements together: expected an even number")
    for one, other in zip(adds, _added(model, (0, 2)), strict=True):
        for first, second in zip(one, other, strict=True):
            first, second = first[:, :, 0].float(), second[:, :, 0].float()
            if (first - second).abs().max() > ROUNDING * first.abs().max():
                raise refused(model, NOT_CAUSAL)
    return kept


def _added(model: Any, tokens: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Returns K and V that each layer adds for these tokens."""
    past, seen = DynamicCache(config=model.config), list[tuple[int, Any, Any]]()
    for index, layer in enumerate(past.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise refused(
                model, f"layer {index} keeps a {type(layer).__name__}: state that is not K and V of each token"
            )
    ids = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    run(model, ids, past, lambda *update: seen.append(update))
    if [index for index, _, _ in seen] != list(range(len(past.layers))) or not seen:
        raise refused(model, "not every layer adds K and V to the cache once, in order")
    return [(k, v) for _, k, v in seen]


def check_model(model: Any) -> None:
    """Raises InvalidRequest for a model whose KV cannot be stored, for reasons that running it would not show."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidRequest(f"model is {kind_of(model)}: expected a PreTrainedModel of transformers")
    config = model.config
    if "past_key_values" not in signature(model.forward).parameters:
        raise refused(model, "its forward takes no past_key_values")
    if model.training:
        raise InvalidRequest("the model is in training mode, where dropout makes KV random: call model.eval()")
    if config.is_encoder_decoder:
        raise refused(model, "it is an encoder-decoder, and its cross-attention depends on the encoder's input")
    if config.get_text_config(decoder=True) is not config:
        raise refused(model, "it takes more than text, and KV of pictures or sound does not follow from token ids")
    # Not getattr of the module, which takes long to find nothing.
    if getattr(config, "use_bidirectional_attention", None) or any(
        vars(module).get("is_causal", getattr(type(module), "is_causal", None)) is False for module in model.modules()
    ):
        raise refused(model, NOT_CAUSAL)
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise refused(model, "which adapters are active does not show in its weights (merge them, to be served)")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise refused(model, "it is split over processes by tensor parallelism")
    implementation = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise refused(
            model, f"its generation_config asks for a cache of its own ({implementation}), which may be quantised"
        )


def check_prompt(model: Any, input_ids: Any) -> None:
    """Raises InvalidRequest for a prompt whose KV cannot be told from its tokens alone."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        given = getattr(input_ids, "shape", type(input_ids).__name__)
        raise InvalidRequest(f"input_ids are {given}: expected an integer tensor of shape (1, tokens)")
    if input_ids.shape[0] != 1:
        raise InvalidRequest(
            f"input_ids hold {input_ids.shape[0]} prompts: expected one, without padding; call once for each"
        )
    if not input_ids.shape[1]:
        raise InvalidRequest("input_ids are empty: expected at least one token")
    generation = getattr(model, "generation_config", None)
    pad, end = getattr(generation, "pad_token_id", None), getattr(generation, "eos_token_id", None)
    if pad is not None and pad not in (end if isinstance(end, list) else [end]) and bool((input_ids == pad).any()):
        raise InvalidRequest(
            f"input_ids hold the padding token {pad}, which generate masks: expected a prompt without padding"
        )
    limit = _rope_limit(model.config)
    if limit is not None and input_ids.shape[1] >= limit:
        raise refused(
            model,
            f"its RoPE changes for prompts of {limit} tokens or more (this one has {input_ids.shape[1]}), "
            "so that KV of a prefix depends on what follows",
        )


def run(model: Any, input_ids: Any, past: Any, take: Any) -> None:
    """Runs ``input_ids`` behind ``past``, which grows; ``take(layer, k, v)`` gets what each layer adds, to store it.

    Intercepts the cache's update, because a sliding layer drops what left its window before the call is over.
    Raises InvalidRequest behind blended KV, whose errors would spread into exact chunks.
    """
    if isinstance(past, BlendedCache):
        raise InvalidRequest("past is blended, so KV computed behind it is not exact and cannot be stored")
    add = past.update

    def update(k: Any, v: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        take(layer, k, v)
        return add(k, v, layer, *args, **kwargs)

    fewer = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    past.update = update
    try:
        with torch.no_grad():
            model(input_ids=input_ids, past_key_values=past, use_cache=True, **fewer)
    finally:
        del past.update


def refused(model: Any, reason: str) -> InvalidRequest:
    """Returns the error for a model that cannot be served."""
    return InvalidRequest(f"{type(model).__name__} cannot be served from a store: {reason}. Call generate without one")


def _rope_limit(config: Any) -> int | None:
    """Returns the prompt length from which the frequencies depend on the length; None: never."""
    settings = getattr(config, "rope_parameters", None) or {}
    each = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    growing = [one for one in each if any(kind in str(one.get("rope_type", "")) for kind in GROWING_ROPE)]
    limits = [one.get("original_max_position_embeddings") or config.max_position_embeddings for one in growing]
    return min(limits, default=None)
