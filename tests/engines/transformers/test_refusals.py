"""Models and prompts that cannot be served are refused with the reason, before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvstore
import kvstore.aio
from kvstore.client import Store
from kvstore.connectors.transformers import model_cache, prefill_with_store
from kvstore.errors import InvalidRequest
from tests.engines.transformers.models import (
    CHUNK,
    SMALL,
    difference,
    llama,
    logits_after,
    logits_without_store,
    made,
    prompt,
)


@pytest.fixture
def store(store: Store) -> Iterator[Store]:
    """Stays empty."""
    yield store
    assert store.stats()["requests_put"] == 0
    assert store.namespaces() == []


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, state_size=8)
    return made(transformers.MambaForCausalLM, config)


def hybrid() -> Any:
    """Full attention in one layer of four, a recurrent state in the others."""
    config = transformers.Qwen3NextConfig(
        **SMALL,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return made(transformers.Qwen3NextForCausalLM, config)


def encoder_decoder() -> Any:
    config = transformers.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    return made(transformers.T5ForConditionalGeneration, config)


def encoder() -> Any:
    settings = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return made(transformers.BertLMHeadModel, transformers.BertConfig(**settings, num_attention_heads=4))


def sparse_encoder() -> Any:
    """Nothing in its modules says that it looks ahead; what it computes does."""
    settings = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.BigBirdConfig(**settings, num_attention_heads=4, initializer_range=0.15)
    return made(transformers.BigBirdForCausalLM, config)


def pictures() -> Any:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**small, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**SMALL), image_token_index=3
    )
    return made(transformers.LlavaForConditionalGeneration, config)


def bidirectional() -> Any:
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=16, use_bidirectional_attention=True)
    return made(transformers.Gemma3ForCausalLM, config)


def training() -> Any:
    return llama().train()


def double() -> Any:
    return llama(dtype=torch.float64)


def with_adapter() -> Any:
    model = llama()
    model.peft_config = {"default": "an adapter"}
    model._hf_peft_config_loaded = True
    return model


def split() -> Any:
    model = llama()
    model._tp_size = 2
    return model


def quantised() -> Any:
    model = llama()
    model.generation_config.cache_implementation = "quantized"
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mamba, "takes no past_key_values|not K and V of each token"),
        (hybrid, "LinearAttentionLayer: state that is not K and V of each token"),
        (encoder_decoder, "encoder-decoder"),
        (encoder, "not causal"),
        (sparse_encoder, "not causal"),
        (pictures, "more than text"),
        (bidirectional, "not causal"),
        (training, "training mode.*model.eval()"),
        (double, "torch.float64, which the store has no type for"),
        (with_adapter, "which adapters are active.*merge them"),
        (split, "tensor parallelism"),
        (quantised, "a cache of its own .quantized."),
        (lambda: torch.nn.Linear(2, 2), "expected a PreTrainedModel"),
    ],
)
def test_models_that_keep_what_tokens_do_not_determine(make: Callable[[], Any], reason: str, store: Store) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        prefill_with_store(make(), prompt(40), store, chunk_tokens=CHUNK)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (torch.zeros((2, 40), dtype=torch.long), "2 prompts: expected one"),
        (torch.zeros((1, 0), dtype=torch.long), "empty"),
        (torch.zeros(40, dtype=torch.long), "expected an integer tensor of shape"),
        (torch.zeros((1, 40)), "expected an integer tensor of shape"),
        ([1, 2, 3], "input_ids are list"),
    ],
)
def test_prompts_that_are_none(ids: Any, reason: str, store: Store) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        prefill_with_store(llama(), ids, store)


def test_padding(store: Store) -> None:
    model, ids = llama(), prompt(40)
    model.generation_config.pad_token_id = int(ids[0, 7])
    with pytest.raises(InvalidRequest, match="padding token"):
        prefill_with_store(model, ids, store)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_rope_that_depends_on_the_length_is_served_up_to_the_length_it_starts_at(
    rope: dict[str, Any], tmp_root: Path
) -> None:
    model = llama(rope_parameters=rope, max_position_embeddings=64)
    with kvstore.open(str(tmp_root)) as store:
        with pytest.raises(InvalidRequest, match=r"RoPE changes for prompts of 64 tokens or more \(this one has 64\)"):
            prefill_with_store(model, prompt(64), store, chunk_tokens=CHUNK)
        ids = prompt(63)
        expected = logits_without_store(model, ids, 48)
        logits_without_store(model, prompt(100))  # which sets the frequencies of long prompts
        for _ in range(2):
            past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK)
            assert difference(logits_after(model, ids, past), expected) == 0.0


@pytest.mark.parametrize("pre", [False, True])
def test_a_model_with_hooks_is_refused_unless_they_are_named(tmp_root: Path, pre: bool) -> None:
    model = llama()
    with kvstore.open(str(tmp_root)) as store:
        cache = model_cache(model, store, chunk_tokens=CHUNK)
        module = model.model.layers[1]
        if pre:
            module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
        else:
            module.register_forward_hook(lambda _, __, out: out * 1.5)
        ids = prompt(100)
        for target in (store, cache):
            with pytest.raises(InvalidRequest, match="hooks"):
                prefill_with_store(model, ids, target, chunk_tokens=CHUNK)
        past = prefill_with_store(model, ids, store, chunk_tokens=CHUNK, attributes={"steering": "1.5 at layer 1"})
        assert difference(logits_after(model, ids, past), logits_without_store(model, ids, 96)) == 0.0
        named = model_cache(model, store, chunk_tokens=CHUNK, attributes={"steering": "1.5 at layer 1"})
        assert prefill_with_store(model, ids, named).get_seq_length() == 96
