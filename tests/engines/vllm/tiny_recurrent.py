"""Writes a small model with recurrent layers and random weights, with no download: LFM2 or Qwen3-Next."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedConfig, Qwen3NextConfig

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "lfm2": lambda: Lfm2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_dim=128,  # vLLM reads these two, transformers does not have them
        block_dim=128,
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **{**COMMON, "num_key_value_heads": 4},
        num_hidden_layers=4,
        # vLLM's kernel for CPUs takes heads of 128. Attention is so wide that 32 tokens are no less than a state.
        head_dim=256,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
}
SPREAD = 0.12


def write(folder: Path, name: str, seed: int) -> None:
    """Weights that are wide enough that a fault in a state changes the tokens."""
    config: PreTrainedConfig = CONFIGS[name]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    for key, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in key else SPREAD)
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    write(given.folder, given.name, given.seed)
