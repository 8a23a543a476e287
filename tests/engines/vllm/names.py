"""Prints the namespaces that engines with given arguments would use, or why they refuse, without starting them."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvstore.connectors.vllm.naming import Shape, check_hashes, model_fingerprint, namespaces
from kvstore.errors import InvalidRequest


def names(arguments: dict[str, Any]) -> list[str] | str:
    """Digests of the namespaces; or the refusal. ``seed`` is no argument of vLLM but PYTHONHASHSEED."""
    seed = arguments.pop("seed", None)
    with patch.dict(os.environ, {"PYTHONHASHSEED": seed} if seed else {}):
        settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, **arguments}
        config = EngineArgs(**settings).create_engine_config()
        spec = FullAttentionSpec(config.cache_config.block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], kv_cache_layout="LBHNC")
        try:
            check_hashes(config)
            shape = Shape(config, cache)
            return [each.digest.hex() for each in namespaces(config, shape, model_fingerprint(config), "")]
        except InvalidRequest as refusal:
            return str(refusal)


if __name__ == "__main__":
    print(json.dumps({name: names(arguments) for name, arguments in json.loads(sys.argv[1]).items()}))
