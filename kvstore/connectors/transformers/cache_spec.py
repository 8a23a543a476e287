"""The KV cache of a model of transformers: its layout in the store, and the namespace of its weights and modules."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from inspect import signature
from typing import Any

import torch
import transformers
import xxhash
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.client import Cache, Store
from kvstore.core.layout import DType, Layout
from kvstore.core.namespace import Namespace
from kvstore.core.validate import kind_of
from kvstore.errors import InvalidRequest

# A digest of a model's modules: swapped or patched modules compute other KV from equal weights.


SILENT = frozenset({"name_or_path", "training", "gradient_checkpointing"})
"""Settings of modules that do not change their results."""
PLAIN = (bool, int, float, str, torch.dtype)
LOOKS_ONLY = "transformers.utils.output_capturing"
"""The module whose hooks change nothing: transformers leaves them behind once hidden states were requested."""


def modules_digest(model: Any) -> str:
    """Returns a digest of each module's class, its plain settings, and the functions that were set on it."""
    digest = blake2b(digest_size=16)
    for name, module in model.named_modules():
        fields = [name, _named(type(module))]
        for setting in _settings(module):
            fields += setting
        digest.update(("\0".join(fields) + "\0").encode(errors="surrogatepass"))
    return digest.hexdigest()


def has_hooks(model: Any) -> bool:
    """True if forward hooks see, and may change, the inputs and outputs of modules."""
    kinds = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    for module in model.modules():
        kinds += [module._forward_hooks, module._forward_pre_hooks]
    return any(getattr(hook, "__module__", "") != LOOKS_ONLY for hooks in kinds for hook in hooks.values())


def _settings(module: Any) -> Iterator[tuple[str, str]]:
    every = vars(module)
    for key in sorted(key for key in every if key[:1] != "_" and key not in SILENT):  # few of many: fast to sort
        value = every[key]
        if value is None or isinstance(value, PLAIN):
            yield key, repr(value)
        elif callable(value):
            yield key, _named(value)


def _named(code: Any) -> str:
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


# A digest of the weights that a model in memory computes with.
#
# Of the tensors themselves, not of their files: weights are merged, quantised and trained after loading, and a model
# may have no files at all. Every byte is hashed once per model object, and again when a tensor was replaced or
# written to.


SCHEME = "tensors-xxh3:"
"""Prefix of every fingerprint made here."""
SAMPLES = 64
"""Number of elements of each tensor that every call samples, in addition to torch's own counter of writes."""

_GIVE_ONE = "give a digest of the weights as fingerprint="
_remembered: weakref.WeakKeyDictionary[Any, tuple[bytes, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def weights_fingerprint(model: Any) -> str:
    """Returns the digest of all parameters and buffers of ``model``, a torch module.

    The first call takes as long as hashing them all (tens of GB/s on the host, the speed of the bus from a device),
    later calls milliseconds. A change is detected by torch's version counters, the tensors' places and a sample of each
    tensor's elements: only a write past the counters (``.data``) that misses the whole sample goes unnoticed.

    Raises InvalidRequest if weights cannot be read, as when they are offloaded to another device.
    """
    tensors = _tensors(model)
    with _lock:
        state = _state(tensors)
        remembered = _remembered.get(model)
        if remembered is None or remembered[0] != state:
            remembered = (state, _digest(tensors))
            _remembered[model] = remembered
        return remembered[1]


def _tensors(model: Any) -> dict[str, Any]:
    """Returns all tensors by name, each once: tied weights have several names."""
    found: dict[str, Any] = dict(model.named_buffers())  # includes those that are not saved: RoPE's frequencies
    found.update(model.state_dict(keep_vars=True))
    distinct: dict[int, tuple[str, Any]] = {}
    for name, tensor in sorted(found.items()):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequest(f"the model's state {name} is {kind_of(tensor)} and no tensor: {_GIVE_ONE}")
        if tensor.device.type == "meta":
            raise InvalidRequest(f"the weights {name} are not in memory (device meta, offloaded): {_GIVE_ONE}")
        distinct.setdefault(id(tensor), (name, tensor.detach()))
    return dict(distinct.values())


def _state(tensors: dict[str, Any]) -> bytes:
    """Returns bytes that change when a tensor is replaced or written to."""
    digest = blake2b(digest_size=16)
    samples: dict[Any, list[Any]] = {}
    for name, tensor in tensors.items():
        version = 0 if tensor.is_inference() else tensor._version
        digest.update(f"{name}\0{tensor.data_ptr()}\0{version}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        elements = _as_bytes(name, tensor).view(-1, tensor.itemsize)
        samples.setdefault(tensor.device, []).append(elements[:: max(1, len(elements) // SAMPLES)].flatten())
    for parts in samples.values():  # one transfer per device
        digest.update(torch.cat(parts).cpu().numpy().data)
    return digest.digest()


def _digest(tensors: dict[str, Any]) -> str:
    whole = blake2b(digest_size=16)
    for name, tensor in tensors.items():
        content = xxhash.xxh3_128_digest(_as_bytes(name, tensor).cpu().numpy().data)
        whole.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode() + content)
    return SCHEME + whole.hexdigest()


def _as_bytes(name: str, tensor: Any) -> Any:
    try:
        return tensor.contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as cause:
        raise InvalidRequest(
            f"the bytes of the weights {name} ({type(tensor).__name__}) cannot be read: {_GIVE_ONE}"
        ) from cause


# The KV that a model keeps of each token in its cache, and the models whose state cannot be stored.
#
# Found by running the model on two tokens: configurations name heads and widths in many ways, and latent attention
# keeps something that none of them describes.


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
class TokenShape:
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


def kept_by(model: Any) -> TokenShape:
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
    kept = TokenShape(k_shape[1::2], v_shape[1::2], dtype, tuple(k.device for k, _ in adds))
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
    """Raises InvalidRequest for a prompt whose tokens alone do not determine its KV."""
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


# The namespace of a model: everything that its KV depends on besides the tokens.


CHUNK_TOKENS = 256
CONFIG_SILENT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Settings that describe a model's origin, not its computation; types are part of the layout and the weights."""

_probed: weakref.WeakKeyDictionary[Any, tuple[str, TokenShape]] = weakref.WeakKeyDictionary()


def model_cache(
    model: Any,
    store: Store,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    fingerprint: str = "",
    tenant: str = "",
    attributes: Mapping[str, str] | None = None,
) -> Cache:
    """Returns the cache in ``store`` that ``prefill_with_store`` uses for ``model``, to match, pin or clear.

    ``fingerprint`` is a digest of the weights; by default it is computed from the tensors, which reads all of them
    once. ``attributes`` are settings that neither the weights nor the configuration show, such as a patched attention.

    Raises InvalidRequest, with the reason, if the model cannot be served, and as ``Store.namespace`` does.
    """
    if not isinstance(store, Store):
        raise not_a_store(store)
    if attributes is not None and not isinstance(attributes, Mapping):
        raise InvalidRequest(f"attributes are {kind_of(attributes)}: expected a mapping of text to text")
    kept = checked(model)
    if not attributes:
        _check_hooks(model)
    layout = kept.layout(chunk_tokens)
    # The geometry is in the name: another chunk length or type is another namespace, not a LayoutMismatch.
    kind = f"{layout.layers}x{layout.kv_heads}x{layout.head_dim}-{layout.dtype}-{chunk_tokens}"
    return store.namespace(
        f"transformers-{model.config.model_type}-{kind}",
        layout,
        fingerprint or weights_fingerprint(model),
        tenant,
        {**(attributes or {}), **_attributes(model, kept)},
    )


def not_a_store(given: object) -> InvalidRequest:
    """Returns the error for what was given instead of a store: one for asyncio is another class of the same name."""
    kind = type(given)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return InvalidRequest(f"store is a {name}: expected what kvstore.open or kvstore.connect returns")


def checked(model: Any) -> TokenShape:
    """Returns the KV that ``model`` keeps of each token. Raises InvalidRequest if it cannot be served."""
    check_model(model)
    seen_as = f"{config_digest(model.config)} {model.dtype} {model.device} {getattr(model, 'hf_device_map', None)}"
    probed = _probed.get(model)
    if probed is None or probed[0] != seen_as:
        probed = _probed[model] = (seen_as, kept_by(model))
    return probed[1]


def check_cache(model: Any, kept: TokenShape, namespace: Namespace) -> None:
    """Raises InvalidRequest if ``namespace`` does not belong to ``model`` as it is now.

    A fingerprint given by the caller is trusted for the weights.
    """
    differing = [
        f"{key} is {dict(namespace.attributes).get(key)!r}, not {value!r}"
        for key, value in _attributes(model, kept).items()
        if dict(namespace.attributes).get(key) != value
    ]
    if set(dict(namespace.attributes)) == set(_attributes(model, kept)):
        _check_hooks(model)
    expected = kept.layout(namespace.layout.chunk_tokens)
    if namespace.layout != expected:
        differing.append(f"its layout is {namespace.layout}, not {expected}")
    if not namespace.fingerprint:
        differing.append("it has no fingerprint of the weights")
    elif namespace.fingerprint.startswith(SCHEME) and namespace.fingerprint != weights_fingerprint(model):
        differing.append("the weights have changed since")
    if differing:
        raise InvalidRequest(
            f"the cache is not one of this model: {'; '.join(differing)}. "
            "Give the store itself, or what model_cache(model, store) returns"
        )


def config_digest(config: Any) -> str:
    """Returns a digest of all settings of a model: RoPE, windows, quantisation and the rest of its configuration."""
    settings = {key: value for key, value in config.to_dict().items() if key not in CONFIG_SILENT}
    return blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _attributes(model: Any, kept: TokenShape) -> dict[str, str]:
    # Releases of transformers change what models put into the cache: latent attention used to be stored expanded.
    release = ".".join(transformers.__version__.split(".")[:2])
    return {
        "engine": f"transformers {release}",
        "model": type(model).__name__,
        "config": config_digest(model.config),
        "modules": modules_digest(model),
        "attention": str(model.config._attn_implementation),  # some leave out the cap of Gemma 2
        "kv": f"k {kept.k[0]}x{kept.k[1]} v {kept.v[0]}x{kept.v[1]}",
    }


def _check_hooks(model: Any) -> None:
    if has_hooks(model):
        raise refused(
            model,
            "forward hooks may change what it computes, and nothing shows how (name what they do in attributes=, to be "
            "served)",
        )
