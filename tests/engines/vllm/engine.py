"""A vLLM engine as a child process: requests as JSON lines on standard input, answers on a given file descriptor.

``{"prompts": [[token, ...], ...], "tokens": n, "adapter": [name, number, path]}`` generates greedily (with the model
alone for ``null``), with vLLM's ``"priority"``, and with ``"hints"`` as ``kv_transfer_params``.
``{"reset": true, "connector": false}`` forgets the engine's own cache, ``{"stats": true}`` gives vLLM's metrics.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def serve(settings: dict[str, Any], answers: Any) -> None:
    engine = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        **{"dtype": "float32", "block_size": 32, "max_model_len": 1024, **settings},
    )

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("reset"):
            answer({"reset": engine.reset_prefix_cache(reset_connector=request["connector"])})
        elif request.get("stats"):
            found = {each.name: getattr(each, "value", None) for each in engine.get_metrics()}
            answer({"stats": {name: value for name, value in found.items() if value is not None}})
        else:
            sampling = SamplingParams(temperature=0.0, max_tokens=request["tokens"], logprobs=1, detokenize=False)
            sampling.ignore_eos = True
            adapter = LoRARequest(*request["adapter"]) if request["adapter"] else None
            prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
            began_s = time.monotonic()
            if request.get("hints"):
                sampling.extra_args = {"kv_transfer_params": request["hints"]}
            priority = [request.get("priority", 0)] * len(prompts)
            outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=adapter, priority=priority)
            answer(
                {
                    "seconds": time.monotonic() - began_s,
                    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                    "logprobs": [
                        [next(iter(each.values())).logprob for each in output.outputs[0].logprobs] for output in outputs
                    ],
                    "cached": [output.num_cached_tokens for output in outputs],
                    "reasons": [output.outputs[0].finish_reason for output in outputs],
                }
            )


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w"))
