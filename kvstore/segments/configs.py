"""RoPE settings in the configurations of models, in Hugging Face's names, and the models whose keys cannot be moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.brief import kind_of
from kvstore.errors import InvalidRequest

INTERLEAVED = ("codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj", "helium")
"""Model types of transformers that rotate neighbouring elements; the others here rotate the halves of a head."""
RECURRENT = (
    *("conv_kernel", "linear_conv_kernel_dim", "linear_num_value_heads", "lru_width", "mamba_d_state", "ssm_cfg"),
    *("ssm_state_size", "state_size", "time_step_rank", "wkv_hidden_size"),
)
"""Settings of models that keep a recurrent state, which has no rows for a segment's tokens."""
QUANTISED = ("kv_cache_dtype", "kv_cache_quant_algo", "kv_cache_scheme")
"""Settings of quantised KV, in a configuration or its ``quantization_config``."""
FULL = ("full_attention", "attention")


class _Settings:
    """Settings by name, of an object or a mapping; None if it has no such setting."""

    def __init__(self, config: Any) -> None:
        find = getattr(config, "get_text_config", None)
        config = find() if callable(find) else config
        if isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        if config is None or isinstance(config, str | bytes | int | float):
            raise InvalidRequest(f"model_config is {kind_of(config)}: expected a model's configuration")
        self._config = config

    def __getitem__(self, name: str) -> Any:
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)


def settings(model_config: Any) -> tuple[float, int, str, dict[str, Any]]:
    """Returns theta, rotated dims, style and scaling. Raises InvalidRequest for a model whose keys cannot be moved."""
    config = _Settings(model_config)
    for reason in (_recurrence(config), _windows(config), _attention(config), _quantisation(config)):
        if reason:
            raise InvalidRequest(f"segments of this model are refused: {reason}")
    scaling = _scaling(config)
    theta = scaling.get("rope_theta") or config["rope_theta"] or config["rotary_emb_base"]
    if not theta:
        raise _refused("its configuration has no rope_theta, so its positions are not those of RoPE")
    dims = _dims(config, scaling)
    style = "interleaved" if config["model_type"] in INTERLEAVED or config["rope_interleave"] else "half"
    return float(theta), dims, style, {key: value for key, value in scaling.items() if value is not None}


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"segments of this model are refused: {reason}")


def _scaling(config: _Settings) -> dict[str, Any]:
    found = config["rope_parameters"] or config["rope_scaling"] or {}
    if not isinstance(found, Mapping):
        raise _refused(f"its rope_scaling is {kind_of(found)}, not a mapping")
    kinds = [each for each in found.values() if isinstance(each, Mapping)]
    if kinds:  # by the type of layer
        if any(dict(each) != dict(kinds[0]) for each in kinds):
            raise _refused("its layers have different RoPE settings")
        found = kinds[0]
    scaling = dict(found)
    if "original_max_position_embeddings" not in scaling and scaling.get("rope_type", scaling.get("type")) == "yarn":
        before = config["original_max_position_embeddings"] or config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = before
    return scaling


def _dims(config: _Settings, scaling: Mapping[str, Any]) -> int:
    head_dim = config["head_dim"]
    if not head_dim:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if not width or not heads:
            raise _refused("its configuration has neither head_dim nor hidden_size and num_attention_heads")
        head_dim = width // heads
    if config["rotary_dim"]:
        return int(config["rotary_dim"])
    share = scaling.get("partial_rotary_factor") or config["partial_rotary_factor"] or config["rotary_pct"] or 1.0
    return int(head_dim * share)


def _recurrence(config: _Settings) -> str:
    signs = [name for name in RECURRENT if config[name]]
    return f"it keeps a recurrent state ({signs[0]} is set)" if signs else ""


def _windows(config: _Settings) -> str:
    layers = config["layer_types"] or config["layers_block_type"]
    others = sorted({str(kind) for kind in layers or () if kind not in FULL})
    if others:
        return f"it has layers of type {others[0]!r}, and only full attention has been shown to blend"
    if not layers and config["sliding_window"] and config["use_sliding_window"] is not False:
        return (
            f"it attends within a sliding window ({config['sliding_window']} tokens), which has not been shown to blend"
        )
    if config["attention_chunk_size"]:
        return "it attends within chunks, which have not been shown to blend"
    return ""


def _attention(config: _Settings) -> str:
    if config["kv_lora_rank"]:
        return "its attention is latent (kv_lora_rank is set): the stored rows are not keys of heads"
    if config["alibi"] or str(config["position_embedding_type"] or "rope") not in ("rope", "rotary"):
        return "its positions are not those of RoPE"
    kinds = config["no_rope_layers"]
    if kinds and not all(kinds):
        return "some of its layers have no RoPE, others have"
    return ""


def _quantisation(config: _Settings) -> str:
    inner = config["quantization_config"]
    inner = inner if isinstance(inner, Mapping) else getattr(inner, "__dict__", {})
    for name in QUANTISED:
        value = config[name] or inner.get(name)
        if value and value not in ("auto", "bfloat16", "float16", "float32"):
            return f"its KV is quantised ({name} is set): rows with scales cannot be rotated"
    return ""
