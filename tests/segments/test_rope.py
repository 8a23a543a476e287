"""RoPE settings are read from configurations; models whose keys cannot be moved are refused (SEGMENTS.md, S4, S5)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.segments import Rope, Style
from tests.kit.cases import for_each


def test_settings_come_from_a_mapping_an_object_and_a_model_of_texts() -> None:
    rope = Rope.of(LLAMA)
    assert (rope.theta, rope.dims, rope.style, rope.magnitude) == (500_000.0, 128, Style.HALF, 1.0)
    assert Rope.of(SimpleNamespace(**LLAMA)) == Rope.of({"text_config": LLAMA}) == rope
    assert Rope.of(SimpleNamespace(get_text_config=lambda: SimpleNamespace(**LLAMA))) == rope
    newer = {**LLAMA, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    assert Rope.of(newer).digest == rope.digest


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@for_each(
    "changed, dims, style",
    (
        ({"head_dim": 64}, 64, Style.HALF),
        ({"partial_rotary_factor": 0.5}, 64, Style.HALF),
        ({"rotary_pct": 0.25}, 32, Style.HALF),
        ({"rotary_dim": 64, "model_type": "gptj"}, 64, Style.INTERLEAVED),
        ({"model_type": "cohere"}, 128, Style.INTERLEAVED),
        ({"sliding_window": 4096, "use_sliding_window": False}, 128, Style.HALF),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 4096}, 128, Style.HALF),
    ),
)
def test_the_rotated_part_of_a_head_and_its_pairs(changed: dict[str, Any], dims: int, style: Style) -> None:
    rope = Rope.of({**LLAMA, **changed})
    assert (rope.dims, rope.style) == (dims, style)


@for_each(
    "changed, reason",
    (
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is refused.*length of the prompt"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is refused.*length of the prompt"),
        ({"rope_scaling": {"type": "su"}}, "'su' is refused"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "'mrope' is refused.*three parts"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional' is refused: known are default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "has a wrong value"),
        ({"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}}}, "layers have different RoPE"),
        ({"sliding_window": 4096}, r"sliding window \(4096 tokens\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type 'sliding_attention'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type 'linear_attention'"),
        ({"attention_chunk_size": 8192}, "within chunks"),
        ({"mamba_d_state": 16}, "recurrent state"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"alibi": True}, "not those of RoPE"),
        ({"no_rope_layers": [1, 1, 0]}, "some of its layers have no RoPE"),
        ({"kv_cache_dtype": "fp8"}, "quantised"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantised"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"hidden_size": None}, "neither head_dim nor hidden_size"),
    ),
)
def test_s5_models_whose_keys_cannot_be_moved_are_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Rope.of({**LLAMA, **changed})


def test_llama3_scales_long_waves_alone() -> None:
    plain = np.asarray(Rope.of(LLAMA).frequencies)
    found = np.asarray(Rope.of({**LLAMA, "rope_scaling": LLAMA3}).frequencies)
    lengths = 2 * np.pi / plain
    assert (found[lengths < 2048] == plain[lengths < 2048]).all()
    assert np.allclose(found[lengths > 8192], plain[lengths > 8192] / 8, rtol=1e-6)
    between = (lengths > 2048) & (lengths < 8192)
    assert ((found < plain) & (found > plain / 8))[between].all() and between.any()


def test_yarn_has_a_magnitude_and_keeps_short_waves() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    rope, plain = Rope(1e6, 128, scaling=scaling), Rope(1e6, 128)
    assert rope.magnitude == pytest.approx(0.1 * np.log(4) + 1)
    assert rope.frequencies[0] == plain.frequencies[0]
    assert rope.frequencies[-1] == pytest.approx(plain.frequencies[-1] / 4)
    assert Rope(1e6, 128, scaling={**scaling, "attention_factor": 1.0}).magnitude == 1.0
    assert Rope(1e6, 128, scaling={**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}).magnitude == 1.0
    # Without the length before scaling in rope_scaling, it is that of the configuration.
    config = {**LLAMA, "rope_theta": 1e6, "max_position_embeddings": 32_768}
    assert Rope.of({**config, "rope_scaling": {"type": "yarn", "factor": 4.0}}).frequencies == rope.frequencies


def test_s2_the_digest_tells_all_settings_apart_that_change_keys() -> None:
    rope = Rope(10_000.0, 8)
    others = [
        Rope(500_000.0, 8),
        Rope(10_000.0, 6),
        Rope(10_000.0, 8, Style.INTERLEAVED),
        Rope(10_000.0, 8, scaling={"rope_type": "linear", "factor": 2.0}),
        Rope(10_000.0, 8, frequencies=(1.0, 0.1, 0.01, 0.002)),
        Rope(
            10_000.0,
            8,
            scaling={
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 2.0,
            },
        ),
    ]
    assert len({rope.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert Rope(10_000.0, 8, frequencies=rope.frequencies).digest == rope.digest
    assert hash(rope) == hash(replace(rope))
