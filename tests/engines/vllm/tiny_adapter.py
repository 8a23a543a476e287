"""Writes a LoRA adapter with random weights for a model of ``tiny_model``, strong enough to change its tokens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def write(model: Path, folder: Path, seed: int) -> None:
    config = json.loads((model / "config.json").read_text())
    source = torch.Generator().manual_seed(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=source) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=source) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": [*widths], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    write(given.model, given.folder, given.seed)
