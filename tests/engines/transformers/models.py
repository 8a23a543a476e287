"""Small models with random weights, wide enough that wrong KV changes the tokens; and the same runs without a store.

With KVSTORE_TEST_DEVICE=cuda models and prompts are on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# A busy machine may give fewer threads to one run than to the next, which then rounds otherwise.
torch.set_num_threads(1)
if device := os.environ.get("KVSTORE_TEST_DEVICE"):
    torch.set_default_device(device)

CHUNK = 16
WINDOW = 24
"""The window of models with a sliding window: shorter than the prompts, and not a multiple of a chunk."""

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def made(kind: Any, config: Any, seed: int = 0, dtype: Any = torch.float32) -> Any:
    """A model of this kind; the same seed gives the same weights in every process."""
    torch.manual_seed(seed)
    return kind(config).to(dtype).eval()


def llama(seed: int = 0, dtype: Any = torch.float32, **settings: Any) -> Any:
    return made(LlamaForCausalLM, LlamaConfig(**{**SMALL, **settings}), seed, dtype)


def qwen2() -> Any:
    return made(Qwen2ForCausalLM, Qwen2Config(**SMALL))


def mistral() -> Any:
    """Each layer keeps only its window."""
    return made(MistralForCausalLM, MistralConfig(**SMALL, sliding_window=WINDOW))


def gemma2() -> Any:
    """Every second layer keeps only its window."""
    return made(Gemma2ForCausalLM, Gemma2Config(**SMALL, head_dim=16, sliding_window=WINDOW))


def qwen3() -> Any:
    """Norms on keys."""
    return made(Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16))


def gemma() -> Any:
    """Scaled embeddings."""
    return made(GemmaForCausalLM, GemmaConfig(**SMALL, head_dim=16))


def gemma3() -> Any:
    """Norms on keys, and another base of RoPE in layers with a window."""
    return made(Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=WINDOW))


def deepseek() -> Any:
    """Latent attention: K and V of different widths, which are no K and V of heads; experts in all layers but one."""
    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    return made(DeepseekV3ForCausalLM, config)


def llama4() -> Any:
    """Every second layer has no RoPE and scales queries by how many tokens came before, as its own cache says."""
    config = Llama4TextConfig(
        **SMALL,
        intermediate_size_mlp=128,
        num_local_experts=2,
        head_dim=16,
        layer_types=["full_attention"] * 4,
        no_rope_layers=[1, 0, 1, 0],
        attn_temperature_tuning=True,
        floor_scale=8,
    )
    return made(Llama4ForCausalLM, config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen2": qwen2,
    "mistral-sliding-window": mistral,
    "gemma2-sliding-every-second": gemma2,
    "deepseek-v3-latent": deepseek,
    "llama4-scaled-by-position": llama4,
}


def prompt(tokens: int, seed: int = 1, behind: Any = None) -> Any:
    """Random ids of shape (1, tokens), after those of ``behind``."""
    source = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(0, 512, (1, tokens), generator=source, device="cpu").to(torch.get_default_device())
    return ids if behind is None else torch.cat((behind, ids), 1)


@torch.no_grad()
def logits_after(model: Any, ids: Any, past: Any) -> Any:
    """Logits of what ``past`` does not hold of ``ids``."""
    return model(ids[:, past.get_seq_length() :], past_key_values=past).logits


@torch.no_grad()
def logits_without_store(model: Any, ids: Any, *ends: int) -> Any:
    """Logits of what is behind the last of ``ends``, the tokens before having been run up to one end after another."""
    past, at = DynamicCache(config=model.config), 0
    for end in ends:
        model(ids[:, at:end], past_key_values=past)
        at = end
    return model(ids[:, at:], past_key_values=past).logits


def generated(model: Any, ids: Any, past: Any = None, tokens: int = 12) -> list[int]:
    """Returns the tokens of greedy decoding."""
    out = model.generate(ids, past_key_values=past, max_new_tokens=tokens, do_sample=False)
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


def difference(one: Any, other: Any) -> float:
    """The largest difference of two tensors of the same shape."""
    assert one.shape == other.shape
    return float((one - other).abs().max())
