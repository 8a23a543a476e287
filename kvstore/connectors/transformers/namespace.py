"""The namespace of a model: everything that its KV depends on besides the tokens."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import transformers

from kvstore.brief import kind_of
from kvstore.client import Cache, Store
from kvstore.connectors.transformers.kept import Kept, check_model, kept_by, refused
from kvstore.connectors.transformers.modules import has_hooks, modules_digest
from kvstore.connectors.transformers.weights import SCHEME, weights_fingerprint
from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace

CHUNK_TOKENS = 256
CONFIG_SILENT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Settings that describe a model's origin, not its computation; types are part of the layout and the weights."""

_probed: weakref.WeakKeyDictionary[Any, tuple[str, Kept]] = weakref.WeakKeyDictionary()


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


def checked(model: Any) -> Kept:
    """Returns the KV that ``model`` keeps of each token. Raises InvalidRequest if it cannot be served."""
    check_model(model)
    seen_as = f"{config_digest(model.config)} {model.dtype} {model.device} {getattr(model, 'hf_device_map', None)}"
    probed = _probed.get(model)
    if probed is None or probed[0] != seen_as:
        probed = _probed[model] = (seen_as, kept_by(model))
    return probed[1]


def check_cache(model: Any, kept: Kept, namespace: Namespace) -> None:
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


def _attributes(model: Any, kept: Kept) -> dict[str, str]:
    # Releases of transformers change what models put into the cache: latent attention used to be stored expanded.
    release = ".".join(transformers.__version__.split(".")[:2])
    return {
        "engine": f"transformers {release}",
        "model": type(model).__name__,
        "config": config_digest(model.config),
        "modules": modules_digest(model),
        "kv": f"k {kept.k[0]}x{kept.k[1]} v {kept.v[0]}x{kept.v[1]}",
    }


def _check_hooks(model: Any) -> None:
    if has_hooks(model):
        raise refused(
            model,
            "forward hooks may change what it computes, and nothing shows how (name what they do in attributes=, to be "
            "served)",
        )
