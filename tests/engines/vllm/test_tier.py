"""The secondary tier under vLLM's own tiered offloading, with memcpy in place of its GPU copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import Answer, check_clean, damage, full_blocks, running_engine, wait_stored

LONG = PROMPTS["long"]


def tiered(place: dict[str, Any]) -> dict[str, Any]:
    """``kv_transfer_config`` for vLLM's offloading with our tier below the CPU cache."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm.cpu_tiering",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm_tier", **place}],
        },
    }


def test_chunks_that_one_engine_stored_the_next_one_loads_and_damaged_ones_are_computed(
    workplace: Path, model: Path, root: Path, reference: dict[str, Answer]
) -> None:
    settings = {"model": str(model), "kv_transfer_config": tiered({"root": str(root)})}
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
                damage(path)
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
