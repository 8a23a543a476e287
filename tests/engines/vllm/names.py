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
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec

from kvstore.connectors import vllm_tier
from kvstore.connectors.vllm.namespaces import KVTopology, check_hashes, model_fingerprint, namespaces
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.errors import InvalidRequest


def tier_spec(groups: list[list[str]]) -> SimpleNamespace:
    """A stand-in for vLLM's offloading specification, with these layers in its groups."""
    numbered = [SimpleNamespace(group_id=number, layer_names=names) for number, names in enumerate(groups)]
    parallel = SimpleNamespace(world_size=1)
    config = SimpleNamespace(canonical_layout=False, replicated_layout=False, parallel=parallel, groups=numbered)
    return SimpleNamespace(blocks_per_chunk=8, config=config)


def names(arguments: dict[str, Any]) -> list[str] | str:
    """Digests of the namespaces; or the refusal.

    Not of vLLM are ``seed`` (PYTHONHASHSEED), ``tier`` (asks for the tier's namespace, of groups of these layers),
    ``tp_shards`` and ``kind`` (fields of the specification of KV).
    """
    seed, tier, kind = arguments.pop("seed", None), arguments.pop("tier", None), arguments.pop("kind", {})
    shards = arguments.pop("tp_shards", 0)
    with patch.dict(os.environ, {"PYTHONHASHSEED": seed} if seed else {}):
        settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, **arguments}
        vllm_config = EngineArgs(**settings).create_engine_config()
        size = vllm_config.cache_config.block_size
        spec_class = RSWASpec if "rswa_window" in kind else FullAttentionSpec
        spec = spec_class(size, num_kv_heads=2, head_size=32, dtype=torch.float32, **kind)
        kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], kv_cache_layout="LBHNC"
        )
        try:
            if tier:
                # It finds ``vllm_config`` and ``kv_cache_config`` here, as it does in vLLM.
                return [
                    vllm_tier._namespace(
                        tier_spec(tier), ConnectorSettings.of({"root": "memory://"}), 65_536
                    ).digest.hex()
                ]
            check_hashes(vllm_config)
            shape = KVTopology(vllm_config, kv_cache_config, shards)
            return [each.digest.hex() for each in namespaces(vllm_config, shape, model_fingerprint(vllm_config), "")]
        except InvalidRequest as refusal:
            return str(refusal)


if __name__ == "__main__":
    print(json.dumps({name: names(arguments) for name, arguments in json.loads(sys.argv[1]).items()}))
