"""LoRA adapters: engines share what the same files computed, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvstore.connectors.vllm.adapters import MARGIN_S
from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    Answer,
    check_clean,
    full_blocks,
    make_adapter,
    running_engine,
    transfer,
    wait_stored,
)

LONG = PROMPTS["long"]
LONG_BLOCKS = full_blocks(LONG) // 32
SETTINGS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}


def test_two_adapters_and_the_model_share_nothing_and_replaced_files_share_nothing_older(
    workplace: Path, model: Path, root: Path
) -> None:
    folders = [workplace / "adapter one", workplace / "adapter two"]
    first, second = (("name", 1, str(folders[0])), ("other", 2, str(folders[1])))
    for seed, folder in enumerate(folders, 11):
        make_adapter(workplace, folder, model, seed)
    plain = {"model": str(model), **SETTINGS}
    shared = {**plain, "kv_transfer_config": transfer({"root": str(root)})}

    def answers(engine: Any) -> list[Answer]:
        return [engine.generate(LONG, adapter=each) for each in (first, second, None)]

    with running_engine(workplace, {**plain, "enable_prefix_caching": False}) as engine:
        expected = answers(engine)
    assert len({str(each.tokens) for each in expected}) == 3, "the adapters change what the model says"

    time.sleep(MARGIN_S)
    for is_warm in (False, True):
        with running_engine(workplace, shared) as engine:
            for answer, right in zip(answers(engine), expected, strict=True):
                answer.check_same(right)
                assert answer.cached == [full_blocks(LONG) if is_warm else 0]
            wait_stored(root, 3 * LONG_BLOCKS)

    # The same name and path with the other's files, and files that change under a running engine.
    for path in folders[1].iterdir():
        (folders[0] / path.name).write_bytes(path.read_bytes())
    time.sleep(MARGIN_S)
    with running_engine(workplace, shared) as engine:
        answer = engine.generate(LONG, adapter=first)
        answer.check_same(expected[1])
        assert answer.cached == [0]
        wait_stored(root, 4 * LONG_BLOCKS)
        engine.forget()
        make_adapter(workplace, folders[0], model, 13)
        skipped = engine.counts()["vllm:kvstore_skipped_lora_requests"]
        assert engine.generate(LONG, adapter=first).cached == [0]
        assert engine.counts()["vllm:kvstore_skipped_lora_requests"] == skipped + 1
    check_clean(root)
