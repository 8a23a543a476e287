"""vLLM's OpenAI server: a prefill engine that stores, a decode engine that loads, and ``/metrics``."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.engines.vllm.conftest import PROMPTS
from tests.engines.vllm.engines import (
    Answer,
    counters,
    full_blocks,
    running_engine,
    running_server,
    stored_files,
    transfer,
    wait_stored,
)
from tests.kit.patience import eventually

LONG = PROMPTS["long"]


def test_a_server_that_decodes_loads_what_another_engine_prefilled(
    workplace: Path, model: Path, root: Path, reference: dict[str, Answer]
) -> None:
    place = {"root": str(root)}
    with running_engine(
        workplace, {"model": str(model), "kv_transfer_config": transfer(place, "kv_producer")}
    ) as prefill:
        prefill.generate(LONG, tokens=1)
        wait_stored(root, 9)
        prefill.forget()
        assert prefill.generate(LONG, tokens=1).cached == [0]  # a producer does not load
    stored = stored_files(root)
    with running_server(workplace, model, config=transfer({**place, "wait_s": 0.5}, "kv_consumer")) as url:
        for prompt in (LONG, PROMPTS["other"]):
            request = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            body = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(body, timeout=120) as answer:
                choice = json.load(answer)["choices"][0]
            name = "long" if prompt is LONG else "other"
            assert choice["token_ids"] == reference[name].tokens[0]
        eventually(lambda: counters(url).get("vllm:kvstore_loaded_blocks_total") == 9)
        seen = counters(url)
        assert seen["vllm:external_prefix_cache_hits_total"] == full_blocks(LONG)
        assert seen["vllm:kvstore_lookup_hit_tokens_total"] == full_blocks(LONG)
    assert stored_files(root) == stored  # a consumer does not store
