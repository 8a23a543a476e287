"""Writes a small Llama with random weights, with no download: wide enough that a fault in the KV changes the tokens.

vLLM's own dummy weights (about 1e-3) would hide one: attention would hardly look at the KV.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
SPREADS = {
    "q_proj": 0.2,
    "k_proj": 0.2,
    "v_proj": 0.2,
    "o_proj": 0.2,
    "gate_proj": 0.1,
    "up_proj": 0.1,
    "down_proj": 0.1,
}
"""The spread of the model's weights, by their names."""
INPUTS = {"o_proj": 128, "down_proj": 256}
"""How many inputs these have in the model above; the others have ``hidden_size``.

Wider models have smaller weights, so that their activations are as large. With weights as large as these, a model with
768 multiplies rounding so much that a prompt computed whole, and in two parts, gave other tokens."""


def write(folder: Path, seed: int, changes: dict[str, Any] | None = None) -> None:
    """The model's configuration, with ``changes``, and its weights."""
    config = {**CONFIG, **(changes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    source = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, spread: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * spread

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, shared = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden, 1.0),
        "lm_head.weight": random(config["vocab_size"], hidden, 0.3),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            kind = name.split(".")[1]
            inputs = INPUTS.get(kind, CONFIG["hidden_size"])
            weights[f"{prefix}{name}.weight"] = random(rows, columns, SPREADS[kind] * math.sqrt(inputs / columns))
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--changes", type=json.loads, default={})
    given = parser.parse_args()
    write(given.folder, given.seed, given.changes)
