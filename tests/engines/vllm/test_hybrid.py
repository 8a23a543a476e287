"""A model with two kinds of KV: layers that see everything, and layers with a sliding window."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    HERE,
    PYTHON,
    check_clean,
    engine_environment,
    make_model,
    mend,
    running_engine,
    stored_files,
    transfer,
)
from tests.kit.programs import ended
from tests.kit.stores import flip

LONG, BRANCH = PROMPTS["long"], PROMPTS["branch"]


def test_both_kinds_are_stored_loaded_and_when_damaged_computed_anew(workplace: Path, root: Path) -> None:
    model = make_model(
        workplace, "hybrid", 7, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64
    )
    settings = {"model": str(model), "kv_transfer_config": transfer({"root": str(root)})}
    with running_engine(workplace, settings) as engine:
        computed = {"long": engine.generate(LONG), "branch": engine.generate(BRANCH)}
        assert computed["long"].cached == [0]
        engine.load(PROMPTS["long"], computed["long"], 288)
        engine.load(PROMPTS["branch"], computed["branch"], 224)
        for path in stored_files(root):
            flip(path)
        engine.forget()
        failed = engine.generate(LONG)
        failed.check_same(computed["long"])
        assert engine.counts()["vllm:kvstore_load_failed_blocks"] >= 1
        engine.load(PROMPTS["long"], computed["long"], 288)
        mend(root)
    check_clean(root)


def test_what_a_hit_needs_is_what_vllm_itself_needs(workplace: Path) -> None:
    done = ended(
        str(PYTHON), str(HERE / "hits.py"), "500", timeout=300, cwd=workplace, env=engine_environment(workplace)
    )
    assert done.stdout.endswith("same 500\n"), done.stdout[-2000:] + done.stderr[-3000:]
