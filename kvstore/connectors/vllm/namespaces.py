"""Namespaces from vLLM's configuration: everything that must be equal for two engines to share KV.

One namespace per parallel rank, because each rank holds other heads or layers. The scheduler names all of them and a
worker its own. They use only what both know, but a worker's model may have changed its configuration: its name counts.
"""

from __future__ import annotations

import json
import os
import platform
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import vllm
from packaging.version import Version

from kvstore.connectors.common import local_folder, weights_fingerprint
from kvstore.connectors.vllm.blocks import GroupKind, LayerGroups
from kvstore.core.layout import DTYPES, DType, Layout, checked_dtype
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest

_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Fields of a model's configuration that do not affect its KV, or are attributes of their own."""
_MEDIA_FIELDS = (
    *("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
    "mm_encoder_attn_dtype",
)
_RANDOM_SEED_HASHES = ("xxhash", "xxhash_cbor")


class KVTopology:
    """The shape of one engine's KV: its kinds, tokens per block of each, and which ranks keep which part."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, tp_shards: int = 0) -> None:
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise InvalidRequest(f"{name}={getattr(parallel, name)}: kvstore stores the KV of whole sequences only")
        self.tp = parallel.tensor_parallel_size
        self.pp = parallel.pipeline_parallel_size
        self.replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
        """Number of consecutive tensor-parallel ranks that hold the same KV; the first of them stores it."""
        groups = kv_cache_config.kv_cache_groups
        # vLLM computes what it does not cache again: scratch memory of a request, windows that it replays.
        cacheable = getattr(kv_cache_config, "prefix_cacheable_group_ids", tuple(range(len(groups))))
        alike: dict[tuple[str, str], list[int]] = {}
        for group in cacheable:
            spec = groups[group].kv_cache_spec
            # By class, too: vLLM gives blocks back differently in each.
            alike.setdefault((type(_one(spec)).__name__, _kind(spec)), []).append(group)
        self.clusters = [_cluster(groups[first].kv_cache_spec, (first, *more)) for first, *more in alike.values()]
        model, specs = vllm_config.model_config, [groups[group].kv_cache_spec for group in cacheable]
        is_pooled = model.runner_type == "pooling" and not model.is_prefix_caching_supported
        if not specs or is_pooled or not all(map(_is_causal, specs)):
            raise InvalidRequest("vLLM caches no prefixes of this model: start without this connector")
        self.block_tokens = [cluster.block_tokens for cluster in self.clusters]
        """Tokens per block of each cluster."""
        if vllm_config.speculative_config is not None and any(each.kind is GroupKind.STATE for each in self.clusters):
            raise InvalidRequest(
                "the model keeps recurrent state, which vLLM corrects after a step if it decodes speculatively: start "
                "without speculative decoding, or without this connector"
            )
        self.hash_tokens = int(
            getattr(kv_cache_config, "hash_block_size", None)
            or getattr(vllm_config.cache_config, "hash_block_size", None)
            or min(self.block_tokens)
        )
        if any(tokens % self.hash_tokens for tokens in self.block_tokens):
            raise InvalidRequest(f"blocks of {self.block_tokens} tokens are not multiples of {self.hash_tokens}")
        self.kinds = [f"{len(groups)} times {kind}" if len(groups) > 1 else kind for (_, kind), groups in alike.items()]
        ranks = self.tp // self.replicas
        self.shards = tp_shards or ranks
        """Parts by heads of each pipeline stage's KV, one namespace each; a rank has ``parts_per_rank`` of them."""
        self.parts_per_rank = self.shards // ranks
        self.is_canonical = tp_shards > 0
        if self.is_canonical:
            self._check_shards(vllm_config.model_config.get_total_num_kv_heads())
        lora = getattr(vllm_config, "lora_config", None)
        self.adapters = "" if lora is None else f"{lora.lora_dtype} {getattr(lora, 'fully_sharded_loras', None)}"
        """What determines the KV of requests with an adapter, in addition to its files."""
        self.physical = str(getattr(kv_cache_config, "kv_cache_layout", None))

    def parts(self) -> list[tuple[int, int]]:
        """Returns pipeline rank and tensor-parallel part of each namespace."""
        return [(pp, part) for pp in range(self.pp) for part in range(self.shards)]

    def parts_of(self, rank: int) -> tuple[range, bool]:
        """Returns the indices in ``parts`` of the KV on worker ``rank``, and whether that worker stores it."""
        pp, tp = divmod(rank % (self.tp * self.pp), self.tp)
        first = pp * self.shards + tp // self.replicas * self.parts_per_rank
        return range(first, first + self.parts_per_rank), tp % self.replicas == 0

    def _check_shards(self, heads: int) -> None:
        """Raises InvalidRequest if the heads cannot be parted so."""
        ranks = self.tp // self.replicas
        if self.shards % ranks or heads % self.shards:
            raise InvalidRequest(
                f"tp_shards={self.shards}: expected a multiple of the tensor-parallel size ({ranks}) that divides the "
                f"model's {heads} KV heads"
            )
        if self.pp > 1 or any(each.kind is GroupKind.STATE for each in self.clusters):
            raise InvalidRequest("tp_shards parts attention by heads, without pipeline parallelism: leave it out")


def namespaces(vllm_config: Any, shape: KVTopology, fingerprint: str, tenant: str) -> list[Namespace]:
    """Returns one namespace for each of ``shape.parts()``. Raises InvalidRequest."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layout = Layout(
        model.get_total_num_hidden_layers(),
        model.get_total_num_kv_heads() // shape.shards
        if shape.is_canonical
        else model.get_num_kv_heads(vllm_config.parallel_config),
        model.get_head_size(),
        _dtype(str(cache.cache_dtype), str(model.dtype)),
        shape.block_tokens[0],
    )
    speculative = vllm_config.speculative_config
    common = {
        "engine": f"vllm {_release(vllm.__version__)}",
        "attention": _attention(vllm_config),
        "hash": f"{cache.prefix_caching_hash_algo} of {shape.hash_tokens} tokens",
        "config": _config_digest(model),
        "dtype": str(model.dtype),
        "cache dtype": " ".join([str(cache.cache_dtype), *_unquantized_layers(cache)]),
        "quantization": str(model.quantization),
        "code": " ".join(
            str(getattr(model, key, None) or "") for key in ("model_impl", "model_class_overrides", "code_revision")
        ),
        "rope": _rope(model),
        "length": _length(model),
        "media": _media(model),
        "physical layout": shape.physical,
        "blocks": "; ".join(shape.kinds),
        "speculative": (
            f"{speculative.method} {speculative.model} {speculative.num_speculative_tokens}" if speculative else ""
        ),
        "pp partition": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "tp": f"any of {shape.shards}" if shape.is_canonical else str(shape.shards),
        "pp": str(shape.pp),
    }
    # The geometry is in the name: another one is another namespace, not a LayoutMismatch.
    name = (
        f"{Path(str(model.model)).name[:120]}-{layout.dtype}-{layout.layers}x{layout.kv_heads}x{layout.head_dim}"
        f"-{'-'.join(map(str, shape.block_tokens[:16]))}"
    )
    return [
        Namespace.of(name, layout, fingerprint, tenant, {**common, "pp rank": str(pp), "tp rank": str(part)})
        for pp, part in shape.parts()
    ]


def model_fingerprint(vllm_config: Any) -> str:
    """Returns the digest of the weights that the engine loads. Raises InvalidRequest if they are not on disk."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy-{model.seed}"
    path = str(getattr(model, "model_weights", "") or model.model)
    return weights_fingerprint(local_folder(path, revision=model.revision, cache_dir=load.download_dir))


def check_hashes(vllm_config: Any) -> None:
    """Raises InvalidRequest if another process would hash the same tokens to other keys, so that nothing is hit."""
    if os.environ.get("PYTHONHASHSEED"):
        return
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    from vllm.v1.core import kv_cache_utils

    if algorithm in _RANDOM_SEED_HASHES or not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):
        raise InvalidRequest(
            f"block hashes by {algorithm} in vLLM {vllm.__version__} start from a random seed, so no other process "
            "could find what this one stores: set the environment variable PYTHONHASHSEED to the same number in every "
            "engine, or start with --prefix-caching-hash-algo sha256 on vLLM 0.32 or newer"
        )


def check_heads(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> None:
    """Raises InvalidRequest unless vLLM itself knows how the ranks' heads make up those of the model in each layer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings

    known = derive_canonical_mappings(vllm_config, kv_cache_config, kv_caches)
    for group in kv_cache_config.prefix_cacheable_group_ids:
        for layer in kv_cache_config.kv_cache_groups[group].layer_names:
            is_known = layer in known and known[layer].parallelism_agnostic
            if not is_known or kv_caches[layer].dim() != 4:
                raise InvalidRequest(f"tp_shards: the KV of {layer} depends on the tensor-parallel size; leave it out")


def _cluster(spec: Any, groups: tuple[int, ...]) -> LayerGroups:
    """Returns the cluster of groups with such a specification. Raises InvalidRequest if it is none that we know."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    tokens, one = int(spec.block_size), _one(spec)
    if isinstance(one, FullAttentionSpec):
        return LayerGroups(groups, tokens)
    if isinstance(one, SlidingWindowSpec):
        reach = int(one.sliding_window) + int(getattr(one, "extra_retained_tokens", 0))
        return LayerGroups(groups, tokens, GroupKind.WINDOW, reach)
    if isinstance(one, ChunkedLocalAttentionSpec):
        return LayerGroups(groups, tokens, GroupKind.CHUNK, int(one.attention_chunk_size))
    if isinstance(one, MambaSpec) and one.mamba_cache_mode == "align":
        return LayerGroups(groups, tokens, GroupKind.STATE)
    mode = f" in mode {one.mamba_cache_mode}" if isinstance(one, MambaSpec) else ""
    raise InvalidRequest(
        f"the model keeps {type(one).__name__} state{mode}, which kvstore does not know how to cut into blocks: start "
        + ("with --enable-prefix-caching" if mode else "without this connector")
    )


def _one(spec: Any) -> Any:
    """Returns the specification of one layer of a group: its layers differ in the size of a page at most."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _is_causal(spec: Any) -> bool:
    """False if KV depends on what follows it, or on where a prompt ended (R-SWA): it is of no use to other prompts."""
    layers = spec.kv_cache_specs.values() if hasattr(spec, "kv_cache_specs") else [spec]
    return not any(getattr(each, "non_causal", False) or hasattr(each, "rswa_window") for each in layers)


def _kind(spec: Any) -> str:
    """Names a kind of KV by what the scheduler and every worker know alike; a worker's own layers are left out."""
    one = _one(spec)
    window = getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None)
    found = f"{spec.block_size} tokens" + (f", window {window}" if window else "")
    if hasattr(one, "mamba_type"):
        found += f", state {one.mamba_type} {one.mamba_cache_mode} {one.shapes} {one.dtypes}"
    return found


def _config_digest(model: Any) -> str:
    """Returns a digest of the model's configuration, as overridden on the command line: RoPE, windows, quantisation."""
    fields = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    fields["of the command line"] = getattr(model, "quantization_config", None)
    return blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _rope(model: Any) -> str:
    """Returns RoPE's settings as text, in addition to the digest, to show an operator why two namespaces differ."""
    config = getattr(model, "hf_text_config", model.hf_config)
    fields = {key: getattr(config, key, None) for key in ("rope_theta", "rope_scaling", "rope_parameters")}
    return json.dumps({key: value for key, value in fields.items() if value}, sort_keys=True, default=str)[:4096]


def _unquantized_layers(cache: Any) -> list[str]:
    """Returns the layers without the cache's dtype: as many other layers would have the same size."""
    return sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ()))


def _attention(vllm_config: Any) -> str:
    """Returns the settings that decide how a kernel packs K and V in a block, which layout names leave open.

    On CPUs it depends on their instructions, on ROCm on switches in the environment.
    """
    from vllm.platforms import current_platform

    chosen = vllm_config.attention_config
    kinds = sorted(f"{kind}={backend}" for kind, backend in getattr(chosen, "backend_per_kind", {}).items())
    found = [str(current_platform.device_name), str(chosen.backend), *kinds]
    # Of GPUs the kernel that vLLM chooses depends on this, and a sparse indexer's type is not the cache's.
    found += [str(current_platform.get_device_capability()), str(getattr(chosen, "indexer_kv_dtype", None))]
    if current_platform.is_cpu():
        flags = ("_is_amx_tile_supported", "_is_avx512_supported")
        found += [platform.machine(), *(f"{flag}={getattr(torch.cpu, flag, lambda: None)()}" for flag in flags)]
    if current_platform.is_rocm():
        found += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("VLLM_ROCM_"))
    return " ".join(found)


def _length(model: Any) -> str:
    """Returns ``max_model_len`` if vLLM computes even short prompts differently for a longer one, else nothing."""
    config = getattr(model, "hf_text_config", model.hf_config)
    scaling = str([getattr(config, key, None) for key in ("rope_scaling", "rope_parameters")])
    depends = "longrope" in scaling or str(getattr(config, "model_type", "")).startswith("llama4")
    return str(model.max_model_len) if depends else ""


def _media(model: Any) -> str:
    """Returns the command line's settings for images and sound, which vLLM's hash may lack."""
    config = getattr(model, "multimodal_config", None)
    fields = {key: getattr(config, key, None) for key in _MEDIA_FIELDS}
    return json.dumps({key: value for key, value in fields.items() if value}, sort_keys=True, default=str)


def _release(version: str) -> str:
    """Returns the minor version, because a change between two of them may change KV; a pre-release's whole version."""
    parsed = Version(version)
    return version if parsed.is_prerelease else f"{parsed.major}.{parsed.minor}"


def _dtype(cache: str, model: str) -> DType:
    name = model.removeprefix("torch.") if cache == "auto" else cache
    name = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name)
    return checked_dtype(name) if name in DTYPES else "int8"
