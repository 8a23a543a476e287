"""KV that must never be shared: other weights, dtypes, RoPE scalings, parallel sizes; and the connector's refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    HERE,
    PYTHON,
    Answer,
    engine_environment,
    full_blocks,
    make_model,
    running_engine,
    stored_files,
    transfer,
    wait_stored,
)
from tests.kit.programs import ended

LONG = PROMPTS["long"]


def test_two_ranks_share_with_two_ranks_only_and_other_weights_share_nothing(
    workplace: Path, model: Path, root: Path, reference: dict[str, Answer]
) -> None:
    weights = workplace / "replaced"
    make_model(workplace, "replaced", 7)
    settings = {"model": str(weights), "kv_transfer_config": transfer({"root": str(root)})}
    with running_engine(workplace, settings) as engine:
        engine.generate(LONG).check_same(reference["long"])
        wait_stored(root, 9)
    with running_engine(workplace, {**settings, "tensor_parallel_size": 2}, processes=True) as engine:
        first = engine.generate(LONG)
        assert first.cached == [0]
        assert first.tokens == reference["long"].tokens
        wait_stored(root, 9 + 2 * 9)
        engine.forget()
        second = engine.generate(LONG)
        assert second.cached == [full_blocks(LONG)]
        second.check_same(first)
    make_model(workplace, "replaced", 8)
    with running_engine(workplace, settings) as engine:
        other = engine.generate(LONG)
        assert other.cached == [0]
        # So that a hit would have been seen: these weights say something else.
        assert other.tokens != reference["long"].tokens
        wait_stored(root, 9 + 2 * 9 + 9)
        engine.forget()
        again = engine.generate(LONG)
        assert again.cached == [full_blocks(LONG)]
        again.check_same(other)
    assert len(stored_files(root)) >= 36


def test_engines_of_one_and_two_ranks_share_what_either_stored(
    workplace: Path, model: Path, root: Path, reference: dict[str, Answer]
) -> None:
    settings = {"model": str(model), "kv_transfer_config": transfer({"root": str(root), "tp_shards": 2})}
    other = PROMPTS["other"]
    with running_engine(workplace, {**settings, "tensor_parallel_size": 2}, processes=True) as engine:
        assert engine.generate(LONG).tokens == reference["long"].tokens
        wait_stored(root, 2 * 9)
    with running_engine(workplace, settings) as engine:
        loaded = engine.generate(LONG)
        # Of a model as small as this one rounding does not change the tokens.
        assert (loaded.cached, loaded.tokens) == ([full_blocks(LONG)], reference["long"].tokens)
        engine.generate(other).check_same(reference["other"])
        wait_stored(root, 2 * 9 + 2 * 6)
    with running_engine(workplace, {**settings, "tensor_parallel_size": 2}, processes=True) as engine:
        loaded = engine.generate(other)
        assert (loaded.cached, loaded.tokens) == ([full_blocks(other)], reference["other"].tokens)


def test_a_model_that_changes_its_configuration_in_the_workers_loads(workplace: Path) -> None:
    folder, heads = workplace / "latent", {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 512, **heads}
    config |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "q_lora_rank": None, "rope_scaling": yarn}))
    root, settings = folder / "root", {"model": str(folder), "load_format": "dummy"}
    with running_engine(
        workplace, {**settings, "kv_transfer_config": transfer({"root": str(root)})}, processes=True
    ) as engine:
        engine.generate(LONG)
        wait_stored(root, len(LONG) // 16)  # vLLM chooses the size of blocks itself
        engine.forget()
        assert engine.generate(LONG).cached == [full_blocks(LONG)]


def long_rope(max_model_len: int) -> dict[str, Any]:
    """vLLM takes the long factors for short prompts too, where ``max_model_len`` is over 1024."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 1024}
    parameters = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, **factors}
    return {"hf_overrides": {"rope_parameters": parameters}, "max_model_len": max_model_len}


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "dtype": {"dtype": "bfloat16"},
    "cache dtype": {"kv_cache_dtype": "fp8"},
    "cache dtype but in one layer": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    "cache dtype but in another layer": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
    "model code": {"model_impl": "vllm"},
    "rope theta": {"hf_overrides": {"rope_theta": 20000.0}},
    "rope scaling": {
        "hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    },
    "long rope": long_rope(1024),
    "long rope for longer prompts": long_rope(2048),
    "attention kernel": {"attention_backend": "CPU_ATTN"},
    "tier": {"tier": [["0", "1", "2", "3"]]},
    "tier with groups of layers": {"tier": [["0", "1"], ["2", "3"]]},
    "tier with groups of other layers": {"tier": [["0", "2"], ["1", "3"]]},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "parts for two ranks": {"tp_shards": 2},
    "parts of two ranks": {"tp_shards": 2, "tensor_parallel_size": 2},
    "block size": {"block_size": 64},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "seeded hash": {"prefix_caching_hash_algo": "xxhash", "seed": "0"},
}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hashes that no other process could repeat": (
        {"prefix_caching_hash_algo": "xxhash"},
        "set the environment variable PYTHONHASHSEED",
    ),
    "a tier where requests may have adapters": ({"tier": [["0"]], "enable_lora": True}, "start without --enable-lora"),
    "parts that heads do not make": ({"tp_shards": 3}, "divides the model's 2 KV heads"),
    "parts of a stage": ({"tp_shards": 2, "pipeline_parallel_size": 2}, "without pipeline parallelism"),
    "a pooler of whole prompts": ({"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}, "no prefixes"),
    "attention to what follows": ({"kind": {"non_causal": True}}, "no prefixes"),
    "a window since the prompt's end": ({"kind": {"rswa_window": 64}}, "no prefixes"),
    "weights that are nowhere": ({"load_format": "auto", "seed": "0"}, "no weight files"),
}


def test_every_setting_that_changes_the_kv_changes_the_namespace(workplace: Path, model: Path) -> None:
    empty = workplace / "without-weights"
    empty.mkdir()
    (empty / "config.json").write_bytes((model / "config.json").read_bytes())
    engines = {name: {"model": str(model), **changes} for name, changes in VARIANTS.items()}
    engines |= {
        name: {"model": str(empty if "weights" in name else model), **changes} for name, (changes, _) in REFUSED.items()
    }
    program, environment = str(HERE / "names.py"), engine_environment(workplace)
    done = ended(str(PYTHON), program, json.dumps(engines), timeout=300, cwd=workplace, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str] | str] = json.loads(done.stdout.splitlines()[-1])
    for name, (_, said) in REFUSED.items():
        assert said in found.pop(name)
    assert {name: len(digests) for name, digests in found.items()} == {
        name: 2 if name.endswith(("ranks", "stages")) else 1 for name in VARIANTS
    }
    assert found.pop("parts of two ranks") == found["parts for two ranks"]
    every = [digest for digests in found.values() for digest in digests]
    assert len(set(every)) == len(every)
