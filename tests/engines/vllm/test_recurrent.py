"""Models with recurrent layers beside attention: a hit needs the attention before it and the state at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    check_clean,
    make_recurrent_model,
    mend,
    prompt,
    running_engine,
    stored_files,
    transfer,
    wait_stored,
)
from tests.kit.stores import flip

LONG, BRANCH = PROMPTS["long"], PROMPTS["branch"]
SIBLING = LONG[:128] + prompt(9, 60)
STATES = 1
"""vLLM keeps the one at 288 tokens, before the last token: the engine cannot hit another by default."""


# vLLM runs gated delta nets on a CPU in bfloat16 only.
@pytest.mark.parametrize(("name", "dtype"), [("lfm2", "float32"), ("qwen3-next", "bfloat16")])
def test_states_are_stored_with_the_attention_before_them_and_damage_is_a_miss(
    name: str, dtype: str, workplace: Path, root: Path
) -> None:
    settings = {
        "model": str(make_recurrent_model(workplace, name)),
        "dtype": dtype,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_transfer_config": transfer({"root": str(root)}),
    }
    with running_engine(workplace, settings) as engine:
        computed = engine.generate(LONG)
        assert computed.cached == [0]
        files = len(wait_stored(root, 9 + STATES))
        engine.forget()
        parted = engine.generate(BRANCH)
        assert parted.cached == [0], "of what it shares there is no state"
        wait_stored(root, files + 3 + 2 * STATES)
        engine.forget()
        sibling = engine.generate(SIBLING)
        assert sibling.cached == [128], "now there is one"
        assert len(set(computed.tokens[0] + parted.tokens[0])) > 2
        engine.forget(connector=True)
        alone = engine.generate(SIBLING)
        assert alone.cached == [0]
        alone.check_same(sibling)
    # The next engine, in a process of its own.
    with running_engine(workplace, settings) as engine:
        loaded = engine.generate(LONG)
        loaded.check_same(computed)
        assert loaded.cached == [288]
        engine.forget()
        branch = engine.generate(BRANCH)
        branch.check_same(parted)
        assert branch.cached == [224]
        for path in stored_files(root):
            flip(path)
        engine.forget()
        engine.generate(LONG).check_same(computed)
        assert engine.counts()["vllm:kvstore_load_failed_blocks"] >= 1
        engine.load(LONG, computed, 288)
    mend(root)
    check_clean(root)
