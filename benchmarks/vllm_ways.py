"""How vLLM is started for each way to keep KV, with which model, and what its processes take of the processor.

Shared by engines that answer one request at a time (serving.py) and servers with many (turns.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.engines.vllm.engines import transfer

SHAPE = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
}
SMALL = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
}
"""The tiny model of the tests, with room for more tokens."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def token_bytes(shape: dict[str, int]) -> int:
    """KV of one token in float32, in bytes."""
    return 2 * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def cpu_s(process: int) -> float:
    """Processor time of a process so far, user's and system's."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return TICK_S * (int(fields[11]) + int(fields[12]))


def settings_of(name: str, root: Path, prompt_bytes: int, connect: str = "") -> dict[str, Any]:
    """Returns vLLM's arguments for a way."""
    if name == "none":
        return {"enable_prefix_caching": False}
    if name in ("tier", "fs"):
        ours = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm_tier", "root": str(root)}
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.engines.vllm.cpu_tiering",
                "cpu_bytes_to_use": prompt_bytes * 5 // 4,  # what came before comes from the tier
                "secondary_tiers": [ours if name == "tier" else {"type": "fs", "root_dir": str(root)}],
            },
        }
        return {"kv_transfer_config": config}
    place: dict[str, Any] = {"connect": connect} if connect else {"root": str(root), "max_bytes": None}
    return {"kv_transfer_config": transfer(place)}
