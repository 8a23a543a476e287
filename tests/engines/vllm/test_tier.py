"""The secondary tier under vLLM's own tiered offloading, with memcpy in place of its GPU copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    Answer,
    check_clean,
    full_blocks,
    make_recurrent_model,
    prompt,
    running_engine,
    wait_stored,
)
from tests.kit.stores import flip

LONG, BRANCH = PROMPTS["long"], PROMPTS["branch"]
SIBLING = LONG[:128] + prompt(9, 60)


def tiered(place: dict[str, Any], cpu_bytes: int) -> dict[str, Any]:
    """``kv_transfer_config`` for vLLM's offloading with our tier below a CPU cache of this size."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm.cpu_tiering",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm_tier", **place}],
        },
    }


def test_chunks_that_one_engine_stored_the_next_one_loads_and_damaged_ones_are_computed(
    workplace: Path, model: Path, root: Path, reference: dict[str, Answer]
) -> None:
    settings = {"model": str(model), "kv_transfer_config": tiered({"root": str(root)}, 1 << 20)}
    for is_warm in (False, True):
        with running_engine(workplace, settings) as engine:
            for name in ("long", "other"):
                answer = engine.generate(PROMPTS[name])
                answer.check_same(reference[name])
                assert answer.cached == [full_blocks(PROMPTS[name]) if is_warm else 0]
                engine.generate(PROMPTS["short"])  # vLLM stores what a request computed in the steps after it
            files = wait_stored(root, 9 + 6)
            check_clean(root)
            if not is_warm:
                continue
            for path in files:
                flip(path)
            # The CPU cache of this engine has no room for all of these, so it asks the tier again.
            for name in [*(name for name in PROMPTS if name.startswith("many")), "long", "branch", "other"]:
                engine.forget()
                engine.generate(PROMPTS[name]).check_same(reference[name])
            assert list((root / "quarantine").iterdir())
            # As after an update of the weights in memory: nothing older is loaded.
            engine.forget(connector=True)
            answer = engine.generate(LONG)
            answer.check_same(reference["long"])
            assert answer.cached == [0]


# vLLM runs gated delta nets on a CPU in bfloat16 only.
@pytest.mark.parametrize(("name", "dtype", "states"), [("lfm2", "float32", 1), ("qwen3-next", "bfloat16", 3)])
def test_states_are_stored_where_prompts_end_and_part_and_one_damaged_chunk_is_a_miss(
    name: str, dtype: str, states: int, workplace: Path, tmp_root: Path
) -> None:
    settings: dict[str, Any] = {
        "model": str(make_recurrent_model(workplace, name)),
        "dtype": dtype,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }
    prompts = {"long": LONG, "branch": BRANCH, "sibling": SIBLING}
    with running_engine(workplace, settings) as engine:
        computed = {}
        for each, tokens in prompts.items():
            engine.forget()
            computed[each] = engine.generate(tokens)
    settings["kv_transfer_config"] = tiered({"root": str(tmp_root)}, 8 << 20)
    with running_engine(workplace, settings) as engine:
        engine.generate(LONG).check_same(computed["long"])
        engine.generate(PROMPTS["short"])  # vLLM stores what a request computed in the steps after it
        files = wait_stored(tmp_root, 9 + states)
        assert len(files) == 9 + states
    flip(min(files))
    with running_engine(workplace, settings) as engine:
        again = engine.generate(LONG)
        again.check_same(computed["long"])
        assert again.cached == [0], "its only state is at its end, and a hit of that needs all"
        assert len(list((tmp_root / "quarantine").iterdir())) == 1
        engine.generate(PROMPTS["short"])
        assert wait_stored(tmp_root, len(files)) == files
        engine.generate(BRANCH).check_same(computed["branch"])
        engine.generate(PROMPTS["short"])
        wait_stored(tmp_root, len(files) + 3 + 2 * states)
    with running_engine(workplace, settings) as engine:
        for each, cached in {"sibling": 128, "long": 288, "branch": 224}.items():
            engine.forget()
            loaded = engine.generate(prompts[each])
            loaded.check_same(computed[each])
            assert loaded.cached == [cached]
    (path,) = (tmp_root / "quarantine").iterdir()
    path.unlink()
    check_clean(tmp_root)
